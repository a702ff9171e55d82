"""A GPU whose streams run late and in any order that CUDA would allow: what takes the place of CupyDevice in the tests.

Nothing runs when it is called. Every stream is a queue; at each call, and wherever the host waits, the head of a stream
chosen at random runs if what it waits for has. Memory that is given back is poisoned when the stream gets there, and is
handed out again to the same stream at once. So whatever is not ordered by a stream or an event comes out wrong for some
seed.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import KernelError, OutOfMemory
from kvcatch.kernels.cuda_device import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

POISON = 0xEE


@dataclass
class Event:
    recorded: int = 0
    completed: int = 0
    stream: int = 0


@dataclass
class Operation:
    run: Callable[[], None]
    event: Event | None = None
    generation: int = 0

    @property
    def ready(self) -> bool:
        return self.event is None or self.event.completed >= self.generation


@dataclass
class SimulatedGpu:
    seed: int = 0
    pace: float = 0.3  # chance that something runs at a call
    memory_limit: int = 1 << 30
    capability: int = 90
    num_sms: int = 4
    # Device and host memory are the same here, and tensors of the host are used: see tensors.view.
    name: str = "cpu"
    library: str = "cupy"
    kernels: dict[str, Callable[..., None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queues: dict[int, deque[Operation]] = {}
        self.current = self.new_stream()
        self.capture: set[int] = set()
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.freed: dict[int, list[tuple[int, int]]] = {}
        self.used = 0
        self.pinned_sizes: list[int] = []
        self.copies: list[tuple[int, int, int]] = []
        self.batches: list[int] = []
        self.loaded: list[str] = []
        self.launches: list[str] = []

    # --- the scheduler --------------------------------------------------------------------------

    def submit(self, stream: Stream, operation: Operation) -> None:
        self.queues[stream.ptr].append(operation)
        while self.random.random() < self.pace and self.step():
            pass

    def step(self) -> bool:
        ready = [queue for queue in self.queues.values() if queue and queue[0].ready]
        if not ready:
            return False
        self.random.choice(ready).popleft().run()
        return True

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self.step(), "deadlock: every stream waits"

    def finish(self) -> None:
        self.run_until(lambda: not any(self.queues.values()))

    # --- what CupyDevice offers -----------------------------------------------------------------

    def current_stream(self) -> Stream:
        return self.current

    def new_stream(self) -> Stream:
        ptr = 16 * (len(self.queues) + 1)
        self.queues[ptr] = deque()
        return Stream(ptr)

    def record(self, stream: Stream, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream = stream.ptr
        event.recorded += 1
        generation = event.recorded

        def reach() -> None:
            event.completed = max(event.completed, generation)

        self.submit(stream, Operation(reach))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        # cudaErrorStreamCaptureIsolation: nothing recorded into a graph may wait for what is not, or the reverse.
        if self.capturing(stream) != (event.stream in self.capture):
            raise KernelError("a wait on cpu: a dependency on work outside the graph")
        self.submit(stream, Operation(lambda: None, event, event.recorded))

    def done(self, event: Event) -> bool:
        if self.random.random() < self.pace:
            self.step()
        return event.completed >= event.recorded

    def synchronise_event(self, event: Event) -> None:
        self.run_until(lambda: event.completed >= event.recorded)

    def synchronise(self, stream: Stream) -> None:
        self.run_until(lambda: not self.queues[stream.ptr])

    def capturing(self, stream: Stream) -> bool:
        return stream.ptr in self.capture

    def allocate(self, num_bytes: int, stream: Stream) -> int:
        for at, (pointer, size) in enumerate(self.freed.get(stream.ptr, [])):
            if size >= num_bytes:
                del self.freed[stream.ptr][at]
                return pointer
        if self.used + num_bytes > self.memory_limit:
            raise OutOfMemory(f"cannot allocate {num_bytes} bytes on {self.name}: simulated")
        self.used += num_bytes
        array = np.full(num_bytes, POISON, np.uint8)
        self.arrays[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, pointer: int, stream: Stream) -> None:
        size = self.arrays[pointer].nbytes
        self.submit(stream, Operation(lambda: ctypes.memset(pointer, POISON, size) and None))
        self.freed.setdefault(stream.ptr, []).append((pointer, size))

    def pinned(self, num_bytes: int) -> np.ndarray[Any, Any]:
        self.pinned_sizes.append(num_bytes)
        return np.full(num_bytes, POISON, np.uint8)

    def host_tensor(self, array: np.ndarray[Any, Any]) -> Any:
        return array

    def zeros(self, num_bytes: int) -> Any:
        if self.used + num_bytes > self.memory_limit:
            raise OutOfMemory(f"cannot allocate {num_bytes} bytes on {self.name}: simulated")
        raw = np.zeros(num_bytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        return raw[start : start + num_bytes]

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        return like.new_empty(shape) if hasattr(like, "new_empty") else np.empty(shape, like.dtype)

    def copy(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self.copies.append((target, source, num_bytes))
        self.submit(stream, Operation(lambda: ctypes.memmove(target, source, num_bytes) and None))

    def copy_many(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Stream
    ) -> None:
        self.batches.append(len(sizes))
        copies = list(zip(targets, sources, sizes, strict=True))
        self.random.shuffle(copies)  # CUDA promises no order within a batch
        for target, source, size in copies:
            self.copy(target, source, size, stream)

    def load(self, cubin: bytes, kernel: str, shared_bytes: int) -> Any:
        self.loaded.append(kernel)
        return kernel, cubin

    def launch(
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[np.generic, ...],
        shared_bytes: int,
        stream: Stream,
    ) -> None:
        kernel, _ = function
        self.launches.append(kernel)
        self.submit(stream, Operation(lambda: self.kernels[kernel](*arguments)))


class FakeNvrtc:
    """A compiler whose machine code is its input; counts what it is asked for."""

    def __init__(self, fail: str = "") -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.fail = fail

    def identity(self) -> str:
        return "fake 1"

    def arches(self) -> tuple[int, ...]:
        return (80, 86, 90, 100)

    def compile(
        self, name: str, source: str, headers: dict[str, str], options: tuple[str, ...]
    ) -> bytes:
        self.compiled.append((name, options))
        if self.fail:
            raise KernelError(self.fail)
        return "\n".join((name, source, *headers.values(), *options)).encode()
