"""The prefix index: what is found, what is not, and why."""

from __future__ import annotations

import numpy as np
import pytest
from core_support import state

from kvcatch import BlockPool, Prefix


def make_pool(num_blocks: int = 16, **options: object) -> BlockPool:
    return BlockPool(num_blocks, 4, **{"placement": "queue", "manual_clock": True, **options})


def test_committed_before_shared() -> None:
    pool = make_pool()
    a = pool.create(range(8))
    assert pool.lookup(range(8)) == 0
    assert pool.create(range(9)).hit_tokens == 0
    pool.commit([a], counts=5)
    assert pool.lookup(range(8)) == 4
    pool.commit(a)
    assert pool.lookup(range(8)) == 8


def test_one_token_at_least_is_computed() -> None:
    pool = make_pool()
    pool.free(pool.create(range(8), commit=True))
    assert pool.lookup(range(8)) == 8
    assert pool.create(range(8)).hit_tokens == 4
    assert pool.create(range(9)).hit_tokens == 8
    assert pool.create(range(9), use_cache=False).hit_tokens == 0
    counters = pool.stats()["counters"]
    assert (counters["hit_tokens"], counters["prompt_tokens"]) == (12, 8 + 8 + 9 + 9)


def test_generated_tokens_are_found() -> None:
    pool = make_pool()
    a, b = pool.create(range(6), commit=True), pool.create([5] * 7, commit=True)
    pool.append([a, b], [3, 1])
    pool.commit([a, b], [6, 7, 8, 5], [3, 1])
    assert (pool.lookup(range(9)), pool.lookup([5] * 8)) == (8, 8)
    pool.append([a, b], 1)
    pool.commit([a, b], np.array([9, 6]))
    assert pool.num_committed(a) == 10


SALTS = [None, "", "1", b"", b"1", 0, 1, -1, np.int64(2), "\0", "é", b"\xff"]


def test_salts_and_tenants_share_nothing() -> None:
    pool = make_pool(64)
    for salt in SALTS:
        pool.create(range(8), salt=salt, commit=True)
        assert pool.create(range(9), salt=salt).hit_tokens == 8
    firsts = {pool.prefix(range(4), salt=salt).block_hashes()[0] for salt in SALTS}
    assert len(firsts) == len(SALTS)
    assert pool.lookup(range(8), salt="2") == 0
    assert pool.lookup(range(8), salt=2) == 8
    assert pool.lookup(range(8), salt=3) == 0


def test_salts_with_lone_surrogates_do_not_collide() -> None:
    pool = make_pool()
    try:
        pool.create(range(4), salt="\ud800", commit=True)
    except ValueError:
        return
    assert pool.lookup(range(4), salt="\ud801") == 0


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_prefix_objects(algorithm: str) -> None:
    prefix = Prefix(np.arange(10), 4, hash=algorithm)
    assert (prefix.num_tokens, len(prefix), prefix.num_full_blocks) == (10, 10, 2)
    hashes = prefix.block_hashes()
    assert len(set(hashes)) == 2
    assert all(0 <= value < 2**128 for value in hashes)
    # Chained: a longer prompt has the same hashes first, another first token changes all.
    assert Prefix(range(16), 4, hash=algorithm).block_hashes()[:2] == hashes
    assert not {*Prefix([7, *range(1, 8)], 4, hash=algorithm).block_hashes()} & {*hashes}
    # Other block sizes and other salts start from another root.
    assert Prefix(range(8), 8, hash=algorithm).block_hashes()[0] not in hashes
    assert Prefix(range(8), 4, salt="s", hash=algorithm).block_hashes()[0] not in hashes
    pool = make_pool(hash=algorithm)
    assert pool.prefix(range(10)).block_hashes() == hashes
    pool.create(prefix, commit=True)
    assert pool.lookup(range(10)) == pool.lookup(prefix) == 8
    assert pool.create(prefix).hit_tokens == 8
    assert Prefix([], 4).block_hashes() == []


