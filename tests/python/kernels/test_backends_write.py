"""Writing tokens and converting blocks on every backend: the same bytes and the same e4m3 codes, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cuda_host import oracle

from kvcatch.errors import InvalidArgument, InvalidType, KernelError
from kvcatch.kernels import KVCache, KVLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from conftest import Machine

E4M3 = "float8_e4m3"

# (dtype of the cache, of the new tokens, scale, head_dim, block_size)
WRITES = [
    ("bfloat16", "bfloat16", "none", 64, 16),
    ("bfloat16", "bfloat16", "none", 80, 16),
    ("float16", "float16", "none", 96, 32),
    ("bfloat16", "bfloat16", "none", 128, 16),
    ("float16", "float16", "none", 256, 64),
    ("float32", "float32", "none", 64, 16),
    ("float32", "float32", "none", 256, 5),
    (E4M3, "bfloat16", "token", 64, 16),
    (E4M3, "float16", "token", 80, 16),
    (E4M3, "bfloat16", "token", 96, 16),
    (E4M3, "bfloat16", "token", 128, 16),
    (E4M3, "bfloat16", "token", 256, 32),
    (E4M3, "float32", "token", 576, 16),
    (E4M3, "bfloat16", "head", 128, 16),
    (E4M3, "float16", "head", 80, 16),
]
# (dtype of the wide pool, scale, head_dim, block_size)
CONVERSIONS = [
    ("bfloat16", "token", 128, 16),
    ("bfloat16", "token", 80, 16),
    ("float16", "token", 96, 5),
    ("float32", "token", 64, 16),
    ("bfloat16", "head", 64, 32),
    ("float16", "block", 128, 16),
    ("bfloat16", "block", 80, 16),
    ("float32", "block", 64, 64),
    ("bfloat16", "block", 576, 3),
]


def name_of(value: Any) -> str:
    return str(value)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Normal numbers, each row of its own magnitude, and every kind of number that can go wrong."""
    x = rng.standard_normal(shape).astype(np.float32)
    x *= np.exp2(rng.integers(-12, 6, (*shape[:-1], 1))).astype(np.float32)
    rows = x.reshape(-1, shape[-1])
    odd = [
        np.zeros(shape[-1]),  # a scale of 1
        np.full(shape[-1], -0.0),
        np.full(shape[-1], np.nan),
        np.full(shape[-1], 2.0**-130),  # subnormal as bfloat16 and float32, 0 as float16
        np.full(shape[-1], 2.0**-101),
        np.linspace(-448, 448, shape[-1]),
        np.arange(shape[-1]) * 0.5 - 16,  # ties
    ]
    with np.errstate(over="ignore"):
        for i, row in zip(rng.permutation(len(rows)), odd, strict=False):
            rows[i] = row
        rows[0, 1], rows[-1, 0], rows[-1, 2] = np.nan, -np.inf, 1
        return x.astype(oracle.DTYPES[dtype])


def slots_for(rng: np.random.Generator, tokens: int, layout: KVLayout, blocks: int) -> Any:
    slots = rng.permutation(blocks * layout.block_size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    return slots


def head_scales_for(rng: np.random.Generator, layout: KVLayout) -> Any:
    if layout.scale != "head":
        return None
    shape = (layout.num_layers, 2, layout.num_kv_heads)
    return np.exp2(rng.uniform(-9, 3, shape)).astype(np.float32)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found, wanted)


