"""The CPU backend: torch tensors, kernels of the Rust core (``src/cpu/``).

The kernels read and write the pool in place through numpy views of the tensors, on as many threads as torch has, and
without the GIL. Results depend neither on the number of threads nor on where the blocks lie.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType, MissingExtra, OutOfMemory
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
    check_moves,
    check_same_layout,
    check_window,
    check_write,
)
from kvcatch.kernels.layout import ALIGNMENT
from kvcatch.kernels.tensors import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds, DecodePlan, Tensor
    from kvcatch.kernels.layout import KVLayout

    Array = NDArray[Any]

__all__ = ["LEVEL_VARIABLE", "CpuBackend", "CpuPlan", "FinishedTransfer"]

LEVEL_VARIABLE = "KVCATCH_CPU_LEVEL"
"""Environment variable that forces an instruction set: ``portable``, ``avx2`` or ``avx512``."""


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
        MissingExtra: torch is not installed.
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
        try:
            import torch
        except ImportError as missing:
            raise MissingExtra(
                "the CPU backend needs torch: pip install 'kvcatch[engine]'"
            ) from missing
        self._torch = torch
        levels = _core.cpu_levels()
        chosen = level or os.environ.get(LEVEL_VARIABLE) or levels[-1]
        if chosen not in levels:
            raise InvalidArgument(f"level {chosen!r}: this machine has {', '.join(levels)}")
        if threads is not None and threads < 1:
            raise InvalidArgument(f"threads must be at least 1, not {threads}")
        self.level = chosen
        self.check_ids = check_ids
        self._num_threads = (lambda: threads) if threads else torch.get_num_threads
        self._own_threads = own_threads
        self._dtypes: dict[str, Any] = {
            "float32": torch.float32,
            "float16": torch.float16,
            "bfloat16": torch.bfloat16,
        }

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def device(self) -> str:
        """``cpu``."""
        return "cpu"

    def __repr__(self) -> str:
        return f"<CpuBackend {self.level}, {self._num_threads()} threads of {_core.cpu_team()}>"

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
        num_bytes = layout.pool_bytes(num_blocks)
        check_head_scales(layout, head_scales, self.device)
        return KVCache(layout, num_blocks, self._zeros(num_bytes), head_scales, self.device)

    def allocate_host(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A pool to swap to, block-major; see :meth:`~kvcatch.kernels.backend.Backend.allocate_host`.

        Raises:
            InvalidArgument: a size out of range.
            OutOfMemory: there is not so much memory; states the bytes.
        """
        from dataclasses import replace

        host = replace(layout, order="block")
        return KVCache(host, num_blocks, self._zeros(host.pool_bytes(num_blocks)))

    def _zeros(self, num_bytes: int) -> Tensor:
        try:
            buffer = self._torch.empty(num_bytes, dtype=self._torch.uint8)
        except RuntimeError as refused:  # how torch reports it
            raise OutOfMemory(f"no memory for a pool of {num_bytes} bytes") from refused
        _core.cpu_advise_huge_pages(buffer.numpy())  # before the first touch
        return buffer.zero_()

    # --- whole blocks ---------------------------------------------------------------------------

    def move_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Copy blocks to free ones; see :meth:`~kvcatch.kernels.backend.Backend.move_blocks`."""
        self._checked("cache", cache)
        self._copy(cache, cache, *check_moves(src, dst, cache, cache))

    def assign_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Assign blocks at once, in any order; see :meth:`~kvcatch.kernels.backend.Backend.assign_blocks`."""
        self._checked("cache", cache)
        sources, targets = check_moves(src, dst, cache, cache, hazards=True)
        _core.cpu_assign_blocks(
            cache.buffer.numpy(),
            _layout_of(cache),
            sources,
            targets,
            threads=self._num_threads(),
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
        self._copy(cache, host, *check_moves(src, dst, cache, host))
        return FinishedTransfer()

    def swap_in(
        self, host: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        """Copy blocks from a host pool, at once; see :meth:`~kvcatch.kernels.backend.Backend.swap_in`."""
        self._pair("host", host, "cache", cache)
        self._copy(host, cache, *check_moves(src, dst, host, cache))
        return FinishedTransfer()

    def _copy(self, source: KVCache, target: KVCache, src: Array, dst: Array) -> None:
        _core.cpu_copy_blocks(
            source.buffer.numpy(),
            _layout_of(source),
            target.buffer.numpy(),
            _layout_of(target),
            src,
            dst,
            threads=self._num_threads(),
            own_threads=self._own_threads,
        )

    # --- tokens ---------------------------------------------------------------------------------

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens into their slots; see :meth:`~kvcatch.kernels.backend.Backend.write_kv`."""
        plain = self._plain_write(cache, layer, key, value, slot_mapping)
        if not plain:
            check_write(cache, layer, key, value, slot_mapping, self.device)
            self._checked("cache", cache)
        try:
            _core.cpu_write_kv(
                cache.buffer.numpy(),
                _layout_of(cache),
                layer,
                self._array(key),
                self._array(value),
                _numpy(slot_mapping),
                dtype=_dtype_name(key),
                threads=self._num_threads(),
                head_scales=_head_scales(cache),
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
            source.buffer.numpy(),
            _layout_of(source),
            target.buffer.numpy(),
            _layout_of(target),
            sources,
            targets,
            threads=self._num_threads(),
            head_scales=_head_scales(quantised),
            own_threads=self._own_threads,
        )

    # --- attention ------------------------------------------------------------------------------

    def plan_decode(
        self, layout: KVLayout, seq_lens: BlockIds, num_q_heads: int, window: int | None = None
    ) -> CpuPlan:
        """Say for whom a decode is; see :meth:`~kvcatch.kernels.backend.Backend.plan_decode`."""
        check_group(num_q_heads, layout)
        lens = check_ids("seq_lens", seq_lens, (1 << 31) - 1)
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
            and self._plain_attention(cache, layer, query, block_tables, scale, out)
            and self._is_vector(seq_lens, self._torch.int32, query.shape[0])
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
            longest = int(_numpy(seq_lens).max(initial=0))
            check_tables_hold(seen.tables, rows, longest, cache.layout.block_size)

        if not plain:
            check()
        if plan is not None:
            _check_plan(plan, cache, query, window)
        lens = _numpy(seq_lens)
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
        check_tables_hold(
            seen.tables, len(chunks.seq_lens), longest, cache.layout.block_size
        )
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
            out = self._torch.empty(query.shape, dtype=query.dtype)
        _core.cpu_attention(
            cache.buffer.numpy(),
            _layout_of(cache),
            layer,
            self._array(query),
            _numpy(block_tables),
            lens,
            self._array(out),
            dtype=_dtype_name(query),
            scale=scale,
            window=check_window(window),
            threads=self._num_threads(),
            level=self.level,
            head_scales=_head_scales(cache),
            soft_cap=soft_cap,
            alibi_slopes=None if alibi_slopes is None else _numpy(alibi_slopes),
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

    def _plain_write(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> bool:
        """Whether a write is plainly right: the common case in few steps. Anything else goes through all checks."""
        if not self._plain_cache(cache, layer) or not isinstance(key, self._torch.Tensor):
            return False
        layout = cache.layout
        shape = key.shape
        return (
            len(shape) == 3
            and shape[1] == layout.num_kv_heads
            and shape[2] == layout.head_dim
            and self._is_plain(key, self._dtypes.get(layout.dtype))
            and self._is_plain(value, key.dtype)
            and value.shape == shape
            and self._is_vector(slot_mapping, self._torch.int64, shape[0])
        )

    def _plain_attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        scale: float,
        out: Tensor | None,
    ) -> bool:
        """As :meth:`_plain_write`, for attention."""
        if not self._plain_cache(cache, layer) or not isinstance(query, self._torch.Tensor):
            return False
        layout = cache.layout
        shape = query.shape
        return (
            type(scale) is float
            and len(shape) == 3
            and shape[2] == layout.head_dim
            and shape[1] % layout.num_kv_heads == 0
            and 1 <= shape[1] // layout.num_kv_heads <= 16
            and self._is_plain(query, self._dtypes.get(layout.dtype))
            and self._is_plain(block_tables, self._torch.int32)
            and len(block_tables.shape) == 2
            and block_tables.shape[0] == shape[0]
            and (out is None or (self._is_plain(out, query.dtype) and out.shape == shape))
        )

    def _plain_cache(self, cache: KVCache, layer: int) -> bool:
        if type(cache) is not KVCache or cache.device != "cpu" or type(layer) is not int:
            return False
        layout = cache.layout
        return (
            layout.scale == "none"
            and 0 <= layer < layout.num_layers
            and self._is_plain(cache.buffer, self._torch.uint8)
        )

    def _is_plain(self, tensor: Tensor, dtype: Any) -> bool:
        return (
            isinstance(tensor, self._torch.Tensor)
            and tensor.dtype is dtype
            and not tensor.requires_grad
            and tensor.is_contiguous()
            and tensor.is_cpu
            and tensor.data_ptr() % ALIGNMENT == 0
        )

    def _is_vector(self, tensor: Tensor, dtype: Any, length: int) -> bool:
        return (
            self._is_plain(tensor, dtype) and len(tensor.shape) == 1 and tensor.shape[0] == length
        )

    def _array(self, tensor: Tensor) -> Array:
        """A numpy view of a tensor of floats; 16-bit ones as int16, which numpy has and bfloat16 it has not."""
        if not isinstance(tensor, self._torch.Tensor):
            return tensor.view(np.int16) if tensor.itemsize == 2 else tensor  # type: ignore[no-any-return]
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype is not self._torch.float32:
            tensor = tensor.view(self._torch.int16)
        return tensor.numpy()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _core_layout(layout: KVLayout, num_blocks: int) -> _core.CpuLayout:
    s = layout.strides(num_blocks)
    return _core.CpuLayout(
        num_blocks,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.dtype,
        layout.scale,
        (s.block, s.layer, s.kv, s.head, s.token, s.scale, s.scale_head, s.scale_token),
    )


def _layout_of(cache: KVCache) -> _core.CpuLayout:
    return _core_layout(cache.layout, cache.num_blocks)


def _first(name: str, staging: KVCache, count: int) -> Array:
    """The staging blocks ``0..count-1``."""
    if count > staging.num_blocks:
        raise InvalidArgument(
            f"{name} has {staging.num_blocks} blocks: {count} block ids are too many"
        )
    return np.arange(count, dtype=np.int32)


def _head_scales(cache: KVCache) -> Array | None:
    """The scales beside a pool, where its layout keeps them there."""
    layout = cache.layout
    if layout.scale != "head":
        return None
    shape = (layout.num_layers, 2, layout.num_kv_heads)
    expect("head_scales", cache.head_scales, shape=shape, dtype="float32", device="cpu")
    return _numpy(cache.head_scales)


def _numpy(tensor: Tensor) -> Array:
    """A contiguous numpy array of a tensor that numpy has a dtype for."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor)
    return tensor.detach().contiguous().numpy()  # type: ignore[no-any-return]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_plan(plan: DecodePlan, cache: KVCache, query: Tensor, window: int | None) -> None:
    """Refuse a plan that was made for another batch, layout or window."""
    if not isinstance(plan, CpuPlan):
        raise InvalidType(f"plan must come from plan_decode of this backend, not {type(plan).__name__}")
    wanted = (query.shape[0], query.shape[1], cache.layout, window or 0)
    made = (plan.num_seqs, plan.num_q_heads, plan.layout, plan.window)
    if wanted == made:
        return
    names = ("sequences", "query heads", "layout", "window")
    name, have, need = next(
        (n, a, b) for n, a, b in zip(names, made, wanted, strict=True) if a != b
    )
    raise InvalidArgument(f"plan was made for {name} {have}, not {need}: make one for this step")
