"""Launches of paged attention, decode and prefill: the checks, the plans, the grids, the arguments.

Shared by the ``cuda`` backend and the tests' ``emulated`` one, as ``device_blocks.py`` is. What the kernels do and hold
in registers and shared memory is described in ``cuda/attention.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels.attention_checks import (
    check_attention,
    check_chunks,
    check_tables_hold,
)
from kvcatch.kernels.checks import check_group, check_layout, check_lengths, check_window
from kvcatch.kernels.device_blocks import DTYPE_CODES, SCALE_CODES
from kvcatch.kernels.tensors import expect, view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.attention_checks import AttentionInputs, Chunks
    from kvcatch.kernels.backend import BlockIds, DecodePlan, Tensor
    from kvcatch.kernels.cache import KVCache
    from kvcatch.kernels.layout import KVLayout
    from kvcatch.kernels.runtime import Argument, Runtime
    from kvcatch.kernels.tensors import TensorView

__all__ = [
    "BLOCK_SIZES",
    "HEAD_DIMS",
    "AttentionLaunches",
    "DevicePlan",
    "attention_defines",
    "decode_shared_bytes",
    "prefill_shared_bytes",
    "thread_blocks_per_sm",
]

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)

# As in cuda/attention.cuh, decode.cu and prefill.cu.
THREADS = 128
WARPS = THREADS // 32
STEP = 16
PREFILL_ROWS = 64
MIN_PIECE = 128
"""Fewest tokens of a piece of a decode: a partial result (4 bytes an element) then costs 3 % of what was read."""

DECODE_PER_SM = {
    64: (5, 4, 5, 4),
    80: (4, 3, 4, 3),
    96: (4, 3, 4, 3),
    128: (3, 2, 4, 2),
    256: (2, 2, 2, 2),
}
"""By head_dim: 16-bit caches with at most 8 query heads a thread block, with more; e4m3 caches likewise."""

PREFILL_PER_SM = {64: 3, 80: 3, 96: 2, 128: 2, 256: 2}


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """A :class:`~kvcatch.kernels.backend.DecodePlan` for :class:`AttentionLaunches`, its lists on the device.

    Attributes:
        num_seqs: sequences it was made for.
        num_q_heads: query heads.
        layout: of the caches it serves.
        window: tokens; 0 for none.
        longest: tokens of the longest sequence.
        num_partials: results that are left to be merged, per query head.
        pieces: [n, 4] int32 of (sequence, first token, end token, partial result or -1); ``None`` where n is 0.
        merges: [m, 4] int32 of (sequence, first partial result, end, 0); ``None`` where m is 0.
    """

    num_seqs: int
    num_q_heads: int
    layout: KVLayout
    window: int
    longest: int
    num_partials: int
    pieces: TensorView | None
    merges: TensorView | None


class AttentionLaunches:
    """The attention calls of :class:`~kvcatch.kernels.backend.Backend` on any :class:`Runtime`; see there.

    To be mixed into a class that sets the attributes below, as ``BlockLaunches`` does.
    """

    runtime: Runtime
    check_ids: bool
    errors: TensorView | None
    _prefill: tuple[bytes, TensorView, TensorView] | None = None

    def plan_decode(
        self, layout: KVLayout, seq_lens: BlockIds, num_q_heads: int, window: int | None = None
    ) -> DevicePlan:
        """Share the tokens of a batch among the processors.

        Every piece has an equal share of the tokens, as many pieces as thread blocks run side by side, and none under
        128 tokens. Pieces are the same for all kv heads, which have a thread block each.

        Raises:
            InvalidType: lengths that are not whole numbers.
            InvalidArgument: negative lengths, heads that do not divide, a window that is not positive.
        """
        _check_supported(check_layout(layout))
        group = check_group(num_q_heads, layout)
        lens = check_lengths("seq_lens", seq_lens)
        tokens = check_window(window)
        side_by_side = self.runtime.num_sms * thread_blocks_per_sm("decode", layout, group)
        slots = max(1, side_by_side // (layout.num_kv_heads * _head_tiles(layout.head_dim, group)))
        pieces, merges, num_partials = _core.decode_work(
            lens, slots, min_tokens=MIN_PIECE, window=tokens
        )
        return DevicePlan(
            num_seqs=len(lens),
            num_q_heads=num_q_heads,
            layout=layout,
            window=tokens,
            longest=int(lens.max(initial=0)),
            num_partials=num_partials,
            pieces=self.runtime.upload(pieces) if len(pieces) else None,
            merges=self.runtime.upload(merges) if len(merges) else None,
        )

    def decode_attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        plan: DecodePlan | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One new token per sequence; see :meth:`~kvcatch.kernels.backend.Backend.decode_attention`.

        ``query`` must start at a multiple of 16 bytes, and its strides be multiples of 16 bytes but for the last, 1.
        """
        inputs = self._attention_inputs(
            cache, layer, query, block_tables, scale, window, soft_cap, alibi_slopes, out
        )
        num_seqs, num_q_heads, head_dim = inputs.query.shape
        lens = expect(
            "seq_lens", seq_lens, shape=(num_seqs,), dtype="int32", device=self.runtime.device
        )
        if plan is None:
            check_tables_hold(inputs.tables, num_seqs, 0, cache.layout.block_size)
            host = self.runtime.download(lens).tolist() if num_seqs else []
            made = self.plan_decode(cache.layout, host, num_q_heads, window)
        else:
            made = _check_plan(plan, cache.layout, num_seqs, num_q_heads, inputs.window)
        check_tables_hold(inputs.tables, num_seqs, made.longest, cache.layout.block_size)

        result = self.runtime.empty(inputs.query.shape, query) if out is None else out
        target = view(result, "out")
        defines = self._attention_defines(cache.layout, inputs)
        layout = cache.layout
        partial = maxima = None
        if made.num_partials:
            partial = self.runtime.scratch((made.num_partials, num_q_heads, head_dim), "float32")
            maxima = self.runtime.scratch((made.num_partials, num_q_heads, 2), "float32")
        if made.pieces is not None:
            tiles = _head_tiles(head_dim, inputs.group)
            self.runtime.launch(
                "decode",
                "decode_attention",
                defines | {"KV_MIN_CTAS": thread_blocks_per_sm("decode", layout, inputs.group)},
                (made.pieces.shape[0], layout.num_kv_heads * tiles),
                (THREADS,),
                [
                    target,
                    partial,
                    maxima,
                    *_query_arguments(inputs),
                    *_cache_arguments(cache, layer),
                    *_table_arguments(inputs),
                    lens,
                    inputs.slopes,
                    made.pieces,
                    *self._attention_numbers(cache, inputs),
                    self.errors,
                ],
                decode_shared_bytes(head_dim, inputs.group),
            )
        if made.merges is not None:
            self.runtime.launch(
                "merge",
                "merge_partials",
                {name: defines[name] for name in ("KV_IO", "KV_HEAD_DIM")},
                (made.merges.shape[0], num_q_heads),
                (head_dim // 2,),
                [target, partial, maxima, made.merges],
            )
        return result

    def prefill_attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        query_starts: BlockIds,
        block_tables: Tensor,
        seq_lens: BlockIds,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The last tokens of each sequence; see :meth:`~kvcatch.kernels.backend.Backend.prefill_attention`.

        ``query`` as in :meth:`decode_attention`.
        """
        inputs = self._attention_inputs(
            cache, layer, query, block_tables, scale, window, soft_cap, alibi_slopes, out
        )
        layout = cache.layout
        chunks = check_chunks(query_starts, seq_lens, inputs.query.shape[0])
        longest = int(chunks.seq_lens.max(initial=0))
        check_tables_hold(inputs.tables, len(chunks.counts), longest, layout.block_size)
        result = self.runtime.empty(inputs.query.shape, query) if out is None else out
        if not inputs.query.shape[0]:
            return result
        sequences, tiles = self._prefill_lists(chunks, inputs.group, inputs.window)
        per_sm = thread_blocks_per_sm("prefill", layout, inputs.group)
        self.runtime.launch(
            "prefill",
            "prefill_attention",
            self._attention_defines(layout, inputs)
            | {"KV_WINDOW": int(inputs.window > 0), "KV_MIN_CTAS": per_sm},
            (tiles.shape[0], layout.num_kv_heads),
            (THREADS,),
            [
                view(result, "out"),
                *_query_arguments(inputs),
                *_cache_arguments(cache, layer),
                *_table_arguments(inputs),
                inputs.slopes,
                sequences,
                tiles,
                *self._attention_numbers(cache, inputs),
                np.int32(inputs.window),
                self.errors,
            ],
            prefill_shared_bytes(layout),
        )
        return result

    def _prefill_lists(
        self, chunks: Chunks, group: int, window: int
    ) -> tuple[TensorView, TensorView]:
        """The lists of ``cuda/prefill.cu`` on the device; those of the last call where it asked for the same.

        All layers of a step do, and so only the first one uploads them.
        """
        zeros = np.zeros_like(chunks.starts)
        sequences = np.stack([chunks.starts, chunks.counts, chunks.seq_lens, zeros], axis=1)
        key = sequences.tobytes() + np.array([group, window]).tobytes()
        kept = self._prefill
        if kept is None or kept[0] != key:
            tiles = prefill_tiles(chunks, group, window)
            kept = self._prefill = (
                key,
                self.runtime.upload(sequences),
                self.runtime.upload(tiles),
            )
        return kept[1:]

    def _attention_inputs(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
        out: Tensor | None,
    ) -> AttentionInputs:
        inputs = check_attention(
            cache,
            layer,
            query,
            block_tables,
            self.runtime.device,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            out=out,
        )
        _check_supported(cache.layout)
        _check_aligned("query", inputs.query, 16)
        if inputs.out is not None:
            _check_aligned("out", inputs.out, 4)
        return inputs

    def _attention_defines(self, layout: KVLayout, inputs: AttentionInputs) -> dict[str, int]:
        return attention_defines(
            layout,
            inputs.query.dtype,
            inputs.group,
            soft_cap=inputs.soft_cap > 0,
            alibi=inputs.slopes is not None,
            check_ids=self.check_ids,
        )

    def _attention_numbers(self, cache: KVCache, inputs: AttentionInputs) -> list[Argument]:
        return [
            np.int32(cache.layout.num_kv_heads),
            np.int32(cache.num_blocks),
            np.float32(inputs.scale),
            np.float32(inputs.soft_cap),
        ]


def attention_defines(
    layout: KVLayout,
    query_dtype: str,
    group: int,
    *,
    soft_cap: bool = False,
    alibi: bool = False,
    check_ids: bool = False,
) -> dict[str, int]:
    """The constants that ``cuda/decode.cu`` and ``cuda/prefill.cu`` share.

    Each adds ``KV_MIN_CTAS`` (:func:`thread_blocks_per_sm`), and prefill ``KV_WINDOW``; ``cuda/merge.cu`` takes
    ``KV_IO`` and ``KV_HEAD_DIM`` alone.
    """
    return {
        "KV_DTYPE": DTYPE_CODES[layout.dtype],
        "KV_IO": DTYPE_CODES[query_dtype],
        "KV_SCALE": SCALE_CODES[layout.scale],
        "KV_HEAD_DIM": layout.head_dim,
        "KV_BLOCK_SIZE": layout.block_size,
        "KV_GROUP": group,
        "KV_SOFT_CAP": int(soft_cap),
        "KV_ALIBI": int(alibi),
        "KV_CHECK_IDS": int(check_ids),
    }


def thread_blocks_per_sm(kernel: str, layout: KVLayout, group: int) -> int:
    """Thread blocks of ``decode`` or ``prefill`` that a processor holds: what ``KV_MIN_CTAS`` makes room for."""
    if kernel == "decode":
        many = _heads(layout.head_dim, group) > 8
        return DECODE_PER_SM[layout.head_dim][2 * (layout.dtype == "float8_e4m3") + many]
    return PREFILL_PER_SM[layout.head_dim]


def decode_shared_bytes(head_dim: int, group: int) -> int:
    """Dynamic shared memory of ``cuda/decode.cu``: an output, a maximum and a sum per warp and head."""
    return 4 * WARPS * _heads(head_dim, group) * (head_dim + 4 + 2)


def prefill_shared_bytes(layout: KVLayout) -> int:
    """Dynamic shared memory of ``cuda/prefill.cu``: two stages of keys, values and scales; queries of 256 elements."""
    token = layout.head_dim * layout.item_bytes
    pitches = (token + 63) // 128 * 128 + 64 + (token + 15) // 32 * 32 + 16 + 8
    stage = min(64, 24 * 1024 // pitches // STEP * STEP)
    queries = PREFILL_ROWS * layout.head_dim * 2 if layout.head_dim == 256 else 0
    return 2 * stage * pitches + queries


def prefill_tiles(chunks: Chunks, group: int, window: int) -> NDArray[np.int32]:
    """[n, 2] of (sequence, first of 64 rows), those with most keys first: the short ones fill the end of the launch."""
    rows = chunks.counts.astype(np.int64) * group
    per_seq = -(-rows // PREFILL_ROWS)
    seq = np.repeat(np.arange(len(rows)), per_seq)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)) * PREFILL_ROWS
    prefix = chunks.seq_lens - chunks.counts
    tokens = (np.minimum(first + PREFILL_ROWS, rows[seq]) - 1) // group - first // group + 1
    keys = prefix[seq] + first // group + tokens
    if window:
        keys = np.minimum(keys, window + tokens - 1)
    order = np.argsort(-keys, kind="stable")
    return np.stack([seq[order], first[order]], axis=1).astype(np.int32)


def _heads(head_dim: int, group: int) -> int:
    """Query heads that one thread block of decode takes."""
    return min(group, 8) if head_dim == 256 else group


def _head_tiles(head_dim: int, group: int) -> int:
    """Thread blocks that share one kv head in decode."""
    return -(-group // _heads(head_dim, group))


def _query_arguments(inputs: AttentionInputs) -> list[Argument]:
    rows, heads, _ = inputs.query.strides
    return [inputs.query, np.int64(rows // 2), np.int64(heads // 2)]


def _cache_arguments(cache: KVCache, layer: int) -> list[Argument]:
    strides = cache.strides
    scales = None
    if cache.layout.scale == "head":
        scales = view(cache.head_scales[layer], "head_scales")
    return [
        view(cache.buffer, "cache"),
        np.int64(layer * strides.layer),
        np.int64(strides.block),
        np.int64(strides.kv),
        np.int64(strides.head),
        np.int64(strides.scale),
        np.int64(strides.scale_head),
        scales,
    ]


def _table_arguments(inputs: AttentionInputs) -> list[Argument]:
    return [inputs.tables, np.int64(inputs.tables.strides[0] // 4)]


def _check_supported(layout: KVLayout) -> None:
    if layout.dtype == "float32":
        raise InvalidArgument(
            "attention over a float32 cache: the CUDA kernels take float16, bfloat16 or float8_e4m3"
        )
    for name, known in (("head_dim", HEAD_DIMS), ("block_size", BLOCK_SIZES)):
        if getattr(layout, name) not in known:
            listed = ", ".join(map(str, known[:-1]))
            raise InvalidArgument(
                f"attention with {name} {getattr(layout, name)}: the CUDA kernels take {listed} or {known[-1]}"
            )


def _check_aligned(name: str, seen: TensorView, alignment: int) -> None:
    """Refuse a tensor whose rows do not start at multiples of ``alignment`` bytes."""
    if 0 in seen.shape:
        return
    steps = [s for n, s in zip(seen.shape[:-1], seen.strides[:-1], strict=True) if n > 1]
    if any(start % alignment for start in (seen.pointer, *steps)):
        raise InvalidArgument(
            f"{name} starts at {seen.pointer:#x} with strides of {list(seen.strides)} bytes: its rows must start at"
            f" multiples of {alignment} bytes"
        )


def _check_plan(
    plan: object, layout: KVLayout, num_seqs: int, num_q_heads: int, window: int
) -> DevicePlan:
    if not isinstance(plan, DevicePlan):
        raise InvalidType(
            f"plan must come from this backend's plan_decode, not be a {type(plan).__name__}"
        )
    made = {
        "sequences": (plan.num_seqs, num_seqs),
        "query heads": (plan.num_q_heads, num_q_heads),
        "tokens of window": (plan.window, window),
        "kv heads": (plan.layout.num_kv_heads, layout.num_kv_heads),
        "elements a head": (plan.layout.head_dim, layout.head_dim),
    }
    for what, (planned, given) in made.items():
        if planned != given:
            raise InvalidArgument(f"the plan was made for {planned} {what}, this call has {given}")
    return plan
