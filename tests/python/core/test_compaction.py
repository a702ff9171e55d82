"""Compaction plans through the boundary: what they move, what follows, and when they are refused."""

from __future__ import annotations

import numpy as np
import pytest
from core_support import state, tables

from kvcatch import BlockPool, InvalidArgument, OutOfBlocks, StalePlan


def make_pool(num_blocks: int = 8, **options: object) -> BlockPool:
    return BlockPool(
        num_blocks,
        4,
        **{"placement": "sorted", "manual_clock": True, "blocks_per_page": 2, **options},
    )


def prompt(name: int, blocks: int = 1) -> list[int]:
    return [1000 * name + token for token in range(4 * blocks)]


def scattered(**options: object) -> tuple[BlockPool, list[object]]:
    """Sequences on blocks 1 and 3 of 8."""
    pool = make_pool(**options)
    seqs = [pool.create(prompt(name), owner=f"o{name}", commit=True) for name in range(4)]
    pool.free([seqs[0], seqs[2]])
    pool.evict(2)
    return pool, [seqs[1], seqs[3]]


def test_largest_run() -> None:
    pool, (a, b) = scattered()
    before = state(pool)
    plan = pool.plan_compaction("largest_run", n=6, bytes_per_block=100, bandwidth=1e3)
    assert state(pool) == before
    assert (plan.src.tolist(), plan.dst.tolist(), plan.rounds) == ([3], [0], [1])
    assert plan.src.dtype == plan.dst.dtype == np.int32
    assert plan.to_dict() == {
        "objective": "largest_run",
        "moves": 1,
        "rounds": [1],
        "runs_before": 2,
        "runs_after": 2,
        "runs_bound": None,
        "empty_pages_before": 2,
        "empty_pages_after": 3,
        "largest_run_before": 4,
        "largest_run_after": 6,
        "bytes_moved": 100,
        "predicted_seconds": 0.2,
    }
    assert (len(plan), plan.num_moves, plan.objective) == (1, 1, "largest_run")
    assert (plan.bytes_moved, plan.seconds, plan.runs_bound) == (100, 0.2, None)
    plan.apply()
    assert tables(pool) == {a.id: [1], b.id: [0]}
    assert pool.largest_run == plan.largest_run_after == 6
    # The prefix and the owner followed.
    assert pool.lookup(prompt(3)) == 4
    assert pool.block_ids(pool.create([*prompt(3), 1])).tolist() == [0, 2]
    assert {row["owner"]: row["blocks"] for row in pool.holdings()}["o3"] == 1
    assert pool.stats()["counters"]["blocks_moved"] == 1
    pool.validate()


def test_pages() -> None:
    pool, (a, b) = scattered()
    plan = pool.plan_compaction("pages")
    assert (plan.src.tolist(), plan.dst.tolist()) == ([1], [2])
    assert (plan.empty_pages_before, plan.empty_pages_after) == (2, 3)
    assert plan.bytes_moved is None
    assert plan.seconds is None
    plan.apply()
    assert tables(pool) == {a.id: [2], b.id: [3]}
    pages = pool.stats()["pages"]
    assert (pages["total"], pages["empty"], pages["pinned"]) == (4, 3, 1)


def test_runs() -> None:
    pool = make_pool(8)
    a, b = pool.create(prompt(1)), pool.create(prompt(2))
    pool.append([a, b], 4)
    assert tables(pool) == {a.id: [0, 2], b.id: [1, 3]}
    plan = pool.plan_compaction("runs")
    assert (plan.runs_before, plan.runs_after, plan.runs_bound) == (4, 2, 2)
    plan.apply()
    assert pool.num_runs([a, b]) == 2
    assert pool.num_runs(a) == 1
    again = pool.plan_compaction("runs")
    assert (again.num_moves, again.runs_before, again.rounds) == (0, 2, [])
    assert again.src.tolist() == []
    again.apply()


def test_runs_of_some_sequences_alone() -> None:
    pool = make_pool(8)
    a, b = pool.create(prompt(1)), pool.create(prompt(2))
    pool.append([a, b], 4)
    plan = pool.plan_compaction("runs", seqs=[b])
    assert (plan.runs_before, plan.runs_after) == (2, 1)
    plan.apply()
    assert pool.num_runs(b) == 1


