"""Which cached block goes first: LRU, tails before heads, priorities and times to live, clairvoyance."""

from __future__ import annotations

import pytest

from kvcatch import BlockPool, InvalidArgument, evictions


def make_pool(num_blocks: int = 8, **options: object) -> BlockPool:
    return BlockPool(num_blocks, 4, **{"placement": "queue", "manual_clock": True, **options})


def prompt(name: int, blocks: int = 1) -> list[int]:
    return [1000 * name + token for token in range(4 * blocks)]


def cached(pool: BlockPool, *names: int, blocks: int = 1) -> None:
    """Leave the prompts cached, the first one least recently used."""
    for name in names:
        pool.free(pool.create(prompt(name, blocks), commit=True))


def found(pool: BlockPool, *names: int, blocks: int = 1) -> list[int]:
    return [pool.lookup(prompt(name, blocks)) for name in names]


def victims(pool: BlockPool, *names: int) -> list[int]:
    """Evict one by one; the names in the order they go."""
    left, order = list(names), []
    while pool.evict(1):
        gone = [name for name in left if not pool.lookup(prompt(name))]
        left = [name for name in left if name not in gone]
        order += gone
    return order


def test_names() -> None:
    assert {"lru", "slru", "clairvoyant"} <= set(evictions())
    for name in evictions():
        assert make_pool(eviction=name).eviction == name


@pytest.mark.parametrize("placement", ["queue", "sorted", "bitmap", "buddy"])
def test_clean_blocks_go_before_cached_ones(placement: str) -> None:
    pool = make_pool(6, placement=placement)
    cached(pool, 1, 2, 3)
    pool.create(prompt(9, 3))
    assert (pool.num_free, pool.num_cached) == (0, 3)
    assert found(pool, 1, 2, 3) == [4, 4, 4]
    pool.create(prompt(8))
    assert found(pool, 1, 2, 3) == ([0, 4, 4])
    assert pool.stats()["counters"]["blocks_evicted"] == 1


def test_lru() -> None:
    pool = make_pool(4)
    cached(pool, 1, 2, 3)
    assert pool.block_ids(pool.create(prompt(9, 2))).tolist() == [3, 0]
    assert found(pool, 1, 2, 3) == [0, 4, 4]


def test_a_hit_makes_it_recent() -> None:
    pool = make_pool()
    cached(pool, 1, 2, 3)
    pool.free(pool.create([*prompt(1), 7]))
    assert victims(pool, 1, 2, 3) == [2, 3, 1]


def test_a_tail_goes_before_its_head() -> None:
    pool = make_pool()
    cached(pool, 1, blocks=3)
    for left in (8, 4, 0):
        assert pool.evict(1) == 1
        assert found(pool, 1, blocks=3) == [left]
    assert pool.evict(5) == 0
    assert pool.num_free == 8


def test_sequences_freed_in_one_call_go_in_the_order_given() -> None:
    pool = make_pool()
    a, b = (pool.create(prompt(name), commit=True) for name in (1, 2))
    pool.free([b, a])
    assert victims(pool, 1, 2) == [2, 1]


def test_evict_counts() -> None:
    pool = make_pool()
    cached(pool, 1, 2, 3)
    assert pool.evict(0) == 0
    assert pool.evict(2) == 2
    assert found(pool, 1, 2, 3) == [0, 0, 4]
    assert pool.evict(2**40) == 1
    assert pool.stats()["counters"]["blocks_evicted"] == 3


def test_priorities() -> None:
    pool = make_pool()
    cached(pool, 1, 2, 3, 4)
    assert pool.retain(prompt(2), priority=2) == 1
    assert pool.retain(prompt(1)) == 1
    assert pool.retain(prompt(7)) == 0
    assert victims(pool, 1, 2, 3, 4) == [3, 4, 1, 2]


def test_priority_zero_ends_a_retention() -> None:
    pool = make_pool()
    cached(pool, 1, 2)
    pool.retain(prompt(1), priority=100)
    pool.retain(prompt(1), priority=0)
    assert victims(pool, 1, 2) == [2, 1]  # 1 was filed anew behind 2


def test_retaining_what_is_in_use() -> None:
    pool = make_pool()
    a = pool.create(prompt(1, 2), commit=True)
    assert pool.retain(prompt(1, 2), priority=5) == 2
    pool.free(a)
    cached(pool, 2)
    assert pool.evict(1) == 1
    assert found(pool, 2) == [0]
    assert pool.evict(1) == 1
    assert found(pool, 1, blocks=2) == [4]  # tail first among equals


def test_time_to_live() -> None:
    pool = make_pool()
    assert pool.now == 0
    cached(pool, 1, 2, 3)
    pool.retain(prompt(2), ttl=5)
    pool.retain(prompt(3), priority=7, ttl=2.5)
    pool.now = 2.499
    assert pool.now == 2.499
    pool.evict(1)
    assert found(pool, 1, 2, 3) == [0, 4, 4]
    pool.now = 2.5
    pool.evict(1)
    assert found(pool, 1, 2, 3) == [0, 4, 0]


def test_what_expired_goes_first() -> None:
    pool = make_pool()
    cached(pool, 1, 2, 3)
    pool.retain(prompt(3), priority=50, ttl=1)
    pool.now = 1.0
    assert victims(pool, 1, 2, 3) == [3, 1, 2]


def test_a_time_to_live_of_nothing_retains_nothing() -> None:
    pool = make_pool()
    cached(pool, 1, 2)
    assert pool.retain(prompt(2), priority=9, ttl=0) == 1
    assert victims(pool, 1, 2) == [1, 2]


def test_the_clock_never_runs_backwards() -> None:
    pool = make_pool()
    pool.now = 5
    pool.now = 1
    assert pool.now == 5


def test_a_real_clock_expires_too() -> None:
    pool = make_pool(manual_clock=False)
    cached(pool, 1, 2)
    pool.retain(prompt(2), priority=1, ttl=0.001)
    start = pool.now
    while pool.now < start + 0.01:
        pass
    assert victims(pool, 1, 2) == [2, 1]


def test_a_retention_ends_with_its_content() -> None:
    pool = make_pool(2)
    cached(pool, 1)
    pool.retain(prompt(1), priority=9)
    pool.free(pool.create(prompt(3, 2)))  # evicts 1
    cached(pool, 1, 2)
    assert victims(pool, 1, 2) == [1, 2]


def test_clairvoyant() -> None:
    pool = make_pool(eviction="clairvoyant")
    for name, next_use in ((1, [30]), (2, [10]), (3, [-1])):
        seq = pool.create(prompt(name), commit=True)
        pool.set_next_use(seq, next_use)
        pool.free(seq)
    cached(pool, 4)
    assert victims(pool, 1, 2, 3, 4) == [3, 4, 1, 2]  # -1 and unknown: never; the older one first
    with pytest.raises(InvalidArgument):
        make_pool().set_next_use(0, [1])


@pytest.mark.parametrize("eviction", ["lru", "slru", "clairvoyant"])
def test_all_blocks_can_be_had(eviction: str) -> None:
    pool = make_pool(eviction=eviction)
    cached(pool, *range(1, 9))
    assert (pool.num_cached, pool.available) == (8, 8)
    assert sorted(pool.block_ids(pool.create(prompt(20, 8)))) == list(range(8))
    assert pool.stats()["counters"]["blocks_evicted"] == 8
    pool.validate()
