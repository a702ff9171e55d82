"""A built kernel, called like ``cupy.RawKernel``, with every argument held against the kernel's C signature.

On a GPU a scalar of the wrong width is silent corruption and a read beyond a buffer is somebody else's bytes; here both
are an :class:`EmulationError`. The kernel works on copies that end at unmapped memory (see ``guard.h``) and are written
back when it has ended well; a launch that fails changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvcatch.errors import KernelError
from kvcatch.kernels.tensors import TensorView, item_bytes, view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ORDERS", "EmulationError", "Kernel", "Module", "Order", "OrderDependence"]

Order = Literal["forward", "reverse", "random"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")

KIND_NAMES = {
    "f": "float",
    "i": "int",
    "u": "uint",
    "b": "bfloat16",
    "h": "float16",
    "e": "float8_e4m3",
}


class EmulationError(KernelError):
    """A launch that a GPU would refuse, or that did what no kernel may do."""


class OrderDependence(EmulationError):
    """A result that changes with the order in which threads and blocks run."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("seconds", ctypes.c_double),
        ("stacks", ctypes.POINTER(ctypes.c_void_p)),
    )


_STACKS = (ctypes.c_void_p * 1024)()
"""Of the threads of a block; the runtime makes them, and all modules use the same."""

_RUNNING = threading.Lock()
"""One launch at a time."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel, from its C signature."""

    name: str
    pointer: bool
    writable: bool
    kind: str
    """``f``, ``i``, ``u``; behind a pointer also ``b`` bf16, ``h`` fp16, ``e`` e4m3 and ``x`` any bytes."""
    bytes: int
    alignment: int

    @classmethod
    def parse(cls, word: str, name: str) -> Parameter:
        """From a word of ``kvemu_signature_*`` (see ``kvemu.h``)."""
        if match := re.fullmatch(r"P([rw])(\w)(\d+):(\d+)", word):
            return cls(name, True, match[1] == "w", match[2], int(match[3]), int(match[4]))
        return cls(name, False, False, word[0], int(word[1:]), int(word[1:]))

    def __str__(self) -> str:
        kind = KIND_NAMES.get(self.kind, "bytes")
        if kind in ("float", "int", "uint"):
            kind += str(8 * self.bytes)
        return f"{'' if self.writable else 'const '}{kind}*" if self.pointer else kind

    def takes(self, dtype: str) -> bool:
        """Whether a buffer of this dtype may lie behind the pointer; uint8 is the dtype of raw bytes."""
        if self.kind == "x" or dtype == "uint8":
            return True
        if item_bytes(dtype) != self.bytes:
            return False
        if self.kind in "bhe":
            return dtype == KIND_NAMES[self.kind]
        return {"f": "float", "i": "int", "u": "uint"}[self.kind] == re.sub(r"\d+$", "", dtype)


class Module:
    """A shared object made from one source."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.source = source
        self.library = ctypes.CDLL(str(path))
        void = ctypes.c_void_p
        self.library.kvemu_guard_open.restype = void
        self.library.kvemu_guard_open.argtypes = (
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_char_p,
            ctypes.POINTER(void),
        )
        self.library.kvemu_guard_protect.argtypes = (void, ctypes.c_int)
        self.library.kvemu_guard_broken.argtypes = (void, ctypes.POINTER(ctypes.c_longlong))
        self.library.kvemu_guard_close.argtypes = (void,)
        self.library.kvemu_guard_close.restype = None

    def get_function(self, name: str) -> Kernel:
        """A kernel by name.

        Raises:
            EmulationError: the source has none of that name, or no ``KVEMU_KERNEL`` for it.
        """
        return Kernel(self, name)

    def where(self, text: str) -> str:
        """A report of the runtime with addresses replaced by file, line and function."""

        def resolve(match: re.Match[str]) -> str:
            try:
                found = subprocess.run(
                    ["addr2line", "-Cfise", match[1], match[2]],
                    capture_output=True,
                    text=True,
                    check=False,
                ).stdout.split("\n")
            except OSError:
                return f"at {match[1]}+{match[2]}"
            places = [
                f"{line.partition(' ')[0]} ({function})"
                for function, line in zip(found[::2], found[1::2], strict=False)
                if not function.startswith(("kvemu", "void kvemu", "decltype"))
            ]
            return "at " + ", called from ".join(places)

        return re.sub(r"@(\S+)\+(0x[0-9a-f]+)", resolve, text)


@dataclass(slots=True)
class _Buffer:
    """One stretch of the caller's memory, and the copy that the kernel works on."""

    start: int
    end: int
    writable: bool
    names: list[str] = field(default_factory=list)
    handle: int = 0
    data: int = 0

    @property
    def bytes(self) -> int:
        return self.end - self.start


