"""Sequences: block tables, slots, copy-on-write, truncation, chunks, promises. Every number worked out by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from core_support import slots, state, tables

from kvcatch import BlockPool, InvalidArgument, OutOfBlocks, StaleHandle


def make_pool(num_blocks: int = 16, **options: object) -> BlockPool:
    return BlockPool(num_blocks, 4, **{"placement": "sorted", "manual_clock": True, **options})


def shortage(error: OutOfBlocks) -> tuple[int, ...]:
    return error.required, error.free, error.cached, error.reserved, error.largest_run


def test_block_tables_are_written_into_the_callers_array() -> None:
    pool = make_pool()
    a, b = pool.create(range(6)), pool.create(range(100, 109))
    whole = np.full((5, 5), 9, np.int32)
    pool.block_tables([b, a], whole[1:4])
    assert whole.tolist() == [
        [9] * 5,
        [2, 3, 4, -1, -1],
        [0, 1, -1, -1, -1],
        [9] * 5,  # a row without a sequence is left alone
        [9] * 5,
    ]
    pool.block_tables(np.array([a.id, a.id]), whole, pad=7)
    assert whole[:2].tolist() == [[0, 1, 7, 7, 7]] * 2
    assert pool.block_ids(b).tolist() == [2, 3, 4]
    assert pool.block_ids(b).dtype == np.int32


def test_slot_mapping_is_written_into_the_callers_array() -> None:
    pool = make_pool()
    a, b = pool.create(range(6)), pool.create(range(100, 109))
    out = np.full(20, -7, np.int64)
    assert pool.slot_mapping([b, a], out=out) == 15
    assert out.tolist() == [*range(8, 17), *range(6), *[-7] * 5]
    pool.commit([a, b])
    assert slots(pool, [a, b]) == []
    assert pool.append([a, b], [1, 4]) == []
    assert tables(pool) == {a.id: [0, 1], b.id: [2, 3, 4, 5]}
    assert slots(pool, [a, b]) == [6, 17, 18, 19, 20]
    assert slots(pool, [a, b], 2, starts=[3, 7]) == [3, 4, 15, 16]
    assert slots(pool, a, starts=7) == []
    assert slots(pool, [b, a], [1, 0]) == [17]


def test_slots_and_tables_of_scattered_blocks() -> None:
    pool = make_pool(placement="queue")
    a, b = pool.create([1] * 4), pool.create([2] * 4)
    pool.append([a, b], 4)
    pool.append([b, a], np.array([1, 1]))
    assert tables(pool) == {a.id: [0, 2, 5], b.id: [1, 3, 4]}
    assert slots(pool, a) == [0, 1, 2, 3, 8, 9, 10, 11, 20]
    assert pool.num_runs(a) == 3
    assert pool.num_runs([a, b]) == 5


def test_the_null_block_is_nobodys() -> None:
    pool = make_pool(4, null_block=True)
    assert (pool.num_free, pool.available, pool.num_active) == (3, 3, 0)
    assert pool.block_ids(pool.create(range(12))).tolist() == [1, 2, 3]
    with pytest.raises(OutOfBlocks):
        pool.create([1])


def test_fork_copies_on_write() -> None:
    pool = make_pool()
    parent = pool.create(range(6), owner="p", tags={"n": "2"}, commit=True)
    child = pool.fork(parent)
    assert (child.owner, pool.describe(child)["tags"]) == ("p", {"n": "2"})
    assert tables(pool) == {parent.id: [0, 1], child.id: [0, 1]}
    assert pool.num_active == 2
    # The first one to write copies, the last one keeps the block.
    assert pool.append([parent, child], 1) == [(1, 2)]
    assert tables(pool) == {parent.id: [0, 2], child.id: [0, 1]}
    assert slots(pool, [parent, child]) == [10, 6]
    pool.commit([parent, child], [7, 8])
    assert pool.append([parent, child], 1) == []
    pool.commit([parent, child], [70, 80])
    assert pool.lookup([*range(6), 7, 70]) == pool.lookup([*range(6), 8, 80]) == 8
    assert pool.stats()["counters"]["copies_on_write"] == 1
    pool.validate()


def test_three_forks_make_three_copies() -> None:
    pool = make_pool()
    parent = pool.create(range(5), commit=True)
    batch = [parent, *(pool.fork(parent, owner=str(i)) for i in range(3))]
    assert pool.append(batch, [1, 0, 1, 1]) == [(1, 2), (1, 3), (1, 4)]
    # One of them has not written: it keeps the old block and may write it now.
    assert pool.append(batch, [0, 1, 0, 0]) == []
    assert list(tables(pool).values()) == [[0, 2], [0, 1], [0, 3], [0, 4]]
    assert [seq.owner for seq in batch] == [None, "0", "1", "2"]


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    pool = make_pool()
    parent = pool.create(range(8), commit=True)
    child = pool.fork(parent, tags={})
    assert pool.append([child, parent], 1) == []
    assert tables(pool) == {parent.id: [0, 1, 3], child.id: [0, 1, 2]}


def test_a_fork_outlives_its_parent() -> None:
    pool = make_pool()
    parent = pool.create(range(6), reserve_tokens=8, commit=True)
    assert pool.num_reserved == 2
    child = pool.fork(parent)
    assert pool.describe(child)["reserved_blocks"] == 0
    pool.free(parent)
    assert (pool.num_active, pool.num_reserved, pool.num_cached) == (2, 0, 0)
    assert pool.append(child) == []
    assert slots(pool, child) == [6]


def test_no_slot_is_written_by_two_forks() -> None:
    pool = make_pool()
    parent = pool.create(range(4), commit=True)
    pool.append(parent, 1)
    before = state(pool)
    with pytest.raises(InvalidArgument, match="room for 1"):
        pool.fork(parent)
    assert state(pool) == before
    pool.commit(parent, [4])
    child = pool.fork(parent)
    pool.append([parent, child], 1)
    assert set(slots(pool, parent)).isdisjoint(slots(pool, child))


def test_fork_of_a_prompt_that_is_not_written_yet() -> None:
    pool = make_pool()
    parent = pool.create(range(6))
    child = pool.fork(parent)
    assert slots(pool, parent) == slots(pool, child) == [0, 1, 2, 3, 4, 5]  # the same tokens
    pool.commit([parent, child])
    assert pool.num_active == 2
    assert pool.append([parent, child]) == [(1, 2)]


def test_truncate_then_append_hides_what_is_overwritten() -> None:
    pool = make_pool()
    a = pool.create(range(8), commit=True)
    pool.truncate(a, 6)
    assert (pool.num_tokens(a), pool.num_committed(a)) == (6, 6)
    assert pool.lookup(range(8)) == 8  # still there, nothing was written over it
    assert pool.append(a, 2) == []
    assert pool.lookup(range(8)) == 4
    assert slots(pool, a) == [6, 7]
    pool.commit(a, [60, 70])
    assert pool.lookup(range(8)) == 4
    assert pool.lookup([0, 1, 2, 3, 4, 5, 60, 70]) == 8
    pool.validate()


def test_truncate_into_a_block_that_another_sequence_shares() -> None:
    pool = make_pool()
    a = pool.create(range(8), commit=True)
    b = pool.create(range(9))
    assert b.hit_tokens == 8
    assert tables(pool) == {a.id: [0, 1], b.id: [0, 1, 2]}
    pool.truncate(a, 6)
    assert pool.append(a, 1) == [(1, 3)]
    pool.commit(a, [60])
    assert pool.lookup(range(8)) == 8
    assert pool.create(range(9)).hit_tokens == 8


def test_truncate_into_a_cached_block_that_is_hit_meanwhile() -> None:
    pool = make_pool()
    a = pool.create(range(8), commit=True)
    pool.truncate(a, 5)
    b = pool.create(range(9))
    assert pool.block_ids(b)[:2].tolist() == [0, 1]
    assert pool.append(a) == [(1, 3)]


def test_a_pinned_block_is_not_written_over() -> None:
    pool = make_pool()
    a = pool.create(range(8), commit=True)
    pin = pool.pin([1])
    pool.truncate(a, 6)
    assert pool.append(a, 1) == [(1, 2)]
    assert pool.block_ids(a).tolist() == [0, 2]
    assert (pool.num_pinned, pool.num_cached, pool.num_active) == (1, 1, 2)
    pool.unpin(pin)
    assert (pool.num_pinned, pool.num_cached, pool.num_active) == (0, 1, 2)
    assert pool.lookup(range(8)) == 8


def test_truncate_gives_blocks_back() -> None:
    pool = make_pool()
    a = pool.create(range(14))
    pool.commit(a, counts=9)
    pool.truncate(a, 4)
    assert (pool.block_ids(a).tolist(), pool.num_committed(a)) == ([0], 4)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (14, 1, 1)
    pool.truncate(a, 0)
    assert (pool.block_ids(a).tolist(), pool.num_tokens(a)) == ([], 0)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (14, 2, 0)
    out = np.zeros((1, 2), np.int32)
    pool.block_tables(a, out)
    assert out.tolist() == [[-1, -1]]
    pool.append(a, 4)
    pool.commit(a, [9, 8, 7, 6])
    assert pool.lookup([9, 8, 7, 6]) == 4
    pool.validate()


def test_chunked_prefill() -> None:
    pool = make_pool()
    a = pool.create(range(10), num_tokens=4)
    assert (pool.block_ids(a).tolist(), pool.num_tokens(a), pool.num_committed(a)) == ([0], 4, 0)
    assert pool.lookup(range(10)) == 0
    pool.commit(a)
    assert (pool.num_committed(a), pool.lookup(range(10))) == (4, 4)
    pool.append(a, 3)
    assert slots(pool, a) == [4, 5, 6]
    pool.commit([a], counts=2)
    assert pool.num_committed(a) == 6
    with pytest.raises(InvalidArgument, match="2"):
        pool.commit([a], counts=2)  # room for one more alone
    pool.commit(a)
    pool.append(a, 3)
    with pytest.raises(InvalidArgument, match="3 known tokens"):
        pool.commit(a, [1, 2, 3])
    pool.commit(a)
    assert (pool.num_committed(a), pool.lookup(range(10))) == (10, 8)
    pool.append(a, 2)
    pool.commit(a, [10, 11])
    assert pool.lookup(range(12)) == 12
    assert pool.stats()["counters"]["blocks_committed"] == 3


def test_a_chunk_smaller_than_the_hit() -> None:
    pool = make_pool()
    pool.free(pool.create(range(8), commit=True))
    a = pool.create(range(10), num_tokens=1)
    assert (a.hit_tokens, pool.num_tokens(a), pool.num_committed(a)) == (8, 8, 8)
    pool.append(a, 2)
    assert slots(pool, a) == [8, 9]


def test_append_is_all_or_nothing() -> None:
    pool = make_pool(4)
    a, b = pool.create([1] * 4), pool.create([2] * 4)
    before = state(pool, refusals=False)
    with pytest.raises(OutOfBlocks) as caught:
        pool.append([a, b], [4, 8])
    assert shortage(caught.value) == (3, 2, 0, 0, 2)
    assert state(pool, refusals=False) == before
    assert pool.stats()["counters"]["refused"] == 1
    assert pool.append([a, b], [4, 4]) == []
    assert tables(pool) == {a.id: [0, 2], b.id: [1, 3]}


def test_append_counts_copies_too() -> None:
    pool = make_pool(3)
    a = pool.create(range(6), commit=True)
    b, c = pool.fork(a), pool.fork(a)
    with pytest.raises(OutOfBlocks) as caught:
        pool.append([a, b, c])
    assert shortage(caught.value) == (2, 1, 0, 0, 1)
    assert pool.append([a]) == [(1, 2)]


def test_out_of_blocks_counts_the_cached_blocks_it_would_hit() -> None:
    pool = make_pool(4)
    pool.free(pool.create(range(8), commit=True))
    before = state(pool, refusals=False)
    with pytest.raises(OutOfBlocks) as caught:
        pool.create(range(20))  # 5 blocks: 2 hit, 3 fresh
    assert shortage(caught.value) == (5, 2, 2, 0, 4)
    assert state(pool, refusals=False) == before
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is OutOfBlocks
    assert (shortage(again), str(again)) == (shortage(caught.value), str(caught.value))
    for number in ("needs 5", "4 are available", "2 free", "2 cached", "0 reserved", "run 4"):
        assert number in str(again)
    assert pool.create(range(16)).hit_tokens == 8


def test_promises_are_kept() -> None:
    pool = make_pool(4)
    a = pool.create([1], reserve_tokens=5)
    assert (pool.num_reserved, pool.available, pool.num_free) == (1, 2, 3)
    with pytest.raises(OutOfBlocks) as caught:
        pool.create(range(12))
    assert shortage(caught.value) == (3, 3, 0, 1, 3)
    b = pool.create(range(8))
    assert pool.available == 0
    pool.append(a, 5)
    assert (pool.num_reserved, pool.num_free, pool.block_ids(a).tolist()) == (0, 0, [0, 3])
    with pytest.raises(OutOfBlocks):
        pool.append(a, 3)
    pool.free(b)
    pool.reserve(a, 10)  # 16 tokens are 4 blocks, 2 are held
    assert (pool.num_reserved, pool.available) == (2, 0)
    with pytest.raises(OutOfBlocks) as caught:
        pool.reserve(a, 11)
    assert shortage(caught.value) == (1, 2, 0, 2, 2)
    pool.reserve(a, 3)
    assert pool.num_reserved == 1
    pool.reserve(a, 0)
    assert pool.num_reserved == 0
    pool.reserve(a, 10)
    pool.free(a)
    assert (pool.num_reserved, pool.available) == (0, 4)


def test_handles() -> None:
    pool = make_pool()
    a = pool.create([1, 2], owner="me")
    b = pool.create([1, 2])
    assert (a.owner, b.owner, a.hit_tokens) == ("me", None, 0)
    assert int(a) == a.id == a.__index__()
    assert a != b
    assert a == next(seq for seq in pool.sequences() if seq.owner == "me")
    assert len({a, b, *pool.sequences()}) == 2
    assert a != a.id
    pool.free(a.id)
    c = pool.create([3])
    assert c not in {a, b}
    for call in (pool.block_ids, pool.num_tokens, pool.num_committed, pool.describe, pool.fork):
        with pytest.raises(StaleHandle, match=str(a.id)):
            call(a)
    assert 0 <= c.id < 2**63
    assert str(c.id) in repr(c)
    pool.free(np.array([b.id, c.id]))
    assert pool.num_sequences == 0
    assert pool.sequences() == []


def test_deduplicate() -> None:
    pool = make_pool()
    a, b = pool.create(range(6)), pool.create(range(6))
    assert tables(pool) == {a.id: [0, 1], b.id: [2, 3]}
    assert pool.commit([a, b], deduplicate=True) == 1
    assert tables(pool) == {a.id: [0, 1], b.id: [0, 3]}
    assert (pool.num_free, pool.num_active) == (13, 3)
    assert pool.stats()["counters"]["blocks_deduplicated"] == 1
    pool.free([a, b])
    assert (pool.num_free, pool.num_cached) == (15, 1)


def test_twins_without_deduplication_are_both_kept() -> None:
    pool = make_pool()
    a, b = pool.create(range(4)), pool.create(range(4))
    assert pool.commit([a, b]) == 0
    pool.free([a, b])
    assert pool.num_cached == 2
    assert pool.evict(1) == 1
    assert pool.lookup(range(4)) == 4
    pool.evict(1)
    assert pool.lookup(range(4)) == 0


def test_describe_says_everything() -> None:
    pool = make_pool(placement="queue")
    a = pool.create(range(6), owner="o", tags={"b": "2", "a": "1"}, reserve_tokens=6)
    pool.create([1])
    pool.append(a, 3)
    pool.commit(a, counts=5)
    assert pool.describe(a) == {
        "id": a.id,
        "owner": "o",
        "tags": {"a": "1", "b": "2"},
        "num_tokens": 9,
        "num_committed": 5,
        "num_blocks": 3,
        "runs": 2,
        "hit_tokens": 0,
        "reserved_blocks": 0,
    }


def test_required_contiguity_refuses_scatter_where_preferred_does_not() -> None:
    for contiguity in ("preferred", "required"):
        pool = make_pool(8, contiguity=contiguity)
        seqs = [pool.create([i] * 8) for i in range(4)]
        pool.free([seqs[0], seqs[2]])
        assert (pool.num_free, pool.largest_run, pool.available) == (4, 2, 4)
        if contiguity == "preferred":
            assert pool.block_ids(pool.create([9] * 16)).tolist() == [0, 1, 4, 5]
            continue
        before = state(pool, refusals=False)
        with pytest.raises(OutOfBlocks, match="one run of 4") as caught:
            pool.create([9] * 16)
        assert shortage(caught.value) == (4, 4, 0, 0, 2)
        with pytest.raises(OutOfBlocks, match="right behind block 7"):
            pool.append(seqs[3], 1)
        assert state(pool, refusals=False) == before
        assert pool.append(seqs[1], 8) == []  # blocks 4 and 5 lie right behind 2 and 3
        assert pool.block_ids(seqs[1]).tolist() == [2, 3, 4, 5]


def test_required_contiguity_keeps_the_run_it_promised() -> None:
    pool = make_pool(8, contiguity="required")
    a = pool.create([1] * 4, reserve_tokens=8)
    b = pool.create([2] * 4)
    assert pool.num_runs([a, b]) == 2
    start = int(pool.block_ids(a)[0])
    assert int(pool.block_ids(b)[0]) not in range(start, start + 3)
    pool.append(a, 8)
    assert pool.block_ids(a).tolist() == [start, start + 1, start + 2]
    with pytest.raises(OutOfBlocks):
        pool.reserve(b, 4 * 7)
    pool.validate()


@pytest.mark.parametrize("how", ["pin", "hit"])
def test_required_contiguity_keeps_cached_blocks_it_promised(how: str) -> None:
    pool = make_pool(5, contiguity="required")
    seqs = [pool.create([name] * 4, commit=True) for name in range(5)]
    pool.free([*seqs[:3], seqs[4]])
    a = pool.create([9] * 4, reserve_tokens=8)  # block 0, and 1 and 2 are promised
    assert (pool.block_ids(a).tolist(), pool.num_reserved, pool.available) == ([0], 2, 1)
    try:
        if how == "pin":
            pool.pin([2])
        else:
            pool.create([*[2] * 4, 7], num_tokens=1)
    except (OutOfBlocks, InvalidArgument):
        pass
    pool.append(a, 8)
    assert pool.num_runs(a) == 1
