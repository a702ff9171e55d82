"""The CPU backend: torch tensors, kernels of the Rust core (``src/cpu/``).

The kernels read and write the pool in place through numpy views of the tensors, on as many threads as torch has, and
without the GIL. Results depend neither on the number of threads nor on where the blocks lie.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType, OutOfMemory
from kvcatch.kernels.attention_checks import check_attention, check_chunks, check_tables_hold
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.checks import (
    check_apart,
    check_buffer,
    check_cache,
    check_conversion,
    check_group,
    check_head_scales,
    check_ids,
    check_layout,
    check_lengths,
    check_moves,
    check_same_layout,
    check_window,
    check_write,
)
from kvcatch.kernels.cpu_tensors import (
    array_of,
    dtype_name,
    empty_like,
    head_scales_of,
    is_vector,
    layout_of,
    numpy_of,
    plain_attention,
    plain_write,
    torch,
)
from kvcatch.kernels.tensors import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds, DecodePlan, Tensor
    from kvcatch.kernels.layout import KVLayout

    Array = NDArray[Any]

__all__ = ["LEVEL_VARIABLE", "CpuBackend", "CpuPlan", "FinishedTransfer"]

LEVEL_VARIABLE = "KVCATCH_CPU_LEVEL"
"""Environment variable that forces an instruction set: ``portable``, ``avx2``, ``avx512`` or ``avx512_bf16``."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A :class:`~kvcatch.kernels.backend.DecodePlan`: the kernel shares the tokens itself, so it only says for whom."""

    num_seqs: int
    num_q_heads: int
    layout: KVLayout
    window: int


