"""Pins, owners and tags: what may not move, who holds what, and what nobody holds any more."""

from __future__ import annotations

import numpy as np
import pytest
from core_support import state

from kvcatch import BlockPool, InvalidArgument, OutOfBlocks, StaleHandle


def make_pool(num_blocks: int = 16, **options: object) -> BlockPool:
    return BlockPool(num_blocks, 4, **{"placement": "sorted", "manual_clock": True, **options})


def counts(pool: BlockPool) -> tuple[int, ...]:
    """free, cached, active, pinned, available."""
    pool.validate()
    return pool.num_free, pool.num_cached, pool.num_active, pool.num_pinned, pool.available


def test_pinned_cached_blocks_are_neither_evicted_nor_available() -> None:
    pool = make_pool(4)
    pool.free(pool.create(range(8), commit=True))
    pin = pool.pin([1, 0], owner="transfer", deadline=9.5)
    assert pin.blocks.tolist() == [1, 0]
    assert pin.blocks.dtype == np.int32
    assert int(pin) == pin.id
    assert counts(pool) == (2, 2, 0, 2, 2)
    assert pool.evict(9) == 0
    with pytest.raises(OutOfBlocks) as caught:
        pool.create([9] * 9)
    error = caught.value
    assert (error.required, error.free, error.cached, error.largest_run) == (3, 2, 0, 2)
    # Others may still read them.
    a = pool.create(range(9))
    assert a.hit_tokens == 8
    assert counts(pool) == (1, 0, 3, 2, 1)
    pool.free(a)
    assert counts(pool) == (2, 2, 0, 2, 2)
    pool.unpin(pin)
    assert counts(pool) == (2, 2, 0, 0, 4)
    with pytest.raises(StaleHandle, match=str(pin.id)):
        pool.unpin(pin)


def test_pins_on_a_sequence_outlive_it() -> None:
    pool = make_pool(8)
    a = pool.create(range(6), commit=True)
    first, second = pool.pin(a), pool.pin(a.id)
    assert first.blocks.tolist() == second.blocks.tolist() == [0, 1]
    pool.free(a)
    # Block 0 is committed: cached. Block 1 is not: held by its pins alone.
    assert counts(pool) == (6, 1, 1, 2, 6)
    pool.unpin(first.id)
    assert counts(pool) == (6, 1, 1, 2, 6)
    pool.unpin(second)
    assert counts(pool) == (7, 1, 0, 0, 8)


def test_a_pin_does_not_break_a_promise() -> None:
    pool = make_pool(4)
    pool.free(pool.create(range(8), commit=True))
    a = pool.create([9], reserve_tokens=12)  # holds one, three promised
    assert (pool.num_reserved, pool.available) == (3, 0)
    before = state(pool, refusals=False)
    with pytest.raises(OutOfBlocks):
        pool.pin([1])
    assert state(pool, refusals=False) == before
    pool.append(a, 12)


def test_a_reset_leaves_pins_alone() -> None:
    pool = make_pool(4)
    pool.free(pool.create(range(4), commit=True))
    pin = pool.pin([0])
    assert pool.reset_prefix_cache() == 1
    assert counts(pool) == (3, 0, 1, 1, 3)
    pool.unpin(pin)
    assert counts(pool) == (4, 0, 0, 0, 4)


def fill(pool: BlockPool) -> list[object]:
    """Owners a (4 blocks of which 2 are shared with b) and b (3), one without an owner (1)."""
    a = pool.create(range(8), owner="a", tags={"tenant": "x", "route": "r"}, commit=True)
    b = pool.create(range(9), owner="b", tags={"tenant": "x"}, commit=True)
    more = pool.create([9] * 6, owner="a", tags={"tenant": "y"}, reserve_tokens=6)
    nobody = pool.create([7])
    return [a, b, more, nobody]


def test_holdings() -> None:
    pool = make_pool()
    fill(pool)
    keys = ("sequences", "blocks", "shared_blocks", "tokens", "reserved_blocks")
    rows = {row["owner"]: tuple(row[key] for key in keys) for row in pool.holdings()}
    assert rows == {"a": (2, 4, 2, 14, 1), "b": (1, 3, 2, 9, 0), None: (1, 1, 0, 1, 0)}
    assert [row["owner"] for row in pool.holdings()] == ["a", "b", None]  # largest first
    rows = {row["tenant"]: tuple(row[key] for key in keys) for row in pool.holdings(by="tenant")}
    assert rows == {"x": (2, 3, 0, 17, 0), "y": (1, 2, 0, 6, 1), None: (1, 1, 0, 1, 0)}
    rows = {row["route"]: row["blocks"] for row in pool.holdings("route")}
    assert rows == {"r": 2, None: 6}
    assert [row["no such tag"] for row in pool.holdings("no such tag")] == [None]
    assert make_pool().holdings() == []


def test_holdings_by_a_tag_that_is_called_like_a_column() -> None:
    pool = make_pool()
    pool.create([1], tags={"blocks": "mine"})
    with pytest.raises(InvalidArgument, match="blocks"):
        pool.holdings("blocks")


def test_audit() -> None:
    pool = make_pool()
    pool.now = 10.0
    a, b, more, nobody = fill(pool)
    pin = pool.pin(b, owner="copy", deadline=12.5)
    pool.pin(a, deadline=20)
    assert pool.audit(["a", "b"]) == {
        "zombies": [],
        "zombie_blocks": 0,
        "unowned": [nobody.id],
        "overdue_pins": [],
    }
    audit = pool.audit({"b"}, now=14)
    assert audit["zombies"] == [
        {"id": a.id, "owner": "a", "blocks": 2},
        {"id": more.id, "owner": "a", "blocks": 2},
    ]
    # The two blocks that b shares are alive.
    assert audit["zombie_blocks"] == 2
    assert audit["overdue_pins"] == [
        {"id": pin.id, "owner": "copy", "blocks": 3, "overdue_seconds": 1.5}
    ]
    assert pool.audit(iter(()))["zombie_blocks"] == 5
    pool.now = 12.5
    assert pool.audit([])["overdue_pins"] == []  # due, not overdue
    pool.now = 13
    assert pool.audit([])["overdue_pins"][0]["overdue_seconds"] == 0.5


def test_audit_by_the_pools_clock_is_exact() -> None:
    pool = make_pool()
    pool.pin(pool.create([1]), deadline=1.0)
    pool.now = 1.001
    assert pool.audit([])["overdue_pins"] == pool.audit([], now=1.001)["overdue_pins"]


def test_owners_of_forks_and_odd_names() -> None:
    pool = make_pool()
    odd = 'quote " backslash \\ newline \n nul \0 emoji \U0001f600'
    a = pool.create([1], owner=odd, tags={odd: odd, "": ""})
    child = pool.fork(a, owner="child", tags={"k": "v"})
    assert (a.owner, child.owner) == (odd, "child")
    assert pool.describe(a)["tags"] == {odd: odd, "": ""}
    assert pool.snapshot()["sequences"][0]["owner"] == odd
    assert {row["owner"] for row in pool.holdings()} == {odd, "child"}
    assert pool.holdings(by="k")[0]["blocks"] == 1
    assert pool.audit([odd])["zombies"] == [{"id": child.id, "owner": "child", "blocks": 1}]
    with pytest.raises(InvalidArgument, match="owner"):
        pool.create([1], tags={"owner": "x"})
