"""quantise_blocks and dequantise_blocks as kernels: tiles of every shape, any grid, bad ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_host import oracle
from cuda_host.emulated import EmulatedRuntime
from cuda_host.kernel import ORDERS
from cuda_host.test_blocks import blocks_of, checking, filled
from kvcatch.errors import KernelError
from kvcatch.kernels import KVLayout
from kvcatch.kernels.device_blocks import BlockLaunches

E4M3 = "float8_e4m3"


def random_values(backend: BlockLaunches, layout: KVLayout, num_blocks: int) -> Any:
    """A pool of normal numbers."""
    cache = backend.allocate(layout, num_blocks)
    data = oracle.elements(cache.buffer.numpy(), layout)
    data[...] = np.random.default_rng(0).standard_normal(data.shape).astype(data.dtype)
    return cache


# Tiles held in registers and tiles read twice, rows of one lane and of several passes, steps beyond the last row.
@pytest.mark.parametrize(
    ("io", "scale", "head_dim", "block_size"),
    [
        ("float32", "block", 16, 1),
        ("bfloat16", "block", 16, 40),
        ("bfloat16", "block", 128, 33),
        ("float16", "block", 48, 3),
        ("bfloat16", "token", 16, 33),
        ("float32", "token", 544, 2),
        ("float32", "head", 112, 3),
    ],
)
def test_tiles_in_all_orders(io: Any, scale: Any, head_dim: int, block_size: int) -> None:
    for num_sms in (1, 4):
        backend = BlockLaunches(EmulatedRuntime(ORDERS, num_sms=num_sms))
        wide_layout = KVLayout(3, 2, head_dim, block_size, dtype=io)
        layout = KVLayout(3, 2, head_dim, block_size, dtype=E4M3, scale=scale, order="layer")
        wide = random_values(backend, wide_layout, 3)
        head_scales = None
        if scale == "head":
            import torch

            head_scales = torch.rand((3, 2, 2)) + 0.01
        cache = backend.allocate(layout, 4, head_scales)
        backend.quantise_blocks(wide, cache, [2, 0], [0, 3])
        x = oracle.elements(wide.buffer.numpy(), wide_layout)[[2, 0]].astype(np.float32)
        if head_scales is not None:
            scales = np.broadcast_to(head_scales.numpy()[None], (2, 3, 2, 2))
        else:
            scales = oracle.scale_of(x, (-1,) if scale == "token" else (-2, -1))
            stored = oracle.scales(cache.buffer.numpy(), layout)
            np.testing.assert_array_equal(stored[[0, 3]], scales)
            assert not stored[1:3].any()
        over = scales.reshape(*scales.shape, *([1] * (6 - scales.ndim)))
        codes = oracle.elements(cache.buffer.numpy(), layout)
        np.testing.assert_array_equal(codes[[0, 3]], oracle.codes_of(x, over))
        assert not codes[1:3].any()

        back = backend.allocate(wide_layout, 2)
        backend.dequantise_blocks(cache, back, [3], [1])
        found = oracle.elements(back.buffer.numpy(), wide_layout)
        values = oracle.values_of(codes[[3]], over[[1]], io)
        np.testing.assert_array_equal(found[1].view(np.uint8), values[0].view(np.uint8))
        assert not found[0].any()


@pytest.mark.parametrize("call", ["quantise_blocks", "dequantise_blocks"])
@pytest.mark.parametrize("column", [0, 1])
def test_a_bad_id_is_recorded_and_skipped(call: str, column: int) -> None:
    backend = checking({(0, column): 5})
    wide = random_values(backend, KVLayout(1, 2, 32), 5)
    cache = filled(backend, KVLayout(1, 2, 32, dtype=E4M3, scale="token"), 5)
    source, target = (wide, cache) if call == "quantise_blocks" else (cache, wide)
    before = blocks_of(target).copy()
    getattr(backend, call)(source, target, [0, 1], [2, 3])
    with pytest.raises(KernelError, match=rf"{call} met block id 5 at index 0.*0\.\.4"):
        backend.synchronise()
    after = blocks_of(target)
    np.testing.assert_array_equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert (after[3] != before[3]).any()


def test_one_launch_and_none_for_no_blocks() -> None:
    runtime = EmulatedRuntime()
    backend = BlockLaunches(runtime)
    wide = random_values(backend, KVLayout(3, 2, 32), 4)
    cache = backend.allocate(KVLayout(3, 2, 32, dtype=E4M3, scale="token"), 4)
    backend.quantise_blocks(wide, cache, [0, 1], [2, 3])
    backend.dequantise_blocks(cache, wide, [2], [0])
    assert runtime.launches == 2
    backend.quantise_blocks(wide, cache, [], [])
    backend.dequantise_blocks(cache, wide, [], [])
    assert runtime.launches == 2
