from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch import BlockPool, SnapshotError
from kvcatch.snapshot import Snapshot
from model_pool import ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fill(pool: Any) -> None:
    """Three owners, a shared prefix, a cached remainder and holes."""
    pool.create(list(range(100)), owner="a", tags={"tenant": "acme"}, commit=True)
    gone = pool.create(list(range(500, 580)), owner="gone", commit=True)
    pool.create(
        [*range(64), *range(900, 950)], owner="b", tags={"tenant": "acme"}, reserve_tokens=40
    )
    pool.create(list(range(1000, 1020)), tags={"tenant": "umbrella"})
    hole = pool.create(list(range(2000, 2030)), owner="hole")
    pool.create(list(range(3000, 3040)), owner="c")
    pool.free(gone)
    pool.free(hole)


@pytest.fixture
def data() -> dict[str, Any]:
    pool = ModelPool(64, 16, blocks_per_page=8, null_block=True)
    fill(pool)
    return pool.snapshot()


@pytest.mark.parametrize("null_block", [False, True])
@pytest.mark.parametrize("placement", ["queue", "sorted", "bitmap", "buddy"])
def test_a_real_pools_snapshot_is_accepted(placement: str, null_block: bool) -> None:
    pool = BlockPool(64, 16, placement=placement, blocks_per_page=8, null_block=null_block)
    Snapshot(json.loads(json.dumps(pool.snapshot())))
    fill(pool)
    read = Snapshot(json.loads(json.dumps(pool.snapshot())))
    assert read.blocks["active"] == pool.num_active
    assert [h.name for h in read.holdings_by_owner()][:2] == ["b", "a"]


def test_holdings(data: dict[str, Any]) -> None:
    read = Snapshot(data)
    owners = {holding.name: holding for holding in read.holdings_by_owner()}
    assert set(owners) == {"a", "b", "c", None}
    assert (owners["a"].blocks, owners["a"].own_blocks) == (7, 3)
    assert (owners["b"].blocks, owners["b"].own_blocks, owners["b"].reserved) == (8, 4, 2)
    tenants = {holding.name: holding.blocks for holding in read.holdings_by_tag("tenant")}
    assert tenants == {"acme": 15, "umbrella": 2, None: 3}
    assert read.tag_names() == ["tenant"]


def test_zombies(data: dict[str, Any]) -> None:
    read = Snapshot(data)
    assert [holding.name for holding in read.zombies(["a"])] == ["b", "c"]
    assert read.zombies(["a", "b", "c", "unknown"]) == []
    facts = read.to_dict(live=["a", "c"])
    assert facts["zombie_blocks"] == 8
    assert "zombies" not in read.to_dict()


