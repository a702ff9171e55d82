"""Every call that kvcatch makes into CuPy, torch and CUDA's bindings, for one GPU.

Streams are passed explicitly, so that what is ordered against what can be read in ``cuda_runtime.py`` and
``cuda_swap.py`` and be tested without a GPU: the tests put a simulated device in place of this one.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvcatch.errors import InvalidArgument, KernelError, MissingExtra, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["CupyDevice", "Library", "Stream"]

Library = Literal["torch", "cupy"]

SCRATCH_KEPT = 256 << 20
"""Bytes of freed scratch that the pool keeps for the next calls instead of giving them back at a synchronisation."""

DEFAULT_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel may use without asking for more."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A CUDA stream: its handle, and the object that keeps it alive."""

    ptr: int
    owner: Any = None


class CupyDevice:
    """One GPU through CuPy.

    Args:
        index: its CUDA device number.
        library: whose tensors it makes and whose current stream is the caller's: ``torch``, or ``cupy``. Not given:
            torch where it is installed with CUDA.

    Raises:
        InvalidArgument: an unknown library.
        MissingExtra: CuPy is not installed.
        KernelError: there is no such GPU, or no driver.
    """

    def __init__(self, index: int = 0, library: Library | None = None) -> None:
        try:
            import cupy
        except ImportError as error:
            raise MissingExtra(
                "the cuda backend needs CuPy: pip install 'kvcatch[cuda]'"
            ) from error
        if library not in {None, "torch", "cupy"}:
            raise InvalidArgument(f"library must be torch or cupy, not {library!r}")
        self._cupy, self._cuda, self._runtime = cupy, cupy.cuda, cupy.cuda.runtime
        self._errors = (self._runtime.CUDARuntimeError, self._cuda.driver.CUDADriverError)
        try:
            count = self._runtime.getDeviceCount()
        except self._errors as error:
            raise KernelError(f"there is no GPU that CUDA can use: {error}") from error
        if not 0 <= index < count:
            raise KernelError(f"there is no GPU {index}: CUDA sees {count}")
        self.index, self.name = index, f"cuda:{index}"
        self._torch = _torch(library)
        self.library: Library = "torch" if self._torch is not None else "cupy"
        self.capability = int(self._cuda.Device(index).compute_capability)
        self.num_sms = int(
            self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrMultiProcessorCount, index)
        )
        self._batch = _batched_copies()
        with self._active("the memory pool"):
            properties = self._runtime.MemPoolProps(
                self._runtime.cudaMemAllocationTypePinned,
                self._runtime.cudaMemHandleTypeNone,
                self._runtime.cudaMemLocationTypeDevice,
                index,
            )
            self._pool = self._runtime.memPoolCreate(properties)
            self._runtime.memPoolSetAttribute(
                self._pool, self._runtime.cudaMemPoolAttrReleaseThreshold, SCRATCH_KEPT
            )

    @contextlib.contextmanager
    def _active(self, what: str) -> Iterator[None]:
        """Make this GPU the current one for some calls; CUDA's errors become KernelError."""
        try:
            before = self._runtime.getDevice()
            if before != self.index:
                self._runtime.setDevice(self.index)
            try:
                yield
            finally:
                if before != self.index:
                    self._runtime.setDevice(before)
        except self._errors as error:
            raise KernelError(f"{what} on {self.name}: {error}") from error

    # --- streams and events ---------------------------------------------------------------------

    def current_stream(self) -> Stream:
        """The caller's current stream on this GPU, as the library of the tensors has it."""
        if self._torch is not None:
            stream = self._torch.cuda.current_stream(self.index)
            return Stream(stream.cuda_stream, stream)
        stream = self._cuda.get_current_stream(self.index)
        return Stream(stream.ptr, stream)

    def new_stream(self) -> Stream:
        """A stream that does not wait for the default stream by itself."""
        with self._active("a stream"):
            stream = self._cuda.Stream(non_blocking=True)
        return Stream(stream.ptr, stream)

    def record(self, stream: Stream, event: Any = None) -> Any:
        """Mark the work that is on ``stream`` now: a new event, or ``event`` set anew."""
        with self._active("an event"):
            if event is None:
                event = self._cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream.ptr)
        return event

    def wait(self, stream: Stream, event: Any) -> None:
        """Make what ``stream`` is given from now on wait for an event; the host goes on."""
        with self._active("a wait"):
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def done(self, event: Any) -> bool:
        """Whether the work that an event marks has run."""
        return bool(event.done)

    def synchronise_event(self, event: Any) -> None:
        """Make the host wait for an event."""
        with self._active("a wait"):
            event.synchronize()

    def synchronise(self, stream: Stream) -> None:
        """Make the host wait for all of a stream's work."""
        with self._active("a kernel"):
            self._runtime.streamSynchronize(stream.ptr)

    def capturing(self, stream: Stream) -> bool:
        """Whether a CUDA graph is being recorded from a stream (never from the default one)."""
        return stream.ptr > 2 and bool(self._runtime.streamIsCapturing(stream.ptr))

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, stream: Stream) -> int:
        """Address of device memory that a stream may use from now on.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        with self._active("an allocation"):
            try:
                pointer: int = self._runtime.mallocFromPoolAsync(num_bytes, self._pool, stream.ptr)
            except self._errors as error:
                raise _no_memory(num_bytes, self.name, error) from error
        return pointer

    def free(self, pointer: int, stream: Stream) -> None:
        """Give device memory back once a stream's work of now has run."""
        with self._active("memory given back"):
            self._runtime.freeAsync(pointer, stream.ptr)

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that every GPU may read and write at the same address; not cleared.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        flags = self._runtime.hostAllocPortable | self._runtime.hostAllocMapped
        with self._active("pinned memory"):
            try:
                memory = self._cuda.PinnedMemory(num_bytes, flags)
            except self._errors as error:
                raise _no_memory(num_bytes, "the host (pinned)", error) from error
        pointer = self._cuda.PinnedMemoryPointer(memory, 0)  # a buffer, which the array keeps alive
        return np.frombuffer(pointer, np.uint8, num_bytes)

    def host_tensor(self, array: NDArray[np.uint8]) -> Any:
        """An array as a tensor of the library on the host: torch's, or itself."""
        return array if self._torch is None else self._torch.from_numpy(array)

    def zeros(self, num_bytes: int) -> Any:
        """A zeroed uint8 tensor of the library.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        try:
            if self._torch is not None:
                return self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=self.name)
            with self._active("an allocation"):
                return self._cupy.zeros(num_bytes, np.uint8)
        except self._memory_errors() as error:
            raise _no_memory(num_bytes, self.name, error) from error

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """An uninitialised tensor of the library and dtype of ``like`` on this GPU.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        try:
            if hasattr(like, "new_empty"):  # torch
                return like.new_empty(shape, device=self.name)
            with self._active("an allocation"):
                return self._cupy.empty(shape, like.dtype)
        except self._memory_errors() as error:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * like.dtype.itemsize
            raise _no_memory(num_bytes, self.name, error) from error

    def _memory_errors(self) -> tuple[type[BaseException], ...]:
        found: tuple[type[BaseException], ...] = (self._cuda.memory.OutOfMemoryError,)
        return found if self._torch is None else (*found, self._torch.cuda.OutOfMemoryError)

    # --- copies ---------------------------------------------------------------------------------

    def copy(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy bytes between addresses of the host (pinned) and of GPUs, on a stream."""
        with self._active("a copy"):
            self._runtime.memcpyAsync(
                target, source, num_bytes, self._runtime.memcpyDefault, stream.ptr
            )

    def copy_many(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        """Copies that do not depend on each other: one call where CUDA's bindings and driver offer it, else one each.

        ``stream`` must not be the default stream.
        """
        if self._batch is not None and len(sizes) > 1:
            with self._active("copies"):
                if self._batch(targets, sources, sizes, stream.ptr):
                    return
            self._batch = None  # the driver does not know the call
        with self._active("copies"):
            kind, copy = self._runtime.memcpyDefault, self._runtime.memcpyAsync
            for target, source, size in zip(targets, sources, sizes, strict=True):
                copy(target, source, size, kind, stream.ptr)

    # --- kernels --------------------------------------------------------------------------------

    def load(self, cubin: bytes, kernel: str, shared_bytes: int) -> Any:
        """A kernel of a cubin, allowed ``shared_bytes`` of dynamic shared memory."""
        with self._active(f"kernel {kernel}"):
            module = self._cuda.Module()
            module.load(cubin)
            function = module.get_function(kernel)
            if shared_bytes > DEFAULT_SHARED_BYTES:
                driver = self._cuda.driver
                driver.funcSetAttribute(
                    function.ptr,
                    driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes,
                )
        return function

    def launch(
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[np.generic[Any], ...],
        shared_bytes: int,
        stream: Stream,
    ) -> None:
        """Launch a kernel on a stream. Arguments are numpy scalars of the exact width, addresses uint64."""
        with self._active("a launch"):
            function(grid, block, arguments, shared_mem=shared_bytes, stream=stream)


def _torch(library: Library | None) -> Any:
    """The module torch where it is to be used, else ``None``."""
    if library == "cupy":
        return None
    try:
        import torch
    except ImportError as error:
        if library == "torch":
            raise MissingExtra(
                "the cuda backend with torch's tensors needs torch: pip install 'kvcatch[engine]'"
            ) from error
        return None
    if torch.version.cuda is None:
        if library == "torch":
            raise KernelError(f"torch {torch.__version__} was built without CUDA")
        return None
    return torch


def _no_memory(num_bytes: int, where: str, error: BaseException) -> OutOfMemory:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return OutOfMemory(f"cannot allocate {num_bytes} bytes on {where}: {reason}")


def _batched_copies() -> Any:
    """``cudaMemcpyBatchAsync`` as a call that says whether the driver knows it; ``None`` without CUDA's bindings."""
    try:
        cudart = importlib.import_module("cuda.bindings.runtime")
        attributes = cudart.cudaMemcpyAttributes()
        attributes.srcAccessOrder = cudart.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = int(cudart.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
        submit, status = cudart.cudaMemcpyBatchAsync, cudart.cudaError_t
        if cudart.getLocalRuntimeVersion()[1] < 13000:  # another signature
            return None
    except (ImportError, AttributeError):  # not installed, or of a CUDA before 12.8
        return None
    unknown = (status.cudaErrorNotSupported, status.cudaErrorCallRequiresNewerDriver)

    def batch(
        targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> bool:
        count = len(sizes)
        outcome = submit(
            list(targets), list(sources), list(sizes), count, [attributes], [0], 1, stream
        )
        if outcome[0] == status.cudaSuccess:
            return True
        if outcome[0] in unknown:
            return False
        raise KernelError(f"a batch of {count} copies: {outcome[0].name}")

    return batch