def test_limits() -> None:
    pool, _ = scattered()
    for objective in ("runs", "pages"):
        assert len(pool.plan_compaction(objective, max_moves=0)) == 0
    with pytest.raises(InvalidArgument, match="at least 1 move"):
        pool.plan_compaction("largest_run", n=6, max_moves=0)
    with pytest.raises(InvalidArgument, match="only 6 are free"):
        pool.plan_compaction("largest_run", n=7)


def test_cached_blocks_move_and_keep_their_order() -> None:
    pool = make_pool(8, placement="queue")
    seqs = [pool.create(prompt(name), commit=True) for name in range(4)]
    pool.free([seqs[3], seqs[1]])  # 3 is the next victim
    pool.free([seqs[0], seqs[2]])
    plan = pool.plan_compaction("largest_run", n=4)
    assert plan.num_moves == 0
    pool.retain(prompt(3), priority=1)
    pool.evict(2)  # 1 and 0
    assert [pool.lookup(prompt(name)) for name in range(4)] == [0, 0, 4, 4]
    plan = pool.plan_compaction("largest_run", n=6)
    assert (plan.src.tolist(), plan.dst.tolist()) == ([2, 3], [0, 1]) or plan.num_moves == 2
    plan.apply()
    assert (pool.num_cached, pool.num_active) == (2, 0)
    assert [pool.lookup(prompt(name)) for name in range(4)] == [0, 0, 4, 4]
    pool.evict(1)
    assert [pool.lookup(prompt(name)) for name in range(4)] == [0, 0, 0, 4]
    pool.validate()


def test_a_pin_stays_where_it_is() -> None:
    pool, (_, b) = scattered()
    pin = pool.pin(b)
    with pytest.raises(InvalidArgument, match="1 fixed"):
        pool.plan_compaction("largest_run", n=6)
    plan = pool.plan_compaction("pages")
    assert 3 not in plan.src
    plan.apply()
    assert pool.block_ids(b).tolist() == [3]
    pool.unpin(pin)
    pool.plan_compaction("largest_run", n=6).apply()
    assert pool.largest_run == 6


def test_the_null_block_stays() -> None:
    pool = make_pool(8, null_block=True)
    a = pool.create(prompt(1))
    b = pool.create(prompt(2))
    pool.free(a)
    plan = pool.plan_compaction("largest_run", n=6)
    assert (plan.src.tolist(), plan.dst.tolist()) == ([2], [7])
    plan.apply()
    assert pool.block_ids(b).tolist() == [7]
    with pytest.raises(InvalidArgument):
        pool.plan_compaction("largest_run", n=7)


def test_a_shared_block_moves_once_for_all() -> None:
    pool, (a, _) = scattered()
    child = pool.fork(a)
    plan = pool.plan_compaction("pages")
    assert (plan.src.tolist(), plan.runs_before) == ([1], 3)
    plan.apply()
    assert pool.block_ids(a).tolist() == pool.block_ids(child).tolist() == [2]


def test_stale_when_a_source_was_freed_or_used_again() -> None:
    pool, (_, b) = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    pool.free(b)  # cached now, and still the same content
    plan.apply()
    pool, (_, b) = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    pool.free(b)
    pool.evict(1)
    before = state(pool)
    with pytest.raises(StalePlan, match="block 3"):
        plan.apply()
    assert state(pool) == before


def test_stale_when_a_destination_was_taken() -> None:
    pool, _ = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    c = pool.create(prompt(9))
    assert pool.block_ids(c).tolist() == [0]
    before = state(pool)
    with pytest.raises(StalePlan, match="block 0"):
        plan.apply()
    pool.free(c)  # block 0 is free again, but not as it was
    with pytest.raises(StalePlan):
        plan.apply()
    assert state(pool) != before
    pool.validate()


def test_stale_when_a_source_was_pinned() -> None:
    pool, (_, b) = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    pin = pool.pin(b)
    before = state(pool)
    with pytest.raises(StalePlan):
        plan.apply()
    assert state(pool) == before
    pool.unpin(pin)
    plan.apply()


def test_a_change_that_does_not_matter() -> None:
    pool, (a, b) = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    pool.append(a, 4)  # block 0 is taken by sorted: that matters
    with pytest.raises(StalePlan):
        plan.apply()
    pool, (a, b) = scattered(placement="queue")
    plan = pool.plan_compaction("largest_run", n=6)
    pool.fork(b)
    pool.retain(prompt(3))
    plan.apply()
    assert pool.block_ids(b).tolist() == [0]


