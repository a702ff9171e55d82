"""Launches of the kernels that move, write and convert KV bytes: the checks, the grids, the arguments.

Shared by the ``cuda`` backend and the tests' ``emulated`` one; :class:`~kvcatch.kernels.runtime.Runtime` says what a
machine must be able to do. Everything is checked before anything is launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcatch import _core
from kvcatch.errors import InvalidArgument, KernelError
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.checks import (
    check_apart,
    check_buffer,
    check_cache,
    check_cache_scales,
    check_conversion,
    check_head_scales,
    check_ids,
    check_layout,
    check_moves,
    check_same_layout,
    check_write,
)
from kvcatch.kernels.tensors import item_bytes, view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds, Tensor
    from kvcatch.kernels.layout import KVLayout
    from kvcatch.kernels.runtime import Runtime
    from kvcatch.kernels.tensors import TensorView

    Ids = NDArray[np.int32]

__all__ = ["DTYPE_CODES", "KERNEL_NAMES", "SCALE_CODES", "BlockLaunches"]

DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3": 3}
"""``KV_DTYPE`` and ``KV_IO`` of ``cuda/common.cuh``."""

SCALE_CODES = {"none": 0, "token": 1, "head": 2, "block": 3}
"""``KV_SCALE`` of ``cuda/common.cuh``."""

KERNEL_NAMES = {
    1: "move_blocks",
    2: "assign_blocks",
    3: "write_kv",
    4: "quantise_blocks",
    5: "dequantise_blocks",
    6: "decode_attention",
    7: "prefill_attention",
}
"""``kernel_code`` of ``cuda/common.cuh``: which kernel recorded a bad id."""

# As in the .cu files: threads of a block, and what one warp takes at a time.
THREADS = 256
WARPS = THREADS // 32
MOVE_CHUNK = 32 * 16 * 8
ASSIGN_CHUNK = 32 * 16 * 4
BLOCKS_PER_SM = 4
"""Thread blocks of 256 that a processor holds of the kernels with a persistent grid, at most."""

MAX_ITEMS = (1 << 31) - 1
"""Most pieces of work a launch may have: the kernels count them in 32 bits."""


class BlockLaunches:
    """The calls of :class:`~kvcatch.kernels.backend.Backend` that copy, write and convert, on any :class:`Runtime`.

    Args:
        runtime: what builds and launches the kernels.
        check_ids: check every block id and slot on the device too. A bad one is skipped and the first is recorded;
            :meth:`synchronise` raises it.

    Attributes:
        errors: the record of the first bad id, int32 {kernel, index, id, bound} on the device;
            ``None`` without the check.
    """

    def __init__(self, runtime: Runtime, *, check_ids: bool = False) -> None:
        self.runtime = runtime
        self.check_ids = check_ids
        self.errors: TensorView | None = self._no_errors() if check_ids else None

    @property
    def name(self) -> str:
        """``cuda`` or ``emulated``."""
        return self.runtime.name

    @property
    def device(self) -> str:
        """``cuda:N``, or ``cpu`` under emulation."""
        return self.runtime.device

    def allocate(
        self, layout: KVLayout, num_blocks: int, head_scales: Tensor | None = None
    ) -> KVCache:
        """A zeroed pool; see :meth:`~kvcatch.kernels.backend.Backend.allocate`."""
        num_bytes = check_layout(layout).pool_bytes(num_blocks)
        check_head_scales(layout, head_scales, self.device)
        return KVCache(layout, num_blocks, self.runtime.zeros(num_bytes), head_scales, self.device)

    def synchronise(self) -> None:
        """Wait for the current stream.

        Raises:
            KernelError: the device met a bad block id or slot since the last call; names the kernel, the place
                and the id.
        """
        self.runtime.synchronise()
        if self.errors is None:
            return
        code, index, found, bound = self.runtime.download(self.errors).tolist()
        if code:
            self.errors = self._no_errors()
            kernel = KERNEL_NAMES.get(code, f"kernel {code}")
            what = "slot" if kernel == "write_kv" else "block id"
            raise KernelError(
                f"{kernel} met {what} {found} at index {index}: must be within 0..{bound - 1}. It was skipped;"
                " others after it may have been too"
            )

    # --- whole blocks ---------------------------------------------------------------------------

    def move_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Copy blocks to free ones; see :meth:`~kvcatch.kernels.backend.Backend.move_blocks`."""
        self._checked("cache", cache)
        sources, targets = check_moves(src, dst, cache, cache)
        self.copy_blocks(cache, cache, sources, targets)

    def assign_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Assign blocks at once, in any order; see :meth:`~kvcatch.kernels.backend.Backend.assign_blocks`."""
        pool = self._checked("cache", cache)
        sources, targets = check_moves(src, dst, cache, cache, hazards=True)
        ops, first = _core.order_moves(sources, targets)
        groups = len(first) - 1
        if groups < 1:
            return
        regions, region_bytes = _regions(cache, cache)
        block, region = _region_strides(cache)
        chunks = -(-region_bytes // ASSIGN_CHUNK)
        items = _check_items(groups * regions * chunks)
        self.runtime.launch(
            "block_assign",
            "assign_blocks",
            self._defines(),
            (self._persistent(items),),
            (THREADS,),
            (
                pool,
                self.runtime.upload(ops),
                self.runtime.upload(first),
                np.uint32(groups),
                np.uint32(regions),
                np.uint32(chunks),
                np.int64(region_bytes),
                np.int64(block),
                np.int64(region),
                np.int32(cache.num_blocks),
                self.errors,
            ),
        )

    def gather_blocks(self, cache: KVCache, block_ids: BlockIds, out: KVCache) -> None:
        """Copy blocks into a staging pool; see :meth:`~kvcatch.kernels.backend.Backend.gather_blocks`."""
        self._staged(cache, out, "out")
        ids = check_ids("block_ids", block_ids, cache.num_blocks)
        sources, targets = check_moves(ids, _first("out", out, ids), cache, out)
        self.copy_blocks(cache, out, sources, targets)

    def scatter_blocks(self, staging: KVCache, cache: KVCache, block_ids: BlockIds) -> None:
        """Copy blocks out of a staging pool; see :meth:`~kvcatch.kernels.backend.Backend.scatter_blocks`."""
        self._staged(cache, staging, "staging")
        ids = check_ids("block_ids", block_ids, cache.num_blocks)
        sources, targets = check_moves(_first("staging", staging, ids), ids, staging, cache)
        self.copy_blocks(staging, cache, sources, targets)

    def copy_blocks(
        self,
        source: KVCache,
        target: KVCache,
        sources: Ids,
        targets: Ids,
        max_thread_blocks: int | None = None,
    ) -> None:
        """Copy blocks between pools by the kernel, on the current stream. The caller has checked everything.

        Args:
            source: the pool read; it may be pinned host memory, as ``target`` may.
            target: the pool written; the orders of the two may differ.
            sources: block ids in ``source``.
            targets: block ids in ``target``, all different, none of them a source where the pools are one.
            max_thread_blocks: most thread blocks to use, so that other work keeps the rest of the device.
        """
        if not len(sources):
            return
        regions, region_bytes = _regions(source, target)
        chunks = -(-region_bytes // MOVE_CHUNK)
        items = _check_items(len(sources) * regions * chunks)
        source_block, source_region = _region_strides(source)
        target_block, target_region = _region_strides(target)
        grid = self._persistent(items)
        self.runtime.launch(
            "block_move",
            "move_blocks",
            self._defines(),
            (grid if max_thread_blocks is None else min(grid, max_thread_blocks),),
            (THREADS,),
            (
                view(source.buffer),
                view(target.buffer),
                self.runtime.upload(_pairs(sources, targets)),
                np.uint32(len(sources)),
                np.uint32(regions),
                np.uint32(chunks),
                np.int64(region_bytes),
                np.int64(source_block),
                np.int64(source_region),
                np.int64(target_block),
                np.int64(target_region),
                np.int32(source.num_blocks),
                np.int32(target.num_blocks),
                self.errors,
            ),
        )

    # --- tokens and conversions -----------------------------------------------------------------

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens into their slots; see :meth:`~kvcatch.kernels.backend.Backend.write_kv`."""
        keys, values, slots = check_write(cache, layer, key, value, slot_mapping, self.device)
        pool = self._checked("cache", cache)
        scales = check_cache_scales(cache)
        layout, strides = cache.layout, cache.strides
        tokens, heads, _ = keys.shape
        if not tokens:
            return
        lanes = _lanes(layout.head_dim * layout.item_bytes // 16)
        rows_per_block = THREADS // lanes
        rows = _check_items(tokens * heads)
        head_scales = None
        if scales is not None:  # those of this layer
            head_scales = view(cache.head_scales[layer])
        self.runtime.launch(
            "write_kv",
            "write_kv",
            self._defines(layout, keys.dtype),
            (-(-rows // rows_per_block),),
            (THREADS,),
            (
                keys,
                values,
                *_row_strides(keys),
                *_row_strides(values),
                slots,
                np.uint32(tokens),
                np.uint32(heads),
                pool,
                np.int64(layer * strides.layer),
                np.int64(strides.block),
                np.int64(strides.kv),
                np.int64(strides.scale),
                head_scales,
                np.int64(cache.num_blocks * layout.block_size),
                self.errors,
            ),
        )

    def quantise_blocks(
        self, source: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert blocks to e4m3; see :meth:`~kvcatch.kernels.backend.Backend.quantise_blocks`."""
        self._convert("quantise_blocks", source, cache, src, dst, quantised=cache)

    def dequantise_blocks(
        self, cache: KVCache, target: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert blocks from e4m3; see :meth:`~kvcatch.kernels.backend.Backend.dequantise_blocks`."""
        self._convert("dequantise_blocks", cache, target, src, dst, quantised=cache)

    def _convert(
        self,
        kernel: str,
        source: KVCache,
        target: KVCache,
        src: BlockIds,
        dst: BlockIds,
        quantised: KVCache,
    ) -> None:
        one, other = self._checked("source", source), self._checked("target", target)
        wide = target if quantised is source else source
        check_conversion(wide, quantised)
        scales = check_cache_scales(quantised)
        sources, targets = check_moves(src, dst, source, target)
        if not len(sources):
            return
        layout = quantised.layout
        tiles = len(sources) * layout.num_layers * 2 * layout.num_kv_heads
        items = _check_items(tiles)
        self.runtime.launch(
            "quantise",
            kernel,
            self._defines(layout, wide.layout.dtype),
            (self._persistent(items),),
            (THREADS,),
            (
                one,
                other,
                self.runtime.upload(_pairs(sources, targets)),
                np.uint32(len(sources)),
                np.uint32(layout.num_layers),
                np.uint32(layout.num_kv_heads),
                *_tile_strides(source),
                *_tile_strides(target),
                np.int64(quantised.strides.scale),
                scales,
                np.int32(source.num_blocks),
                np.int32(target.num_blocks),
                self.errors,
            ),
        )

    # --- helpers --------------------------------------------------------------------------------

    def _no_errors(self) -> TensorView:
        return self.runtime.upload(np.zeros(4, np.int32))

    def _checked(self, name: str, cache: KVCache) -> TensorView:
        return check_buffer(name, check_cache(name, cache, self.device))

    def _staged(self, cache: KVCache, staging: KVCache, name: str) -> None:
        self._checked("cache", cache)
        self._checked(name, staging)
        check_same_layout(cache, staging)
        check_apart(cache, staging)

    def _defines(self, layout: KVLayout | None = None, io_dtype: str = "") -> dict[str, int]:
        defines = {"KV_CHECK_IDS": int(self.check_ids)}
        if layout is not None:
            defines |= {
                "KV_DTYPE": DTYPE_CODES[layout.dtype],
                "KV_IO": DTYPE_CODES[io_dtype],
                "KV_SCALE": SCALE_CODES[layout.scale],
                "KV_HEAD_DIM": layout.head_dim,
                "KV_BLOCK_SIZE": layout.block_size,
            }
        return defines

    def _persistent(self, items: int) -> int:
        """Thread blocks of a persistent grid: one warp an item, and no more than the device holds at once."""
        return min(-(-items // WARPS), BLOCKS_PER_SM * self.runtime.num_sms)


def _first(name: str, staging: KVCache, block_ids: Ids) -> Ids:
    """The staging blocks ``0..n-1`` that stand for ``block_ids``."""
    count = len(block_ids)
    if count > staging.num_blocks:
        raise InvalidArgument(
            f"{name} has {staging.num_blocks} blocks: {count} block ids are too many"
        )
    return np.arange(count, dtype=np.int32)


def _pairs(sources: Ids, targets: Ids) -> Ids:
    return np.stack([sources, targets], axis=1).astype(np.int32, copy=False)


def _regions(source: KVCache, target: KVCache) -> tuple[int, int]:
    """Runs of bytes that make up a block in both pools, and the bytes of one."""
    layout = source.layout
    regions = max(layout.regions_per_block, target.layout.regions_per_block)
    return regions, layout.block_bytes // regions


def _region_strides(cache: KVCache) -> tuple[int, int]:
    """Bytes between blocks, and between the runs of a block where it has more than one."""
    strides = cache.strides
    return strides.block, strides.layer


def _tile_strides(cache: KVCache) -> tuple[np.int64, np.int64, np.int64]:
    strides = cache.strides
    return np.int64(strides.block), np.int64(strides.layer), np.int64(strides.kv)


def _row_strides(seen: TensorView) -> tuple[np.int64, np.int64]:
    """Elements between tokens and between heads; a dimension of one has no stride."""
    item = item_bytes(seen.dtype)
    token, head = (
        stride // item if size > 1 else 0
        for size, stride in zip(seen.shape[:2], seen.strides[:2], strict=True)
    )
    return np.int64(token), np.int64(head)


def _lanes(units: int) -> int:
    """Lanes that share a row of ``units`` 16-byte units, as ``lanes_for`` in ``cuda/common.cuh``."""
    return min(32, 1 << (units - 1).bit_length())


def _check_items(items: int) -> int:
    if items > MAX_ITEMS:
        raise InvalidArgument(
            f"{items} pieces of work in one call: at most {MAX_ITEMS}; call it in parts"
        )
    return items
