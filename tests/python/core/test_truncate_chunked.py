"""Truncation of a prompt that is known further than there is room for it."""

from __future__ import annotations

import numpy as np
import pytest

from kvcatch import BlockPool


@pytest.mark.parametrize("room", [1, 2, 5, 9])
def test_known_tokens_beyond_the_cut_are_gone(room: int) -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    seq = pool.create(np.zeros(9, np.int32), num_tokens=room, use_cache=False)
    pool.truncate(seq, 1)
    pool.commit([seq], counts=[1])
    pool.validate()
    pool.append([seq], 1)
    pool.commit([seq], np.ones(1, np.int32), [1])
    assert (pool.num_tokens(seq), pool.num_committed(seq)) == (2, 2)
    pool.validate()
