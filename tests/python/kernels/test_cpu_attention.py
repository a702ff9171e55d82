"""Attention of the CPU backend at every instruction set of this machine, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_support import E4M3, TOLERANCE, Batch, error
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels import KVLayout, get_backend

torch = pytest.importorskip(
    "torch", reason="the CPU backend needs torch: pip install 'kvcatch[engine]'"
)

LEVELS = _core.cpu_levels()
LENS = [0, 1, 5, 16, 17, 63, 64, 65, 129, 200, 1000]
KINDS = [
    ("float32", "none"),
    ("float16", "none"),
    ("bfloat16", "none"),
    (E4M3, "token"),
    (E4M3, "head"),
    (E4M3, "block"),
]


@pytest.fixture(params=LEVELS)
def backend(request: pytest.FixtureRequest) -> Any:
    return get_backend("cpu", level=request.param)


def decode(backend: Any, batch: Batch, query: Any, layer: int = 0, **options: Any) -> Any:
    scale = options.pop("scale", batch.layout.head_dim**-0.5)
    out = torch.full_like(query, float("nan"))
    found = backend.decode_attention(
        batch.cache, layer, query, batch.tables, batch.seq_lens, scale=scale, out=out, **options
    )
    assert found is out
    return out


def check_decode(backend: Any, batch: Batch, query: Any, layer: int = 0, **options: Any) -> None:
    out = decode(backend, batch, query, layer, **options)
    scale = options.pop("scale", batch.layout.head_dim**-0.5)
    slopes = options.pop("alibi_slopes", None)
    options["slopes"] = None if slopes is None else slopes.tolist()
    # A logit's rounding error grows with the logit.
    bound = TOLERANCE[str(query.dtype).removeprefix("torch.")] * max(1.0, 4 * scale)
    for seq, tokens in enumerate(batch.lens):
        if tokens == 0:
            assert (out[seq] == 0).all()
            continue
        wanted = batch.expected(layer, seq, query[seq], tokens - 1, scale=scale, **options)
        assert error(out[seq], wanted) < bound, (seq, tokens)


@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_lengths(backend: Any, dtype: Any, scale: Any) -> None:
    batch = Batch(KVLayout(2, 2, 64, dtype=dtype, scale=scale), LENS)
    check_decode(backend, batch, batch.query(len(LENS), 3), layer=1)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", E4M3])
def test_head_dims(backend: Any, dtype: Any, head_dim: int) -> None:
    kind = "token" if dtype == E4M3 else "none"
    batch = Batch(KVLayout(1, 2, head_dim, dtype=dtype, scale=kind), [130, 33])
    check_decode(backend, batch, batch.query(2, 2))


@pytest.mark.parametrize("head_dim", [4, 12, 20])
def test_head_dims_that_fill_no_vector(backend: Any, head_dim: int) -> None:
    batch = Batch(KVLayout(1, 2, head_dim, dtype="float32"), [130, 33])
    check_decode(backend, batch, batch.query(2, 2))
    check_prefill(backend, batch, [70, 33], 2)


@pytest.mark.parametrize("group", range(1, 17))
def test_groups(backend: Any, group: int) -> None:
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [300, 17])
    check_decode(backend, batch, batch.query(2, group))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("order", ["block", "layer"])
def test_block_sizes(backend: Any, block_size: int, order: Any) -> None:
    batch = Batch(KVLayout(2, 2, 64, block_size, dtype="bfloat16", order=order), [200, 65, 1])
    check_decode(backend, batch, batch.query(3, 4), layer=1)
    check_prefill(backend, batch, [100, 65, 1], 4, layer=1)


RULES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 20},
    {"window": 300},
    {"soft_cap": 5.0},
    {"alibi_slopes": True},
    {"window": 70, "soft_cap": 2.0, "alibi_slopes": True},
    {"scale": 3.0},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules(backend: Any, rules: dict[str, Any]) -> None:
    rules = dict(rules)
    if "alibi_slopes" in rules:
        rules["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float32)
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [600, 64, 20, 1])
    check_decode(backend, batch, batch.query(4, 2), **rules)
    check_prefill(backend, batch, [130, 64, 3, 1], 2, **rules)


def test_blocks_before_the_window_are_not_read(backend: Any) -> None:
    """Their ids may name blocks that others own by now: here poison."""
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [600])
    clean = decode(backend, batch, batch.query(1, 2), window=100)
    for block in batch.tables[0, : 500 // 16].tolist():
        batch.cache.buffer.view(batch.cache.num_blocks, -1)[block] = 0xFF
    assert torch.equal(decode(backend, batch, batch.query(1, 2), window=100), clean)
    check_prefill(backend, batch, [1], 2, window=100)


def check_prefill(
    backend: Any, batch: Batch, chunks: list[int], group: int, layer: int = 0, **options: Any
) -> Any:
    starts = np.cumsum([0, *chunks])
    query = batch.query(int(starts[-1]), group)
    scale = options.pop("scale", batch.layout.head_dim**-0.5)
    out = torch.full_like(query, float("nan"))
    backend.prefill_attention(
        batch.cache, layer, query, starts, batch.tables, batch.lens, scale=scale, out=out, **options
    )
    slopes = options.pop("alibi_slopes", None)
    options["slopes"] = None if slopes is None else slopes.tolist()
    # A logit's rounding error grows with the logit.
    bound = TOLERANCE[str(query.dtype).removeprefix("torch.")] * max(1.0, 4 * scale)
    for seq, chunk in enumerate(chunks):
        for row in {0, chunk // 3, chunk // 2, chunk - 1} if chunk else ():
            position = batch.lens[seq] - chunk + row
            at = starts[seq] + row
            wanted = batch.expected(layer, seq, query[at], position, scale=scale, **options)
            assert error(out[at], wanted) < bound, (seq, row)
    return out


@pytest.mark.parametrize(("dtype", "scale"), KINDS)
def test_prefill_chunks(backend: Any, dtype: Any, scale: Any) -> None:
    batch = Batch(KVLayout(2, 2, 80, dtype=dtype, scale=scale), [1, 17, 129, 300, 0, 64])
    check_prefill(backend, batch, [1, 5, 129, 70, 0, 64], 3, layer=1)


@pytest.mark.parametrize("group", [1, 5, 7, 16])
def test_prefill_groups(backend: Any, group: int) -> None:
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [300])
    check_prefill(backend, batch, [250], group)


def test_a_chunk_alone_is_what_it_is_in_a_whole_prompt(backend: Any) -> None:
    """A row's result depends on its own keys alone, bit for bit."""
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [300])
    query = batch.query(300, 3)
    whole = backend.prefill_attention(
        batch.cache, 0, query, [0, 300], batch.tables, [300], scale=0.1
    )
    for end in (70, 201, 300):
        start = max(0, end - 70)
        part = backend.prefill_attention(
            batch.cache, 0, query[start:end], [0, end - start], batch.tables, [end], scale=0.1
        )
        assert torch.equal(part, whole[start:end])


