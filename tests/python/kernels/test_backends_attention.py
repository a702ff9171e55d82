"""Paged attention on every backend: the same calls give the same results, to the rounding of the output.

What is expected comes from float64 on the stored values; every slot that no live token owns holds NaN.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cuda_host import oracle
from cuda_host.attention_oracle import (
    BOUNDS,
    NO_BLOCK,
    Case,
    Options,
    decode_reference,
    make_case,
    prefill_reference,
    relative_error,
)

from kvcatch.errors import InvalidArgument, InvalidType, KernelError
from kvcatch.kernels import KVLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from conftest import Machine

# name: layout, dtype of queries, query heads per kv head
KINDS: dict[str, tuple[dict[str, Any], str, int]] = {
    "bf16": ({"head_dim": 64}, "bfloat16", 3),
    "fp16": ({"head_dim": 80, "dtype": "float16", "block_size": 32}, "float16", 4),
    "token": ({"head_dim": 64, "dtype": "float8_e4m3", "scale": "token"}, "bfloat16", 4),
    "head": ({"head_dim": 96, "dtype": "float8_e4m3", "scale": "head"}, "float16", 2),
    "block": ({"head_dim": 64, "dtype": "float8_e4m3", "scale": "block"}, "bfloat16", 1),
}
LENGTHS = (1, 17, 0, 64, 200, 33)


def make(
    kind: str, rng: np.random.Generator, lengths: Sequence[int] = LENGTHS, **more: Any
) -> tuple[Case, NDArray[Any], str]:
    given, dtype, group = KINDS[kind]
    layout = KVLayout(num_layers=2, num_kv_heads=2, **{**given, **more})
    case = make_case(rng, layout, lengths)
    shape = (len(lengths), 2 * group, layout.head_dim)
    return case, rng.standard_normal(shape).astype(oracle.DTYPES[dtype]), dtype


def arguments(machine: Machine, case: Case, options: Options) -> dict[str, Any]:
    slopes = options.alibi_slopes
    return {
        "scale": options.scale,
        "window": options.window,
        "soft_cap": options.soft_cap,
        "alibi_slopes": None if slopes is None else machine.tensor(slopes),
    }


def decode(
    machine: Machine, case: Case, query: NDArray[Any], options: Options, **more: Any
) -> NDArray[Any]:
    cache = machine.pool(case.layout, case.num_blocks, case.pool, case.head_scales)
    out = machine.backend.decode_attention(
        cache,
        case.layer,
        machine.tensor(query),
        machine.tensor(case.tables),
        machine.tensor(case.seq_lens),
        **arguments(machine, case, options),
        **more,
    )
    machine.backend.synchronise()
    return machine.array(out)


def prefill(
    machine: Machine,
    case: Case,
    query: NDArray[Any],
    starts: Sequence[int],
    options: Options,
    **more: Any,
) -> NDArray[Any]:
    cache = machine.pool(case.layout, case.num_blocks, case.pool, case.head_scales)
    out = machine.backend.prefill_attention(
        cache,
        case.layer,
        machine.tensor(query),
        starts,
        machine.tensor(case.tables),
        case.seq_lens,
        **arguments(machine, case, options),
        **more,
    )
    machine.backend.synchronise()
    return machine.array(out)


def options_of(name: str, num_q_heads: int) -> Options:
    slopes = (2.0 ** -np.linspace(1, 8, num_q_heads)).astype(np.float32)
    return {
        "plain": Options(scale=0.125),
        "window": Options(scale=0.125, window=40),
        "soft cap": Options(scale=0.3, soft_cap=1.5),
        "alibi": Options(scale=0.125, alibi_slopes=slopes),
        "all": Options(scale=0.3, window=50, soft_cap=2.0, alibi_slopes=slopes),
    }[name]


# --- decode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decode(machine: Machine, kind: str) -> None:
    case, query, dtype = make(kind, np.random.default_rng(1))
    options = Options(scale=case.layout.head_dim**-0.5)
    out = decode(machine, case, query, options)
    assert out.dtype == query.dtype
    assert relative_error(out, decode_reference(case, query, options)) < BOUNDS[dtype]
    assert not out[case.seq_lens == 0].any()


@pytest.mark.parametrize("name", ["window", "soft cap", "alibi", "all"])
@pytest.mark.parametrize("kind", ["bf16", "token"])
def test_decode_options(machine: Machine, kind: str, name: str) -> None:
    case, query, dtype = make(kind, np.random.default_rng(2))
    options = options_of(name, query.shape[1])
    out = decode(machine, case, query, options)
    assert relative_error(out, decode_reference(case, query, options)) < BOUNDS[dtype]


def test_decode_with_a_plan(machine: Machine) -> None:
    case, query, _ = make("bf16", np.random.default_rng(3))
    options = Options(scale=0.1, window=150)
    plan = machine.backend.plan_decode(case.layout, case.seq_lens, query.shape[1], window=150)
    assert plan.num_seqs == len(case.seq_lens)
    given = decode(machine, case, query, options, plan=plan)
    made = decode(machine, case, query, options)
    np.testing.assert_array_equal(given.view(np.int16), made.view(np.int16))


def test_decode_into_a_given_tensor(machine: Machine) -> None:
    case, query, dtype = make("bf16", np.random.default_rng(4))
    cache = machine.pool(case.layout, case.num_blocks, case.pool)
    out = machine.tensor(np.full(query.shape, 7, query.dtype))
    tables, lens = machine.tensor(case.tables), machine.tensor(case.seq_lens)
    found = machine.backend.decode_attention(
        cache, case.layer, machine.tensor(query), tables, lens, scale=0.1, out=out
    )
    assert found is out
    machine.backend.synchronise()
    wanted = decode_reference(case, query, Options(scale=0.1))
    assert relative_error(machine.array(out), wanted) < BOUNDS[dtype]
    assert (machine.bytes_of(cache) == case.pool).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["bf16", "token"])
def test_random_batches(machine: Machine, kind: str, seed: int) -> None:
    """Any lengths, windows and chunks, against float64."""
    rng = np.random.default_rng(100 + seed)
    lengths = rng.choice([0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 300], 5).tolist()
    case, query, dtype = make(kind, rng, lengths=lengths)
    options = replace(
        options_of("all", query.shape[1]),
        window=int(rng.choice([1, 2, 15, 16, 17, 100, 1000])),
        scale=float(rng.choice([-0.3, 0.0, 0.02, 0.5])),
        soft_cap=float(rng.choice([0.5, 30.0])),
    )
    for seq, tokens in enumerate(lengths):
        hidden = max(0, tokens - (options.window or 0)) // case.layout.block_size
        case.tables[seq, :hidden] = -1
    found = decode(machine, case, query, options)
    assert relative_error(found, decode_reference(case, query, options)) < 2 * BOUNDS[dtype]

    case, _, _ = make(kind, rng, lengths=lengths)
    counts = [int(rng.integers(0, min(tokens, 90) + 1)) for tokens in lengths]
    starts = np.cumsum([0, *counts]).tolist()
    rows = rng.standard_normal((starts[-1], *query.shape[1:])).astype(query.dtype)
    found = prefill(machine, case, rows, starts, options)
    wanted = prefill_reference(case, rows, starts, options)
    assert relative_error(found, wanted) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("number", [np.float32(0.125), np.float64(0.125), 1, np.int64(1)])
def test_numbers_of_numpy_and_whole_ones(machine: Machine, number: Any) -> None:
    case, query, _ = make("bf16", np.random.default_rng(22), lengths=[20, 33])
    options = Options(scale=number, soft_cap=number)
    assert (
        relative_error(
            decode(machine, case, query, options), decode_reference(case, query, options)
        )
        < 4e-3
    )


@pytest.mark.parametrize("cap", [1e4, 1e8, 1e15])
def test_a_large_soft_cap_is_none(machine: Machine, cap: float) -> None:
    """tanh of a small argument keeps its digits, which the cap multiplies."""
    case, query, _ = make("bf16", np.random.default_rng(23), lengths=[70, 33])
    wanted = decode_reference(case, query, Options(scale=0.125))
    assert (
        relative_error(decode(machine, case, query, Options(scale=0.125, soft_cap=cap)), wanted)
        < 4e-3
    )


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_blocks_behind_the_window_may_be_gone(machine: Machine, which: str) -> None:
    """Their table entries name no block: an engine has given them to others."""
    case, query, _ = make("bf16", np.random.default_rng(24), lengths=[70, 33, 20])
    options = Options(scale=0.125, window=20)
    starts = [0, 3, 3, 3]  # the second and third sequence have no query rows
    if which == "decode":
        wanted = decode_reference(case, query, options)
        case.tables[0, : (70 - 20) // 16] = -1
        found = decode(machine, case, query, options)
    else:
        wanted = prefill_reference(case, query, starts, options)
        case.tables[0, : (70 - 2 - 20) // 16] = -1
        case.tables[1:] = -1
        found = prefill(machine, case, query, starts, options)
    assert relative_error(found, wanted) < 4e-3


@pytest.mark.parametrize("kind", ["bf16", "token"])
def test_decode_layer_major(machine: Machine, kind: str) -> None:
    results = []
    for order in ("block", "layer"):
        case, query, _ = make(kind, np.random.default_rng(5), order=order)
        results.append(decode(machine, case, query, Options(scale=0.1)))
    np.testing.assert_array_equal(*(x.view(np.int16) for x in results))


def test_decode_of_rows_of_a_larger_batch(machine: Machine) -> None:
    """Tables with more columns than are read, and queries that are part of a wider tensor."""
    case, query, dtype = make("bf16", np.random.default_rng(6))
    cache = machine.pool(case.layout, case.num_blocks, case.pool)
    wide = machine.tensor(np.concatenate([query, query, query], axis=1))
    tables = machine.tensor(np.pad(case.tables, ((0, 2), (0, 3)), constant_values=NO_BLOCK))
    seqs, heads, _ = query.shape
    out = machine.backend.decode_attention(
        cache,
        case.layer,
        wide[:, heads : 2 * heads],
        tables[:seqs, :-1],
        machine.tensor(case.seq_lens),
        scale=0.1,
    )
    machine.backend.synchronise()
    wanted = decode_reference(case, query, Options(scale=0.1))
    assert relative_error(machine.array(out), wanted) < BOUNDS[dtype]


def test_nothing_to_decode(machine: Machine) -> None:
    case, query, _ = make("bf16", np.random.default_rng(7), lengths=[0, 0])
    assert not decode(machine, case, query, Options(scale=1.0)).any()
    empty = Case(
        case.layout, 0, case.num_blocks, case.pool, None, case.tables[:0], case.seq_lens[:0]
    )
    assert decode(machine, empty, query[:0], Options(scale=1.0)).shape == (0, *query.shape[1:])


@pytest.mark.parametrize("kind", ["bf16", "token"])
def test_what_is_not_finite_in_a_query_reaches_its_output(machine: Machine, kind: str) -> None:
    case, query, dtype = make(kind, np.random.default_rng(8))
    query[4, 1, 3], query[3, 0, 0] = np.nan, np.inf
    out = decode(machine, case, query, Options(scale=0.1))
    for place in ((4, 1), (3, 0)):
        assert np.isnan(out[place].astype(np.float32)).all()
        out[place] = query[place] = 0
    wanted = decode_reference(case, query, Options(scale=0.1))
    wanted[4, 1] = wanted[3, 0] = 0
    assert relative_error(out, wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("scale", ["none", "token"])
def test_what_was_written_is_read(machine: Machine, scale: str) -> None:
    """Tokens by ``write_kv``, at slots of a table, then decode: one against the other's bytes."""
    rng = np.random.default_rng(9)
    dtype = "bfloat16" if scale == "none" else "float8_e4m3"
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=64, dtype=dtype, scale=scale)  # type: ignore[arg-type]
    tokens = 50
    cache = machine.backend.allocate(layout, 6)
    table = np.array([[4, 1, 5, 2]], np.int32)
    place = np.arange(tokens)
    slots = table[0, place // 16].astype(np.int64) * 16 + place % 16
    rows = rng.standard_normal((2, tokens, 2, 64)).astype(oracle.DTYPES["bfloat16"])
    key, value = map(machine.tensor, rows)
    machine.backend.write_kv(cache, 1, key, value, machine.tensor(slots))
    query = rng.standard_normal((1, 4, 64)).astype(oracle.DTYPES["bfloat16"])
    out = machine.backend.decode_attention(
        cache,
        1,
        machine.tensor(query),
        machine.tensor(table),
        machine.tensor(np.array([tokens], np.int32)),
        scale=0.125,
    )
    pool = machine.bytes_of(cache)
    stored = oracle.elements(pool, layout)[table[0], 1].astype(np.float64)
    if scale == "token":
        codes = oracle.elements(pool, layout)[table[0], 1].view(oracle.DTYPES["float8_e4m3"])
        stored = codes.astype(np.float64) * oracle.scales(pool, layout)[table[0], 1][..., None]
    # [block, K or V, head, token, element] to [K or V][token, head, element]
    joined = stored.transpose(1, 0, 3, 2, 4).reshape(2, 64, 2, 64)[:, :tokens]
    case = Case(layout, 1, 6, pool, None, table, np.array([tokens], np.int32))
    case.keys, case.values = [joined[0]], [joined[1]]
    wanted = decode_reference(case, query, Options(scale=0.125))
    assert relative_error(machine.array(out), wanted) < BOUNDS["bfloat16"]
    assert relative_error(joined[0], rows[0].astype(np.float64)) < (
        1e-9 if scale == "none" else 0.05
    )


# --- prefill ------------------------------------------------------------------------------------------

COUNTS = (1, 17, 0, 30, 20, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill(machine: Machine, kind: str) -> None:
    rng = np.random.default_rng(10)
    case, one, dtype = make(kind, rng)
    starts = [0, *itertools.accumulate(COUNTS)]
    query = rng.standard_normal((starts[-1], *one.shape[1:])).astype(one.dtype)
    options = Options(scale=case.layout.head_dim**-0.5)
    out = prefill(machine, case, query, starts, options)
    assert out.dtype == query.dtype
    assert relative_error(out, prefill_reference(case, query, starts, options)) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["window", "soft cap", "alibi", "all"])
def test_prefill_options(machine: Machine, name: str) -> None:
    rng = np.random.default_rng(11)
    case, one, dtype = make("bf16", rng)
    starts = np.array([0, *itertools.accumulate(COUNTS)])
    query = rng.standard_normal((starts[-1], *one.shape[1:])).astype(one.dtype)
    options = options_of(name, query.shape[1])
    out = prefill(machine, case, query, starts.tolist(), options)
    wanted = prefill_reference(case, query, starts.tolist(), options)
    assert relative_error(out, wanted) < BOUNDS[dtype]
    again = prefill(machine, case, query, starts, options)
    np.testing.assert_array_equal(out.view(np.int16), again.view(np.int16))


def test_prefill_of_the_last_token_is_decode(machine: Machine) -> None:
    case, query, dtype = make("bf16", np.random.default_rng(12), lengths=[5, 40, 90])
    one = prefill(machine, case, query, [0, 1, 2, 3], Options(scale=0.1)).astype(np.float64)
    assert relative_error(decode(machine, case, query, Options(scale=0.1)), one) < BOUNDS[dtype] / 2


def test_nothing_to_prefill(machine: Machine) -> None:
    case, query, _ = make("bf16", np.random.default_rng(13), lengths=[20, 3])
    out = prefill(machine, case, query[:0], [0, 0, 0], Options(scale=1.0))
    assert out.shape == (0, *query.shape[1:])


# --- refusals -----------------------------------------------------------------------------------------


class Call:
    """A decode and a prefill that are right, to be made wrong in one place."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.case, query, _ = make("bf16", np.random.default_rng(14), lengths=[20, 33])
        self.cache = machine.pool(self.case.layout, self.case.num_blocks, self.case.pool)
        self.out = machine.tensor(np.full(query.shape, 7, query.dtype))
        self.decode: dict[str, Any] = {
            "cache": self.cache,
            "layer": 1,
            "query": machine.tensor(query),
            "block_tables": machine.tensor(self.case.tables),
            "seq_lens": machine.tensor(self.case.seq_lens),
            "scale": 0.1,
            "out": self.out,
        }
        self.prefill: dict[str, Any] = {
            **self.decode,
            "query_starts": [0, 1, 2],
            "seq_lens": [20, 33],
        }

    def refused(self, kind: type[Exception], match: str, which: str, **wrong: Any) -> None:
        """The call raises, and neither the pool nor ``out`` changes."""
        call = getattr(self.machine.backend, f"{which}_attention")
        with pytest.raises(kind, match=match):
            call(**{**getattr(self, which), **wrong})
        assert (self.machine.bytes_of(self.cache) == self.case.pool).all()
        assert (self.machine.array(self.out).astype(np.float32) == 7).all()


@pytest.fixture
def call(machine: Machine) -> Call:
    return Call(machine)


BOTH = ("decode", "prefill")


@pytest.mark.parametrize("which", BOTH)
def test_wrong_numbers_are_refused(call: Call, which: str) -> None:
    for wrong, match in (
        ({"layer": 2}, "layer 2: must be within 0..1"),
        ({"layer": -1}, "layer -1"),
        ({"scale": float("nan")}, "scale must be finite, not nan"),
        ({"window": 0}, "window must be a positive number of tokens, not 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive and finite, not 0.0"),
        ({"soft_cap": float("inf")}, "soft_cap must be positive and finite, not inf"),
        # Beyond what float32 holds, or so near its ends that products leave it.
        ({"scale": 1e300}, r"scale must be within -2\^60..2\^60, not 1e\+300"),
        ({"scale": -(2.0**61)}, "scale must be within"),
        ({"scale": 10**400}, "scale must be finite, not inf"),
        ({"soft_cap": 1e300}, r"soft_cap must be within 2\^-60..2\^60, not 1e\+300"),
        ({"soft_cap": 1e-50}, "soft_cap must be within 2"),
    ):
        call.refused(InvalidArgument, match, which, **wrong)
    call.refused(InvalidType, "scale must be a number, not bool", which, scale=True)
    call.refused(InvalidType, "scale must be a number, not str", which, scale="1")
    call.refused(InvalidType, "cache must be a KVCache, not int", which, cache=3)


@pytest.mark.parametrize("which", BOTH)
def test_wrong_tensors_are_refused(call: Call, which: str) -> None:
    tensor, query = call.machine.tensor, call.decode["query"]
    floats = np.zeros((2, 6, 64), np.float32)
    for kind, match, wrong in (
        (InvalidType, "query has dtype float32: must be bfloat16", {"query": tensor(floats)}),
        (InvalidArgument, r"query has shape \[2, 384\]", {"query": query.reshape(2, 384)}),
        (InvalidArgument, r"shape \[2, 6, 32\]: must be \[any, any, 64\]", {"query": query[..., :32]}),
        (InvalidArgument, "strides", {"query": tensor(np.zeros((2, 6, 128), query_dtype(call)))[..., ::2]}),
        (InvalidArgument, "5 query heads over 2 kv heads", {"query": query[:, :5]}),
        (InvalidType, "query must be a torch", {"query": [1.0]}),
        (InvalidType, "block_tables has dtype int64", {"block_tables": tensor(call.case.tables.astype(np.int64))}),
        (InvalidArgument, "block_tables has shape", {"block_tables": tensor(call.case.tables[0])}),
        (InvalidArgument, "block_tables has 1 rows", {"block_tables": tensor(call.case.tables[:1])}),
        (InvalidArgument, "the longest has 33 tokens", {"block_tables": tensor(call.case.tables[:, :2])}),
        (InvalidType, "alibi_slopes has dtype float64", {"alibi_slopes": tensor(np.ones(6))}),
        (InvalidArgument, "alibi_slopes has shape", {"alibi_slopes": tensor(np.ones(5, np.float32))}),
        (InvalidType, "out has dtype float32", {"out": tensor(floats)}),
        (InvalidArgument, "out has shape", {"out": call.out[:1]}),
    ):  # fmt: skip
        call.refused(kind, match, which, **wrong)


@pytest.mark.parametrize("which", BOTH)
def test_a_result_over_what_is_read_is_refused(call: Call, which: str) -> None:
    """Thread blocks that are done would write what others still read."""
    query = call.decode["query"]
    call.refused(InvalidArgument, "out overlaps query in memory", which, out=query)
    room = call.machine.tensor(np.zeros((3, 6, 64), query_dtype(call)))
    call.refused(
        InvalidArgument, "out overlaps query in memory", which, query=room[:2], out=room[1:]
    )
    if hasattr(call.cache.buffer, "data_ptr"):
        inside = call.cache.buffer[: 2 * 6 * 64 * 2].view(query.dtype).view(2, 6, 64)
        call.refused(InvalidArgument, "out overlaps cache in memory", which, out=inside)


@pytest.mark.parametrize("which", BOTH)
def test_tensors_that_do_not_lie_plainly_in_memory_are_refused(call: Call, which: str) -> None:
    query, tables = call.decode["query"], call.decode["block_tables"]
    if not hasattr(query, "to_sparse"):
        pytest.skip("only torch has such tensors")
    for name, tensor in (("query", query), ("block_tables", tables)):
        call.refused(
            InvalidType, f"{name} is a tensor of layout", which, **{name: tensor.to_sparse()}
        )
    if call.machine.backend.device == "cpu":
        backwards = call.case.tables[::-1]
        call.refused(InvalidArgument, "none may be negative", which, block_tables=backwards)


@pytest.mark.parametrize("which", BOTH)
def test_head_scales_that_do_not_fit_are_refused(machine: Machine, which: str) -> None:
    """A cache may be put together by hand."""
    case, query, _ = make("head", np.random.default_rng(21), lengths=[20])
    cache = machine.pool(case.layout, case.num_blocks, case.pool, case.head_scales)
    scales = cache.head_scales
    lens: Any = [20] if which == "prefill" else machine.tensor(case.seq_lens)
    starts = ([0, 1],) if which == "prefill" else ()
    rest = (*starts, machine.tensor(case.tables), lens)
    for kind, match, wrong in (
        (InvalidType, "head_scales must be a torch", None),
        (InvalidArgument, r"head_scales has shape \[2, 2\]", scales[0]),
        (InvalidArgument, "head_scales has strides", scales.swapaxes(0, 2)),
    ):
        call = getattr(machine.backend, f"{which}_attention")
        with pytest.raises(kind, match=match):
            call(replace(cache, head_scales=wrong), 1, machine.tensor(query), *rest, scale=0.1)


def query_dtype(call: Call) -> Any:
    return oracle.DTYPES[call.case.layout.dtype]


def test_too_many_query_heads_are_refused(call: Call) -> None:
    wide = call.machine.tensor(np.zeros((2, 34, 64), query_dtype(call)))
    call.refused(InvalidArgument, "must be 1 to 16 times as many", "decode", query=wide, out=None)


def test_wrong_lengths_are_refused(call: Call) -> None:
    tensor = call.machine.tensor
    call.refused(
        InvalidType, "seq_lens has dtype int64", "decode", seq_lens=tensor(np.array([20, 33]))
    )
    call.refused(
        InvalidArgument,
        "seq_lens has shape",
        "decode",
        seq_lens=tensor(np.array([20], np.int32)),
    )
    for wrong, match in (
        ({"query_starts": [0, 2]}, "query_starts has 2 entries for 2 sequences"),
        ({"query_starts": [0, 1, 3]}, "runs from 0 to 3"),
        ({"query_starts": [0, 3, 2]}, "must not fall"),
        ({"query_starts": [1, 1, 2]}, "runs from 1 to 2"),
        ({"seq_lens": [0, 33]}, "sequence 0 has 1 query rows and 0 tokens"),
        ({"seq_lens": [-1, 33]}, "seq_lens"),
    ):
        call.refused(InvalidArgument, match, "prefill", **wrong)


def test_a_plan_for_another_batch_is_refused(call: Call) -> None:
    backend, layout = call.machine.backend, call.case.layout
    for plan in (
        backend.plan_decode(layout, [20, 33, 1], 6),
        backend.plan_decode(layout, [20, 33], 12),
        backend.plan_decode(layout, [20, 33], 6, window=16),
    ):
        call.refused(InvalidArgument, "plan was made for", "decode", plan=plan)
    call.refused(InvalidType, "plan", "decode", plan=object())


def test_plans_refuse_what_cannot_be(machine: Machine) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=64)
    plan = machine.backend.plan_decode
    for match, given in (
        ("3 query heads over 2 kv heads", ([4], 3)),
        ("must be 1 to 16 times", ([4], 34)),
        (r"seq_lens\[1\]", ([4, -1], 2)),
        (r"seq_lens\[0\] = 1073741825", ([(1 << 30) + 1], 2)),
    ):
        with pytest.raises(InvalidArgument, match=match):
            plan(layout, *given)
    with pytest.raises(InvalidArgument, match="window"):
        plan(layout, [4], 2, window=-3)
    for given in ((layout, [4.5], 2), (layout, [4], 2.0), ("layout", [4], 2)):
        with pytest.raises(InvalidType):
            plan(*given)  # type: ignore[arg-type]


def test_a_bad_block_id_is_refused(machine: Machine) -> None:
    """At once where the tables can be looked at, when synchronising where the device checks them."""
    if machine.backend.name != "cpu":
        pytest.skip("the device's check is asked for: test_a_bad_block_id_is_found_by_the_device")
    case, query, _ = make("bf16", np.random.default_rng(15), lengths=[20, 33])
    for bad in (case.num_blocks, -1):
        case.tables[1, 1] = bad
        for call in (
            lambda: decode(machine, case, query, Options(scale=0.1)),
            lambda: prefill(machine, case, query, [0, 1, 2], Options(scale=0.1)),
        ):
            with pytest.raises(InvalidArgument, match=str(bad)):
                call()


def test_a_bad_block_id_is_found_by_the_device(checking: Machine) -> None:
    case, query, _ = make("bf16", np.random.default_rng(15), lengths=[20, 33])
    case.tables[1, 1] = bad = case.num_blocks
    with pytest.raises(KernelError, match=f"decode_attention met block id {bad} at index 1"):
        decode(checking, case, query, Options(scale=0.1))
    with pytest.raises(KernelError, match=f"prefill_attention met block id {bad} at index 1"):
        prefill(checking, case, query, [0, 1, 2], Options(scale=0.1))
    checking.backend.synchronise()


@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"head_dim": 48}, {"block_size": 8}])
def test_what_the_cuda_kernels_do_not_take(machine: Machine, given: dict[str, Any]) -> None:
    """The CPU takes it; the GPU's kernels say so before anything is launched."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, **{"head_dim": 64, **given})
    rng = np.random.default_rng(16)
    case = make_case(rng, layout, [20])
    query = rng.standard_normal((1, 2, layout.head_dim)).astype(oracle.DTYPES[layout.dtype])
    if machine.backend.name != "cpu":
        for call in (
            lambda: decode(machine, case, query, Options(scale=0.1)),
            lambda: prefill(machine, case, query, [0, 1], Options(scale=0.1)),
        ):
            with pytest.raises(InvalidArgument, match="the CUDA kernels take"):
                call()
        return
    wanted = decode_reference(case, query, Options(scale=0.1))
    assert relative_error(decode(machine, case, query, Options(scale=0.1)), wanted) < 4e-3