def free_pool(num_blocks: int, free: int, largest: int, buckets: dict[str, int]) -> dict[str, Any]:
    """A snapshot of blocks pinned by one sequence, with the free runs as told."""
    active = num_blocks - free
    runs = sum(buckets.values())
    return {
        "format": "kvcatch.snapshot",
        "version": 1,
        "kvcatch": "0.1.0",
        "config": {
            "num_blocks": num_blocks,
            "block_size": 16,
            "blocks_per_page": 128,
            "placement": "queue",
            "eviction": "lru",
            "contiguity": "preferred",
            "null_block": False,
        },
        "blocks": {
            "total": num_blocks,
            "free": free,
            "cached": 0,
            "active": active,
            "pinned": 0,
            "reserved": 0,
            "available": free,
            "null": 0,
        },
        "runs": {
            "largest_run": largest,
            "free_run_histogram": buckets,
            "free_runs": runs,
            "fragmentation": 1 - largest / free,
        },
        "pages": {
            "total": -(-num_blocks // 128),
            "empty": -(-num_blocks // 128) - min(active, -(-num_blocks // 128)),
            "pinned": min(active, -(-num_blocks // 128)),
        },
        "tokens": {"slots": active * 16, "used": active * 16, "internal_fragmentation": 0.0},
        "counters": {},
        "sequences": [
            {
                "id": 1,
                "owner": "x",
                "tags": {},
                "num_tokens": active * 16,
                "num_committed": 0,
                "blocks": active,
                "shared_blocks": 0,
                "runs": active,
                "hit_tokens": 0,
                "reserved": 0,
            }
        ],
        "pins": [],
    }


def test_an_impossible_largest_run_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(SnapshotError) as caught:
        Snapshot(free_pool(65_536, 65_423, 80, {"64-127": 114}))
    message = str(caught.value)
    for number in ("65,423", "65,536", "113 are used", "114 runs", "574", "80"):
        assert number in message


def test_the_least_possible_largest_run_is_accepted() -> None:
    Snapshot(free_pool(65_536, 65_423, 574, {"512-1023": 114}))


def changed(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        part: Any = data
        for name in parents:
            part = part[int(name) if isinstance(part, list) else name]
        part[int(last) if isinstance(part, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("format", "other"), "format = 'other'"),
        (changed("version", 2), "version = 2: this kvcatch reads version 1"),
        (changed("blocks/free", -1), "blocks.free = -1"),
        (changed("blocks/free", 1.5), "blocks.free = 1.5"),
        (changed("blocks/free", True), "blocks.free = True"),
        (changed("blocks/free", 40), "but blocks.total is 64"),
        (changed("blocks/total", 70), "but config.num_blocks is 64"),
        (changed("blocks/null", 0), "blocks.null = 0"),
        (changed("blocks/pinned", 64), "blocks.pinned 64 is more than"),
        (changed("blocks/available", 3), "blocks.available = 3"),
        (changed("config/num_blocks", 0), "config.num_blocks = 0"),
        (changed("config/placement", None), "config.placement = None"),
        (changed("runs/largest_run", 63), "runs.largest_run 63 is more than"),
        (changed("runs/largest_run", 1), "so the largest has at least"),
        (changed("runs/free_runs", 60), "runs.free_runs = 60"),
        (changed("runs/free_run_histogram", {"1": 9}), "runs.free_runs is 2"),
        (changed("runs/free_run_histogram", {"1": 2}), "have 2 to 2 blocks together"),
        (changed("runs/free_run_histogram", {"3-4": 2}), "not a bucket"),
        (changed("runs/free_run_histogram", {"many": 2}), "not a bucket"),
        (changed("runs/fragmentation", float("nan")), "runs.fragmentation = nan"),
        (changed("pages/total", 9), "pages.total = 9"),
        (changed("pages/pinned", 8), "but pages.total is 8"),
        (changed("sequences/0/blocks", 1), "100 tokens do not fit 1 blocks"),
        (changed("sequences/0/num_committed", 101), "101 tokens committed of 100"),
        (changed("sequences/0/shared_blocks", 8), "8 of 7 blocks shared"),
        (changed("sequences/0/runs", 0), "7 blocks in 0 runs"),
        (changed("sequences/0/blocks", 60), "but only 16 blocks are active"),
        (changed("sequences/1/reserved", 9), "blocks.reserved is 2"),
        (changed("sequences/0/owner", 5), "sequences[0].owner = 5"),
        (changed("sequences/0/tags", {"tenant": 5}), "sequences[0].tags"),
        (changed("sequences", None), "sequences is missing"),
        (changed("pages", {"total": 8, "empty": 8, "pinned": 0}), "blocks are not clean"),
        (changed("tokens/used", 10**6), "is more than slots"),
        (changed("tokens/slots", 10**6), "active blocks of 16 have"),
        (changed("tokens/internal_fragmentation", 0.9), "tokens.internal_fragmentation = 0.9"),
        (changed("runs", []), "runs is missing"),
        (lambda data: data.pop("pins"), "pins is missing"),
        (lambda data: data["sequences"].clear(), "are active, but sequences and pins hold only 0"),
    ],
)
def test_impossible_numbers_are_refused(
    data: dict[str, Any], change: Callable[[dict[str, Any]], object], words: str
) -> None:
    Snapshot(copy.deepcopy(data))
    change(data)
    with pytest.raises(SnapshotError) as caught:
        Snapshot(data)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": 1}'])
def test_a_file_that_is_no_snapshot_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pool.json"
    path.write_text(text)
    with pytest.raises(SnapshotError, match=r"pool\.json: "):
        Snapshot.read(path)
