"""``plan.apply(kv_cache, backend)``: bytes and tables as one step, whatever the backend does."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from core_support import state, tables

from kvcatch import BlockPool, InvalidArgument, StalePlan
from kvcatch.kernels import KVCache, KVLayout

BLOCK = 4


@dataclass
class Recorder:
    """A backend of numpy bytes that notes its calls and may fail."""

    calls: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    before: Any = None

    def _copy(self, call: str, cache: KVCache, src: Any, dst: Any) -> None:
        if self.before is not None:
            self.before()
        self.calls.append((call, src.tolist(), dst.tolist()))
        blocks = cache.buffer.reshape(cache.num_blocks, -1)
        if call == "move_blocks":
            assert not set(src.tolist()) & set(dst.tolist())
        blocks[dst] = blocks[src].copy()

    def move_blocks(self, cache: KVCache, src: Any, dst: Any) -> None:
        self._copy("move_blocks", cache, src, dst)

    def assign_blocks(self, cache: KVCache, src: Any, dst: Any) -> None:
        self._copy("assign_blocks", cache, src, dst)


def cache_of(num_blocks: int, block_size: int = BLOCK) -> KVCache:
    layout = KVLayout(1, 1, 8, block_size, "float16")
    return KVCache(layout, num_blocks, np.zeros(layout.pool_bytes(num_blocks), np.uint8))


def stamp(pool: BlockPool, cache: KVCache) -> dict[int, list[bytes]]:
    """Fill every block with bytes of its own; what each sequence then reads."""
    blocks = cache.buffer.reshape(cache.num_blocks, -1)
    blocks[:] = np.random.default_rng(1).integers(0, 256, blocks.shape, np.uint8)
    return contents(pool, cache)


def contents(pool: BlockPool, cache: KVCache) -> dict[int, list[bytes]]:
    blocks = cache.buffer.reshape(cache.num_blocks, -1)
    return {seq: [blocks[i].tobytes() for i in ids] for seq, ids in tables(pool).items()}


def busy_pool(seed: int, num_blocks: int = 60, **options: Any) -> BlockPool:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, BLOCK, blocks_per_page=4, manual_clock=True, **options)
    live = []
    for step in range(120):
        if rng.random() < 0.45 and live:
            pool.free(live.pop(rng.randrange(len(live))))
        elif pool.num_free > 8:
            name = rng.randrange(6)
            tokens = [1000 * name + i for i in range(BLOCK * rng.randrange(1, 4))]
            live.append(pool.create([*tokens, step], owner=f"o{step}", commit=True))
        if live and pool.num_free > 2:
            pool.append([rng.choice(live)], 1)
    return pool


@pytest.mark.parametrize("objective", ["pages", "runs", "largest_run"])
@pytest.mark.parametrize("placement", ["queue", "sorted", "bitmap"])
def test_every_sequence_reads_the_same_bytes_afterwards(objective: Any, placement: str) -> None:
    rounds = 0
    for seed in range(12):
        pool = busy_pool(seed, placement=placement)
        cache, backend = cache_of(60), Recorder()
        before = stamp(pool, cache)
        n = pool.num_free if objective == "largest_run" else None
        plan = pool.plan_compaction(objective, n=n)
        plan.apply(cache, backend)
        pool.validate()
        assert contents(pool, cache) == before
        assert len(backend.calls) == 1
        assert backend.calls[0][0] == ("assign_blocks" if len(plan.rounds) > 1 else "move_blocks")
        rounds = max(rounds, len(plan.rounds))
        with pytest.raises(StalePlan, match="applied already"):
            plan.apply(cache, backend)
        assert len(backend.calls) == 1
    assert objective != "runs" or rounds > 1


def test_strict_contiguity_slides_through_one_assignment() -> None:
    pool = BlockPool(12, BLOCK, contiguity="required", manual_clock=True, placement="sorted")
    seqs = [pool.create([10 * i] * (BLOCK * 3)) for i in range(4)]
    pool.free([seqs[0], seqs[2]])
    cache, backend = cache_of(12), Recorder()
    before = stamp(pool, cache)
    pool.plan_compaction("largest_run", n=6).apply(cache, backend)
    assert contents(pool, cache) == before
    assert pool.largest_run == 6
    pool.validate()


def movable() -> tuple[BlockPool, Any]:
    pool = busy_pool(3)
    plan = pool.plan_compaction("pages")
    assert len(plan) > 0
    return pool, plan


def test_a_backend_that_fails_leaves_the_pool_as_it_was() -> None:
    pool, plan = movable()
    backend, cache = Recorder(), cache_of(60)

    def refuse() -> None:
        raise MemoryError("no room for the upload")

    backend.before = refuse
    before, bytes_before = state(pool), cache.buffer.copy()
    with pytest.raises(MemoryError, match="no room"):
        plan.apply(cache, backend)
    assert state(pool) == before
    assert (cache.buffer == bytes_before).all()
    backend.before = None
    plan.apply(cache, backend)  # it may be tried again
    pool.validate()


def test_a_stale_plan_copies_nothing() -> None:
    pool, plan = movable()
    pool.free(list(tables(pool)))
    backend = Recorder()
    with pytest.raises(StalePlan):
        plan.apply(cache_of(60), backend)
    assert backend.calls == []


@pytest.mark.parametrize(
    ("cache", "message"),
    [(cache_of(59), "num_blocks 59"), (cache_of(60, 8), "block_size 8")],
)
def test_a_cache_of_another_pool_is_refused(cache: KVCache, message: str) -> None:
    pool, plan = movable()
    before, backend = state(pool), Recorder()
    with pytest.raises(InvalidArgument, match=message):
        plan.apply(cache, backend)
    assert (state(pool), backend.calls) == (before, [])


def test_bytes_need_both_a_cache_and_a_backend() -> None:
    pool, plan = movable()
    before = state(pool)
    for arguments in ({"kv_cache": cache_of(60)}, {"backend": Recorder()}):
        with pytest.raises(InvalidArgument, match="needed"):
            plan.apply(**arguments)
    assert state(pool) == before


def test_the_pool_cannot_be_called_from_within_its_own_copies() -> None:
    pool, plan = movable()
    backend, refused = Recorder(), []

    def meddle() -> None:
        calls = (lambda: pool.create([1]), pool.stats, lambda: pool.plan_compaction("pages"))
        for call in calls:
            with pytest.raises(InvalidArgument, match=r"within its own plan.apply\(\)") as caught:
                call()
            refused.append(caught)

    backend.before = meddle
    plan.apply(cache_of(60), backend)
    assert len(refused) == 3
    pool.validate()


def test_other_threads_wait_until_tables_follow_the_bytes() -> None:
    pool, plan = movable()
    backend, cache = Recorder(), cache_of(60)
    stamp(pool, cache)
    done, order = threading.Event(), []

    def other() -> None:
        pool.create([1])
        order.append("created")

    thread = threading.Thread(target=other)

    def hold() -> None:
        thread.start()
        done.wait(0.2)
        order.append("copied")

    backend.before = hold
    plan.apply(cache, backend)
    thread.join()
    assert order == ["copied", "created"]
    pool.validate()
