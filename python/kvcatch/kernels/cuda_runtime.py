"""What launches kernels on a GPU: streams, uploads and scratch memory in stream order, kernels built once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import InvalidType, KernelError
from kvcatch.kernels.modules import choose_arch
from kvcatch.kernels.tensors import TensorView, item_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvcatch.kernels.cuda_device import CupyDevice, Stream
    from kvcatch.kernels.modules import KernelCompiler
    from kvcatch.kernels.runtime import Argument

    _Slabs = deque[tuple[NDArray[np.uint8], Any]]

__all__ = ["CudaRuntime", "DeviceMemory"]

SMALLEST_SLAB = 64 << 10
"""Bytes of the smallest piece of pinned memory that uploads pass through."""


class DeviceMemory:
    """Device memory that belongs to one stream, its home, and goes back in that stream's order when it is dropped.

    Other streams may use it as guests: a guest waits for what home has been given so far, and home waits for its
    guests before the memory goes back. A stream that is recorded into a CUDA graph is no guest: CUDA refuses an event
    from outside the recording. Who records sees to it that the memory is ready, and keeps it for as long as the graph.
    """

    __slots__ = ("_device", "_guests", "_home", "_in_graph", "pointer")

    def __init__(self, device: CupyDevice, num_bytes: int, home: Stream) -> None:
        self.pointer = 0  # set when it is there: __del__ runs after a refused allocation too
        self._device, self._home = device, home
        self._guests: dict[int, Stream] = {}
        self._in_graph = device.capturing(home)
        if not self._in_graph:
            _give_back_late()
        self.pointer = device.allocate(max(num_bytes, 1), home)

    def use_on(self, stream: Stream) -> None:
        """Order a stream that is about to use it."""
        if stream.ptr == self._home.ptr or stream.ptr in self._guests:
            return
        if not self._device.capturing(stream):
            self._device.wait(stream, self._device.record(self._home))
            self._guests[stream.ptr] = stream

    def __del__(self) -> None:
        if not self.pointer or sys.is_finalizing():
            return
        with contextlib.suppress(KernelError):  # the GPU is lost: there is nothing to give back
            if not self._in_graph and _recorded(self._device, self._home, self._guests):
                # The graph being recorded must not give it back at every replay.
                _late.append((self._device, self.pointer, self._home, self._guests))
                return
            _give_back(self._device, self.pointer, self._home, self._guests)


_Guests = dict[int, "Stream"]

_late: deque[tuple[CupyDevice, int, Stream, _Guests]] = deque()
"""Memory that was dropped while one of its streams was recorded into a CUDA graph."""


def _recorded(device: CupyDevice, home: Stream, guests: _Guests) -> bool:
    """Whether one of the streams is being recorded into a CUDA graph."""
    return any(device.capturing(stream) for stream in (home, *guests.values()))


def _give_back(device: CupyDevice, pointer: int, home: Stream, guests: _Guests) -> None:
    """Give memory back on its home stream, after its guests."""
    for guest in guests.values():
        device.wait(home, device.record(guest))
    device.free(pointer, home)


def _give_back_late() -> None:
    for _ in range(len(_late)):
        try:
            device, pointer, home, guests = _late.popleft()
        except IndexError:  # another thread was here
            return
        if _recorded(device, home, guests):
            _late.append((device, pointer, home, guests))
        else:
            _give_back(device, pointer, home, guests)


class _Staging:
    """Pinned memory that copies pass through: a piece is used again once the copy out of it has run."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._sent: dict[int, _Slabs] = {}
        self._lock = threading.Lock()

    def send(self, data: NDArray[np.uint8], target: int, stream: Stream) -> None:
        """Copy bytes to a device address on a stream; the caller's array is free at once."""
        slab, event, sent = self._take(data.nbytes)
        slab[: data.nbytes] = data
        self._device.copy(target, slab.ctypes.data, data.nbytes, stream)
        self._give(slab, self._device.record(stream, event), sent)

    def receive(self, source: int, num_bytes: int, stream: Stream) -> NDArray[np.uint8]:
        """Copy bytes from a device address and wait for them."""
        slab, event, sent = self._take(num_bytes)
        self._device.copy(slab.ctypes.data, source, num_bytes, stream)
        event = self._device.record(stream, event)
        self._device.synchronise_event(event)
        data = slab[:num_bytes].copy()
        self._give(slab, event, sent)
        return data

    def _take(self, num_bytes: int) -> tuple[NDArray[np.uint8], Any, _Slabs]:
        size = max(SMALLEST_SLAB, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            sent = self._sent.setdefault(size, deque())
            if sent and self._device.done(sent[0][1]):
                return (*sent.popleft(), sent)
        return self._device.pinned(size), None, sent

    def _give(self, slab: NDArray[np.uint8], event: Any, sent: _Slabs) -> None:
        with self._lock:
            sent.append((slab, event))


class CudaRuntime:
    """Launches on one GPU, on the caller's current stream unless :meth:`on` says otherwise. Safe for threads.

    Args:
        device: the GPU.
        compiler: builds the kernels.

    Raises:
        KernelError: no kernel can be built for this GPU.
    """

    def __init__(self, device: CupyDevice, compiler: KernelCompiler) -> None:
        self._gpu, self._compiler = device, compiler
        self.arch = choose_arch(device.capability, compiler.nvrtc.arches(), device.name)
        self._functions: dict[tuple[str, str, frozenset[tuple[str, int]]], tuple[Any, int]] = {}
        self._staging = _Staging(device)
        self._local = threading.local()

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def device(self) -> str:
        """``cuda:N``."""
        return self._gpu.name

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        return self._gpu.num_sms

    def stream(self) -> Stream:
        """The stream that work is put on: the caller's current one, or that of :meth:`on`."""
        chosen: list[Stream] = getattr(self._local, "chosen", [])
        return chosen[-1] if chosen else self._gpu.current_stream()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Put this thread's work on a stream."""
        if not hasattr(self._local, "chosen"):
            self._local.chosen = []
        self._local.chosen.append(stream)
        try:
            yield
        finally:
            self._local.chosen.pop()

    def launch(
        self,
        source: str,
        kernel: str,
        defines: Mapping[str, int],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel; see :class:`kvcatch.kernels.runtime.Runtime`.

        Raises:
            KernelError: it does not compile for this GPU, or the launch was refused.
            InvalidType: an argument that a kernel cannot take.
        """
        function = self._function(source, kernel, defines, shared_bytes)
        stream = self.stream()
        packed = tuple(_packed(kernel, argument, stream) for argument in arguments)
        self._gpu.launch(function, grid, block, packed, shared_bytes, stream)

    def build(self, source: str, defines: Mapping[str, int]) -> None:
        """Compile a source now rather than at its first launch."""
        self._compiler.cubin(source, defines, self.arch)

    def _function(
        self, source: str, kernel: str, defines: Mapping[str, int], shared_bytes: int
    ) -> Any:
        key = (source, kernel, frozenset(defines.items()))
        found = self._functions.get(key)
        if found is None or found[1] < shared_bytes:
            cubin = self._compiler.cubin(source, defines, self.arch)
            found = (self._gpu.load(cubin, kernel, shared_bytes), shared_bytes)
            self._functions[key] = found
        return found[0]

    def upload(self, array: NDArray[np.generic[Any]]) -> TensorView:
        """Copy a small host array to the device without waiting; see :class:`kvcatch.kernels.runtime.Runtime`.

        Raises:
            OutOfMemory: there is no memory for it.
            KernelError: a CUDA graph is being recorded: each replay would copy what then lies at the array's place.
        """
        stream = self.stream()
        self.refuse_while_recorded("ids cannot be copied to the GPU")
        data = np.ascontiguousarray(array)
        memory = DeviceMemory(self._gpu, data.nbytes, stream)
        if data.nbytes:
            self._staging.send(data.reshape(-1).view(np.uint8), memory.pointer, stream)
        return _view(memory, array.shape, str(array.dtype), self.device)

    def refuse_while_recorded(self, what: str) -> None:
        """Refuse what a CUDA graph could not repeat.

        Raises:
            KernelError: one is being recorded from the current stream; starts with ``what``.
        """
        if self._gpu.capturing(self.stream()):
            raise KernelError(
                f"{what} while a CUDA graph is recorded: make plans before, move blocks outside"
            )

    def scratch(self, shape: tuple[int, ...], dtype: str) -> TensorView:
        """Uninitialised device memory in stream order; see :class:`kvcatch.kernels.runtime.Runtime`.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        num_bytes = int(np.prod(shape, dtype=np.int64)) * item_bytes(dtype)
        memory = DeviceMemory(self._gpu, num_bytes, self.stream())
        return _view(memory, shape, dtype, self.device)

    def download(self, view: TensorView) -> NDArray[np.generic[Any]]:
        """A small contiguous array of the device; waits for the current stream.

        Raises:
            KernelError: a kernel before it failed, or a CUDA graph is being recorded.
        """
        stream = self.stream()
        self.refuse_while_recorded("lengths cannot be read back")
        if isinstance(view.owner, DeviceMemory):
            view.owner.use_on(stream)
        if not view.num_bytes:
            return np.empty(view.shape, view.dtype)
        data = self._staging.receive(view.pointer, view.num_bytes, stream)
        return data.view(view.dtype).reshape(view.shape)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """An uninitialised tensor of the library and dtype of ``like``."""
        return self._gpu.empty(shape, like)

    def zeros(self, num_bytes: int) -> Any:
        """A zeroed uint8 tensor of the library.

        Raises:
            OutOfMemory: there is none; states the bytes.
        """
        return self._gpu.zeros(num_bytes)

    def synchronise(self) -> None:
        """Wait for the current stream.

        Raises:
            KernelError: a kernel failed on the device.
        """
        self._gpu.synchronise(self.stream())


def _packed(kernel: str, argument: Argument, stream: Stream) -> np.generic[Any]:
    """A kernel argument as the numpy scalar whose bytes are passed."""
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, TensorView):
        if isinstance(argument.owner, DeviceMemory):
            argument.owner.use_on(stream)
        return np.uint64(argument.pointer)
    if isinstance(argument, np.generic):
        return argument
    raise InvalidType(
        f"an argument of kernel {kernel} must be a tensor view or a numpy scalar, not {type(argument).__name__}"
    )


def _view(memory: DeviceMemory, shape: tuple[int, ...], dtype: str, device: str) -> TensorView:
    strides, step = [], item_bytes(dtype)
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return TensorView(
        memory.pointer, tuple(shape), tuple(reversed(strides)), dtype, device, True, memory
    )