# --- write_kv ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize(("dtype", "io", "scale", "head_dim", "block_size"), WRITES, ids=name_of)
def test_write(
    machine: Machine, dtype: Any, io: str, scale: Any, head_dim: int, block_size: int, order: Any
) -> None:
    rng = np.random.default_rng(head_dim)
    layout = KVLayout(3, 3, head_dim, block_size, dtype=dtype, scale=scale, order=order)
    head_scales = head_scales_for(rng, layout)
    cache = machine.pool(layout, 5, rng, head_scales)
    wanted = machine.bytes_of(cache)
    for layer, tokens in ((1, 13), (2, 1), (0, 4 * block_size)):
        key, value = (numbers(rng, (tokens, 3, head_dim), io) for _ in range(2))
        slots = slots_for(rng, tokens, layout, 5)
        machine.backend.write_kv(
            cache, layer, machine.tensor(key), machine.tensor(value), machine.tensor(slots)
        )
        wanted = oracle.expected_write(wanted, layout, layer, key, value, slots, head_scales)
    same(machine.bytes_of(cache), wanted)


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", "none"), (E4M3, "token")])
@pytest.mark.parametrize("heads", [1, 3])
def test_keys_and_values_inside_larger_tensors(
    machine: Machine, dtype: Any, scale: Any, heads: int
) -> None:
    """As a model has them: slices of one projection, or heads outermost."""
    rng = np.random.default_rng(21)
    layout = KVLayout(2, heads, 64, dtype=dtype, scale=scale)
    cache = machine.pool(layout, 4, rng)
    wanted = machine.bytes_of(cache)
    fused = numbers(rng, (9, 2 + 2 * heads, 64), "bfloat16")
    slots = slots_for(rng, 9, layout, 4)
    on_device = machine.tensor(fused)
    key, value = on_device[:, 2 : 2 + heads], on_device[:, 2 + heads :]
    machine.backend.write_kv(cache, 0, key, value, machine.tensor(slots))
    wanted = oracle.expected_write(
        wanted, layout, 0, fused[:, 2 : 2 + heads], fused[:, 2 + heads :], slots
    )
    turned = numbers(rng, (2 * heads, 9, 64), "bfloat16")
    on_device = machine.tensor(turned).swapaxes(0, 1)
    machine.backend.write_kv(
        cache, 1, on_device[:, :heads], on_device[:, heads:], machine.tensor(slots)
    )
    turned = turned.swapaxes(0, 1)
    wanted = oracle.expected_write(wanted, layout, 1, turned[:, :heads], turned[:, heads:], slots)
    same(machine.bytes_of(cache), wanted)


def test_padding_alone_and_no_tokens(machine: Machine) -> None:
    layout = KVLayout(1, 2, 64)
    cache = machine.pool(layout, 2, np.random.default_rng(22))
    before = machine.bytes_of(cache)
    for slots in ([-1, -1, np.iinfo(np.int64).min], []):
        tokens = machine.tensor(np.ones((len(slots), 2, 64), oracle.DTYPES["bfloat16"]))
        machine.backend.write_kv(
            cache, 0, tokens, tokens, machine.tensor(np.array(slots, np.int64))
        )
    same(machine.bytes_of(cache), before)


def test_an_infinity_is_loud(machine: Machine) -> None:
    """Its row reads back as NaN; the row beside it is whole."""
    layout = KVLayout(1, 1, 64, dtype=E4M3, scale="token")
    cache = machine.pool(layout, 1, np.zeros(layout.block_bytes, np.uint8))
    wide = machine.pool(KVLayout(1, 1, 64, dtype="float32"), 1, np.random.default_rng(23))
    key = np.ones((2, 1, 64), np.float32)
    key[0, 0, 5] = np.inf
    machine.backend.write_kv(
        cache, 0, machine.tensor(key), machine.tensor(key), machine.tensor(np.arange(2))
    )
    machine.backend.dequantise_blocks(cache, wide, [0], [0])
    read = oracle.elements(machine.bytes_of(wide), wide.layout)[0, 0, :, 0]
    assert np.isnan(read[:, 0]).all()
    assert (read[:, 1] == 1).all()


def test_codes_round_to_even_and_saturate(machine: Machine) -> None:
    layout = KVLayout(1, 1, 16, block_size=1, dtype=E4M3, scale="head")
    cache = machine.pool(layout, 1, np.zeros(32, np.uint8), np.ones((1, 2, 1), np.float32))
    x = [0, -0.0, 1.0625, 1.1875, 464, 1e30, np.inf, -np.inf, np.nan, -np.nan, 2**-10, 3 * 2**-10]
    x += [-1.0625, 17, 19, 2**-11]
    wanted = [0, 0x80, 0x38, 0x3A, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0, 2, 0xB8, 0x58, 0x5A, 0]
    rows = np.array(x, np.float32).reshape(1, 1, 16)
    machine.backend.write_kv(
        cache, 0, machine.tensor(rows), machine.tensor(rows), machine.tensor(np.zeros(1, np.int64))
    )
    same(machine.bytes_of(cache), np.array(wanted * 2, np.uint8))


# --- refusals of write_kv ---------------------------------------------------------------------------


