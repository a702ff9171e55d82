"""What the emulator promises, against numpy: collectives, products, copies, atomics, launches and their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cuda_host.build import HERE, build
from cuda_host.kernel import ORDERS, EmulationError, Kernel, OrderDependence
from kvcatch.errors import InvalidType, KernelError
from kvcatch.kernels.tensors import TensorView, view

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANES = np.arange(32)


def kernel(name: str) -> Kernel:
    return build(HERE / "semantics.cu").get_function(name)


# ---- collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("shuffles_float", np.float32), ("shuffles_i64", np.int64), ("shuffles_half", np.float16)],
)
@pytest.mark.parametrize(
    ("by", "width"), [(0, 32), (1, 32), (5, 32), (3, 16), (7, 8), (31, 32), (2, 4)]
)
def test_shuffles(name: str, dtype: Any, by: int, width: int) -> None:
    values = np.arange(32).astype(dtype)
    out = np.zeros((4, 32), dtype)
    kernel(name).in_all_orders((1,), (32,), (out, values, np.int32(by), np.int32(width)))
    part, within = LANES // width * width, LANES % width
    flipped = LANES ^ by
    wanted = [
        part + by % width,
        np.where(flipped // width <= LANES // width, flipped, LANES),
        np.where(within < by, LANES, LANES - by),
        np.where(within + by >= width, LANES, LANES + by),
    ]
    assert (out == np.stack(wanted)).all()


def test_half_warps_go_their_own_ways() -> None:
    values = np.random.default_rng(0).integers(0, 100, 32).astype(np.int32)
    out = np.zeros(32, np.int32)
    kernel("half_warps").in_all_orders((1,), (32,), (out, values))
    wanted = values.copy()
    for i in range(5):
        changed = wanted + wanted[LANES ^ (1 << i % 4)]
        wanted = np.where((LANES < 16) & (i >= 3), wanted, changed)
    assert (out == wanted).all()


@given(arrays.arrays(np.int32, 32, elements=st.integers(-200, 200)))
@settings(max_examples=20, deadline=None)
def test_votes_and_reductions(values: NDArray[np.int32]) -> None:
    out = np.zeros((8, 32), np.uint32)
    kernel("votes")((1,), (32,), (out, values), order="random")
    unsigned = values.view(np.uint32)
    wanted = [
        sum(1 << int(lane) for lane in LANES[values > 0]),
        (values > 100).any(),
        (values > -100).all(),
        values.sum(dtype=np.int32).view(np.uint32),
        values.min().view(np.uint32),
        values.max().view(np.uint32),
        unsigned.max(),
        np.bitwise_xor.reduce(unsigned),
    ]
    assert (out == np.array(wanted, np.uint32)[:, None]).all()


@pytest.mark.parametrize("threads", [1, 33, 96])
def test_votes_of_a_block(threads: int) -> None:
    values = np.random.default_rng(threads).integers(-150, 150, threads).astype(np.int32)
    out = np.zeros((3, threads), np.int32)
    kernel("block_votes").in_all_orders((1,), (threads,), (out, values))
    assert (out[0] == (values > 0).sum()).all()
    assert (out[1] == (values > 100).any()).all()
    assert (out[2] == (values > -100).all()).all()


def test_places_of_threads_and_blocks() -> None:
    out = np.full((2 * 3 * 4 * 5 * 2 * 3, 6), -1, np.int32)
    kernel("places").in_all_orders((4, 3, 2), (5, 2, 3), (out,))
    bz, by, bx, tz, ty, tx = np.indices((2, 3, 4, 3, 2, 5)).reshape(6, -1)
    assert (out == np.stack([tx, ty, tz, bx, by, bz], 1)).all()


# ---- products and copies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("product_bf16", ml_dtypes.bfloat16), ("product_fp16", np.float16)]
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-14, 1e4])
def test_product_of_a_warp(name: str, dtype: Any, scale: float) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape) * scale for shape in ((16, 16), (16, 8)))
    a, b = a.astype(dtype), (b / scale).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    out = np.full((16, 8), np.nan, np.float32)
    kernel(name).in_all_orders((1,), (32,), (out, a.view(np.uint16), b.view(np.uint16), c))
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) + np.abs(c)
    assert (np.abs(out - wanted) <= 2.0**-21 * size).all()


@pytest.mark.parametrize(
    ("name", "dtype"), [("product_bf16", ml_dtypes.bfloat16), ("product_fp16", np.float16)]
)
def test_product_takes_every_number_of_its_type(name: str, dtype: Any) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    identity = np.eye(16, 8, dtype=np.float32).astype(dtype)
    for start in range(0, len(codes), 16 * 16 * 37):  # 37: a sample, every exponent in it
        a = np.zeros((16, 16), np.uint16)
        a[:, :8] = codes[start : start + 128].reshape(16, 8)
        finite = np.isfinite(a.view(dtype).astype(np.float32)).all(axis=1)
        out = np.zeros((16, 8), np.float32)
        kernel(name)((1,), (32,), (out, a, identity.view(np.uint16), np.zeros((16, 8), np.float32)))
        wanted = a.view(dtype).astype(np.float32)[:, :8]
        assert (out[finite] == wanted[finite]).all()
        assert (
            (~np.isfinite(out[~finite])).any(axis=1).all()
        )  # infinity times 0 of the identity is NaN


def test_matrices_as_they_lie_and_transposed() -> None:
    values = np.arange(4 * 64, dtype=np.uint16)
    out = np.zeros((2, 4, 32, 2), np.uint16)
    kernel("matrices").in_all_orders((1,), (32,), (out, values), shared_mem=512)
    wanted = values.reshape(4, 8, 8)
    assert (out[0].reshape(4, 8, 8) == wanted).all()
    assert (out[1].reshape(4, 8, 8) == wanted.transpose(0, 2, 1)).all()


def test_copies_land_at_the_wait_or_before() -> None:
    values = np.arange(1, 129, dtype=np.uint32)
    wanted = values.copy().reshape(-1, 4)
    wanted[:, 2:] = 0
    seen = set()
    for order in ORDERS:
        before, after = np.zeros_like(wanted), np.zeros_like(wanted)
        kernel("copies")((1,), (32,), (before, after, values), 512, order, seed=3)
        assert (after == wanted).all()
        landed = (before == wanted).all(axis=1)
        assert (landed | (before == 0xFFFFFFFF).all(axis=1)).all()
        seen.add((order, bool(landed.any()), bool(landed.all())))
    assert seen == {("forward", False, False), ("reverse", True, True), ("random", True, False)}


def test_a_misaligned_copy_is_an_error() -> None:
    with pytest.raises(
        EmulationError, match=r"cp.async at a misaligned address at semantics.cu:\d+"
    ):
        kernel("misaligned_copy")((1,), (1,), (np.zeros(1, np.uint32), np.zeros(8, np.uint32)), 16)


def test_atomics() -> None:
    out, total, counter = np.zeros(6, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint32)
    kernel("atomics").in_all_orders((1,), (64,), (out, total, counter))
    assert out.tolist() == [64 * 63 // 2, 63, -63, 255, -64, 7]
    assert (total[0], counter[0]) == (32, 64 % 10)


def test_intrinsics() -> None:
    values = np.array([0x44332211, 0x00887766, 0b101000, 0x7FC00000], np.uint32)
    out = np.zeros(8, np.uint32)
    kernel("intrinsics")((1,), (1,), (out, values))
    assert out[:2].tolist() == [0x00662233, 0x00FF0011]
    assert out[2:5].tolist() == [10, 8, 4]
    assert out[5] == 0x44332211 * 0x00887766 >> 32
    assert out[6:].view(np.float32).tolist() == [1, 2]


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 5, 128, 1000])
def test_shared_memory_is_exact_and_poisoned_for_every_block(num_bytes: int) -> None:
    out = np.zeros(3, np.int32)
    kernel("shared_bytes").in_all_orders((3,), (1,), (out, np.int32(num_bytes)), num_bytes)
    assert (out == num_bytes).all()
    with pytest.raises(EmulationError, match="shared memory"):
        kernel("shared_bytes")((1,), (1,), (out, np.int32(num_bytes + 1)), num_bytes)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "why"),
    [
        ((1,), (1025,), 0, "a block of 1025x1x1 threads"),
        ((1,), (1, 1, 65), 0, "a block of 1x1x65 threads"),
        ((1,), (0,), 0, "a block of 0x1x1 threads"),
        ((0,), (32,), 0, "a grid of 0x1x1 blocks"),
        ((1 << 31,), (32,), 0, "a grid of 2147483648x1x1 blocks"),
        ((1, 65536), (32,), 0, "a grid of 1x65536x1 blocks"),
        ((1,), (32,), 227 * 1024 + 1, "232449 bytes of dynamic shared memory: over 227 KiB"),
        ((1, 1, 1, 1), (32,), 0, "must be one to three numbers"),
        ((1,), (-1,), 0, "must be one to three numbers"),
    ],
)
def test_a_launch_beyond_the_limits_is_refused(
    grid: tuple[int, ...], block: tuple[int, ...], shared: int, why: str
) -> None:
    with pytest.raises(EmulationError, match=why):
        kernel("places")(grid, block, (np.zeros(1, np.int32),), shared)


def test_launch_bounds_are_a_limit() -> None:
    out = np.zeros(65, np.int32)
    kernel("bounded")((1,), (64,), (out,))
    assert out.tolist() == [1] * 64 + [0]
    with pytest.raises(EmulationError, match="65 threads: its launch bounds allow 64"):
        kernel("bounded")((1,), (65,), (out,))


def test_the_same_memory_by_two_parameters() -> None:
    values = np.arange(8, dtype=np.int32)
    kernel("both").in_all_orders((1,), (8,), (values, values, np.int32(8)))
    assert (values == np.arange(8) + 1).all()
    # Overlapping by half: what one parameter sees, the other does.
    values = np.arange(12, dtype=np.int32)
    kernel("both")((1,), (4,), (values[4:], values[:8], np.int32(4)))
    assert values.tolist() == [5, 6, 7, 8, 4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(OrderDependence, match="out/in depend on the order"):
        kernel("both").in_all_orders((1,), (4,), (values[1:9], values[:8], np.int32(4)))


def test_a_failed_launch_changes_nothing() -> None:
    out = np.zeros(4, np.int32)
    with pytest.raises(EmulationError, match="beyond the end of out"):
        kernel("both")((1,), (8,), (np.arange(8, dtype=np.int32), out, np.int32(8)))
    assert not out.any()


def test_no_bytes_is_a_buffer_too() -> None:
    nothing = np.zeros(0, np.int32)
    kernel("both")((1,), (8,), (nothing, nothing, np.int32(0)))
    with pytest.raises(
        EmulationError, match=r"load 0 byte\(s\) beyond the end of .*in.* \(0 bytes\)"
    ):
        kernel("both")((1,), (8,), (nothing, np.zeros(8, np.int32), np.int32(8)))


# ---- arguments -----------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "f": np.zeros(4, np.float32),
    "b": np.zeros(4, ml_dtypes.bfloat16),
    "h": np.zeros(4, np.float16),
    "bytes": np.zeros(4, np.uint8),
    "ints": np.zeros((2, 4), np.int32),
    "longs": np.zeros(4, np.int64),
    "floats": np.zeros((2, 2), np.float32),
    "i": np.int32(1),
    "l": np.int64(1),
    "x": np.float32(1),
    "u": np.uint32(1),
}


def test_parameters_are_read_from_the_source() -> None:
    parameters = kernel("parameters").parameters
    assert [p.name for p in parameters] == list(GOOD)
    assert [str(p) for p in parameters] == [
        "float32*",
        "const bfloat16*",
        "const float16*",
        "const bytes*",
        "const int32*",
        "int64*",
        "const float32*",
        "int32",
        "int64",
        "float32",
        "uint32",
    ]


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"f": None, "b": None},
        {"f": np.zeros(16, np.uint8)},  # bytes of a pool
        {"bytes": np.zeros(4, ml_dtypes.float8_e4m3fn)},
        {"b": read_only(np.zeros(4, ml_dtypes.bfloat16))},
        {"longs": view(np.zeros((4, 4), np.int64)[:, :2])},  # a view may have gaps
    ],
)
def test_arguments_that_fit(changes: dict[str, Any]) -> None:
    kernel("parameters")((1,), (1,), tuple({**GOOD, **changes}.values()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"i": 1}, r"i must be a numpy scalar \(int32\), not int"),
        ({"i": np.int64(1)}, "i is int64, the kernel takes int32"),
        ({"l": np.int32(1)}, "l is int32, the kernel takes int64"),
        ({"u": np.int32(1)}, "u is int32, the kernel takes uint32"),
        ({"x": np.float64(1)}, "x is float64, the kernel takes float32"),
        ({"x": np.int32(1)}, "x is int32, the kernel takes float32"),
        ({"x": np.zeros(1, np.float32)}, r"x must be a numpy scalar \(float32\), not ndarray"),
        ({"f": np.float32(1)}, r"f is a scalar, the kernel takes float32\*"),
        ({"f": np.zeros(4, np.int32)}, r"f has dtype int32, the kernel takes float32\*"),
        ({"f": np.zeros(4, np.float16)}, "f has dtype float16"),
        (
            {"h": np.zeros(4, ml_dtypes.bfloat16)},
            r"h has dtype bfloat16, the kernel takes const float16\*",
        ),
        ({"ints": np.zeros(4, np.float32)}, "ints has dtype float32"),
        ({"longs": np.zeros(4, np.uint64)}, "longs has dtype uint64"),
        ({"f": np.zeros((4, 4), np.float32)[:, 0]}, "f is not contiguous"),
        ({"f": read_only(np.zeros(4, np.float32))}, "f is read-only"),
        ({"ints": np.zeros(9, np.int32)[1:]}, r"ints lies at 0x\w+: no multiple of 16 bytes"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(EmulationError, match=why):
        kernel("parameters")((1,), (1,), tuple({**GOOD, **changes}.values()))


def test_other_misfits() -> None:
    function = kernel("parameters")
    with pytest.raises(EmulationError, match="10 arguments given, it takes 11"):
        function((1,), (1,), tuple(GOOD.values())[:-1])
    elsewhere = TensorView(64, (4,), (4,), "float32", "cuda:0", True, None)
    with pytest.raises(EmulationError, match="f lies on cuda:0"):
        function((1,), (1,), (elsewhere, *tuple(GOOD.values())[1:]))
    with pytest.raises(InvalidType, match="must be a torch, CuPy or numpy array, not str"):
        function((1,), (1,), ("memory", *tuple(GOOD.values())[1:]))
    with pytest.raises(KernelError, match=r"semantics.cu has no KVEMU_KERNEL\(nothing\)"):
        kernel("nothing")
