"""What paged attention must give, in float64 on the stored values, and pools made so that wrong indexing cannot pass.

Every byte of a pool that no live token owns is 0xFF: NaN as an element of any type and as a scale. Block ids beyond a
sequence's last block are out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_host import oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvcatch.kernels import KVLayout

    Doubles = NDArray[np.float64]

__all__ = [
    "BOUNDS",
    "Case",
    "Options",
    "attend",
    "decode_reference",
    "make_case",
    "prefill_reference",
    "relative_error",
]

BOUNDS = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-5}
"""Relative l2 error of a whole output against float64, by the output's dtype: its rounding, and no more."""

NO_BLOCK = 10**6
STALE = 0xFF


@dataclass(frozen=True)
class Options:
    """What changes the logits: as the keyword arguments of ``decode_attention``."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: NDArray[np.float32] | None = None


@dataclass
class Case:
    """A pool with some sequences in it.

    ``keys`` and ``values`` are what the pool's bytes stand for, per sequence [tokens, kv heads, head_dim].
    """

    layout: KVLayout
    layer: int
    num_blocks: int
    pool: NDArray[np.uint8]
    head_scales: NDArray[np.float32] | None
    tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    keys: list[Doubles] = field(default_factory=list)
    values: list[Doubles] = field(default_factory=list)


def make_case(
    rng: np.random.Generator,
    layout: KVLayout,
    seq_lens: Sequence[int],
    *,
    keys: list[NDArray[Any]] | None = None,
    values: list[NDArray[Any]] | None = None,
    spare_blocks: int = 3,
) -> Case:
    """Write sequences into scattered blocks of the last layer; Gaussian ones unless they are given."""
    heads, dim, size = layout.num_kv_heads, layout.head_dim, layout.block_size
    blocks = [-(-n // size) for n in seq_lens]
    num_blocks = sum(blocks) + spare_blocks
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(seq_lens), max([*blocks, 1]) + 1), NO_BLOCK, np.int32)
    wide = "float32" if layout.dtype == "float8_e4m3" else layout.dtype
    given = [keys, values]
    for kv, rows in enumerate(given):
        if rows is None:
            given[kv] = [
                rng.standard_normal((n, heads, dim)).astype(oracle.DTYPES[wide]) for n in seq_lens
            ]
    layer = layout.num_layers - 1
    pool = np.full(layout.pool_bytes(num_blocks), STALE, np.uint8)
    head_scales = None
    if layout.scale == "head":
        head_scales = np.full((layout.num_layers, 2, heads), 2.0**90, np.float32)
        for kv in range(2):
            every = np.concatenate([x.astype(np.float32) for x in given[kv] or ()])
            head_scales[layer, kv] = oracle.scale_of(every, (0, 2))
    stored: list[list[Doubles]] = [[], []]
    data, scales = oracle.elements(pool, layout), oracle.scales(pool, layout)
    taken = 0
    for s, n in enumerate(seq_lens):
        tables[s, : blocks[s]] = order[taken : taken + blocks[s]]
        taken += blocks[s]
        for kv in range(2):
            x = np.asarray((given[kv] or [])[s])
            kept = np.empty((n, heads, dim), np.float64)
            for first in range(0, n, size):
                part = x[first : first + size]
                place = (tables[s, first // size], layer, kv)
                room = data[place][:, : len(part)]  # [head, token, element]
                if layout.scale == "none":
                    room[...] = part.swapaxes(0, 1)
                    kept[first : first + size] = part.astype(np.float64)
                    continue
                y = part.astype(np.float32).swapaxes(0, 1)
                if head_scales is not None:
                    scale = np.repeat(head_scales[layer, kv][:, None], len(part), 1)
                elif layout.scale == "token":
                    scale = scales[place][:, : len(part)] = oracle.scale_of(y, (2,))
                else:
                    scale = oracle.scale_of(y, (1, 2))
                    scales[place] = scale
                    scale = np.repeat(scale[:, None], len(part), 1)
                room[...] = oracle.codes_of(y, scale[..., None])
                codes = room.view(oracle.DTYPES["float8_e4m3"]).astype(np.float64)
                kept[first : first + size] = (codes * scale[..., None]).swapaxes(0, 1)
            stored[kv].append(kept)
    lens = np.asarray(seq_lens, np.int32)
    return Case(layout, layer, num_blocks, pool, head_scales, tables, lens, *stored)


def attend(
    query: NDArray[Any], position: int, keys: Doubles, values: Doubles, head: int, options: Options
) -> Doubles:
    """One row: ``query`` [head_dim] at ``position`` over ``keys`` and ``values`` [tokens, head_dim] up to it."""
    first = 0 if options.window is None else max(0, position + 1 - options.window)
    k, v = keys[first : position + 1], values[first : position + 1]
    with np.errstate(all="ignore"):
        logits = (k @ query.astype(np.float64)) * options.scale
        if options.soft_cap is not None:
            logits = options.soft_cap * np.tanh(logits / options.soft_cap)
        if options.alibi_slopes is not None:
            places = np.arange(first, position + 1) - position
            logits = logits + float(options.alibi_slopes[head]) * places
        p = np.exp(logits - logits.max())
        return np.asarray(p @ v / p.sum())


def decode_reference(case: Case, query: NDArray[Any], options: Options) -> Doubles:
    """``decode_attention`` of ``query`` [seqs, q heads, head_dim]."""
    group = query.shape[1] // case.layout.num_kv_heads
    out = np.zeros(query.shape)
    for s, n in enumerate(case.seq_lens.tolist()):
        for h in range(query.shape[1] if n else 0):
            k, v = case.keys[s][:, h // group], case.values[s][:, h // group]
            out[s, h] = attend(query[s, h], n - 1, k, v, h, options)
    return out


def prefill_reference(
    case: Case, query: NDArray[Any], starts: Sequence[int], options: Options
) -> Doubles:
    """``prefill_attention`` of ``query`` [rows, q heads, head_dim]."""
    group = query.shape[1] // case.layout.num_kv_heads
    out = np.zeros(query.shape)
    for s, n in enumerate(case.seq_lens.tolist()):
        for r in range(starts[s], starts[s + 1]):
            for h in range(query.shape[1]):
                k, v = case.keys[s][:, h // group], case.values[s][:, h // group]
                out[r, h] = attend(query[r, h], n - starts[s + 1] + r, k, v, h, options)
    return out


def relative_error(found: NDArray[Any], wanted: Doubles) -> float:
    """Relative l2 error of the whole; infinite where something is not finite."""
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
