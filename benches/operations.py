"""The measured operations, set up the same way for ``figures.py`` and for the pytest benches.

Each function sets up and returns the call to time. Unless said otherwise the call leaves things as
it found them.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from baselines import LinkedListPool, PythonPrefixCache, PythonTables
from kvcatch import BlockPool, OutOfBlocks
from kvcatch._core import FreeBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvcatch import Prefix
    from kvcatch.workload.request import Workload

    Operation = Callable[[], object]

BLOCK_SIZE = 16
"""Tokens per block, everywhere."""

ALLOCATE_POOL = 65_536
"""Blocks of the pool that is half full at random."""

ALLOCATE = 64
"""Blocks taken and given back at once."""

BATCH = 256
"""Sequences that grow by one token in one call."""

PROMPT = 8_192
"""Tokens of a prompt that is hashed and looked up."""


def allocate_and_free(placement: str) -> Operation:
    """``FreeBlocks.take(64, out=int32)`` and ``give_clean`` of the same, pool half full at random."""
    free = FreeBlocks(ALLOCATE_POOL, placement=placement)
    every = free.take(ALLOCATE_POOL)
    assert not isinstance(every, int)
    chance = np.random.default_rng(1)
    given = every[chance.random(len(every)) < 0.5]
    free.give_clean(np.ascontiguousarray(chance.permutation(given)))
    out = np.empty(ALLOCATE, dtype=np.int32)
    take, give = free.take, free.give_clean

    def call() -> None:
        take(ALLOCATE, out=out)
        give(out)

    return call


def allocate_and_free_linked_list() -> Operation:
    """The same on a linked list of block objects, with reference counts."""
    pool = LinkedListPool(ALLOCATE_POOL)
    chance = random.Random(1)
    every = pool.allocate(ALLOCATE_POOL - 1)
    given = [block for block in every if chance.random() < 0.5]
    chance.shuffle(given)
    pool.free(given)

    def call() -> None:
        pool.free(reversed(pool.allocate(ALLOCATE)))

    return call


def append_lengths() -> list[int]:
    """Lengths of the batch (tokens): spread so that each call needs a block for one in sixteen."""
    return [1_000 + i for i in range(BATCH)]


APPEND_POOL = 524_288
"""Blocks: room for 256 sequences to grow by 30,000 tokens each."""


def append_batch(placement: str = "bitmap") -> Operation:
    """``append`` of one token to each of 256 sequences in one call. They keep growing."""
    pool = BlockPool(APPEND_POOL, BLOCK_SIZE, placement=placement)
    handles = np.array(
        [
            pool.create(np.full(length, i, dtype=np.int32), use_cache=False).id
            for i, length in enumerate(append_lengths())
        ],
        dtype=np.int64,
    )
    append = pool.append

    def call() -> None:
        append(handles, 1)

    return call


def append_batch_python() -> Operation:
    """The same, sequence by sequence. They keep growing."""
    return PythonTables(APPEND_POOL // 4, BLOCK_SIZE, append_lengths()).append_all


def prompt_arrays(count: int, first: int = 0) -> list[npt.NDArray[np.int32]]:
    """Prompts that share nothing, as int32 arrays."""
    return [
        np.arange(i * PROMPT, (i + 1) * PROMPT, dtype=np.int32) for i in range(first, first + count)
    ]


def lookup_hits(count: int) -> Operation:
    """``BlockPool.lookup`` of ``count`` prompts, hashing included; all their blocks are cached."""
    prompts = prompt_arrays(count)
    pool = BlockPool(count * PROMPT // BLOCK_SIZE + 1, BLOCK_SIZE)
    pool.free([pool.create(prompt, commit=True) for prompt in prompts])
    lookup = pool.lookup

    def call() -> None:
        for prompt in prompts:
            if lookup(prompt) != PROMPT:
                raise AssertionError("a block was not hit")

    return call


def lookup_misses(count: int) -> Operation:
    """The same for ``count`` prompts of which nothing is cached, in a pool full of others."""
    others, prompts = prompt_arrays(100), prompt_arrays(count, first=100)
    pool = BlockPool(len(others) * PROMPT // BLOCK_SIZE + 1, BLOCK_SIZE)
    pool.free([pool.create(prompt, commit=True) for prompt in others])
    lookup = pool.lookup

    def call() -> None:
        for prompt in prompts:
            if lookup(prompt):
                raise AssertionError("a block was hit")

    return call


def lookup_hits_python(count: int, digest: Callable[[bytes], bytes]) -> Operation:
    """Hash and look up ``count`` prompts (lists of tokens) in Python, all blocks hit."""
    prompts: list[Sequence[int]] = [prompt.tolist() for prompt in prompt_arrays(count)]
    cache = PythonPrefixCache(BLOCK_SIZE, digest)
    for prompt in prompts:
        cache.insert(prompt)

    def call() -> None:
        for prompt in prompts:
            if cache.lookup(prompt) != PROMPT:
                raise AssertionError("a block was not hit")

    return call


def replay_calls(
    workload: Workload, prompts: Sequence[Prefix], pool: BlockPool, n: int = 64
) -> int:
    """The pool calls of a whole replay and the least Python around them; decode tokens.

    The loop of ``kvcatch.workload.replay`` without what it measures. Prompts come hashed, as they
    do for ``baselines.replay_through``. Every prompt has to fit.
    """
    waiting = deque(enumerate(prompts))
    handles = np.empty(n, dtype=np.int64)
    left = np.empty(n, dtype=np.int64)
    generated = np.zeros(n, dtype=np.int32)
    running = decode_tokens = 0
    index = np.empty(n, dtype=np.int64)
    while waiting or running:
        while running:
            try:
                pool.append(handles[:running], 1)
            except OutOfBlocks:
                running -= 1
                pool.free(handles[running : running + 1])
                position = int(index[running])
                waiting.appendleft((position, prompts[position]))
                continue
            pool.commit(handles[:running], generated[:running])
            decode_tokens += running
            break
        while waiting and running < n:
            position, prompt = waiting[0]
            try:
                handle = pool.create(prompt, commit=True).id
            except OutOfBlocks:
                if not running:
                    raise
                break
            waiting.popleft()
            handles[running], index[running] = handle, position
            left[running] = workload.requests[position].output_tokens
            running += 1
        left[:running] -= 1
        done = left[:running] <= 0
        if done.any():
            pool.free(handles[:running][done])
            stay = np.flatnonzero(~done)
            running = len(stay)
            for column in (handles, left, index):
                column[:running] = column[stay]
    return decode_tokens


def scattered_pool(num_blocks: int, blocks_each: int, seed: int = 1) -> tuple[BlockPool, int]:
    """A pool half active at random, in sequences of ``blocks_each`` blocks; and how many those are.

    Through the public API: under ``queue`` blocks are handed out in the order they are given back,
    so sequences that grow by one block each in turn, in an order drawn anew every time, get blocks
    from everywhere. All are made and freed once in random order, made again the same way, and a
    random half of them is freed.
    """
    count = num_blocks // blocks_each
    chance = np.random.default_rng(seed)
    pool = BlockPool(num_blocks, BLOCK_SIZE, placement="queue")
    tokens = np.zeros(BLOCK_SIZE, dtype=np.int32)
    handles = np.empty(count, dtype=np.int64)
    for give_back in (count, count // 2):
        for i in range(count):
            handles[i] = pool.create(tokens, use_cache=False).id
        for _ in range(blocks_each - 1):
            chance.shuffle(handles)
            pool.append(handles, BLOCK_SIZE)
        chance.shuffle(handles)
        pool.free(handles[:give_back].copy())
    return pool, count - count // 2