class Kernel:
    """One kernel: ``kernel(grid, block, args, shared_mem=...)``."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.name = name
        try:
            self._launch = getattr(module.library, f"kvemu_launch_{name}")
            signature = getattr(module.library, f"kvemu_signature_{name}")
        except AttributeError:
            raise EmulationError(f"{module.source.name} has no KVEMU_KERNEL({name})") from None
        words = ctypes.create_string_buffer(4096)
        signature(words)
        split = words.value.decode().split()
        names = self._parameter_names(len(split))
        self.parameters = [Parameter.parse(w, n) for w, n in zip(split, names, strict=True)]
        try:
            self.max_threads: int | None = ctypes.c_int.in_dll(
                module.library, f"kvemu_max_threads_{name}"
            ).value
        except ValueError:
            self.max_threads = None

    def _parameter_names(self, count: int) -> list[str]:
        """From the source; the signature knows types only."""
        found = re.search(rf"\b{self.name}\s*\(([^()]*)\)\s*\{{", self.module.source.read_text())
        listed = re.sub(r"//[^\n]*", "", found[1]).split(",") if found else []
        names = [re.findall(r"\w+", text)[-1] for text in listed if text.strip()]
        return names if len(names) == count else [f"argument {i}" for i in range(count)]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        order: Order | None = None,
        seed: int = 0,
    ) -> None:
        """Launch it and wait.

        Args:
            grid: blocks in x, y and z (missing ones are 1).
            block: threads in x, y and z.
            args: for a pointer a numpy array, a torch CPU tensor, a ``TensorView`` or ``None``; for a scalar a numpy
                scalar of the exact kind and width.
            shared_mem: bytes of dynamic shared memory.
            order: of threads and blocks; by default that of the process (``KVCATCH_ORDER``), else forward.
            seed: of random order.

        Raises:
            EmulationError: an argument that does not fit the signature, a launch that a GPU would refuse, a fault, a
                hang, or a misuse of barriers and collectives.
        """
        chosen = order or os.environ.get("KVCATCH_ORDER", "forward")
        self._run(grid, block, args, shared_mem, (chosen,), seed)

    def in_all_orders(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        seed: int = 0,
        orders: Sequence[Order] = ORDERS,
    ) -> None:
        """Launch it from the same bytes in every order, and demand the same bytes after each.

        Raises:
            OrderDependence: two orders leave different bytes behind a pointer.
            EmulationError: as a call.
        """
        self._run(grid, block, args, shared_mem, orders, seed)

    def _run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int,
        orders: Sequence[str],
        seed: int,
    ) -> None:
        launch = _Launch()
        launch.grid[:] = self._extent("grid", grid)
        launch.block[:] = self._extent("block", block)
        threads = int(np.prod(launch.block[:], dtype=np.int64))
        if self.max_threads is not None and threads > self.max_threads:
            raise self._error(
                f"a block of {threads} threads: its launch bounds allow {self.max_threads}"
            )
        launch.smem_bytes = shared_mem
        launch.seed = seed
        launch.seconds = float(os.environ.get("KVCATCH_LAUNCH_SECONDS", "120"))
        values, views = self._arguments(args)
        buffers = self._buffers(views)
        launch.stacks = _STACKS
        with _RUNNING:
            self._launch_orders(launch, values, views, buffers, orders)

    def _error(self, text: str) -> EmulationError:
        return EmulationError(f"{self.name}: {text}")

    def _extent(self, name: str, extent: Sequence[int]) -> list[int]:
        if not 1 <= len(extent) <= 3 or any(not 0 <= int(n) < 1 << 32 for n in extent):
            raise self._error(f"{name} {tuple(extent)}: must be one to three numbers")
        return [*map(int, extent), 1, 1][:3]

    def _arguments(self, args: Sequence[Any]) -> tuple[list[Any], dict[int, TensorView]]:
        """Scalars as ctypes buffers, and the tensors by position."""
        if len(args) != len(self.parameters):
            raise self._error(f"{len(args)} arguments given, it takes {len(self.parameters)}")
        values: list[Any] = []
        views: dict[int, TensorView] = {}
        for i, (value, wanted) in enumerate(zip(args, self.parameters, strict=True)):
            if wanted.pointer:
                values.append(ctypes.c_void_p(0))
                if value is not None:
                    views[i] = self._tensor(value, wanted)
                continue
            if not isinstance(value, np.generic):
                raise self._error(
                    f"{wanted.name} must be a numpy scalar ({wanted}), not {type(value).__name__}"
                )
            if value.dtype.kind != wanted.kind or value.dtype.itemsize != wanted.bytes:
                raise self._error(f"{wanted.name} is {value.dtype}, the kernel takes {wanted}")
            values.append(ctypes.create_string_buffer(value.tobytes(), wanted.bytes))
        return values, views

    def _tensor(self, value: Any, wanted: Parameter) -> TensorView:
        if isinstance(value, np.generic):
            raise self._error(f"{wanted.name} is a scalar, the kernel takes {wanted}")
        seen = (
            value if isinstance(value, TensorView) else view(value, f"{self.name}: {wanted.name}")
        )
        if not isinstance(value, TensorView) and not seen.contiguous:
            raise self._error(f"{wanted.name} is not contiguous")
        if seen.device != "cpu":
            raise self._error(f"{wanted.name} lies on {seen.device}, the emulation needs it on cpu")
        if not wanted.takes(seen.dtype):
            raise self._error(f"{wanted.name} has dtype {seen.dtype}, the kernel takes {wanted}")
        if wanted.writable and not seen.writable:
            raise self._error(f"{wanted.name} is read-only, the kernel takes {wanted}")
        if seen.pointer % wanted.alignment:
            raise self._error(
                f"{wanted.name} lies at {seen.pointer:#x}: no multiple of {wanted.alignment} bytes"
            )
        if any(stride < 0 for stride in seen.strides):
            raise self._error(f"{wanted.name} has a negative stride")
        return seen

    def _buffers(self, views: dict[int, TensorView]) -> list[_Buffer]:
        """What the tensors cover, overlapping ones as one."""
        found: list[_Buffer] = []
        for i, seen in sorted(
            views.items(), key=lambda item: (item[1].pointer, -item[1].num_bytes)
        ):
            writable, name = self.parameters[i].writable, self.parameters[i].name
            end = seen.pointer + seen.num_bytes
            if found and seen.pointer < found[-1].end:
                last = found[-1]
                last.end = max(last.end, end)
                last.writable |= writable
                last.names.append(name)
            else:
                found.append(_Buffer(seen.pointer, end, writable, [name]))
        return found

    def _launch_orders(
        self,
        launch: _Launch,
        values: list[Any],
        views: dict[int, TensorView],
        buffers: list[_Buffer],
        orders: Sequence[str],
    ) -> None:
        library = self.module.library
        try:
            for buffer in buffers:
                data = ctypes.c_void_p()
                name = "/".join(buffer.names).encode()[:95]
                buffer.handle = library.kvemu_guard_open(
                    buffer.bytes, buffer.start % 16, name, data
                )
                if not buffer.handle:
                    raise self._error(
                        f"no memory for a copy of {name.decode()} ({buffer.bytes} bytes)"
                    )
                buffer.data = data.value or 0
                ctypes.memmove(buffer.data, buffer.start, buffer.bytes)
                if not buffer.writable:
                    library.kvemu_guard_protect(buffer.handle, 0)
            for i, seen in views.items():
                home = next(
                    b
                    for b in reversed(buffers)
                    if b.start <= seen.pointer <= b.end - seen.num_bytes
                )
                values[i] = ctypes.c_void_p(home.data + seen.pointer - home.start)
            pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
            results: list[np.ndarray[Any, Any]] = []
            for k, order in enumerate(orders):
                if k:
                    for buffer in buffers:
                        if buffer.writable:
                            ctypes.memmove(buffer.data, buffer.start, buffer.bytes)
                launch.order = ORDERS.index(order)
                self._once(launch, pointers, buffers)
                written = [_bytes_at(b.data, b.bytes) for b in buffers if b.writable]
                if len(orders) > 1:
                    written = [w.copy() for w in written]
                if k:
                    self._same(
                        results, written, [b for b in buffers if b.writable], orders[0], order
                    )
                else:
                    results = written
            for buffer, result in zip((b for b in buffers if b.writable), results, strict=True):
                ctypes.memmove(buffer.start, result.ctypes.data, buffer.bytes)
        finally:
            for buffer in buffers:
                if buffer.handle:
                    library.kvemu_guard_close(buffer.handle)

    def _once(self, launch: _Launch, pointers: Any, buffers: list[_Buffer]) -> None:
        report = ctypes.create_string_buffer(2048)
        if self._launch(ctypes.byref(launch), pointers, report, len(report)):
            raise self._error(self.module.where(report.value.decode()))
        for buffer in buffers:
            offset = ctypes.c_longlong()
            if self.module.library.kvemu_guard_broken(buffer.handle, offset):
                where = "before the start" if offset.value < 0 else "beyond the end"
                distance = -offset.value if offset.value < 0 else offset.value
                names = "/".join(buffer.names)
                raise self._error(
                    f"store {distance} byte(s) {where} of {names} ({buffer.bytes} bytes)"
                )

    def _same(
        self,
        first: list[np.ndarray[Any, Any]],
        second: list[np.ndarray[Any, Any]],
        buffers: list[_Buffer],
        first_order: str,
        second_order: str,
    ) -> None:
        for one, other, buffer in zip(first, second, buffers, strict=True):
            differ = np.flatnonzero(one != other)
            if differ.size:
                raise OrderDependence(
                    f"{self.name}: {differ.size} of {buffer.bytes} bytes of {'/'.join(buffer.names)} depend on the"
                    f" order of threads and blocks ({first_order} against {second_order}), the first at byte"
                    f" {differ[0]}"
                )


def _bytes_at(address: int, count: int) -> np.ndarray[Any, Any]:
    """Memory as bytes, not copied."""
    if not count:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * count).from_address(address), np.uint8)
