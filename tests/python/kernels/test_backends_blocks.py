"""Whole blocks on every backend: moves, assignments, staging. The same calls leave the same bytes, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cuda_host import oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels import KVCache, KVLayout

if TYPE_CHECKING:
    from conftest import Machine

ORDERS = ("block", "layer")

# Bytes of a block's run: 24 KiB (whole chunks of every kernel), 1,584 (no multiple of any), 96 (less than a warp's).
LAYOUTS: dict[str, dict[str, Any]] = {
    "large": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64},
    "scaled": {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 16,
        "block_size": 11,
        "dtype": "float8_e4m3",
        "scale": "token",
    },
    "tiny": {"num_layers": 4, "num_kv_heads": 1, "head_dim": 8, "block_size": 3},
}

random_ids = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest, order: str) -> KVLayout:
    return KVLayout(order=order, **LAYOUTS[request.param])


def assigned(pool: Any, layout: KVLayout, src: Any, dst: Any) -> Any:
    """A pool's bytes after new[dst] = old[src]."""
    after = pool.copy()
    blocks = oracle.by_block(after, layout)
    blocks[np.asarray(dst, np.int64)] = oracle.by_block(pool, layout)[np.asarray(src, np.int64)]
    return after


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found, wanted)


# --- moves to free blocks ---------------------------------------------------------------------------


def test_moves_with_fan_out(machine: Machine, layout: KVLayout) -> None:
    rng = np.random.default_rng(1)
    cache = machine.pool(layout, 40, rng)
    before = machine.bytes_of(cache)
    blocks = rng.permutation(40)
    src, dst = rng.choice(blocks[:12], 25), blocks[12:37]
    machine.backend.move_blocks(cache, src, dst)
    same(machine.bytes_of(cache), assigned(before, layout, src, dst))


@random_ids
@given(seed=st.integers(0, 2**32 - 1))
def test_any_moves(machine: Machine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = KVLayout(order=str(rng.choice(ORDERS)), **LAYOUTS[str(rng.choice(sorted(LAYOUTS)))])
    num_blocks = int(rng.integers(2, 20))
    blocks = rng.permutation(num_blocks)
    sources = int(rng.integers(1, num_blocks))
    count = int(rng.integers(0, num_blocks - sources + 1))
    src, dst = rng.choice(blocks[:sources], count), blocks[sources : sources + count]
    cache = machine.pool(layout, num_blocks, rng)
    before = machine.bytes_of(cache)
    machine.backend.move_blocks(cache, src.tolist(), dst.tolist())
    same(machine.bytes_of(cache), assigned(before, layout, src, dst))


# --- assignments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([0, 1, 2], [1, 2, 3]),
        ([1, 2, 0], [0, 1, 2]),
        ([1, 0], [0, 1]),
        ([4, 4, 4, 5], [5, 6, 7, 4]),
        ([1, 2, 0, 0, 3], [0, 1, 2, 3, 8]),
        ([2, 3, 5, 5], [2, 3, 5, 6]),
        ([*range(1, 9), 0], list(range(9))),
    ],
    ids=["chain", "cycle", "swap", "cycle and copies", "cycle with a tail", "itself", "all"],
)
def test_assignment(machine: Machine, layout: KVLayout, src: list[int], dst: list[int]) -> None:
    cache = machine.pool(layout, 9, np.random.default_rng(2))
    before = machine.bytes_of(cache)
    machine.backend.assign_blocks(cache, src, dst)
    same(machine.bytes_of(cache), assigned(before, layout, src, dst))


