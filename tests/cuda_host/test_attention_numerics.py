"""Numbers that attention must get right: what fp32 keeps, logits and scales of any size, what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_host import oracle
from cuda_host.attention_cases import VARIANTS, decode, layout_of, pieces, random_query
from cuda_host.attention_oracle import (
    BOUNDS,
    Options,
    decode_reference,
    make_case,
    relative_error,
)
from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS


@pytest.fixture(scope="module")
def backend() -> EmulatedBackend:
    pytest.importorskip("torch", reason="the emulated backend makes torch tensors")
    return EmulatedBackend(orders=ORDERS)


class Recorder(EmulatedBackend):
    """Keeps the partial results of the last decode."""

    def __init__(self) -> None:
        super().__init__(orders=("forward",))
        self.kept: list[Any] = []
        scratch = self.runtime.scratch

        def keep(shape: tuple[int, ...], dtype: str) -> Any:
            self.kept.append(scratch(shape, dtype))
            return self.kept[-1]

        self.runtime.scratch = keep  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("bf16 d128 b16 g8", 2e-6),
        ("fp16 d128 b16 g4", 1e-6),
        ("e4m3 token d128 b16 g8", 1e-6),
        ("e4m3 block d128 b16 g2", 1e-6),
    ],
)
def test_partial_results_keep_fp32(name: str, bound: float) -> None:
    """P is kept as two numbers: the fp32 results before rounding show it (one bf16 P alone gives 6e-4)."""
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(11)
    backend = Recorder()
    case = make_case(rng, layout_of(1, **given), [333])
    query = random_query(rng, case, group, dtype, 2.0)
    plan = pieces(backend, case, group, 3)
    assert plan.num_partials > 1
    options = Options(scale=case.layout.head_dim**-0.5)
    decode(backend, case, query, options, plan)
    partial, max_sum = (
        view.owner.view(np.float32).reshape(view.shape).astype(np.float64) for view in backend.kept
    )
    weight = max_sum[..., 1] * np.exp2(max_sum[..., 0] - max_sum[..., 0].max(0))
    merged = (partial * weight[..., None]).sum(0) / weight.sum(0)[:, None]
    assert relative_error(merged, decode_reference(case, query, options)[0]) < bound


@pytest.mark.parametrize("name", ["bf16 d128 b16 g8", "e4m3 token d128 b16 g8"])
def test_splits_agree(backend: EmulatedBackend, name: str) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(12)
    case = make_case(rng, layout_of(1, **given), [200, 40])
    query = random_query(rng, case, group, dtype)
    options = Options(scale=0.1)
    wanted = decode_reference(case, query, options)
    for num_slots in (1, 2, 5, 1000):
        plan = pieces(backend, case, group, num_slots)
        out = decode(backend, case, query, options, plan)
        assert relative_error(out, wanted) < BOUNDS[dtype]
    assert relative_error(decode(backend, case, query, options), wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["fp16 d128 b16 g4", "e4m3 token d64 b32 g4"])
def test_large_logits(backend: EmulatedBackend, name: str) -> None:
    """The maximum is subtracted: exp of these logits is no float."""
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(13)
    case = make_case(rng, layout_of(1, **given), [100])
    query = random_query(rng, case, group, dtype, 60.0)
    options = Options(scale=case.layout.head_dim**-0.5)
    out = decode(backend, case, query, options, pieces(backend, case, group, 3))
    assert relative_error(out, decode_reference(case, query, options)) < 2e-3


@pytest.mark.parametrize("name", ["bf16 d128 b16 g8", "e4m3 token d64 b32 g4"])
def test_equal_logits_average_the_values(backend: EmulatedBackend, name: str) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(14)
    case = make_case(rng, layout_of(1, **given), [77])
    query = np.zeros((1, group, case.layout.head_dim), oracle.DTYPES[dtype])
    out = decode(backend, case, query, Options(scale=1.0), pieces(backend, case, group, 3))
    wanted = np.broadcast_to(case.values[0].mean(0), (1, group, case.layout.head_dim))
    assert relative_error(out, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("place", [0, 70, 99])
@pytest.mark.parametrize("name", ["bf16 d128 b16 g8", "e4m3 token d64 b32 g4"])
def test_one_key_dominates(backend: EmulatedBackend, name: str, place: int) -> None:
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(15)
    layout = layout_of(1, **given)
    keys = rng.standard_normal((100, 1, layout.head_dim))
    keys[place] = 30.0
    wide = oracle.DTYPES["float32" if layout.scale != "none" else layout.dtype]
    case = make_case(rng, layout, [100], keys=[keys.astype(wide)])
    query = np.ones((1, group, layout.head_dim), oracle.DTYPES[dtype])
    out = decode(backend, case, query, Options(scale=1.0), pieces(backend, case, group, 3))
    wanted = np.broadcast_to(case.values[0][place], (1, group, layout.head_dim))
    assert relative_error(out, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["bf16 d128 b16 g8", "e4m3 token d128 b16 g8", "fp16 d64 b64 g5"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_in_a_query_reaches_its_output(
    backend: EmulatedBackend, name: str, value: float
) -> None:
    """And no other row's."""
    given, dtype, group = VARIANTS[name]
    rng = np.random.default_rng(16)
    case = make_case(rng, layout_of(1, **given), [50, 60])
    query = random_query(rng, case, group, dtype)
    query[1, 1, 3] = value
    out = decode(backend, case, query, Options(scale=0.1), pieces(backend, case, group, 4))
    assert np.isnan(out[1, 1].astype(np.float32)).all()
    out[1, 1] = query[1, 1] = 0
    wanted = decode_reference(case, query, Options(scale=0.1))
    wanted[1, 1] = 0
    assert relative_error(out, wanted) < BOUNDS[dtype]


