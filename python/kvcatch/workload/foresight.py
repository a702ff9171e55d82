"""When every prompt block is needed next: what ``eviction="clairvoyant"`` is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcatch.workload.request import Request, Workload

NEVER = np.iinfo(np.int64).max
"""Next use of a block that no later prompt starts with."""


def prefix_keys(request: Request, block_size: int) -> npt.NDArray[np.uint64]:
    """One key per full block of the prompt; equal keys mean equal prefixes to the block's end."""
    full = request.num_tokens // block_size * block_size
    mixed = request.tokens()[:full].astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed += np.arange(1, full + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    keys: npt.NDArray[np.uint64] = mixed.reshape(-1, block_size).sum(axis=1, dtype=np.uint64)
    return np.cumsum(keys, dtype=np.uint64)


def next_uses(workload: Workload, block_size: int) -> list[npt.NDArray[np.int64]]:
    """Index of the next request that starts with the same prefix, per request and prompt block.

    Generated blocks count as never needed again.
    """
    keys = [prefix_keys(request, block_size) for request in workload.requests]
    ends = np.cumsum([len(part) for part in keys])
    every = np.concatenate(keys) if keys else np.empty(0, dtype=np.uint64)
    owner = np.repeat(np.arange(len(keys)), [len(part) for part in keys])
    order = np.argsort(every, kind="stable")
    same = every[order[1:]] == every[order[:-1]]
    upcoming = np.full(len(every), NEVER, dtype=np.int64)
    upcoming[order[:-1][same]] = owner[order[1:][same]]
    return np.split(upcoming, ends[:-1])
