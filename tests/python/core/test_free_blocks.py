"""``FreeBlocks`` alone: what an engine that owns reference counts and hashes would use."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from core_support import free_state

from kvcatch import DoubleFree, FreeBlocks, InvalidArgument, OutOfBlocks, placements


def test_names() -> None:
    assert placements() == ["queue", "sorted", "bitmap", "buddy"]
    free = FreeBlocks(8)
    assert (free.placement, free.eviction, free.num_blocks) == ("bitmap", "lru", 8)
    assert "8 clean, 0 cached" in repr(free)


def test_vllm_order() -> None:
    free = FreeBlocks(10, placement="queue")
    assert list(free) == list(range(10))
    assert free.take(7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    free.give_cached([2, 1, 0])  # a sequence: tail first
    free.give_clean([5, 3])
    free.give_clean([6])
    free.give_cached([4])
    # Last freed first among the clean ones, then cached ones, least recently used first.
    assert list(free) == [6, 5, 3, 7, 8, 9, 2, 1, 0, 4]
    assert (len(free), free.num_clean, free.num_cached) == (10, 6, 4)
    free.remove(1)  # a hit
    assert free.take(7).tolist() == [6, 5, 3, 7, 8, 9, 2]
    free.give_cached([1])
    assert list(free) == [0, 4, 1]
    assert 1 in free
    assert 2 not in free
    free.validate()


def test_sorted_order() -> None:
    free = FreeBlocks(8, placement="sorted")
    free.take(8)
    free.give_clean([6, 2])
    free.give_clean([4])
    assert list(free) == [2, 4, 6]
    free.give_cached([7, 0])
    assert free.take(2).tolist() == [2, 4]
    assert free.take(3).tolist() == [0, 6, 7]


def test_take_into_the_callers_array_counts_evictions() -> None:
    free = FreeBlocks(6, placement="queue")
    out = np.full(8, -1, np.int32)
    assert free.take(4, out=out) == 0
    assert out.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    free.give_cached([3, 2])
    assert free.take(3, out=out[5:]) == 1
    assert out.tolist() == [0, 1, 2, 3, -1, 4, 5, 3]
    taken = free.take(1)
    assert (taken.tolist(), taken.dtype) == ([2], np.int32)


@pytest.mark.parametrize("placement", placements())
def test_growth_continues_behind_the_last_block(placement: str) -> None:
    free = FreeBlocks(64, placement=placement)
    first = free.take(8).tolist()
    assert first == list(range(8))
    assert free.take(1, after=7).tolist() == [8]
    if placement == "bitmap":
        assert free.take(4).tolist() != [9, 10, 11, 12]  # room to grow is left behind 8
        assert free.take(1, after=8).tolist() == [9]
    assert free.take(3, after=None, contiguous=True).size == 3
    free.validate()


@pytest.mark.parametrize("placement", placements())
def test_contiguous(placement: str) -> None:
    free = FreeBlocks(12, placement=placement)
    free.take(12)
    free.give_clean([0, 1, 4, 5, 6, 9])
    free.give_cached([10])
    before = free_state(free)
    with pytest.raises(OutOfBlocks, match="one run of 4") as caught:
        free.take(4, contiguous=True)
    error = caught.value
    assert (error.required, error.free, error.cached, error.reserved) == (4, 6, 1, 0)
    assert error.largest_run == free.largest_run == 3
    with pytest.raises(OutOfBlocks):
        free.take(2, after=7, contiguous=True)
    with pytest.raises(OutOfBlocks):
        free.take(1, after=11, contiguous=True)
    assert free_state(free) == before
    assert free.take(2, after=3, contiguous=True).tolist() == [4, 5]
    # The fewest cached blocks lost, then the tightest fit, then the lowest id.
    assert free.take(1, contiguous=True).tolist() == [6]
    assert free.take(1, contiguous=True).tolist() == [0]
    assert free.take(2, contiguous=True).tolist() == [9, 10]
    assert list(free) == [1]


@pytest.mark.parametrize("placement", placements())
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64, 65, 100, 4097])
def test_the_whole_pool_at_once(placement: str, num_blocks: int) -> None:
    free = FreeBlocks(num_blocks, placement=placement)
    assert free.largest_run == num_blocks
    assert free.take(num_blocks).tolist() == list(range(num_blocks))
    assert (len(free), free.largest_run, list(free)) == (0, 0, [])
    with pytest.raises(OutOfBlocks) as caught:
        free.take(1)
    assert caught.value.required == 1
    assert free.take(0).tolist() == []
    assert free.take(0, after=num_blocks - 1).tolist() == []
    free.give_clean(range(num_blocks))
    assert free.take(num_blocks, contiguous=True).tolist() == list(range(num_blocks))


def test_remove_touch_and_places() -> None:
    free = FreeBlocks(4, placement="queue")
    free.remove(2)
    assert list(free) == [0, 1, 3]
    with pytest.raises(InvalidArgument, match="2"):
        free.remove(2)
    free.touch(2)
    free.give_cached([2])
    assert (free.is_clean(2), free.is_cached(2)) == (False, True)
    assert (free.is_clean(0), free.is_cached(0)) == (True, False)
    with pytest.raises(DoubleFree, match="2"):
        free.give_clean([2])


def test_order_is_a_copy() -> None:
    free = FreeBlocks(4, placement="queue")
    order = iter(free)
    free.take(2)
    assert list(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("eviction", ["lru", "slru", "clairvoyant"])
@pytest.mark.parametrize("placement", placements())
def test_against_sets(placement: str, eviction: str) -> None:
    rng = random.Random(f"{placement} {eviction}")
    size = 53
    free = FreeBlocks(size, placement=placement, eviction=eviction, seed=3)
    clean, cached, out = set(range(size)), set(), set()
    for step in range(1500):
        match rng.randrange(5):
            case 0 | 1:
                n = rng.randrange(12)
                after = rng.choice([None, *out])
                contiguous = rng.random() < 0.2
                try:
                    taken = free.take(n, after=after, contiguous=contiguous).tolist()
                except OutOfBlocks:
                    assert contiguous or n > len(clean | cached)
                    continue
                assert len(set(taken)) == n
                assert set(taken) <= clean | cached
                if contiguous and n:
                    assert taken == list(range(taken[0], taken[0] + n))
                    assert after is None or taken[0] == after + 1
                clean -= set(taken)
                cached -= set(taken)
                out |= set(taken)
            case 2 | 3:
                given = rng.sample(sorted(out), min(len(out), rng.randrange(12)))
                if rng.random() < 0.5:
                    free.give_clean(given)
                    clean |= set(given)
                else:
                    free.give_cached(np.array(given, np.int32))
                    cached |= set(given)
                out -= set(given)
            case 4 if clean | cached:
                block = rng.choice(sorted(clean | cached))
                free.remove(block)
                clean.discard(block)
                cached.discard(block)
                out.add(block)
        assert (free.num_clean, free.num_cached, len(free)) == (
            len(clean),
            len(cached),
            size - len(out),
        )
        if step % 16 == 0:
            free.validate()
            assert set(free) == clean | cached
            assert {block for block in range(size) if free.is_cached(block)} == cached


def test_queue_against_vllms_list() -> None:
    """One deque: clean blocks are prepended, cached ones appended, the head is handed out."""
    rng = random.Random(11)
    size = 40
    free = FreeBlocks(size, placement="queue")
    queue = deque(range(size))
    out: list[int] = []
    for _ in range(1500):
        match rng.randrange(4):
            case 0 if queue:
                n = rng.randrange(len(queue) + 1)
                expected = [queue.popleft() for _ in range(n)]
                assert free.take(n).tolist() == expected
                out += expected
            case 1 if queue:
                block = rng.choice(list(queue))
                queue.remove(block)
                free.remove(block)
                out.append(block)
            case _:
                rng.shuffle(out)
                n = rng.randrange(len(out) + 1)
                given, out = out[:n], out[n:]
                if rng.random() < 0.5:
                    free.give_clean(given)
                    queue.extendleft(reversed(given))
                else:
                    free.give_cached(given)
                    queue.extend(given)
        assert list(free) == list(queue)