def test_decode_and_prefill_agree(backend: Any) -> None:
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [300, 17])
    query = batch.query(2, 4)
    one = decode(backend, batch, query)
    two = backend.prefill_attention(
        batch.cache, 0, query, [0, 1, 2], batch.tables, batch.lens, scale=64**-0.5
    )
    assert error(one, two.double().numpy()) < 2e-6


# --- what must not matter ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_threads_nor_placement_nor_order_change_a_bit(dtype: Any) -> None:
    lens, found = [600, 257, 256, 40], []
    for order in ("block", "layer"):
        for identity in (True, False):
            batch = Batch(KVLayout(2, 3, 64, dtype=dtype, order=order), lens, identity=identity)  # type: ignore[arg-type]
            query = batch.query(len(lens), 3)
            chunk = batch.query(300, 3)
            for options in (
                {"threads": 1},
                {"threads": 2},
                {"threads": 7},
                {"threads": 3, "own_threads": True},
            ):
                backend = get_backend("cpu", **options)
                found.append(decode(backend, batch, query, layer=1).view(torch.uint8))
                rows = backend.prefill_attention(
                    batch.cache, 1, chunk, [0, 200, 200, 300, 300], batch.tables, lens, scale=0.1
                )
                found.append(rows.view(torch.uint8))
    assert all(torch.equal(one, found[0]) for one in found[::2])
    assert all(torch.equal(one, found[1]) for one in found[1::2])


def test_a_sequence_does_not_depend_on_its_batch(backend: Any) -> None:
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [700, 33, 300])
    query = batch.query(3, 4)
    together = decode(backend, batch, query)
    for seq, tokens in enumerate(batch.lens):
        alone = backend.decode_attention(
            batch.cache,
            0,
            query[seq : seq + 1],
            batch.tables[seq : seq + 1],
            torch.tensor([tokens], dtype=torch.int32),
            scale=64**-0.5,
        )
        assert torch.equal(alone[0], together[seq])


