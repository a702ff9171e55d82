"""move_blocks and assign_blocks as kernels: edges of a run, any grid, races where the contract is broken, bad ids."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_host import oracle
from cuda_host.emulated import EmulatedRuntime
from cuda_host.kernel import ORDERS, OrderDependence
from kvcatch import _core
from kvcatch.errors import InvalidArgument, KernelError
from kvcatch.kernels import KVCache, KVLayout, device_blocks
from kvcatch.kernels.device_blocks import ASSIGN_CHUNK, MOVE_CHUNK, BlockLaunches
from kvcatch.kernels.tensors import view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.tensors import TensorView

torch = pytest.importorskip("torch")


class CorruptedUploads(EmulatedRuntime):
    """Tables that change between the host's check and the kernel: ``changes`` {(row, column): id}."""

    changes: dict[tuple[int, int], int]

    def upload(self, array: NDArray[Any]) -> TensorView:
        array = np.array(array)
        if array.ndim == 2:
            for place, value in self.changes.items():
                array[place] = value
        return super().upload(array)


def launches(num_sms: int = 4) -> BlockLaunches:
    return BlockLaunches(EmulatedRuntime(ORDERS, num_sms=num_sms))


def checking(changes: dict[tuple[int, int], int]) -> BlockLaunches:
    runtime = CorruptedUploads()
    runtime.changes = changes
    return BlockLaunches(runtime, check_ids=True)


def filled(backend: BlockLaunches, layout: KVLayout, num_blocks: int, seed: int = 0) -> KVCache:
    cache = backend.allocate(layout, num_blocks)
    rng = np.random.default_rng(seed)
    cache.buffer.numpy()[...] = rng.integers(0, 256, cache.num_bytes, dtype=np.uint8)
    return cache


def blocks_of(cache: KVCache) -> NDArray[np.uint8]:
    return oracle.by_block(cache.buffer.numpy(), cache.layout)


