"""Statistics and snapshot: every key, every number, and no number that cannot be."""

from __future__ import annotations

import json
import random

import pytest

import kvcatch
from kvcatch import BlockPool, KvcatchError, OutOfBlocks

COUNTERS = {
    "created",
    "freed",
    "forked",
    "prompt_tokens",
    "hit_tokens",
    "blocks_allocated",
    "blocks_evicted",
    "blocks_committed",
    "blocks_deduplicated",
    "copies_on_write",
    "refused",
    "blocks_moved",
}


def filled() -> BlockPool:
    """20 blocks in pages of 4: null, 1-3 shared by two, 4-6 of one, 7-8 cached, 9-19 clean."""
    pool = BlockPool(
        20, 4, placement="sorted", null_block=True, blocks_per_page=4, manual_clock=True
    )
    a = pool.create(range(10), owner="a", commit=True)
    pool.fork(a)
    pool.create([50] * 9, reserve_tokens=10, tags={"k": "v"})
    pool.free(pool.create([60] * 8, commit=True))
    pool.create(range(8))  # hits block 1, takes block 9
    pool.pin(a, owner="p", deadline=4)
    with pytest.raises(OutOfBlocks):
        pool.create(range(1000))
    return pool


def test_stats() -> None:
    stats = filled().stats()
    assert set(stats) >= {"blocks", "runs", "pages", "sequences", "tokens", "counters"}
    assert stats["blocks"] == {
        "total": 20,
        "null": 1,
        "free": 10,
        "cached": 2,
        "active": 7,
        "pinned": 3,
        "reserved": 2,
        "available": 10,
    }
    runs = stats["runs"]
    assert runs["largest_run"] == runs["largest_run_with_cached"] == 10
    assert runs["free_runs"] == 1
    assert runs["free_run_histogram"] == {"8-15": 1}
    assert runs["fragmentation"] == 0
    pages = stats["pages"]
    assert (pages["total"], pages["empty"], pages["pinned"]) == (5, 2, 3)
    sequences = stats["sequences"]
    # a, its fork and the third lie in one run each, the last one on blocks 1 and 9.
    assert (sequences["sequences"], sequences["runs"], sequences["mean"]) == (4, 5, 1.25)
    assert (sequences["p99"], sequences["max"]) == (2, 2)
    # 10 tokens in three blocks (shared), 9 in three, 4 more in block 9.
    assert stats["tokens"] == {
        "slots": 28,
        "used": 23,
        "internal_fragmentation": pytest.approx(1 - 23 / 28),
    }
    assert stats["counters"] == {
        "created": 4,
        "freed": 1,
        "forked": 1,
        "prompt_tokens": 10 + 9 + 8 + 8,
        "hit_tokens": 4,
        "blocks_allocated": 3 + 3 + 2 + 1,
        "blocks_evicted": 0,
        "blocks_committed": 2 + 2,
        "blocks_deduplicated": 0,
        "copies_on_write": 0,
        "refused": 1,
        "blocks_moved": 0,
    }


def test_stats_of_free_runs() -> None:
    pool = BlockPool(16, 4, placement="sorted", blocks_per_page=4)
    seqs = [pool.create([i]) for i in range(16)]
    pool.free([seqs[i] for i in (0, 2, 3, 5, 6, 7, 12, 13, 14, 15)])
    runs = pool.stats()["runs"]
    assert runs["free_run_histogram"] == {"1": 1, "2-3": 2, "4-7": 1}
    assert (runs["free_runs"], runs["largest_run"]) == (4, 4)
    assert runs["fragmentation"] == pytest.approx(0.6)
    assert pool.stats()["pages"]["empty"] == 1


def test_stats_of_an_empty_and_of_a_full_pool() -> None:
    pool = BlockPool(5, 4, blocks_per_page=2)
    sequences = pool.stats()["sequences"]
    assert (sequences["mean"], sequences["p99"], sequences["max"]) == (None, None, None)
    assert pool.stats()["tokens"] == {"slots": 0, "used": 0, "internal_fragmentation": 0}
    assert pool.stats()["pages"]["total"] == pool.stats()["pages"]["empty"] == 3
    pool.create([1] * 20)
    runs = pool.stats()["runs"]
    assert (runs["largest_run"], runs["free_runs"], runs["free_run_histogram"]) == (0, 0, {})
    assert runs["fragmentation"] == 0
    assert pool.stats()["tokens"]["internal_fragmentation"] == 0