def test_levels_agree() -> None:
    batch = Batch(KVLayout(1, 2, 96, dtype="float32"), [500, 31])
    outs = [decode(get_backend("cpu", level=level), batch, batch.query(2, 5)) for level in LEVELS]
    for out in outs[1:]:
        assert error(out, outs[0].double().numpy()) < 2e-6


def test_strided_query(backend: Any) -> None:
    """The query may be a slice of a fused projection."""
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [100, 20])
    query = batch.query(2, 3)
    wide = torch.full((2, 9, 64), float("nan"))
    wide[:, 2:8] = query
    plain = decode(backend, batch, query)
    out = backend.decode_attention(
        batch.cache, 0, wide[:, 2:8], batch.tables, batch.seq_lens, scale=64**-0.5
    )
    assert torch.equal(out, plain)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    dtype, kind = draw(st.sampled_from(KINDS))
    layout = KVLayout(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([16, 64, 80])),
        draw(st.sampled_from([1, 5, 16, 32])),
        dtype=dtype,  # type: ignore[arg-type]
        scale=kind,  # type: ignore[arg-type]
        order=draw(st.sampled_from(["block", "layer"])),
    )
    lens = draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))
    backend = get_backend("cpu", level=draw(st.sampled_from(LEVELS)))
    batch = Batch(layout, lens, seed=draw(st.integers(0, 99)))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 150))
    group = draw(st.sampled_from([1, 2, 3, 5, 8, 16]))
    if draw(st.booleans()):
        options["soft_cap"] = draw(st.sampled_from([0.5, 30.0, 1e6]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.linspace(0.01, 1, group * layout.num_kv_heads)
    layer = layout.num_layers - 1
    check_decode(backend, batch, batch.query(len(lens), group), layer=layer, **options)
    chunks = [draw(st.integers(0, tokens)) for tokens in lens]
    check_prefill(backend, batch, chunks, group, layer=layer, **options)


# --- numbers that are not ordinary ------------------------------------------------------------------


def test_large_logits_and_equal_ones(backend: Any) -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [400])
    check_decode(backend, batch, batch.query(1, 2, factor=60.0))
    mean = batch.values[0][0].mean(axis=0)
    out = decode(backend, batch, torch.zeros(1, 2, 64))
    assert error(out[0], np.repeat(mean, 2, axis=0)) < 1e-5


def test_one_key_takes_it_all(backend: Any) -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [400])
    key = torch.from_numpy(batch.keys[0][0, 123]).float()
    out = decode(backend, batch, (key * 100)[None])
    assert error(out[0], batch.values[0][0, 123]) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_query_that_is_not_finite_shows(backend: Any, bad: float) -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [300, 20])
    query = batch.query(2, 2)
    query[0, 1, 3] = bad
    out = decode(backend, batch, query)
    assert torch.isnan(out[0, 1]).all()
    assert torch.isfinite(out[0, 0]).all()
    assert torch.isfinite(out[1]).all()
    rows = backend.prefill_attention(
        batch.cache, 0, query, [0, 1, 2], batch.tables, batch.lens, scale=0.1
    )
    assert torch.isnan(rows[0, 1]).all()
    assert torch.isfinite(rows[1]).all()


def test_all_codes_of_e4m3(backend: Any) -> None:
    """One token: the output is its value, exactly."""
    layout = KVLayout(1, 1, 256, block_size=1, dtype=E4M3, scale="head")
    scales = torch.tensor([[[1.0], [2.0]]])
    cache = backend.allocate(layout, 1, scales)
    cache.buffer[256:] = torch.arange(256).to(torch.uint8)
    out = backend.decode_attention(
        cache,
        0,
        torch.ones(1, 1, 256, dtype=torch.bfloat16),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        scale=1.0,
    )
    wanted = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float() * 2
    assert torch.equal(out[0, 0].float().nan_to_num(12345), wanted.nan_to_num(12345))


# --- refusals ---------------------------------------------------------------------------------------


