"""Swaps between a GPU's pool and pinned host memory, on a stream of their own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import KernelError
from kvcatch.kernels.tensors import view

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvcatch.kernels.cache import KVCache
    from kvcatch.kernels.cuda_device import CupyDevice
    from kvcatch.kernels.cuda_runtime import CudaRuntime

    Ids = NDArray[np.int32]

__all__ = ["CudaTransfer", "Swaps", "merge_runs"]

DMA_BYTES = 64 << 10
"""Pieces smaller than this, on average, are copied by a kernel: a DMA costs more to start than they take."""

COPY_THREAD_BLOCKS = 16
"""Blocks of threads that a copying kernel gets: they saturate PCIe, and the rest of the GPU stays free."""


def merge_runs(src: Ids, dst: Ids) -> tuple[Ids, Ids, Ids]:
    """Merge moves whose blocks lie beside each other at both ends.

    Returns:
        First source block, first destination block and number of blocks of each run, by rising source.
    """
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    starts = np.flatnonzero(
        np.concatenate([[True], (np.diff(src) != 1) | (np.diff(dst) != 1)])[: len(src)]
    )
    lengths = np.diff(np.append(starts, len(src))).astype(np.int32)
    return src[starts], dst[starts], lengths


class CudaTransfer:
    """A swap under way on the swap stream. It keeps both pools alive until its bytes have arrived."""

    def __init__(self, swaps: Swaps, event: Any, pools: tuple[KVCache, KVCache]) -> None:
        self._swaps, self._event, self._pools = swaps, event, pools

    def done(self) -> bool:
        """Whether all bytes have arrived; does not wait."""
        return self._swaps.device.done(self._event)

    def wait(self) -> None:
        """Make the current stream wait for it; the host goes on."""
        self._swaps.device.wait(self._swaps.runtime.stream(), self._event)

    def synchronise(self) -> None:
        """Make the host wait for it.

        Raises:
            KernelError: the copy failed.
        """
        self._swaps.device.synchronise_event(self._event)


class Swaps:
    """The swap stream of one GPU.

    A swap starts when what the caller's stream had been given has run: the blocks it reads are written by then, and
    those it overwrites are no longer read. Swaps follow each other in the order of the calls.

    Args:
        device: the GPU.
        runtime: its launches.
        copy_by_kernel: copies blocks between two pools by a kernel on the runtime's current stream, given most thread
            blocks to use.
    """

    def __init__(
        self,
        device: CupyDevice,
        runtime: CudaRuntime,
        copy_by_kernel: Callable[[KVCache, KVCache, Ids, Ids, int], None],
    ) -> None:
        self.device, self.runtime, self._copy_by_kernel = device, runtime, copy_by_kernel
        self._stream = device.new_stream()
        self._under_way: list[CudaTransfer] = []
        self._lock = threading.Lock()

    def start(self, source: KVCache, target: KVCache, src: Ids, dst: Ids) -> CudaTransfer:
        """Start copying blocks ``src`` of one pool to blocks ``dst`` of the other.

        Raises:
            KernelError: the copy was refused, or a CUDA graph is being recorded from the current stream.
        """
        now = self.runtime.stream()
        if self.device.capturing(now):
            raise KernelError(
                "blocks cannot be swapped while a CUDA graph is recorded: swap before or after"
            )
        with self._lock:
            self._under_way = [swap for swap in self._under_way if not swap.done()]
            self.device.wait(self._stream, self.device.record(now))
            try:
                if len(src):
                    self._copy(source, target, src, dst)
            finally:  # a refused copy may follow others that run: they too keep the pools alive
                transfer = CudaTransfer(self, self.device.record(self._stream), (source, target))
                self._under_way.append(transfer)
        return transfer

    def _copy(self, source: KVCache, target: KVCache, src: Ids, dst: Ids) -> None:
        runs = merge_runs(src, dst)
        block_bytes = source.layout.block_bytes
        in_one_run = source.layout.regions_per_block == target.layout.regions_per_block == 1
        if not in_one_run or len(src) * block_bytes < DMA_BYTES * len(runs[0]):
            with self.runtime.on(self._stream):
                self._copy_by_kernel(source, target, src, dst, COPY_THREAD_BLOCKS)
            return
        start, end = view(source.buffer).pointer, view(target.buffer).pointer
        first, to, lengths = (part.astype(np.int64) * block_bytes for part in runs)
        self.device.copy_many(
            (end + to).tolist(), (start + first).tolist(), lengths.tolist(), self._stream
        )

    def synchronise(self) -> None:
        """Make the host wait for all swaps.

        Raises:
            KernelError: one failed.
        """
        with self._lock:
            for swap in self._under_way:
                swap.synchronise()
            self._under_way = []