def test_a_plan_is_applied_once() -> None:
    pool, _ = scattered()
    plan = pool.plan_compaction("largest_run", n=6)
    twin = pool.plan_compaction("largest_run", n=6)
    plan.apply()
    before = state(pool)
    for spent in (plan, twin):
        with pytest.raises(StalePlan):
            spent.apply()
    assert state(pool) == before


def test_required_contiguity_is_cured() -> None:
    pool = make_pool(8, contiguity="required")
    seqs = [pool.create([i] * 8) for i in range(4)]
    pool.free([seqs[0], seqs[2]])
    assert (pool.num_free, pool.largest_run) == (4, 2)
    with pytest.raises(OutOfBlocks) as caught:
        pool.create([9] * 16)
    assert (caught.value.free, caught.value.largest_run) == (4, 2)
    plan = pool.plan_compaction("largest_run", n=4)
    assert plan.num_moves == 2
    plan.apply()
    new = pool.create([9] * 16)
    assert pool.num_runs(new) == 1
    assert [pool.num_runs(seq) for seq in (seqs[1], seqs[3])] == [1, 1]
    pool.validate()


@pytest.mark.parametrize("objective", ["largest_run", "pages"])
def test_required_contiguity_survives_compaction(objective: str) -> None:
    # Blocks 0-7: free free S S X free Y free. S may go to 5 and 7 alone, in two runs.
    pool = make_pool(8, contiguity="required", blocks_per_page=4)
    gone = pool.create([1] * 8)
    s = pool.create([2] * 8)
    singles = [pool.create([3 + i] * 4) for i in range(4)]
    pool.free([gone, singles[1], singles[3]])
    assert list(tables(pool).values()) == [[2, 3], [4], [6]]
    n = 4 if objective == "largest_run" else None
    pool.plan_compaction(objective, n=n).apply()
    assert pool.num_runs(s) == 1


def test_required_contiguity_keeps_promises_in_compaction() -> None:
    pool = make_pool(8, contiguity="required", blocks_per_page=4)
    a = pool.create([1] * 8, reserve_tokens=8)
    gap = pool.create([2] * 4)
    assert list(tables(pool).values()) == [[0, 1], [4]]
    pool.plan_compaction("pages").apply()
    pool.append(a, 8)
    pool.free(gap)


def test_what_a_plan_says() -> None:
    pool, _ = scattered()
    plan = pool.plan_compaction("pages", bytes_per_block=1 << 20, bandwidth=4e12)
    text = str(plan)
    assert "1 moves (1.0 MiB" in text
    assert "4.00 TB/s" in text
    assert "2 -> 3 empty pages" in text
    assert "pages" in repr(plan)


def test_content_follows_many_random_plans() -> None:
    rng = np.random.default_rng(5)
    pool = BlockPool(48, 4, placement="queue", blocks_per_page=4, manual_clock=True)
    kv = np.full(48, -1)
    seqs: list[object] = []
    content: dict[int, list[int]] = {}
    number = 0
    for _ in range(300):
        if rng.random() < 0.5 and pool.available > 6:
            seq = pool.create([number * 100 + i for i in range(int(rng.integers(1, 24)))])
            blocks = pool.block_ids(seq)
            kv[blocks] = number * 100 + np.arange(len(blocks))
            content[seq.id] = kv[blocks].tolist()
            seqs.append(seq)
            number += 1
        elif seqs:
            pool.free(seqs.pop(int(rng.integers(len(seqs)))))
        objective = str(rng.choice(["runs", "pages", "largest_run"]))
        n = int(pool.num_free) if objective == "largest_run" else None
        if objective == "largest_run" and not n:
            continue
        plan = pool.plan_compaction(objective, n=n, max_moves=None if n else int(rng.integers(9)))
        start = 0
        for end in plan.rounds:
            source, destination = plan.src[start:end], plan.dst[start:end]
            assert set(source.tolist()).isdisjoint(destination.tolist())
            kv[destination] = kv[source]
            start = end
        plan.apply()
        pool.validate()
        assert pool.num_runs(seqs) == plan.runs_after
        for seq in seqs:
            assert kv[pool.block_ids(seq)].tolist() == content[seq.id]