def test_logits_that_are_all_minus_infinity_give_nan(backend: EmulatedBackend) -> None:
    rng = np.random.default_rng(17)
    layout = layout_of(1, head_dim=64)
    keys = [np.ones((20, 1, 64), oracle.DTYPES["bfloat16"])]
    case = make_case(rng, layout, [20], keys=keys)
    query = np.full((1, 1, 64), -np.inf, oracle.DTYPES["bfloat16"])
    assert np.isnan(decode(backend, case, query, Options(scale=1.0)).astype(np.float32)).all()


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("scale", ["token", "block", "head"])
def test_e4m3_holds_values_of_any_size(backend: EmulatedBackend, scale: str, factor: float) -> None:
    """Queries, keys and values far outside what halves hold; and tokens that differ by 2^20 among themselves."""
    rng = np.random.default_rng(18)
    layout = layout_of(1, head_dim=64, scale=scale)
    keys = rng.standard_normal((90, 1, 64)) / factor
    values = rng.standard_normal((90, 1, 64)) * factor
    values[40:60] *= 2.0**20
    values[70:] *= 2.0**-20
    case = make_case(
        rng, layout, [90], keys=[keys.astype(np.float32)], values=[values.astype(np.float32)]
    )
    query = random_query(rng, case, 3, "bfloat16", factor)
    options = Options(scale=0.1)
    out = decode(backend, case, query, options, pieces(backend, case, 3, 3))
    assert relative_error(out, decode_reference(case, query, options)) < BOUNDS["bfloat16"]


def test_every_e4m3_code_is_read_exactly(backend: EmulatedBackend) -> None:
    """One token, so that the output is its value; scale 1."""
    layout = layout_of(1, head_dim=256, scale="head")
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(oracle.DTYPES["float8_e4m3"]).astype(np.float32)
    case = make_case(np.random.default_rng(19), layout, [1])
    case.head_scales[case.layer] = 1.0  # type: ignore[index]
    oracle.elements(case.pool, layout)[case.tables[0, 0], case.layer, 1, 0, 0] = codes
    query = np.zeros((1, 1, 256), np.float16)
    out = decode(backend, case, query, Options(scale=1.0))
    np.testing.assert_array_equal(out[0, 0].astype(np.float32), wanted)


@pytest.mark.parametrize("num_slots", [1, 8])
def test_logits_of_minus_infinity_weigh_nothing(backend: EmulatedBackend, num_slots: int) -> None:
    """Whole steps and whole pieces of them among finite ones."""
    rng = np.random.default_rng(24)
    keys = rng.standard_normal((150, 1, 64)).astype(oracle.DTYPES["bfloat16"])
    keys[:70, :, 0] = -np.inf
    case = make_case(rng, layout_of(1, head_dim=64), [150], keys=[keys])
    query = random_query(rng, case, 3, "bfloat16")
    query[..., 0] = 1
    plan = pieces(backend, case, 3, num_slots)
    assert plan.num_partials == {1: 0, 8: 5}[num_slots]
    out = decode(backend, case, query, Options(scale=0.1), plan)
    wanted = decode_reference(case, query, Options(scale=0.1))
    assert np.isfinite(wanted).all()
    assert relative_error(out, wanted) < BOUNDS["bfloat16"]


@pytest.mark.parametrize("steps", [(0, 20, -20), (-20, 0, 20), (20, -20, 0)])
@pytest.mark.parametrize("scale", ["token", "block"])
def test_e4m3_values_that_change_size_under_equal_logits(
    backend: EmulatedBackend, scale: str, steps: tuple[int, ...]
) -> None:
    """The scales of values grow while the maximum of the logits does not."""
    rng = np.random.default_rng(25)
    values = rng.standard_normal((192, 1, 64)).astype(np.float32)
    for i, exponent in enumerate(steps):
        values[64 * i : 64 * (i + 1)] *= 2.0**exponent
    case = make_case(rng, layout_of(1, head_dim=64, scale=scale), [192], values=[values])
    query = np.zeros((1, 2, 64), oracle.DTYPES["bfloat16"])
    out = decode(backend, case, query, Options(scale=1.0))
    wanted = decode_reference(case, query, Options(scale=1.0))
    assert relative_error(out, wanted) < BOUNDS["bfloat16"]
