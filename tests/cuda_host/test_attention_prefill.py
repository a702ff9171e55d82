"""cuda/prefill.cu under emulation: every order gives the same bytes, and they are the right ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cuda_host import oracle
from cuda_host.attention_cases import (
    VARIANTS,
    array,
    decode,
    forget,
    layout_of,
    load,
    prefill,
    tensor,
)
from cuda_host.attention_oracle import (
    BOUNDS,
    NO_BLOCK,
    Options,
    make_case,
    prefill_reference,
    relative_error,
)
from cuda_host.build import CUDA
from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS, EmulationError, OrderDependence
from kvcatch.errors import KernelError
from kvcatch.kernels.attention_checks import check_chunks
from kvcatch.kernels.device_attention import prefill_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# tokens in the cache, and how many of them, the last, are queries
CHUNKS = ((1, 1), (16, 16), (63, 20), (65, 1), (0, 0), (129, 33), (40, 0), (70, 17))


@pytest.fixture(scope="module")
def backend() -> EmulatedBackend:
    pytest.importorskip("torch", reason="the emulated backend makes torch tensors")
    return EmulatedBackend(orders=ORDERS)


def starts_of(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]


def check(
    backend: EmulatedBackend,
    variant: tuple[dict[str, Any], str, int],
    chunks: Sequence[tuple[int, int]] = CHUNKS,
    num_kv_heads: int = 1,
    seed: int = 0,
    **options: Any,
) -> None:
    given, dtype, group = variant
    rng = np.random.default_rng(seed)
    layout = layout_of(num_kv_heads, **given)
    lens, counts = zip(*chunks, strict=True)
    case = make_case(rng, layout, lens)
    starts = starts_of(counts)
    shape = (starts[-1], num_kv_heads * group, layout.head_dim)
    query = rng.standard_normal(shape).astype(oracle.DTYPES[dtype])
    chosen = Options(scale=layout.head_dim**-0.5, **options)
    out = prefill(backend, case, query, starts, chosen)
    assert relative_error(out, prefill_reference(case, query, starts, chosen)) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("name", "num_kv_heads"),
    [
        ("bf16 d64 b16 g1", 2),
        ("bf16 d64 b32 g3", 2),
        ("bf16 d80 b16 g2", 1),
        ("bf16 d128 b16 g8", 1),
        ("bf16 d128 b64 g7 layer-major", 1),
        ("bf16 d256 b16 g4", 1),
        ("fp16 d64 b64 g5", 1),
        ("e4m3 token d64 b32 g4", 2),
        ("e4m3 token d80 b16 g3", 1),
        ("e4m3 head d96 b16 g7", 1),
        ("e4m3 block d128 b16 g2", 2),
    ],
)
def test_variants(backend: EmulatedBackend, name: str, num_kv_heads: int) -> None:
    check(backend, VARIANTS[name], num_kv_heads=num_kv_heads, seed=len(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16 d128 b16 g8", {"window": 30}),
        ("bf16 d64 b32 g3", {"window": 1}),
        ("e4m3 token d80 b16 g3", {"window": 50, "soft_cap": 2.0}),
        ("bf16 d64 b32 g3", {"alibi": True}),
    ],
)
def test_options(backend: EmulatedBackend, name: str, options: dict[str, Any]) -> None:
    given, dtype, group = VARIANTS[name]
    if options.pop("alibi", False):
        options["alibi_slopes"] = (2.0 ** -np.linspace(0.5, 8, group)).astype(np.float32)
    check(backend, (given, dtype, group), seed=7, **options)


@pytest.mark.parametrize("name", ["bf16 d64 b32 g3", "e4m3 token d64 b32 g4"])
def test_what_lies_before_the_window_is_not_read(backend: EmulatedBackend, name: str) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(9)
    case = make_case(rng, layout_of(1, **given), [100, 39, 7])
    query = rng.standard_normal((50, group, 64)).astype(oracle.DTYPES[dtype])
    options = Options(scale=0.1, window=38)
    starts = [0, 30, 45, 50]
    gone = forget(case, [100 - 30 + 1 - 38, 0, 0])
    out = prefill(backend, gone, query, starts, options)
    assert relative_error(out, prefill_reference(case, query, starts, options)) < BOUNDS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "token", "head", "block"])
def test_all_shapes(backend: EmulatedBackend, head_dim: int, kind: str) -> None:
    rng = np.random.default_rng(head_dim)
    for group, size in zip((1, 2, 3, 4, 5, 7, 8, 12, 16), itertools.cycle((16, 32, 64))):
        scaled = kind in ("token", "head", "block")
        given = {"scale": kind} if scaled else {"dtype": kind}
        dtype = str(rng.choice(["bfloat16", "float16"])) if scaled else kind
        options: dict[str, Any] = {"head_dim": head_dim, "block_size": size, **given}
        options["order"] = str(rng.choice(["block", "layer"]))
        window = int(rng.integers(1, 150)) if rng.random() < 0.5 else None
        check(backend, (options, dtype, group), seed=group, window=window)


@pytest.mark.parametrize("name", ["bf16 d64 b32 g3", "e4m3 token d64 b32 g4"])
def test_one_row_a_sequence_is_decode(backend: EmulatedBackend, name: str) -> None:
    """Both kernels round the same sums; they differ in the order of additions alone."""
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(3)
    case = make_case(rng, layout_of(2, **given), [1, 40, 100])
    query = rng.standard_normal((3, 2 * group, case.layout.head_dim)).astype(oracle.DTYPES[dtype])
    options = Options(scale=0.2)
    one = prefill(backend, case, query, [0, 1, 2, 3], options).astype(np.float64)
    assert relative_error(decode(backend, case, query, options), one) < BOUNDS[dtype] / 4


def test_chunks_agree_with_the_whole(backend: EmulatedBackend) -> None:
    """A prompt taken in chunks over its own prefix gives what it gives at once."""
    given, dtype, group = VARIANTS["bf16 d64 b32 g3"]
    rng = np.random.default_rng(4)
    case = make_case(rng, layout_of(1, **given), [90])
    query = rng.standard_normal((90, group, 64)).astype(oracle.DTYPES[dtype])
    whole = prefill(backend, case, query, [0, 90], Options(scale=0.2)).astype(np.float64)
    for first, end in ((0, 7), (7, 50), (50, 90)):
        part = replace(case, seq_lens=np.array([end], np.int32))
        out = prefill(backend, part, query[first:end], [0, end - first], Options(scale=0.2))
        assert relative_error(out, whole[first:end]) < 1e-3


@pytest.mark.parametrize("name", ["bf16 d64 b32 g3", "e4m3 token d64 b32 g4"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_in_a_query_reaches_its_output(
    backend: EmulatedBackend, name: str, value: float
) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(5)
    case = make_case(rng, layout_of(1, **given), [60])
    query = rng.standard_normal((30, group, 64)).astype(oracle.DTYPES[dtype])
    query[9, 1, 3] = value
    out = prefill(backend, case, query, [0, 30], Options(scale=0.1))
    assert np.isnan(out[9, 1].astype(np.float32)).all()
    out[9, 1] = query[9, 1] = 0
    wanted = prefill_reference(case, query, [0, 30], Options(scale=0.1))
    wanted[9, 1] = 0
    assert relative_error(out, wanted) < BOUNDS[dtype]


def test_large_logits(backend: EmulatedBackend) -> None:
    rng = np.random.default_rng(6)
    case = make_case(rng, layout_of(1, head_dim=64, dtype="float16"), [100])
    query = (rng.standard_normal((60, 2, 64)) * 60).astype(np.float16)
    options = Options(scale=0.125)
    out = prefill(backend, case, query, [0, 60], options)
    assert relative_error(out, prefill_reference(case, query, [0, 60], options)) < 2e-3


def test_strided_queries(backend: EmulatedBackend) -> None:
    """Rows of a joint query, key and value projection, as models make them."""
    rng = np.random.default_rng(7)
    case = make_case(rng, layout_of(1, head_dim=64), [40])
    joint = tensor(rng.standard_normal((20, 6, 64)).astype(oracle.DTYPES["bfloat16"]))
    results = [
        backend.prefill_attention(
            load(backend, case), 1, query, [0, 20], tensor(case.tables), [40], scale=0.1
        )
        for query in (joint[:, 1:5], joint[:, 1:5].contiguous())
    ]
    one, other = (array(result).view(np.int16) for result in results)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_is_found(tmp_path: Path, which: int) -> None:
    """Neither of the two barriers of a stage can go: before it is read, and before it is filled again.

    The window lets the last warp skip tokens that the first needs, so that it runs ahead.
    """
    parts = (CUDA / "prefill.cu").read_text().split("__syncthreads();")
    assert len(parts) == 3
    kept = ["", "__syncthreads();"] if which == 0 else ["__syncthreads();", ""]
    (tmp_path / "prefill.cu").write_text(parts[0] + kept[0] + parts[1] + kept[1] + parts[2])
    rng = np.random.default_rng(8)
    case = make_case(rng, layout_of(1, head_dim=64), [300])
    query = rng.standard_normal((64, 1, 64)).astype(oracle.DTYPES["bfloat16"])
    broken = EmulatedBackend(ORDERS, cuda_dir=tmp_path)
    with pytest.raises(OrderDependence, match="prefill_attention"):
        prefill(broken, case, query, [0, 64], Options(scale=1.0, window=150))


def test_bad_ids_are_recorded_and_left_out() -> None:
    rng = np.random.default_rng(9)
    case = make_case(rng, layout_of(1, head_dim=64), [40, 70])
    query = rng.standard_normal((50, 2, 64)).astype(oracle.DTYPES["bfloat16"])
    checking = EmulatedBackend(check_ids=True)
    whole = prefill(checking, case, query, [0, 20, 50], Options(scale=0.1))
    checking.synchronise()
    for bad in (case.num_blocks, -1, NO_BLOCK):
        broken = replace(case, tables=case.tables.copy())
        broken.tables[1, 1] = bad
        out = prefill(checking, broken, query, [0, 20, 50], Options(scale=0.1))
        np.testing.assert_array_equal(out[:20], whole[:20])
        assert np.isfinite(out.astype(np.float32)).all()
        assert relative_error(out[20:], whole[20:].astype(np.float64)) > 0.02
        with pytest.raises(KernelError, match=f"prefill_attention met block id {bad} at index 1"):
            checking.synchronise()


def test_shared_memory_is_what_the_kernel_uses() -> None:
    rng = np.random.default_rng(10)
    case = make_case(rng, layout_of(1, head_dim=256), [40])
    backend = EmulatedBackend()
    launch = backend.runtime.launch
    backend.runtime.launch = lambda *rest: launch(*rest[:-1], rest[-1] - 16)  # type: ignore[method-assign]
    query = rng.standard_normal((40, 2, 256)).astype(oracle.DTYPES["bfloat16"])
    with pytest.raises(EmulationError):
        prefill(backend, case, query, [0, 40], Options(scale=1.0))


def test_tiles_cover_every_row_longest_first() -> None:
    chunks = check_chunks([0, 100, 100, 101, 164], [100, 7, 5000, 64], 164)
    tiles = prefill_tiles(chunks, 3, 0)
    rows = sorted((s, first) for s, first in tiles.tolist())
    assert rows == [
        *((0, 64 * i) for i in range(5)),
        (2, 0),
        *((3, 64 * i) for i in range(3)),
    ]
    assert tiles[0].tolist() == [2, 0]
    assert tiles[1].tolist() == [0, 256]
    # under a window of 8 tokens the tile of one row, at the end of 5,000 tokens, has the fewest keys
    assert prefill_tiles(chunks, 3, 8)[-1].tolist() == [2, 0]
