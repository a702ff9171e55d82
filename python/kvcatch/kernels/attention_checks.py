"""Refusals of the attention calls that all backends share, made before anything is launched."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels.checks import (
    check_buffer,
    check_cache,
    check_cache_scales,
    check_group,
    check_layer,
    check_lengths,
    check_result_apart,
    check_window,
)
from kvcatch.kernels.tensors import TensorView, expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds
    from kvcatch.kernels.layout import KVLayout

    Ids = NDArray[np.int32]

__all__ = [
    "MAGNITUDE",
    "AttentionInputs",
    "Chunks",
    "check_attention",
    "check_chunks",
    "check_tables_hold",
]

MAGNITUDE = 2.0**60
"""Largest scale and cap, and one over the smallest cap: their products and quotients stay within float32."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The checked tensors and numbers of an attention call.

    Attributes:
        query: [rows, num_q_heads, head_dim], the last dimension packed.
        tables: [seqs, blocks] int32, each row packed.
        slopes: [num_q_heads] float32, or ``None``.
        out: as ``query``, contiguous; ``None`` where the caller gave none.
        group: query heads per kv head.
        scale: what ``q.k`` is multiplied by.
        soft_cap: bound of the logits; 0 for none.
        window: tokens; 0 for none.
    """

    query: TensorView
    tables: TensorView
    slopes: TensorView | None
    out: TensorView | None
    group: int
    scale: float
    soft_cap: float
    window: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the query rows of each sequence lie, on the host, int32.

    Attributes:
        starts: [seqs] first row.
        counts: [seqs] rows.
        seq_lens: [seqs] tokens in the cache.
    """

    starts: Ids
    counts: Ids
    seq_lens: Ids


def check_attention(
    cache: Any,
    layer: int,
    query: Any,
    block_tables: Any,
    device: str,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: Any,
    out: Any,
) -> AttentionInputs:
    """What decode and prefill have in common.

    Raises:
        InvalidType: not tensors, or a wrong dtype.
        InvalidArgument: a shape, device or stride that does not fit, heads that do not divide, a number out of range,
            an ``out`` that overlaps what is read.
    """
    layout = check_cache("cache", cache, device).layout
    buffer = check_buffer("cache", cache)
    check_cache_scales(cache)
    check_layer(layer, layout)
    dtypes = query_dtypes(layout)
    seen = expect(
        "query",
        query,
        shape=(None, None, layout.head_dim),
        dtype=dtypes,
        device=device,
        contiguous=False,
    )
    rows, num_q_heads, _ = seen.shape
    group = check_group(num_q_heads, layout)
    tables = expect(
        "block_tables",
        block_tables,
        shape=(None, None),
        dtype="int32",
        device=device,
        contiguous=False,
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = expect(
            "alibi_slopes", alibi_slopes, shape=(num_q_heads,), dtype="float32", device=device
        )
    target = None
    if out is not None:
        shape = (rows, num_q_heads, layout.head_dim)
        target = expect("out", out, shape=shape, dtype=seen.dtype, device=device, writable=True)
        check_result_apart("out", target, query=seen, cache=buffer)
    return AttentionInputs(
        seen,
        tables,
        slopes,
        target,
        group,
        _number("scale", scale),
        0.0 if soft_cap is None else _number("soft_cap", soft_cap, positive=True),
        check_window(window),
    )


def query_dtypes(layout: KVLayout) -> tuple[str, ...]:
    """Dtypes of queries and outputs: the cache's, or a 16-bit one where the cache is e4m3."""
    if layout.dtype == "float8_e4m3":
        return ("bfloat16", "float16")
    return (layout.dtype,)


def check_chunks(query_starts: BlockIds, seq_lens: BlockIds, num_rows: int) -> Chunks:
    """The rows of a prefill.

    Raises:
        InvalidType: not whole numbers.
        InvalidArgument: rows that are not all covered in order, or more rows than a sequence has tokens.
    """
    lens = check_lengths("seq_lens", seq_lens)
    starts = check_lengths("query_starts", query_starts)
    if len(starts) != len(lens) + 1:
        raise InvalidArgument(
            f"query_starts has {len(starts)} entries for {len(lens)} sequences: must have one more"
        )
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != num_rows or (counts < 0).any():
        raise InvalidArgument(
            f"query_starts runs from {starts[0]} to {starts[-1]}: must not fall, start at 0 and end at the"
            f" {num_rows} rows of query"
        )
    if (counts > lens).any():
        s = int(np.argmax(counts > lens))
        raise InvalidArgument(
            f"sequence {s} has {counts[s]} query rows and {lens[s]} tokens in the cache: its rows are its last tokens"
        )
    return Chunks(starts[:-1], counts.astype(np.int32), lens)


def check_tables_hold(tables: TensorView, num_seqs: int, longest: int, block_size: int) -> None:
    """Refuse block tables with too few rows, or too short for the longest sequence."""
    if tables.shape[0] != num_seqs:
        raise InvalidArgument(
            f"block_tables has {tables.shape[0]} rows: must have one for each of {num_seqs} sequences"
        )
    if tables.shape[1] * block_size < longest:
        raise InvalidArgument(
            f"block_tables has {tables.shape[1]} blocks of {block_size} tokens a sequence: the longest has"
            f" {longest} tokens"
        )


def _number(name: str, value: Any, *, positive: bool = False) -> float:
    """A number whose size a kernel can work with in float32; a positive one not too near 0 either."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidType(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond any float
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        wanted = "positive and finite" if positive else "finite"
        raise InvalidArgument(f"{name} must be {wanted}, not {number!r}")
    if abs(number) > MAGNITUDE or (positive and number < 1 / MAGNITUDE):
        wanted = "within 2^-60..2^60" if positive else "within -2^60..2^60"
        raise InvalidArgument(f"{name} must be {wanted}, not {number!r}")
    return number
