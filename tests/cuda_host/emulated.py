"""kvcatch's CUDA backend without a GPU: its launching code and kernels, run by the emulator on torch CPU tensors."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_host.build import CUDA, build
from cuda_host.kernel import ORDERS
from kvcatch.errors import InvalidArgument, OutOfMemory
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.checks import (
    check_apart,
    check_cache,
    check_layout,
    check_moves,
    check_same_layout,
)
from kvcatch.kernels.device_attention import AttentionLaunches
from kvcatch.kernels.device_blocks import BlockLaunches
from kvcatch.kernels.tensors import TensorView, item_bytes, view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cuda_host.kernel import Order
    from kvcatch.kernels.backend import BlockIds
    from kvcatch.kernels.layout import KVLayout

__all__ = ["EmulatedBackend", "EmulatedRuntime"]

POISON = 0xFF
"""What uninitialised memory holds: NaN in every float type, -1 in every integer type."""


class EmulatedRuntime:
    """A :class:`kvcatch.kernels.runtime.Runtime` on the CPU, where every launch has ended when it returns.

    Args:
        orders: of threads and blocks: with several, every launch runs in each from the same bytes and must leave the
            same bytes.
        num_sms: multiprocessors that planners are told of.
        seed: of random order; each launch draws its own from it.
        sanitizer: as :func:`cuda_host.build.build`.
        cuda_dir: where the sources are.
    """

    name = "emulated"
    device = "cpu"

    def __init__(
        self,
        orders: Sequence[Order] = ("forward",),
        *,
        num_sms: int = 4,
        seed: int = 0,
        sanitizer: str | None = None,
        cuda_dir: Path = CUDA,
    ) -> None:
        unknown = [order for order in orders if order not in ORDERS]
        if unknown or not orders:
            raise InvalidArgument(f"orders {list(orders)}: must be some of {', '.join(ORDERS)}")
        self.orders = tuple(orders)
        self.num_sms = num_sms
        self.launches = 0
        self._seed = seed
        self._sanitizer = sanitizer
        self._cuda_dir = cuda_dir

    def launch(
        self,
        source: str,
        kernel: str,
        defines: Mapping[str, int],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` of ``cuda/<source>.cu`` in every order asked for.

        Raises:
            BuildError: it does not compile.
            EmulationError: as :meth:`cuda_host.kernel.Kernel.__call__` and ``in_all_orders``.
        """
        function = build(self._cuda_dir / f"{source}.cu", defines, self._sanitizer).get_function(
            kernel
        )
        self.launches += 1
        function.in_all_orders(
            grid, block, arguments, shared_bytes, self._seed + self.launches, self.orders
        )

    def upload(self, array: np.ndarray[Any, Any]) -> TensorView:
        """A copy of ``array``."""
        return view(np.array(array, order="C"))

    def download(self, seen: TensorView) -> np.ndarray[Any, Any]:
        """A copy of an array."""
        count = int(np.prod(seen.shape, dtype=np.int64))
        array = np.empty(count, seen.dtype)
        ctypes.memmove(array.ctypes.data, seen.pointer, array.nbytes)
        return array.reshape(seen.shape)

    def scratch(self, shape: tuple[int, ...], dtype: str) -> TensorView:
        """Poisoned memory."""
        items = int(np.prod(shape, dtype=np.int64))
        memory = _aligned(items * item_bytes(dtype), POISON)
        size = item_bytes(dtype)
        strides = tuple(
            size * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))
        )
        return TensorView(memory.ctypes.data, tuple(shape), strides, dtype, "cpu", True, memory)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """A poisoned tensor of the dtype of ``like``."""
        import torch

        if not isinstance(like, torch.Tensor):
            result = np.empty(shape, like.dtype)
            result.view(np.uint8)[...] = POISON
            return result
        result = torch.empty(shape, dtype=like.dtype, device=like.device)
        result.view(torch.uint8).fill_(POISON)
        return result

    def zeros(self, num_bytes: int) -> Any:
        """A zeroed uint8 tensor at a multiple of 256 bytes.

        Raises:
            OutOfMemory: there is not that much.
        """
        import torch

        try:
            return torch.from_numpy(_aligned(num_bytes, 0))
        except MemoryError:
            raise OutOfMemory(f"no {num_bytes} bytes of memory for the emulated pool") from None

    def synchronise(self) -> None:
        """Nothing is under way."""


class FinishedTransfer:
    """A swap that was done when it was asked for."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def synchronise(self) -> None:
        """There is nothing to wait for."""


class EmulatedBackend(BlockLaunches, AttentionLaunches):
    """A :class:`kvcatch.kernels.backend.Backend` whose kernels the emulator runs.

    Args:
        orders: as :class:`EmulatedRuntime`.
        check_ids: check block ids in the kernels too.
        num_sms: multiprocessors that planners are told of.
        seed: of random order.
        sanitizer: as :func:`cuda_host.build.build`.
        cuda_dir: where the sources are.
    """

    def __init__(
        self,
        orders: Sequence[Order] = ("forward",),
        *,
        check_ids: bool = False,
        num_sms: int = 4,
        seed: int = 0,
        sanitizer: str | None = None,
        cuda_dir: Path = CUDA,
    ) -> None:
        runtime = EmulatedRuntime(
            orders, num_sms=num_sms, seed=seed, sanitizer=sanitizer, cuda_dir=cuda_dir
        )
        super().__init__(runtime, check_ids=check_ids)

    def allocate_host(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A zeroed pool, block-major."""
        layout = replace(check_layout(layout), order="block")
        buffer = self.runtime.zeros(layout.pool_bytes(num_blocks))
        return KVCache(layout, num_blocks, buffer, pinned=True)

    def swap_out(
        self, cache: KVCache, host: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        """Copy blocks to a host pool by the kernel that serves layer-major pools."""
        return self._swap(cache, host, src, dst)

    def swap_in(
        self, host: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        """Copy blocks from a host pool by the kernel that serves layer-major pools."""
        return self._swap(host, cache, src, dst)

    def _swap(
        self, source: KVCache, target: KVCache, src: BlockIds, dst: BlockIds
    ) -> FinishedTransfer:
        check_cache("source", source, self.device)
        check_cache("target", target, self.device)
        check_same_layout(source, target)
        check_apart(source, target)
        self.copy_blocks(source, target, *check_moves(src, dst, source, target))
        return FinishedTransfer()


def _aligned(num_bytes: int, fill: int) -> np.ndarray[Any, Any]:
    """Bytes at a multiple of 256."""
    memory = np.full(num_bytes + 255, fill, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + num_bytes]
