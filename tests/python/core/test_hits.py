"""``pool.hits``: what ``create`` would share, told before it does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch import BlockPool, InvalidArgument

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@settings(max_examples=200)
@given(st.lists(st.tuples(PROMPT, st.booleans()), max_size=8), PROMPT)
def test_hits_are_what_create_shares_and_what_it_costs(
    history: list[tuple[list[int], bool]], prompt: list[int]
) -> None:
    pool = BlockPool(80, 4, manual_clock=True)
    for tokens, freed in history:
        sequence = pool.create(tokens, commit=True)
        if freed:
            pool.free(sequence)
    before = pool.available
    hit, active = pool.hits(prompt)
    assert pool.hits(pool.prefix(prompt)) == (hit, active)
    assert pool.available == before
    sequence = pool.create(prompt)
    assert sequence.hit_tokens == hit
    assert active <= hit <= max(0, len(prompt) - 1)
    # Active blocks cost nothing; a cached one that is hit and a new one cost one block each.
    assert before - pool.available == -(-len(prompt) // 4) - active // 4
    pool.validate()


def test_a_prefix_of_another_block_size_is_refused() -> None:
    pool = BlockPool(8, 4)
    with pytest.raises(InvalidArgument, match="block_size = 8"):
        pool.hits(BlockPool(8, 8).prefix([1, 2, 3]))