def test_bad_tokens(machine: Machine) -> None:
    layout = KVLayout(2, 2, 64)
    cache = machine.pool(layout, 4, np.random.default_rng(24))
    before = machine.bytes_of(cache)
    bf16 = oracle.DTYPES["bfloat16"]

    def tokens(*shape: int, dtype: Any = bf16) -> Any:
        return machine.tensor(np.ones(shape, dtype))

    good, slots = tokens(3, 2, 64), machine.tensor(np.arange(3))
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (InvalidArgument, "layer", (2, good, good, slots)),
        (InvalidArgument, "layer", (-1, good, good, slots)),
        (InvalidArgument, "layer", (True, good, good, slots)),
        (InvalidType, "key.*float16", (0, tokens(3, 2, 64, dtype=np.float16), good, slots)),
        (InvalidType, "value.*float32", (0, good, tokens(3, 2, 64, dtype=np.float32), slots)),
        (InvalidArgument, "key.*shape", (0, tokens(3, 3, 64), good, slots)),
        (InvalidArgument, "key.*shape", (0, tokens(3, 2, 32), good, slots)),
        (InvalidArgument, "key.*shape", (0, tokens(3, 128), good, slots)),
        (InvalidArgument, "value.*shape", (0, good, tokens(4, 2, 64), slots)),
        (InvalidArgument, "slot_mapping.*shape", (0, good, good, machine.tensor(np.arange(4)))),
        (
            InvalidType,
            "slot_mapping.*int32",
            (0, good, good, machine.tensor(np.arange(3, dtype=np.int32))),
        ),
        (
            InvalidArgument,
            "slot_mapping.*contiguous",
            (0, good, good, machine.tensor(np.arange(6))[::2]),
        ),
        (InvalidArgument, "key.*contiguous", (0, tokens(3, 2, 128)[:, :, ::2], good, slots)),
        (InvalidArgument, "value.*multiple", (0, good, tokens(3, 2, 68)[:, :, :64], slots)),
        (InvalidArgument, "key.*multiple", (0, tokens(3, 2, 72)[:, :, 4:68], good, slots)),
        (InvalidType, "slot_mapping", (0, good, good, [0, 1, 2])),
    ]
    for error, words, arguments in cases:
        with pytest.raises(error, match=words):
            machine.backend.write_kv(cache, *arguments)
    same(machine.bytes_of(cache), before)


def bad_slot(machine: Machine) -> tuple[Any, Any, tuple[Any, ...]]:
    """A pool of two blocks, its bytes, and arguments of ``write_kv`` whose middle slot is beyond it."""
    cache = machine.pool(KVLayout(1, 1, 64, dtype="float32"), 2, np.random.default_rng(29))
    tokens = machine.tensor(np.ones((3, 1, 64), np.float32))
    slots = machine.tensor(np.array([0, 32, 31], np.int64))
    return cache, machine.bytes_of(cache), (cache, 0, tokens, tokens, slots)


def test_a_bad_slot_met_by_the_device(checking: Machine) -> None:
    """It is skipped, the tokens around it are written, and the next wait names it."""
    cache, wanted, arguments = bad_slot(checking)
    checking.backend.write_kv(*arguments)
    with pytest.raises(KernelError, match="write_kv met slot 32 at index 1"):
        checking.backend.synchronise()
    ones = np.ones((3, 1, 64), np.float32)
    slots = np.array([0, -1, 31], np.int64)
    wanted = oracle.expected_write(wanted, cache.layout, 0, ones, ones, slots)
    same(checking.bytes_of(cache), wanted)


def test_a_bad_slot_on_the_cpu(cpu: Machine) -> None:
    """Where the host sees the slots at no cost the call is refused."""
    cache, before, arguments = bad_slot(cpu)
    with pytest.raises(InvalidArgument, match="32"):
        cpu.backend.write_kv(*arguments)
    same(cpu.bytes_of(cache), before)


def test_tokens_inside_the_cache(machine: Machine) -> None:
    layout = KVLayout(1, 1, 64, dtype="float32")
    cache = machine.pool(layout, 4, np.zeros(4 * layout.block_bytes, np.uint8))
    inside = cache.buffer[: 2 * 256].view(
        np.float32 if machine.backend.name == "cuda" else _float32()
    )
    with pytest.raises(InvalidArgument, match="inside the cache"):
        machine.backend.write_kv(
            cache,
            0,
            inside.reshape(2, 1, 64),
            inside.reshape(2, 1, 64),
            machine.tensor(np.arange(2)),
        )