class FinishedTransfer:
    """A swap between two host pools, which is a copy and done when the call returns."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronise(self) -> None:
        """Nothing to wait for."""


class CpuBackend:
    """Moves, writes and reads KV blocks in host memory; see :class:`~kvcatch.kernels.backend.Backend`.

    Args:
        level: instruction set, one of ``_core.cpu_levels()``; the best of this machine by default, or what the
            environment variable ``KVCATCH_CPU_LEVEL`` names.
        threads: threads of a call; ``torch.get_num_threads()`` at each call by default.
        own_threads: use threads of kvcatch even where torch's OpenMP team could be joined. They compete with that
            team for the cores: for comparisons.
        check_ids: taken so that all backends have it; here ids are always checked.

    Raises:
        InvalidArgument: this machine does not have that level, or ``threads`` is not positive.
    """

    def __init__(
        self,
        level: str | None = None,
        *,
        threads: int | None = None,
        own_threads: bool = False,
        check_ids: bool = True,
    ) -> None:
        levels = _core.cpu_levels()
        chosen = level or os.environ.get(LEVEL_VARIABLE) or levels[-1]
        if chosen not in levels:
            raise InvalidArgument(f"level {chosen!r}: this machine has {', '.join(levels)}")
        if threads is not None and threads < 1:
            raise InvalidArgument(f"threads must be at least 1, not {threads}")
        self.level = chosen
        self.check_ids = check_ids
        self._fixed_threads = threads
        self._own_threads = own_threads

    @property
    def _threads(self) -> int:
        return self._fixed_threads or torch.get_num_threads()

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def device(self) -> str:
        """``cpu``."""
        return "cpu"

    def __repr__(self) -> str:
        return f"<CpuBackend {self.level}, {self._threads} threads of {_core.cpu_team()}>"

    # --- memory ---------------------------------------------------------------------------------

    def allocate(
        self, layout: KVLayout, num_blocks: int, head_scales: Tensor | None = None
    ) -> KVCache:
        """A zeroed pool; see :meth:`~kvcatch.kernels.backend.Backend.allocate`.

        Raises:
            InvalidArgument: a size out of range, or head scales that the layout does not take.
            InvalidType: head scales that are no float32 tensor.
            OutOfMemory: there is not so much memory; states the bytes.
        """
        num_bytes = check_layout(layout).pool_bytes(num_blocks)
        check_head_scales(layout, head_scales, self.device)
        return KVCache(layout, num_blocks, self._zeros(num_bytes), head_scales, self.device)

    def allocate_host(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A pool to swap to, block-major; see :meth:`~kvcatch.kernels.backend.Backend.allocate_host`.

        Raises:
            InvalidArgument: a size out of range.
            OutOfMemory: there is not so much memory; states the bytes.
        """
        host = replace(check_layout(layout), order="block")
        return KVCache(host, num_blocks, self._zeros(host.pool_bytes(num_blocks)))

    def _zeros(self, num_bytes: int) -> Tensor:
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as refused:  # how torch reports it
            raise OutOfMemory(f"no memory for a pool of {num_bytes} bytes") from refused
        _core.cpu_advise_huge_pages(buffer.numpy())  # before the first touch
        return buffer.zero_()

    # --- whole blocks ---------------------------------------------------------------------------

    def move_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Copy blocks to free ones; see :meth:`~kvcatch.kernels.backend.Backend.move_blocks`."""
        self._checked("cache", cache)
        self._copy(cache, cache, src, dst)

    def assign_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Assign blocks at once, in any order; see :meth:`~kvcatch.kernels.backend.Backend.assign_blocks`."""
        self._checked("cache", cache)
        sources, targets = check_moves(src, dst, cache, cache, hazards=True)
        _core.cpu_assign_blocks(
            numpy_of(cache.buffer),
            layout_of(cache),
            sources,
            targets,
            threads=self._threads,
            own_threads=self._own_threads,
        )

    def gather_blocks(self, cache: KVCache, block_ids: BlockIds, out: KVCache) -> None:
        """Copy blocks to a staging cache; see :meth:`~kvcatch.kernels.backend.Backend.gather_blocks`."""
        self._pair("cache", cache, "out", out)
        ids = check_ids("block_ids", block_ids, cache.num_blocks)
        self._copy(cache, out, ids, _first("out", out, len(ids)))

    def scatter_blocks(self, staging: KVCache, cache: KVCache, block_ids: BlockIds) -> None:
        """Copy blocks from a staging cache; see :meth:`~kvcatch.kernels.backend.Backend.scatter_blocks`."""
        self._pair("staging", staging, "cache", cache)
        ids = check_ids("block_ids", block_ids, cache.num_blocks)
        _core.check_moves(_first("staging", staging, len(ids)), ids, allow_overlap=True)
        self._copy(staging, cache, _first("staging", staging, len(ids)), ids)

    def swap_out(
        self, cache: KVCache, host: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        """Copy blocks to a host pool, at once; see :meth:`~kvcatch.kernels.backend.Backend.swap_out`."""
        self._pair("cache", cache, "host", host)
        self._copy(cache, host, src, dst)
        return FinishedTransfer()

    def swap_in(
        self, host: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        """Copy blocks from a host pool, at once; see :meth:`~kvcatch.kernels.backend.Backend.swap_in`."""
        self._pair("host", host, "cache", cache)
        self._copy(host, cache, src, dst)
        return FinishedTransfer()

    def _copy(self, source: KVCache, target: KVCache, src: BlockIds, dst: BlockIds) -> None:
        try:  # the core checks the ids too, in less time
            _core.cpu_copy_blocks(
                numpy_of(source.buffer),
                layout_of(source),
                numpy_of(target.buffer),
                layout_of(target),
                src,
                dst,
                threads=self._threads,
                own_threads=self._own_threads,
            )
        except (InvalidArgument, InvalidType):
            check_moves(src, dst, source, target)  # the message that all backends share
            raise

    # --- tokens ---------------------------------------------------------------------------------

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens into their slots; see :meth:`~kvcatch.kernels.backend.Backend.write_kv`."""
        plain = plain_write(cache, layer, key, value, slot_mapping)
        if not plain:
            check_write(cache, layer, key, value, slot_mapping, self.device)
            self._checked("cache", cache)
        try:
            _core.cpu_write_kv(
                numpy_of(cache.buffer),
                layout_of(cache),
                layer,
                array_of(key),
                array_of(value),
                numpy_of(slot_mapping),
                dtype=dtype_name(key),
                threads=self._threads,
                head_scales=head_scales_of(cache),
                own_threads=self._own_threads,
            )
        except InvalidArgument:
            if plain:  # the message that all backends share, where there is one
                check_write(cache, layer, key, value, slot_mapping, self.device)
            raise

    def quantise_blocks(
        self, source: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert blocks to e4m3; see :meth:`~kvcatch.kernels.backend.Backend.quantise_blocks`."""
        self._convert(source, cache, src, dst, wide=source, quantised=cache)

    def dequantise_blocks(
        self, cache: KVCache, target: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert blocks from e4m3; see :meth:`~kvcatch.kernels.backend.Backend.dequantise_blocks`."""
        self._convert(cache, target, src, dst, wide=target, quantised=cache)

    def _convert(
        self,
        source: KVCache,
        target: KVCache,
        src: BlockIds,
        dst: BlockIds,
        *,
        wide: KVCache,
        quantised: KVCache,
    ) -> None:
        self._checked("source", source)
        self._checked("target", target)
        check_conversion(wide, quantised)
        sources, targets = check_moves(src, dst, source, target)
        _core.cpu_convert_blocks(
            numpy_of(source.buffer),
            layout_of(source),
            numpy_of(target.buffer),
            layout_of(target),
            sources,
            targets,
            threads=self._threads,
            head_scales=head_scales_of(quantised),
            own_threads=self._own_threads,
        )

    # --- attention ------------------------------------------------------------------------------

    def plan_decode(
        self, layout: KVLayout, seq_lens: BlockIds, num_q_heads: int, window: int | None = None
    ) -> CpuPlan:
        """Say for whom a decode is; see :meth:`~kvcatch.kernels.backend.Backend.plan_decode`."""
        check_group(num_q_heads, check_layout(layout))
        lens = check_lengths("seq_lens", seq_lens)
        return CpuPlan(len(lens), num_q_heads, layout, check_window(window))

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
        """Attention of one new token per sequence; see :meth:`~kvcatch.kernels.backend.Backend.decode_attention`."""
        plain = (
            alibi_slopes is None
            and soft_cap is None
            and plain_attention(cache, layer, query, block_tables, scale, out)
            and is_vector(seq_lens, torch.int32, query.shape[0])
        )

        def check() -> None:
            seen = check_attention(
                cache,
                layer,
                query,
                block_tables,
                self.device,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
                out=out,
            )
            rows = seen.query.shape[0]
            expect("seq_lens", seq_lens, shape=(rows,), dtype="int32", device=self.device)
            longest = int(numpy_of(seq_lens).max(initial=0))
            check_tables_hold(seen.tables, rows, longest, cache.layout.block_size)

        if not plain:
            check()
        if plan is not None:
            _check_plan(plan, cache, query, window)
        lens = numpy_of(seq_lens)
        try:
            return self._attention(
                cache, layer, query, block_tables, lens, scale, window, soft_cap, alibi_slopes, out
            )
        except InvalidArgument:
            if plain:  # the message that all backends share, where there is one
                check()
            raise

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
        """Attention of a chunk of a prompt; see :meth:`~kvcatch.kernels.backend.Backend.prefill_attention`."""
        seen = check_attention(
            cache,
            layer,
            query,
            block_tables,
            self.device,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            out=out,
        )
        chunks = check_chunks(query_starts, seq_lens, query.shape[0])
        longest = int(chunks.seq_lens.max(initial=0))
        check_tables_hold(seen.tables, len(chunks.seq_lens), longest, cache.layout.block_size)
        starts = np.append(chunks.starts, np.int32(query.shape[0]))
        return self._attention(
            cache,
            layer,
            query,
            block_tables,
            chunks.seq_lens,
            scale,
            window,
            soft_cap,
            alibi_slopes,
            out,
            starts,
        )

    def _attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        lens: Array,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
        out: Tensor | None,
        starts: Array | None = None,
    ) -> Tensor:
        if out is None:
            out = empty_like(query)
        _core.cpu_attention(
            numpy_of(cache.buffer),
            layout_of(cache),
            layer,
            array_of(query),
            numpy_of(block_tables),
            lens,
            array_of(out),
            dtype=dtype_name(query),
            scale=scale,
            window=check_window(window),
            threads=self._threads,
            level=self.level,
            head_scales=head_scales_of(cache),
            soft_cap=soft_cap,
            alibi_slopes=None if alibi_slopes is None else numpy_of(alibi_slopes),
            starts=starts,
            own_threads=self._own_threads,
        )
        return out

    def synchronise(self) -> None:
        """Nothing to wait for: every call is done when it returns."""

    # --- checks ---------------------------------------------------------------------------------

    def _checked(self, name: str, cache: KVCache) -> None:
        check_buffer(name, check_cache(name, cache, self.device))

    def _pair(self, name: str, source: KVCache, other: str, target: KVCache) -> None:
        self._checked(name, source)
        self._checked(other, target)
        check_same_layout(source, target)
        check_apart(source, target)


def _first(name: str, staging: KVCache, count: int) -> Array:
    """The staging blocks ``0..count-1``."""
    if count > staging.num_blocks:
        raise InvalidArgument(
            f"{name} has {staging.num_blocks} blocks: {count} block ids are too many"
        )
    return np.arange(count, dtype=np.int32)


def _check_plan(plan: DecodePlan, cache: KVCache, query: Tensor, window: int | None) -> None:
    """Refuse a plan that was made for another batch, layout or window."""
    if not isinstance(plan, CpuPlan):
        raise InvalidType(
            f"plan must come from plan_decode of this backend, not {type(plan).__name__}"
        )
    wanted = (query.shape[0], query.shape[1], cache.layout, window or 0)
    made = (plan.num_seqs, plan.num_q_heads, plan.layout, plan.window)
    if wanted == made:
        return
    names = ("sequences", "query heads", "layout", "window")
    name, have, need = next(
        (n, a, b) for n, a, b in zip(names, made, wanted, strict=True) if a != b
    )
    raise InvalidArgument(f"plan was made for {name} {have}, not {need}: make one for this step")
