"""cuda/decode.cu and cuda/merge.cu under emulation: every order gives the same bytes, and they are the right ones.

Bounds are relative l2 errors against float64 on the stored values (see ``attention_oracle``).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cuda_host import oracle
from cuda_host.attention_cases import (
    VARIANTS,
    decode,
    forget,
    layout_of,
    pieces,
    random_query,
    tensor,
)
from cuda_host.attention_oracle import (
    BOUNDS,
    NO_BLOCK,
    Options,
    decode_reference,
    make_case,
    relative_error,
)
from cuda_host.build import CUDA, build
from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS, EmulationError, OrderDependence
from kvcatch.errors import KernelError
from kvcatch.kernels.device_attention import (
    attention_defines,
    decode_shared_bytes,
    thread_blocks_per_sm,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


HERE = Path(__file__).resolve().parent
LENGTHS = (0, 1, 5, 16, 17, 63, 64, 65, 129, 200)


@pytest.fixture(scope="module")
def backend() -> EmulatedBackend:
    pytest.importorskip("torch", reason="the emulated backend makes torch tensors")
    return EmulatedBackend(orders=ORDERS)


def check(
    backend: EmulatedBackend,
    variant: tuple[dict[str, Any], str, int],
    lengths: Sequence[int] = LENGTHS,
    num_slots: int = 20,
    seed: int = 0,
    **options: Any,
) -> None:
    given, dtype, group = variant
    rng = np.random.default_rng(seed)
    layout = layout_of(1 if group > 8 else 2, **given)
    case = make_case(rng, layout, lengths)
    query = random_query(rng, case, group, dtype)
    chosen = Options(scale=layout.head_dim**-0.5, **options)
    plan = pieces(backend, case, query.shape[1], num_slots, chosen.window or 0)
    out = decode(backend, case, query, chosen, plan)
    wanted = decode_reference(case, query, chosen)
    assert relative_error(out, wanted) < BOUNDS[dtype]
    empty = case.seq_lens == 0
    assert not out[empty].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(backend: EmulatedBackend, name: str) -> None:
    check(backend, VARIANTS[name], seed=len(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16 d128 b16 g8", {"window": 70}),
        ("bf16 d128 b16 g8", {"window": 1}),
        ("e4m3 token d128 b16 g8", {"window": 33}),
        ("bf16 d64 b32 g3", {"soft_cap": 1.5}),
        ("fp16 d128 b16 g4", {"alibi": True, "window": 100}),
        ("e4m3 token d80 b16 g3", {"alibi": True, "soft_cap": 30.0}),
    ],
)
def test_options(backend: EmulatedBackend, name: str, options: dict[str, Any]) -> None:
    given, dtype, group = VARIANTS[name]
    if options.pop("alibi", False):
        heads = 2 * group
        options["alibi_slopes"] = (2.0 ** -np.linspace(0.5, 8, heads)).astype(np.float32)
    check(backend, (given, dtype, group), seed=7, **options)


@pytest.mark.parametrize("name", ["bf16 d64 b32 g3", "e4m3 token d64 b32 g4"])
def test_what_lies_before_the_window_is_not_read(backend: EmulatedBackend, name: str) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(9)
    case = make_case(rng, layout_of(1, **given), [100, 39, 7])
    query = random_query(rng, case, group, dtype)
    options = Options(scale=0.1, window=38)
    plan = pieces(backend, case, group, 4, 38)
    out = decode(backend, forget(case, [62, 1, 0]), query, options, plan)
    assert relative_error(out, decode_reference(case, query, options)) < BOUNDS[dtype]


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
        check(backend, (options, dtype, group), num_slots=int(rng.integers(1, 40)), seed=group)


# --- a second opinion, and the checks themselves ------------------------------------------------------


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 80), ("float16", 64)])
def test_the_plain_kernel_agrees(backend: EmulatedBackend, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(20)
    case = make_case(rng, layout_of(2, head_dim=head_dim, dtype=dtype), [1, 30, 47])
    query = random_query(rng, case, 2, dtype)
    defines = attention_defines(case.layout, dtype, 2)
    strides = case.layout.strides(case.num_blocks)
    pool = case.pool.view(oracle.DTYPES[dtype])[case.layer * strides.layer // 2 :]
    result = tensor(np.full(query.shape, np.nan, np.float32))
    build(HERE / "decode_reference.cu", defines).get_function("decode_reference")(
        (3, 4),
        (head_dim,),
        (
            result,
            tensor(query),
            tensor(pool),
            tensor(case.tables),
            np.int32(case.tables.shape[1]),
            tensor(case.seq_lens),
            np.int32(2),
            np.int64(strides.block // 2),
            np.int64(strides.kv // 2),
            np.int64(strides.head // 2),
            np.float32(0.125),
        ),
        4 * (head_dim + 47),
    )
    plain = result.numpy().astype(np.float64)
    assert relative_error(plain, decode_reference(case, query, Options(scale=0.125))) < 2e-6
    assert relative_error(decode(backend, case, query, Options(scale=0.125)), plain) < BOUNDS[dtype]


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    """Without the barrier before the warps' results are joined, poison or another order shows."""
    text = (CUDA / "decode.cu").read_text()
    assert text.count("__syncthreads();") == 1
    (tmp_path / "decode.cu").write_text(text.replace("__syncthreads();", ""))
    rng = np.random.default_rng(21)
    case = make_case(rng, layout_of(1, head_dim=64), [64])
    query = random_query(rng, case, 1, "bfloat16")
    with pytest.raises(OrderDependence, match="decode_attention"):
        decode(EmulatedBackend(ORDERS, cuda_dir=tmp_path), case, query, Options(scale=1.0))
    out = decode(EmulatedBackend(cuda_dir=tmp_path), case, query, Options(scale=1.0))
    assert not relative_error(out, decode_reference(case, query, Options(scale=1.0))) < 1e-2