def test_snapshot() -> None:
    pool = filled()
    snapshot = pool.snapshot()
    stats = pool.stats()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert (snapshot["format"], snapshot["version"]) == ("kvcatch.snapshot", 1)
    assert snapshot["kvcatch"] == kvcatch.__version__
    assert snapshot["config"] == {
        "num_blocks": 20,
        "block_size": 4,
        "blocks_per_page": 4,
        "placement": "sorted",
        "eviction": "lru",
        "contiguity": "preferred",
        "hash": "xxh3",
        "null_block": True,
    }
    for part in ("blocks", "runs", "pages", "tokens", "counters"):
        assert snapshot[part] == stats[part]
    a, _, third, last = pool.sequences()
    assert snapshot["sequences"][0] == {
        "id": a.id,
        "owner": "a",
        "tags": {},
        "num_tokens": 10,
        "num_committed": 10,
        "blocks": 3,
        "shared_blocks": 3,
        "runs": 1,
        "hit_tokens": 0,
        "reserved": 0,
    }
    assert snapshot["sequences"][2] == {
        "id": third.id,
        "owner": None,
        "tags": {"k": "v"},
        "num_tokens": 9,
        "num_committed": 0,
        "blocks": 3,
        "shared_blocks": 0,
        "runs": 1,
        "hit_tokens": 0,
        "reserved": 2,
    }
    assert (snapshot["sequences"][3]["id"], snapshot["sequences"][3]["shared_blocks"]) == (
        last.id,
        1,
    )
    assert [{**pin, "id": 0} for pin in snapshot["pins"]] == [
        {"id": 0, "owner": "p", "blocks": 3, "deadline": 4.0}
    ]


def test_properties_agree_with_stats() -> None:
    pool = filled()
    blocks = pool.stats()["blocks"]
    assert [
        pool.num_blocks,
        pool.num_free,
        pool.num_cached,
        pool.num_active,
        pool.num_pinned,
        pool.num_reserved,
        pool.available,
    ] == [
        blocks[k] for k in ("total", "free", "cached", "active", "pinned", "reserved", "available")
    ]
    assert (pool.num_sequences, pool.largest_run) == (4, 10)
    assert (pool.block_size, pool.blocks_per_page) == (4, 4)
    assert (pool.placement, pool.eviction, pool.contiguity) == ("sorted", "lru", "preferred")
    assert "10 free, 2 cached, 7 active, 2 reserved, 3 pinned" in repr(pool)


def check_possible(pool: BlockPool) -> None:
    """The numbers of one snapshot can be true together."""
    snapshot = pool.snapshot()
    blocks, runs, pages = snapshot["blocks"], snapshot["runs"], snapshot["pages"]
    assert blocks["total"] == blocks["null"] + blocks["free"] + blocks["cached"] + blocks["active"]
    assert all(number >= 0 for number in blocks.values())
    assert blocks["available"] <= blocks["free"] + blocks["cached"] - blocks["reserved"]
    assert (
        runs["largest_run"] <= runs["largest_run_with_cached"] <= blocks["free"] + blocks["cached"]
    )
    assert runs["largest_run"] <= blocks["free"]
    assert sum(runs["free_run_histogram"].values()) == runs["free_runs"]
    assert (runs["free_runs"] > 0) == (blocks["free"] > 0)
    # So many blocks in so few gaps need a run at least this long.
    taken = blocks["total"] - blocks["free"]
    assert runs["free_runs"] <= taken + 1
    if blocks["free"]:
        assert runs["largest_run"] * runs["free_runs"] >= blocks["free"]
        assert runs["fragmentation"] == pytest.approx(1 - runs["largest_run"] / blocks["free"])
    assert pages["empty"] + pages["pinned"] == pages["total"]
    assert pages["empty"] * 4 <= blocks["free"] + 4
    tokens = snapshot["tokens"]
    assert 0 <= tokens["used"] <= tokens["slots"] <= blocks["active"] * 4
    assert 0 <= tokens["internal_fragmentation"] < 1
    assert set(snapshot["counters"]) == COUNTERS
    for seq in snapshot["sequences"]:
        assert seq["num_committed"] <= seq["num_tokens"] <= seq["blocks"] * 4
        assert seq["shared_blocks"] <= seq["blocks"]
        assert min(1, seq["blocks"]) <= seq["runs"] <= seq["blocks"]


@pytest.mark.parametrize("placement", kvcatch.placements())
@pytest.mark.parametrize("contiguity", ["preferred", "required"])
def test_no_impossible_numbers(placement: str, contiguity: str) -> None:
    rng = random.Random(f"{placement} {contiguity}")
    pool = BlockPool(
        37, 4, placement=placement, contiguity=contiguity, blocks_per_page=4, null_block=True
    )
    seqs: list[kvcatch.Sequence] = []
    pins: list[kvcatch.Pin] = []
    last = pool.stats()["counters"]
    for _ in range(400):
        try:
            match rng.randrange(8):
                case 0 | 1:
                    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
                    reserve = rng.randrange(9)
                    seqs.append(pool.create(tokens, reserve_tokens=reserve, commit=True))
                case 2 if seqs:
                    pool.append(rng.sample(seqs, min(3, len(seqs))), rng.randrange(6))
                case 3 if seqs:
                    seq = rng.choice(seqs)
                    pool.truncate(seq, rng.randrange(pool.num_tokens(seq) + 1))
                case 4 if seqs:
                    seqs.append(pool.fork(rng.choice(seqs)))
                case 5 | 6 if seqs:
                    pool.free(seqs.pop(rng.randrange(len(seqs))))
                case 7 if pins and rng.random() < 0.6:
                    pool.unpin(pins.pop())
                case 7 if seqs:
                    pins.append(pool.pin(rng.choice(seqs)))
                case _:
                    pool.evict(rng.randrange(3))
        except KvcatchError:
            pass
        check_possible(pool)
        counters = pool.stats()["counters"]
        assert all(counters[key] >= last[key] for key in COUNTERS)
        last = counters
    pool.validate()