def _float32() -> Any:
    import torch

    return torch.float32


def test_a_cache_scaled_by_block_takes_no_tokens(machine: Machine) -> None:
    layout = KVLayout(1, 1, 64, dtype=E4M3, scale="block")
    cache = machine.pool(layout, 1, np.random.default_rng(25))
    before = machine.bytes_of(cache)
    tokens = machine.tensor(np.ones((1, 1, 64), np.float32))
    with pytest.raises(InvalidArgument, match="quantise_blocks"):
        machine.backend.write_kv(cache, 0, tokens, tokens, machine.tensor(np.zeros(1, np.int64)))
    same(machine.bytes_of(cache), before)


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        (None, InvalidArgument),
        (np.ones((1, 2, 2), np.float32), InvalidArgument),
        (np.ones((2, 2, 2), np.float64), InvalidType),
        (np.full((2, 2, 2), np.nan, np.float32), InvalidArgument),
        (np.zeros((2, 2, 2), np.float32), InvalidArgument),
        (np.full((2, 2, 2), -1, np.float32), InvalidArgument),
        (np.full((2, 2, 2), 2.0**101, np.float32), InvalidArgument),
    ],
    ids=["none", "shape", "dtype", "nan", "zero", "negative", "huge"],
)
def test_bad_head_scales(machine: Machine, scales: Any, error: type[Exception]) -> None:
    layout = KVLayout(2, 2, 16, dtype=E4M3, scale="head")
    given = None if scales is None else machine.tensor(scales)
    with pytest.raises(error, match="head_scales"):
        machine.backend.allocate(layout, 2, given)


def test_head_scales_where_none_belong(machine: Machine) -> None:
    ones = machine.tensor(np.ones((2, 2, 2), np.float32))
    with pytest.raises(InvalidArgument, match="head_scales"):
        machine.backend.allocate(KVLayout(2, 2, 16), 2, ones)


# --- conversions ------------------------------------------------------------------------------------


def quantised(x: Any, layout: KVLayout, head_scales: Any) -> tuple[Any, Any]:
    """Codes of blocks ``[n, layer, K or V, head, token, head_dim]`` and their scales, as stored."""
    wide = x.astype(np.float32)
    if layout.scale == "head":
        return oracle.codes_of(wide, head_scales[None, :, :, :, None, None]), head_scales
    scale = oracle.scale_of(wide, (-1,) if layout.scale == "token" else (-2, -1))
    return oracle.codes_of(wide, scale.reshape(*scale.shape, *([1] * (6 - scale.ndim)))), scale


@pytest.mark.parametrize("orders", ["block block", "layer block", "block layer"])
@pytest.mark.parametrize(("io", "scale", "head_dim", "block_size"), CONVERSIONS, ids=name_of)
def test_convert(
    machine: Machine, io: Any, scale: Any, head_dim: int, block_size: int, orders: str
) -> None:
    rng = np.random.default_rng(head_dim)
    first, second = orders.split()
    wide_layout = KVLayout(2, 3, head_dim, block_size, dtype=io, order=first)  # type: ignore[arg-type]
    layout = KVLayout(2, 3, head_dim, block_size, dtype=E4M3, scale=scale, order=second)  # type: ignore[arg-type]
    head_scales = head_scales_for(rng, layout)
    wide = machine.pool(wide_layout, 4, rng)
    data = machine.bytes_of(wide)
    x = oracle.elements(data, wide_layout)
    x[...] = numbers(rng, x.shape, io)
    wide = machine.pool(wide_layout, 4, data)
    cache = machine.pool(layout, 5, rng, head_scales)

    wanted = machine.bytes_of(cache)
    codes, scales = quantised(x, layout, head_scales)
    src, dst = [3, 0, 3, 2], [4, 1, 0, 2]
    oracle.elements(wanted, layout)[dst] = codes[src]
    if scale != "head":
        oracle.scales(wanted, layout)[dst] = scales[src]
    machine.backend.quantise_blocks(wide, cache, src, dst)
    same(machine.bytes_of(cache), wanted)
    same(machine.bytes_of(wide), data)

    back = machine.pool(wide_layout, 4, rng)
    read = machine.bytes_of(back)
    machine.backend.dequantise_blocks(cache, back, [1, 4], [3, 1])
    stored = scales[None] if scale == "head" else scales[[0, 3]]
    values = oracle.values_of(
        codes[[0, 3]], stored.reshape(*stored.shape, *([1] * (6 - stored.ndim))), io
    )
    found = machine.bytes_of(back)
    same(oracle.elements(found, wide_layout)[[3, 1]].astype(np.float64), values.astype(np.float64))
    untouched = [0, 2]
    same(
        oracle.by_block(found, wide_layout)[untouched],
        oracle.by_block(read, wide_layout)[untouched],
    )