def test_algorithms_differ() -> None:
    assert Prefix(range(4), 4).block_hashes() != Prefix(range(4), 4, hash="blake3").block_hashes()


def test_lookup_many_takes_nothing() -> None:
    pool = make_pool()
    pool.create(range(8), commit=True)
    prefixes = [
        pool.prefix(tokens) for tokens in (range(8), range(7), range(3), [9] * 8, range(12))
    ]
    before = state(pool)
    hits = pool.lookup_many(prefixes)
    assert (hits.dtype, hits.tolist()) == (np.int64, [8, 4, 0, 0, 8])
    assert pool.lookup_many(tuple(prefixes[:1])).tolist() == [8]
    assert state(pool) == before


def test_every_integer_type_hashes_alike() -> None:
    expected = Prefix(list(range(8)), 4).block_hashes()
    for dtype in "bBhHiIlLqQ":
        assert Prefix(np.arange(8, dtype=dtype), 4).block_hashes() == expected
    assert Prefix(np.arange(16, dtype=np.int32)[::2] // 2, 4).block_hashes() == expected
    assert Prefix(np.arange(7, -1, -1, dtype=np.int32)[::-1], 4).block_hashes() == expected
    assert Prefix([2**32 - 1] * 4, 4).block_hashes() == (
        Prefix(np.full(4, 2**32 - 1, np.uint32), 4).block_hashes()
    )


def reasons(pool: BlockPool, tokens: object, **options: object) -> tuple[object, ...]:
    before = state(pool)
    miss = pool.explain_miss(tokens, **options)
    assert state(pool) == before
    assert miss.hit_tokens == pool.lookup(tokens, **options)
    return (
        miss.reason,
        miss.hit_tokens,
        miss.num_tokens,
        miss.block_index,
        miss.neighbour_block,
        miss.diverges_at,
    )


def test_explain_miss() -> None:
    pool = make_pool()
    assert reasons(pool, range(9)) == ("empty_cache", 0, 9, 0, None, None)
    a = pool.create(range(8), commit=True)  # blocks 0 and 1
    assert reasons(pool, range(9)) == ("full_hit", 8, 9, 2, None, None)
    assert reasons(pool, range(8)) == ("full_hit", 8, 8, 2, None, None)
    assert reasons(pool, range(12)) == ("never_committed", 8, 12, 2, None, None)
    assert reasons(pool, [0, 1, 2, 3, 4, 9, 6, 7]) == ("diverged", 4, 8, 1, 1, 5)
    assert reasons(pool, [0, 1, 9, 3]) == ("diverged", 0, 4, 0, 0, 2)
    # The neighbour that agrees longest, and among equals the lowest id.
    pool.create([0, 1, 2, 3, 4, 9, 6, 9], commit=True)  # blocks 0 and 2
    assert reasons(pool, [0, 1, 2, 3, 4, 9, 6, 7]) == ("diverged", 4, 8, 1, 2, 7)
    assert reasons(pool, [0, 1, 2, 3, 4, 8, 8, 8]) == ("diverged", 4, 8, 1, 1, 5)
    assert reasons(pool, range(8), salt="other") == ("other_salt", 0, 8, 0, None, None)
    pool.free(a)
    assert pool.evict(1) == 1  # the tail, block 1
    assert reasons(pool, range(8))[:4] == ("evicted", 4, 8, 1)
    assert "evicted" in repr(pool.explain_miss(range(8)))


def test_a_reset_forgets_all() -> None:
    pool = make_pool()
    pool.create(range(8), commit=True)
    pool.free(pool.create([9] * 8, commit=True))
    assert pool.reset_prefix_cache() == 4
    assert reasons(pool, range(8)) == ("empty_cache", 0, 8, 0, None, None)
    assert (pool.num_cached, pool.num_active, pool.num_free) == (0, 2, 14)
    pool.validate()
