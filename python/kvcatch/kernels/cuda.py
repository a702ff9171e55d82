"""The GPU's backend: CuPy over the kernels of ``cuda/``.

    backend = get_backend("cuda")                       # torch's tensors and torch's current stream
    backend = get_backend("cuda:1", library="cupy")     # CuPy's
    cache, host = backend.allocate(layout, 4096), backend.allocate_host(layout, 16384)
    transfer = backend.swap_out(cache, host, src, dst)  # on a stream of its own
    transfer.wait()                                     # the current stream waits, the host goes on

Nothing here waits for the GPU but ``synchronise``, a decode without a plan, and a kernel's first use, when it is built
(see :meth:`CudaBackend.build`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.checks import (
    check_buffer,
    check_cache,
    check_layout,
    check_moves,
    check_same_layout,
)
from kvcatch.kernels.cuda_device import CupyDevice
from kvcatch.kernels.cuda_runtime import CudaRuntime
from kvcatch.kernels.cuda_swap import CudaTransfer, Swaps
from kvcatch.kernels.cuda_variants import attention_variants, block_variants
from kvcatch.kernels.device_attention import AttentionLaunches
from kvcatch.kernels.device_blocks import BlockLaunches
from kvcatch.kernels.modules import KernelCompiler

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.kernels.attention_checks import Chunks
    from kvcatch.kernels.backend import BlockIds
    from kvcatch.kernels.cuda_device import Library
    from kvcatch.kernels.layout import KVLayout
    from kvcatch.kernels.tensors import TensorView

__all__ = ["CudaBackend"]


class CudaBackend(BlockLaunches, AttentionLaunches):
    """KV blocks on one GPU; see :class:`~kvcatch.kernels.backend.Backend`.

    It makes the tensors of one library and follows that library's current stream; tensors that are passed in may be
    torch's or CuPy's all the same. Tensors of other libraries come in by ``cupy.from_dlpack`` or ``torch.from_dlpack``.

    Args:
        index: the CUDA device number.
        library: ``torch`` or ``cupy``. Not given: torch where it is installed with CUDA.
        check_ids: check every block id and slot on the device; ``synchronise`` raises the first bad one.
        source_dir: read kernel sources from this folder instead of those in the extension.
        cache_dir: where built kernels are kept, instead of ``KVCATCH_CACHE_DIR`` or the user's caches.

    Raises:
        MissingExtra: CuPy, NVRTC, CUDA's headers or the library are not installed.
        KernelError: there is no such GPU, or it is older or newer than the kernels can be built for.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        library: Library | None = None,
        check_ids: bool = False,
        source_dir: Path | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self._gpu = CupyDevice(index, library)
        self._launcher = CudaRuntime(self._gpu, KernelCompiler(source_dir, cache_dir))
        super().__init__(self._launcher, check_ids=check_ids)
        self._swaps = Swaps(self._gpu, self._launcher, self.copy_blocks)

    @property
    def library(self) -> Library:
        """Whose tensors it makes and whose current stream it follows."""
        return self._gpu.library

    def build(
        self,
        layout: KVLayout,
        num_q_heads: int | None = None,
        *,
        window: bool = False,
        soft_cap: bool = False,
        alibi: bool = False,
    ) -> int:
        """Build the kernels that pools of one layout use, those on disk excepted, so that no first call waits.

        Args:
            layout: of the pools.
            num_q_heads: query heads of the model on this rank, for the attention kernels too.
            window: the model has a sliding window.
            soft_cap: it caps its logits.
            alibi: it adds slopes to them.

        Returns:
            How many kernels there are.

        Raises:
            InvalidArgument: there are no attention kernels for this layout.
            KernelError: one does not compile for this GPU.
        """
        variants = block_variants(check_layout(layout), check_ids=self.check_ids)
        if num_q_heads is not None:
            variants += attention_variants(
                layout,
                num_q_heads,
                window=window,
                soft_cap=soft_cap,
                alibi=alibi,
                check_ids=self.check_ids,
            )
        for variant in variants:
            self._launcher.build(variant.source, variant.defines)
        return len(variants)

    def allocate_host(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A zeroed pool in pinned host memory, block-major; see :class:`~kvcatch.kernels.backend.Backend`."""
        layout = replace(check_layout(layout), order="block")
        array = self._gpu.pinned(layout.pool_bytes(num_blocks))
        array.fill(0)
        return KVCache(layout, num_blocks, self._gpu.host_tensor(array), pinned=True)

    def swap_out(self, cache: KVCache, host: KVCache, src: BlockIds, dst: BlockIds) -> CudaTransfer:
        """Start copying blocks to a host pool; see :class:`~kvcatch.kernels.backend.Backend`."""
        self._check_swap(cache, host)
        return self._swaps.start(cache, host, *check_moves(src, dst, cache, host))

    def swap_in(self, host: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds) -> CudaTransfer:
        """Start copying blocks from a host pool; see :class:`~kvcatch.kernels.backend.Backend`."""
        self._check_swap(cache, host)
        return self._swaps.start(host, cache, *check_moves(src, dst, host, cache))

    def synchronise(self) -> None:
        """Wait for the current stream and for all swaps, and raise what ``check_ids`` found.

        Raises:
            KernelError: a kernel or a copy failed, or the device met a bad block id.
        """
        self._swaps.synchronise()
        super().synchronise()

    def _prefill_lists(
        self, chunks: Chunks, group: int, window: int
    ) -> tuple[TensorView, TensorView]:
        # The lists are this backend's and live until another prefill needs others: a graph would outlive them.
        self._launcher.refuse_while_recorded("the lists of a prefill cannot be kept")
        return super()._prefill_lists(chunks, group, window)

    def _check_swap(self, cache: KVCache, host: KVCache) -> None:
        check_buffer("cache", check_cache("cache", cache, self.device))
        check_buffer("host", check_cache("host", host, "cpu"))
        if not host.pinned:
            raise InvalidArgument(
                "host is not pinned memory, which a GPU cannot copy to and from by itself: use allocate_host"
            )
        check_same_layout(cache, host)