@random_ids
@given(seed=st.integers(0, 2**32 - 1))
def test_any_assignment(machine: Machine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = KVLayout(order=str(rng.choice(ORDERS)), **LAYOUTS[str(rng.choice(sorted(LAYOUTS)))])
    num_blocks = int(rng.integers(1, 24))
    count = int(rng.integers(0, num_blocks + 1))
    dst = rng.permutation(num_blocks)[:count]
    # A permutation has cycles; sources drawn at random give chains and fan-out.
    src = rng.permutation(dst) if rng.random() < 0.5 else rng.integers(0, num_blocks, count)
    cache = machine.pool(layout, num_blocks, rng)
    before = machine.bytes_of(cache)
    machine.backend.assign_blocks(cache, src, dst)
    same(machine.bytes_of(cache), assigned(before, layout, src, dst))


def test_a_permutation_and_its_inverse_change_nothing(machine: Machine, layout: KVLayout) -> None:
    rng = np.random.default_rng(3)
    cache = machine.pool(layout, 17, rng)
    before = machine.bytes_of(cache)
    there = rng.permutation(17)
    machine.backend.assign_blocks(cache, np.arange(17), there)
    machine.backend.assign_blocks(cache, there, np.arange(17))
    same(machine.bytes_of(cache), before)


# --- staging ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging_order", ORDERS)
def test_gather_and_scatter(machine: Machine, layout: KVLayout, staging_order: str) -> None:
    rng = np.random.default_rng(4)
    cache = machine.pool(layout, 12, rng)
    before = machine.bytes_of(cache)
    name = next(n for n, kind in LAYOUTS.items() if kind["head_dim"] == layout.head_dim)
    other = KVLayout(order=staging_order, **LAYOUTS[name])
    staging = machine.pool(other, 6, rng)
    untouched = machine.bytes_of(staging)
    ids = [7, 0, 11, 7]
    machine.backend.gather_blocks(cache, ids, staging)
    staged = machine.bytes_of(staging)
    same(oracle.by_block(staged, other)[:4], oracle.by_block(before, layout)[ids])
    same(oracle.by_block(staged, other)[4:], oracle.by_block(untouched, other)[4:])
    same(machine.bytes_of(cache), before)

    machine.backend.scatter_blocks(staging, cache, [3, 5, 1])
    after = before.copy()
    oracle.by_block(after, layout)[[3, 5, 1]] = oracle.by_block(before, layout)[[7, 0, 11]]
    same(machine.bytes_of(cache), after)


def test_no_blocks(machine: Machine, layout: KVLayout) -> None:
    cache, staging = (machine.pool(layout, 4, np.random.default_rng(5)) for _ in range(2))
    before = machine.bytes_of(cache)
    machine.backend.move_blocks(cache, [], [])
    machine.backend.assign_blocks(cache, [], np.empty(0, np.int32))
    machine.backend.gather_blocks(cache, [], staging)
    machine.backend.scatter_blocks(staging, cache, [])
    same(machine.bytes_of(cache), before)
    same(machine.bytes_of(staging), before)


# --- refusals, which change nothing -----------------------------------------------------------------

SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=4)


@pytest.mark.parametrize("call", ["move_blocks", "assign_blocks"])
@pytest.mark.parametrize(
    ("src", "dst", "error", "words"),
    [
        ([0, 8], [1, 2], InvalidArgument, "8"),
        ([0, 1], [2, -1], InvalidArgument, "-1"),
        ([0, 1], [2, 1 << 40], InvalidArgument, str(1 << 40)),
        ([0, 1], [3, 3], InvalidArgument, "3"),
        ([0, 1], [2], InvalidArgument, "2"),
        ([0.5], [2], InvalidType, "src"),
        (["0"], [2], InvalidType, "src"),
    ],
    ids=["source", "negative", "huge", "twice", "lengths", "fraction", "text"],
)
def test_bad_ids(
    machine: Machine, call: str, src: Any, dst: Any, error: type[Exception], words: str
) -> None:
    cache = machine.pool(SMALL, 8, np.random.default_rng(6))
    before = machine.bytes_of(cache)
    with pytest.raises(error, match=words):
        getattr(machine.backend, call)(cache, src, dst)
    same(machine.bytes_of(cache), before)


