"""What the tests of the core share: pools to look at, and their whole state as one value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import kvcatch


def tables(pool: kvcatch.BlockPool) -> dict[int, list[int]]:
    """Every live sequence's block ids."""
    return {seq.id: pool.block_ids(seq).tolist() for seq in pool.sequences()}


def state(pool: kvcatch.BlockPool, *, refusals: bool = True) -> str:
    """All that can be seen of a pool; ``refusals=False`` leaves out the count of refused calls."""
    snapshot = pool.snapshot()
    if not refusals:
        del snapshot["counters"]["refused"]
    details = [pool.describe(seq) for seq in pool.sequences()]
    counts = [
        pool.num_free,
        pool.num_cached,
        pool.num_active,
        pool.num_reserved,
        pool.num_pinned,
        pool.available,
        pool.num_sequences,
        pool.largest_run,
        pool.now,
    ]
    text = json.dumps([snapshot, details, counts, tables(pool), pool.holdings()], sort_keys=True)
    # Handles differ from pool to pool: what is compared is their rank.
    handles = [seq.id for seq in pool.sequences()] + [pin["id"] for pin in snapshot["pins"]]
    for rank, handle in enumerate(handles):
        text = text.replace(str(handle), f"#{rank}")
    return text


def drain(pool: kvcatch.BlockPool) -> list[int]:
    """Take every block that is left, one prompt of one block each: the order is hidden state."""
    order = []
    unseen = 1 << 30
    while pool.available:
        seq = pool.create([unseen], use_cache=False)
        order += pool.block_ids(seq).tolist()
    return order


def free_state(free: kvcatch.FreeBlocks) -> list[Any]:
    """All that can be seen of a ``FreeBlocks``, hand-out order included."""
    places = [(free.is_clean(block), free.is_cached(block)) for block in range(free.num_blocks)]
    return [list(free), len(free), free.num_clean, free.num_cached, free.largest_run, places]


def slots(pool: kvcatch.BlockPool, seqs: Any, *args: Any, **kwargs: Any) -> list[int]:
    """``slot_mapping`` as a list."""
    out = np.full(4096, -7, np.int64)
    written = pool.slot_mapping(seqs, *args, **kwargs, out=out)
    assert (out[written:] == -7).all()
    return out[:written].tolist()