def test_every_code_survives_the_way_back(machine: Machine) -> None:
    wide_layout = KVLayout(1, 1, 16, dtype="float16")
    layout = KVLayout(1, 1, 16, dtype=E4M3, scale="head")
    ones = np.ones((1, 2, 1), np.float32)
    codes = np.tile(np.arange(256, dtype=np.uint8), 2)
    cache = machine.pool(layout, 2, np.concatenate([codes, np.zeros_like(codes)]), ones)
    wide = machine.pool(wide_layout, 1, np.random.default_rng(26))
    machine.backend.dequantise_blocks(cache, wide, [0], [0])
    machine.backend.quantise_blocks(wide, cache, [0], [1])
    codes[codes == 0xFF] = 0x7F  # a NaN has no sign
    same(machine.bytes_of(cache)[512:], codes)


def test_quantising_what_was_dequantised_changes_little(machine: Machine) -> None:
    """The largest element of a row keeps its code, 448, and with it the row's scale but for a rounding."""
    rng = np.random.default_rng(27)
    wide_layout = KVLayout(2, 2, 64, dtype="float32")
    layout = KVLayout(2, 2, 64, dtype=E4M3, scale="token")
    wide, cache = machine.pool(wide_layout, 2, rng), machine.pool(layout, 2, rng)
    data = machine.bytes_of(wide)
    oracle.elements(data, wide_layout)[...] = rng.standard_normal((2, 2, 2, 2, 16, 64))
    wide = machine.pool(wide_layout, 2, data)
    machine.backend.quantise_blocks(wide, cache, [0], [0])
    machine.backend.dequantise_blocks(cache, wide, [0], [0])
    machine.backend.quantise_blocks(wide, cache, [0], [1])
    codes = oracle.elements(machine.bytes_of(cache), layout)
    same(codes[1], codes[0])


@pytest.mark.parametrize("call", ["quantise_blocks", "dequantise_blocks"])
def test_bad_conversions(machine: Machine, call: str) -> None:
    rng = np.random.default_rng(28)
    fields: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 64}
    codes = KVLayout(**fields, dtype=E4M3, scale="block")
    wide, cache = machine.pool(KVLayout(**fields), 4, rng), machine.pool(codes, 4, rng)
    pools = (wide, cache) if call == "quantise_blocks" else (cache, wide)
    before = machine.bytes_of(wide), machine.bytes_of(cache)
    convert = getattr(machine.backend, call)
    for src, dst, words in (
        ([4], [0], "4"),
        ([0], [-1], "-1"),
        ([0, 1], [2, 2], "2"),
        ([0], [1, 2], "2"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            convert(*pools, src, dst)
    with pytest.raises(InvalidArgument, match="e4m3"):
        convert(*reversed(pools), [0], [0])
    with pytest.raises(InvalidArgument, match="e4m3"):
        convert(wide, wide, [0], [1])
    with pytest.raises(InvalidArgument, match="e4m3"):
        convert(cache, cache, [0], [1])
    for change in ({"num_layers": 1}, {"num_kv_heads": 2}, {"head_dim": 32}, {"block_size": 8}):
        other = machine.pool(KVLayout(**(fields | change)), 4, rng)
        with pytest.raises(InvalidArgument, match=next(iter(change))):
            convert(*((other, cache) if call == "quantise_blocks" else (cache, other)), [0], [0])
    inside = KVCache(codes, 2, wide.buffer[: 2 * codes.block_bytes], None, wide.device)
    with pytest.raises(InvalidArgument, match="overlap"):
        convert(*((wide, inside) if call == "quantise_blocks" else (inside, wide)), [0], [1])
    convert(*pools, [], [])
    same(machine.bytes_of(wide), before[0])
    same(machine.bytes_of(cache), before[1])
