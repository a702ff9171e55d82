"""write_kv as a kernel: every head size and lane mapping, any number of rows, bad slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_host import oracle
from cuda_host.emulated import EmulatedRuntime
from cuda_host.kernel import ORDERS
from kvcatch.errors import KernelError
from kvcatch.kernels import KVCache, KVLayout
from kvcatch.kernels.device_blocks import BlockLaunches

torch = pytest.importorskip("torch")

E4M3 = "float8_e4m3"


def tensor(array: Any) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def write(
    backend: BlockLaunches, cache: KVCache, layer: int, key: Any, value: Any, slots: Any
) -> None:
    backend.write_kv(cache, layer, tensor(key), tensor(value), tensor(slots))


# A unit is 8 elements of bfloat16 and 16 codes: rows of 1 to 64 units, and lanes with and without one.
@pytest.mark.parametrize(
    ("dtype", "scale", "head_dim"),
    [
        ("bfloat16", "none", 8),
        ("bfloat16", "none", 40),
        ("bfloat16", "none", 264),
        ("float32", "none", 20),
        (E4M3, "token", 16),
        (E4M3, "token", 48),
        (E4M3, "token", 112),
        (E4M3, "token", 1024),
        (E4M3, "head", 48),
    ],
)
def test_head_sizes_in_all_orders(dtype: Any, scale: Any, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    backend = BlockLaunches(EmulatedRuntime(ORDERS))
    layout = KVLayout(2, 5, head_dim, 7, dtype=dtype, scale=scale)
    head_scales = None
    if scale == "head":
        head_scales = np.exp2(rng.uniform(-5, 0, (2, 2, 5))).astype(np.float32)
    cache = backend.allocate(layout, 6, None if head_scales is None else tensor(head_scales))
    cache.buffer.fill_(0xFF)
    for tokens in (1, 2, 31, 42):
        io = "bfloat16" if dtype == E4M3 else dtype
        key, value = (
            rng.standard_normal((tokens, 5, head_dim)).astype(oracle.DTYPES[io]) for _ in range(2)
        )
        slots = rng.permutation(42)[:tokens].astype(np.int64)
        slots[tokens // 2 + 1 :: 4] = -1
        before = cache.buffer.numpy().copy()
        write(backend, cache, 1, key, value, slots)
        wanted = oracle.expected_write(before, layout, 1, key, value, slots, head_scales)
        np.testing.assert_array_equal(cache.buffer.numpy(), wanted)


def test_neighbours_of_a_padding_row_keep_their_scales() -> None:
    """The lanes of a padding token take part in the warp's maximum; their garbage must not."""
    backend = BlockLaunches(EmulatedRuntime(ORDERS))
    layout = KVLayout(1, 1, 64, 8, dtype=E4M3, scale="token")
    cache = backend.allocate(layout, 1)
    key = np.full((8, 1, 64), 1.0, np.float32)
    key[1::2] = 1e9
    slots = np.array([0, -1, 2, -1, 4, -1, 6, -1], np.int64)
    write(backend, cache, 0, key, key, slots)
    scales = oracle.scales(cache.buffer.numpy(), layout)[0, 0, :, 0]
    one = np.float32(1) / np.float32(448)
    np.testing.assert_array_equal(scales, np.tile(np.array([one, 0] * 4, np.float32), (2, 1)))


@pytest.mark.parametrize("bad", [32, 1 << 40])
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", "none"), (E4M3, "token")])
def test_a_bad_slot_is_recorded_and_skipped(bad: int, dtype: Any, scale: Any) -> None:
    rng = np.random.default_rng(1)
    backend = BlockLaunches(EmulatedRuntime(), check_ids=True)
    layout = KVLayout(1, 2, 64, 16, dtype=dtype, scale=scale)
    cache = backend.allocate(layout, 2)
    key, value = (
        rng.standard_normal((4, 2, 64)).astype(oracle.DTYPES["bfloat16"]) for _ in range(2)
    )
    slots = np.array([31, bad, -1, 0], np.int64)
    write(backend, cache, 0, key, value, slots)
    shown = min(bad, 2**31 - 1)
    with pytest.raises(KernelError, match=rf"write_kv met slot {shown} at index 1.*0\.\.31"):
        backend.synchronise()
    slots[1] = -1
    before = np.zeros(cache.num_bytes, np.uint8)
    wanted = oracle.expected_write(before, layout, 0, key, value, slots)
    np.testing.assert_array_equal(cache.buffer.numpy(), wanted)
    backend.synchronise()


def test_one_launch_and_none_for_no_tokens() -> None:
    runtime = EmulatedRuntime()
    backend = BlockLaunches(runtime)
    cache = backend.allocate(KVLayout(1, 2, 64), 2)
    for tokens in (3, 0):
        rows = np.ones((tokens, 2, 64), oracle.DTYPES["bfloat16"])
        write(backend, cache, 0, rows, rows, np.arange(tokens))
    assert runtime.launches == 1