def layout_of(run_bytes: int, order: str = "layer", num_layers: int = 2) -> KVLayout:
    """A layout whose layers are runs of ``run_bytes``: K and V of one head of float32."""
    return KVLayout(num_layers, 1, 4, run_bytes // 32, dtype="float32", order=order)  # type: ignore[arg-type]


# One 16-byte unit, one warp's row of them, and around each kernel's piece of work.
EDGES = [32, 512, 544, ASSIGN_CHUNK - 32, ASSIGN_CHUNK, ASSIGN_CHUNK + 32]
EDGES += [MOVE_CHUNK - 32, MOVE_CHUNK, MOVE_CHUNK + 32, 3 * MOVE_CHUNK + 544]


@pytest.mark.parametrize("run_bytes", EDGES)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_edges_of_a_run(run_bytes: int, num_sms: int) -> None:
    backend = launches(num_sms)
    cache = filled(backend, layout_of(run_bytes), 6)
    before = blocks_of(cache).copy()
    backend.move_blocks(cache, [0, 1, 0], [2, 3, 4])
    np.testing.assert_array_equal(blocks_of(cache), before[[0, 1, 0, 1, 0, 5]])
    before = blocks_of(cache).copy()
    backend.assign_blocks(cache, [5, 0, 2, 1], [0, 2, 5, 3])
    np.testing.assert_array_equal(blocks_of(cache), before[[5, 1, 0, 1, 4, 2]])


def test_any_grid_copies_the_same() -> None:
    backend = launches()
    source = filled(backend, layout_of(MOVE_CHUNK + 544, "block", 3), 5, seed=1)
    for most in (1, 2, 7, None):
        target = filled(backend, layout_of(MOVE_CHUNK + 544, "layer", 3), 4, seed=2)
        kept = blocks_of(target)[1].copy()
        backend.copy_blocks(
            source, target, np.array([4, 0, 4], np.int32), np.array([0, 2, 3], np.int32), most
        )
        np.testing.assert_array_equal(blocks_of(target)[[0, 2, 3]], blocks_of(source)[[4, 0, 4]])
        np.testing.assert_array_equal(blocks_of(target)[1], kept)


def test_one_launch_for_all_layers_and_none_for_nothing() -> None:
    backend = launches()
    runtime = backend.runtime
    assert isinstance(runtime, EmulatedRuntime)
    cache, staging = (filled(backend, layout_of(512, "layer", 7), 4) for _ in range(2))
    for call, arguments in (
        (backend.move_blocks, (cache, [0, 1], [2, 3])),
        (backend.assign_blocks, (cache, [0, 1], [1, 0])),
        (backend.gather_blocks, (cache, [0, 1], staging)),
        (backend.scatter_blocks, (staging, cache, [0, 1])),
    ):
        had = runtime.launches
        call(*arguments)  # type: ignore[operator]
        assert runtime.launches == had + 1
        call(*(argument if isinstance(argument, KVCache) else [] for argument in arguments))  # type: ignore[operator]
        assert runtime.launches == had + 1
    backend.assign_blocks(cache, [2], [2])
    assert runtime.launches == had + 1


@pytest.mark.skipif(
    os.environ.get("KVCATCH_SANITIZER") == "tsan", reason="the race is planted: TSan reports it"
)
def test_a_destination_that_is_a_source_is_a_race() -> None:
    """What the refusal in move_blocks keeps out: without it the result depends on the order."""
    backend = launches()
    cache = filled(backend, layout_of(MOVE_CHUNK), 4)
    before = blocks_of(cache).copy()
    with pytest.raises(OrderDependence):
        backend.copy_blocks(cache, cache, np.array([0, 1], np.int32), np.array([1, 2], np.int32))
    np.testing.assert_array_equal(blocks_of(cache), before)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_assignment_of_any_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    backend = launches(int(rng.integers(1, 5)))
    run_bytes = 32 * int(rng.integers(1, 3 * ASSIGN_CHUNK // 32))
    cache = filled(backend, layout_of(run_bytes, str(rng.choice(["block", "layer"]))), 14, seed)
    before = blocks_of(cache).copy()
    count = int(rng.integers(0, 15))
    dst = rng.permutation(14)[:count]
    src = rng.permutation(dst) if rng.random() < 0.5 else rng.integers(0, 14, count)
    backend.assign_blocks(cache, src, dst)
    before[dst] = before[src]
    np.testing.assert_array_equal(blocks_of(cache), before)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_ordered_ops_read_old_contents_alone(seed: int) -> None:
    """What assign_blocks relies on to load ahead: no op reads a block that an earlier op of its group wrote."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 31))
    dst = rng.permutation(30)[:count]
    src = rng.permutation(dst) if rng.random() < 0.5 else rng.integers(0, 30, count)
    ops, first = _core.order_moves(src, dst)
    groups = [ops[a:b].tolist() for a, b in pairwise(first)]
    writers: dict[int, int] = {}
    for number, group in enumerate(groups):
        written: set[int] = set()
        for target, source in group:
            assert source not in written
            written |= {target} - {-1}
        assert not written & writers.keys()
        writers |= dict.fromkeys(written, number)
    for number, group in enumerate(groups):  # and none that another group writes
        assert all(writers.get(source, number) == number for _, source in group)


def test_more_work_than_a_launch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "MAX_ITEMS", 3)
    backend = launches()
    cache = filled(backend, layout_of(512), 4)
    before = cache.buffer.clone()
    for call in (backend.move_blocks, backend.assign_blocks):
        with pytest.raises(InvalidArgument, match="4 pieces"):
            call(cache, [0, 1], [2, 3])
    assert torch.equal(cache.buffer, before)


# --- the check of ids on the device -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [6, -1, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("column", [0, 1])
def test_a_bad_id_in_move_blocks(bad: int, column: int) -> None:
    backend = checking({(1, column): bad})
    cache = filled(backend, layout_of(512), 6)
    before = blocks_of(cache).copy()
    backend.move_blocks(cache, [0, 1, 2], [3, 4, 5])
    with pytest.raises(
        KernelError, match=rf"move_blocks.* {max(bad, -(2**31) + 1)} at index 1.*0\.\.5"
    ):
        backend.synchronise()
    np.testing.assert_array_equal(blocks_of(cache), before[[0, 1, 2, 0, 4, 2]])
    backend.synchronise()  # reported once


@pytest.mark.parametrize("bad", [6, -2, 1 << 30])
@pytest.mark.parametrize(("row", "column"), [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)])
def test_a_bad_id_in_assign_blocks(bad: int, row: int, column: int) -> None:
    """Of a cycle: whatever is left out, each other block holds its old bytes or those it was to get."""
    src, dst = [1, 2, 0], [0, 1, 2]
    ops, _ = _core.order_moves(src, dst)
    assert [[bool(block == -1) for block in op] for op in ops.tolist()] == [
        [True, False],
        [False, False],
        [False, False],
        [False, True],
    ]
    backend = checking({(row, column): bad})
    cache = filled(backend, layout_of(512), 6)
    before = blocks_of(cache).copy()
    backend.assign_blocks(cache, src, dst)
    with pytest.raises(KernelError, match=rf"assign_blocks.* {bad} at index {row}.*0\.\.5"):
        backend.synchronise()
    after = blocks_of(cache)
    for block, wanted in ((0, 1), (1, 2), (2, 0)):
        assert (after[block] == before[block]).all() or (after[block] == before[wanted]).all()
    np.testing.assert_array_equal(after[3:], before[3:])


def test_the_first_bad_id_is_kept_and_the_next_call_starts_anew() -> None:
    backend = checking({(0, 0): 77, (2, 1): 88})
    cache = filled(backend, layout_of(512), 6)
    backend.move_blocks(cache, [0, 1, 2], [3, 4, 5])
    with pytest.raises(KernelError, match=" 77 at index 0"):
        backend.synchronise()
    runtime = backend.runtime
    assert isinstance(runtime, CorruptedUploads)
    runtime.changes = {(1, 1): 99}
    backend.move_blocks(cache, [0, 1], [4, 5])
    with pytest.raises(KernelError, match=" 99 at index 1"):
        backend.synchronise()


def test_good_ids_pass_the_check() -> None:
    backend = checking({})
    cache = filled(backend, layout_of(512), 6)
    before = blocks_of(cache).copy()
    backend.move_blocks(cache, [0, 1], [5, 4])
    backend.assign_blocks(cache, [0, 1, 2], [1, 2, 0])
    backend.synchronise()
    np.testing.assert_array_equal(blocks_of(cache), before[[2, 0, 1, 3, 1, 0]])


def test_pinned_memory_is_taken_for_what_it_is() -> None:
    """A host pool's buffer lies on the CPU whatever device it belongs to."""
    backend = launches()
    pool = filled(backend, layout_of(512, "layer"), 4)
    host = filled(backend, layout_of(512, "block"), 4, seed=3)
    host = KVCache(host.layout, 4, host.buffer, None, "cpu", pinned=True)
    backend.gather_blocks(pool, [3, 1], host)
    np.testing.assert_array_equal(blocks_of(host)[:2], blocks_of(pool)[[3, 1]])
    assert view(host.buffer).device == "cpu"