def test_bad_ids_are_recorded_and_left_out() -> None:
    rng = np.random.default_rng(22)
    case = make_case(rng, layout_of(1, head_dim=64), [40, 70])
    query = random_query(rng, case, 2, "bfloat16")
    checking = EmulatedBackend(check_ids=True)
    whole = decode(checking, case, query, Options(scale=0.1))
    assert relative_error(whole, decode_reference(case, query, Options(scale=0.1))) < 4e-3
    checking.synchronise()
    for bad in (case.num_blocks, -1, NO_BLOCK):
        broken = replace(case, tables=case.tables.copy())
        broken.tables[1, 2] = bad
        out = decode(checking, broken, query, Options(scale=0.1))
        np.testing.assert_array_equal(out[0], whole[0])
        assert relative_error(out[1], decode_reference(case, query, Options(scale=0.1))[1]) > 0.02
        assert np.isfinite(out.astype(np.float32)).all()
        with pytest.raises(KernelError, match=f"decode_attention met block id {bad} at index 1"):
            checking.synchronise()
        checking.synchronise()


def test_shared_memory_is_what_the_kernel_uses() -> None:
    """One byte less is a fault, so the launching code's figure is exact."""
    layout = layout_of(1, head_dim=96)
    rng = np.random.default_rng(23)
    case = make_case(rng, layout, [20])
    backend = EmulatedBackend()
    launch = backend.runtime.launch

    def short(*arguments: Any) -> None:
        launch(*arguments[:-1], arguments[-1] - 4)

    backend.runtime.launch = short  # type: ignore[method-assign]
    assert decode_shared_bytes(96, 3) == 4 * 4 * 3 * (96 + 4 + 2)
    with pytest.raises(EmulationError):
        decode(backend, case, random_query(rng, case, 3, "bfloat16"), Options(scale=1.0))


def test_plans_fill_the_processors() -> None:
    layout = layout_of(2, head_dim=128)
    backend = EmulatedBackend(num_sms=10)
    plan = backend.plan_decode(layout, [100_000, 3], 16)
    assert plan.pieces is not None
    slots = 10 * thread_blocks_per_sm("decode", layout, 8) // 2
    assert slots == 15
    rows = backend.runtime.download(plan.pieces)
    assert slots <= len(rows) <= slots + 2
    long = rows[rows[:, 0] == 0]
    assert (long[:, 2] - long[:, 1]).sum() == 100_000
    # the short sequence has a slot of its own
    assert (long[:, 2] - long[:, 1]).max() <= -(-100_000 // (slots - 1)) + 16