def test_refusals_leave_the_output_alone() -> None:
    backend = get_backend("cpu")
    batch = Batch(KVLayout(2, 2, 64, dtype="float32"), [100, 20])
    query = batch.query(2, 3)
    tables, lens = batch.tables, batch.seq_lens
    bad_id, far_id = tables.clone(), tables.clone()
    bad_id[0, 2], far_id[1, 1] = -1, batch.cache.num_blocks
    i32 = torch.int32
    slopes = torch.ones(6)
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (InvalidArgument, r"block_tables.*-1", (0, query, bad_id, lens), {}),
        (InvalidArgument, "block_tables", (0, query, far_id, lens), {}),
        (
            InvalidArgument,
            "seq_lens.*-3",
            (0, query, tables, torch.tensor([100, -3], dtype=i32)),
            {},
        ),
        (
            InvalidArgument,
            "900",
            (0, query, tables, torch.tensor([900, 3], dtype=i32)),
            {},
        ),
        (InvalidArgument, "seq_lens", (0, query, tables, torch.tensor([100], dtype=i32)), {}),
        (InvalidType, "seq_lens", (0, query, tables, lens.long()), {}),
        (InvalidType, "block_tables", (0, query, tables.long(), lens), {}),
        (InvalidType, "query", (0, query.bfloat16(), tables, lens), {}),
        (InvalidType, "query", (0, query.tolist(), tables, lens), {}),
        (InvalidArgument, "query", (0, query[..., :32], tables, lens), {}),
        (InvalidArgument, "query heads", (0, query[:, :5], tables, lens), {}),
        (InvalidArgument, "block_tables", (0, query, tables[:1], lens), {}),
        (InvalidArgument, "layer 2", (2, query, tables, lens), {}),
        (InvalidArgument, "layer", (-1, query, tables, lens), {}),
        (InvalidArgument, "window", (0, query, tables, lens), {"window": 0}),
        (InvalidArgument, "soft_cap", (0, query, tables, lens), {"soft_cap": -1.0}),
        (InvalidArgument, "scale", (0, query, tables, lens), {"scale": float("nan")}),
        (InvalidType, "scale", (0, query, tables, lens), {"scale": "1"}),
        (InvalidArgument, "alibi", (0, query, tables, lens), {"alibi_slopes": slopes[:5]}),
        (InvalidType, "alibi", (0, query, tables, lens), {"alibi_slopes": slopes.double()}),
        (InvalidType, "plan", (0, query, tables, lens), {"plan": 3}),
    ]
    for kind, message, arguments, options in cases:
        out = torch.full((2, 6, 64), 7.0)
        with pytest.raises(kind, match=message):
            backend.decode_attention(
                batch.cache, *arguments, **{"scale": 0.1, "out": out, **options}
            )
        assert (out == 7).all(), message
    with pytest.raises(InvalidArgument, match="overlap"):
        backend.decode_attention(batch.cache, 0, query, tables, lens, scale=0.1, out=query)
    inside = batch.cache.buffer[: 2 * 6 * 64 * 4].view(torch.float32).view(2, 6, 64)
    with pytest.raises(InvalidArgument, match="overlap"):
        backend.decode_attention(batch.cache, 0, query, tables, lens, scale=0.1, out=inside)
    stale = backend.plan_decode(batch.layout, [100, 20, 5], 6)
    with pytest.raises(InvalidArgument, match="sequences 3"):
        backend.decode_attention(batch.cache, 0, query, tables, lens, scale=0.1, plan=stale)


def test_refusals_of_prefill() -> None:
    backend = get_backend("cpu")
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [100, 20])
    query = batch.query(10, 3)
    for starts, lens in (
        ([0, 5], [100, 20]),
        ([0, 5, 9], [100, 20]),
        ([1, 5, 10], [100, 20]),
        ([0, 7, 3], [100, 20]),
        ([0, -5, 10], [100, 20]),
        ([0, 5, 10], [100, 4]),
        ([0, 5, 10], [100, 900]),
        ([0, 5, 10], [100]),
    ):
        with pytest.raises(InvalidArgument):
            backend.prefill_attention(batch.cache, 0, query, starts, batch.tables, lens, scale=0.1)


def test_an_empty_batch(backend: Any) -> None:
    batch = Batch(KVLayout(1, 2, 64, dtype="float32"), [20])
    none = torch.zeros(0, 6, 64)
    tables, lens = batch.tables[:0], batch.seq_lens[:0]
    assert backend.decode_attention(batch.cache, 0, none, tables, lens, scale=0.1).shape == (
        0,
        6,
        64,
    )
    found = backend.prefill_attention(batch.cache, 0, none, [0], tables, [], scale=0.1)
    assert found.shape == (0, 6, 64)