def test_a_move_into_a_source(machine: Machine) -> None:
    cache = machine.pool(SMALL, 8, np.random.default_rng(7))
    before = machine.bytes_of(cache)
    for src, dst in (([0, 1], [1, 2]), ([3], [3])):
        with pytest.raises(InvalidArgument, match=str(src[-1])):
            machine.backend.move_blocks(cache, src, dst)
    same(machine.bytes_of(cache), before)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 32},
        {"block_size": 8},
        {"dtype": "float16"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_staging_of_another_layout(machine: Machine, change: dict[str, Any]) -> None:
    fields = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 4}
    cache = machine.pool(SMALL, 4, np.random.default_rng(8))
    staging = machine.pool(KVLayout(**(fields | change)), 4, np.random.default_rng(9))
    before, staged = machine.bytes_of(cache), machine.bytes_of(staging)
    field = next(iter(change))
    with pytest.raises(InvalidArgument, match=field):
        machine.backend.gather_blocks(cache, [1], staging)
    with pytest.raises(InvalidArgument, match=field):
        machine.backend.scatter_blocks(staging, cache, [1])
    same(machine.bytes_of(cache), before)
    same(machine.bytes_of(staging), staged)


def test_staging_too_small_or_the_pool_itself(machine: Machine) -> None:
    cache = machine.pool(SMALL, 8, np.random.default_rng(10))
    staging = machine.pool(SMALL, 2, np.random.default_rng(11))
    before, staged = machine.bytes_of(cache), machine.bytes_of(staging)
    with pytest.raises(InvalidArgument, match="3"):
        machine.backend.gather_blocks(cache, [0, 1, 2], staging)
    with pytest.raises(InvalidArgument, match="3"):
        machine.backend.scatter_blocks(staging, cache, [0, 1, 2])
    with pytest.raises(InvalidArgument, match="8"):
        machine.backend.gather_blocks(cache, [8], staging)
    with pytest.raises(InvalidArgument, match="8"):
        machine.backend.scatter_blocks(staging, cache, [8])
    part = KVCache(SMALL, 4, cache.buffer[: 4 * SMALL.block_bytes], None, cache.device)
    for out in (cache, part):
        with pytest.raises(InvalidArgument, match="overlap"):
            machine.backend.gather_blocks(cache, [5], out)
        with pytest.raises(InvalidArgument, match="overlap"):
            machine.backend.scatter_blocks(out, cache, [5])
    same(machine.bytes_of(cache), before)
    same(machine.bytes_of(staging), staged)


def test_what_is_no_layout(machine: Machine) -> None:
    for call in (machine.backend.allocate, machine.backend.allocate_host):
        for wrong in ("layout", None, 3):
            with pytest.raises(InvalidType, match="layout must be a KVLayout, not"):
                call(wrong, 4)


def test_what_is_no_cache(machine: Machine) -> None:
    cache = machine.pool(SMALL, 4, np.random.default_rng(12))
    before = machine.bytes_of(cache)
    with pytest.raises(InvalidType, match="KVCache"):
        machine.backend.move_blocks(cache.buffer, [0], [1])  # type: ignore[arg-type]
    elsewhere = KVCache(SMALL, 4, cache.buffer, None, "meta")
    with pytest.raises(InvalidArgument, match="meta"):
        machine.backend.move_blocks(elsewhere, [0], [1])
    for buffer, error in (
        (cache.buffer[:-16], InvalidArgument),
        (cache.buffer[::2], InvalidArgument),
        (cache.buffer.reshape(4, -1), InvalidArgument),
        (machine.tensor(np.zeros(cache.num_bytes // 4, np.float32)), InvalidType),
        (machine.tensor(np.zeros(cache.num_bytes + 16, np.uint8))[8:-8], InvalidArgument),
    ):
        wrong = KVCache(SMALL, 4, buffer, None, cache.device)
        for call in ("move_blocks", "assign_blocks"):
            with pytest.raises(error, match="buffer"):
                getattr(machine.backend, call)(wrong, [0], [1])
    same(machine.bytes_of(cache), before)
