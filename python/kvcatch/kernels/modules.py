"""Kernels from source to machine code: the text of ``cuda/``, NVRTC, and a cache of what it built.

The sources travel inside the extension, so an installed package needs no ``cuda/`` folder. A kernel is built for one
set of constants (``-D``) and one architecture the first time it is launched, and kept on disk under a key of everything
that decides the result: source, the headers it includes, constants, options, NVRTC's build, CUDA's headers and the
architecture. No GPU and no driver is needed to build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import struct
import sys
import tempfile
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvcatch.errors import InvalidArgument, KernelError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["MIN_ARCH", "OPTIONS", "KernelCompiler", "Nvrtc", "cache_folder", "choose_arch"]

OPTIONS = ("-std=c++17", "--device-as-default-execution-space")
"""Options of every kernel; the second, which CuPy gives too, makes functions without a ``__device__`` the device's.
No ``-ftz`` and no fast maths: results are those of the emulation."""

MIN_ARCH = 80
"""Oldest architecture: the first with bf16 on its tensor cores and ``cp.async``."""

CUDA_HEADERS = ("cuda_fp16", "cuda_bf16", "cuda_fp8")
MAGIC = b"kvcatch kernel 1\n"


class Nvrtc(Protocol):
    """The compiler: NVRTC through CuPy, or a test's stand-in."""

    def identity(self) -> str:
        """What identifies its build and the headers it brings; part of the cache key."""

    def arches(self) -> tuple[int, ...]:
        """Architectures it builds for, such as 80 and 90."""

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: tuple[str, ...]
    ) -> bytes:
        """Machine code (a cubin) of ``source``.

        Raises:
            KernelError: it does not compile; the message is the first error.
        """


class CupyNvrtc:
    """NVRTC through CuPy's binding, which needs neither GPU nor driver.

    Raises:
        MissingExtra: CuPy, NVRTC or CUDA's headers are not installed.
    """

    def __init__(self) -> None:
        try:
            from cupy.cuda import nvrtc
        except ImportError as error:
            raise MissingExtra("the CUDA kernels need CuPy: pip install 'kvcatch[cuda]'") from error
        try:
            self.version: tuple[int, int] = nvrtc.getVersion()
        except Exception as error:  # CuPy raises several kinds when the library is absent
            raise MissingExtra(
                "the CUDA kernels need NVRTC (nvidia-cuda-nvrtc): pip install 'kvcatch[cuda]'"
            ) from error
        self._nvrtc = nvrtc
        self._include = _cuda_include()
        self._identity = ""

    def identity(self) -> str:
        """NVRTC's version and build, and a digest of the CUDA headers that kernels include.

        Raises:
            KernelError: NVRTC does not work.
        """
        with _first_build:
            if not self._identity:
                self._identity = self._read_identity()
        return self._identity

    def _read_identity(self) -> str:
        program = self._nvrtc.createProgram("", "empty.cu", (), ())
        try:
            self._nvrtc.compileProgram(program, ("-arch=compute_80",))
            text = self._nvrtc.getPTX(program)
        except self._nvrtc.NVRTCError as error:
            log = _first_error(self._nvrtc.getProgramLog(program))
            raise KernelError(f"NVRTC cannot build an empty program: {log or error}") from error
        finally:
            self._nvrtc.destroyProgram(program)
        text = text.decode() if isinstance(text, bytes) else text
        build = " ".join(re.findall(r"CL-\d+|V[\d.]+", text))
        digest = hashlib.sha256()
        for stem in CUDA_HEADERS:
            for suffix in (".h", ".hpp"):
                path = self._include / (stem + suffix)
                digest.update(path.read_bytes() if path.is_file() else b"-")
        major, minor = self.version
        return f"nvrtc {major}.{minor} {build} headers {digest.hexdigest()[:16]}"

    def arches(self) -> tuple[int, ...]:
        """Architectures this NVRTC builds for."""
        return tuple(int(arch) for arch in self._nvrtc.getSupportedArchs())

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: tuple[str, ...]
    ) -> bytes:
        """Machine code of ``source``; see :class:`Nvrtc`."""
        program = self._nvrtc.createProgram(
            source,
            name,
            [text.encode() for text in headers.values()],
            [header.encode() for header in headers],
        )
        try:
            try:
                self._nvrtc.compileProgram(program, (*options, f"-I{self._include}"))
            except self._nvrtc.NVRTCError as error:
                log = self._nvrtc.getProgramLog(program)
                raise KernelError(_first_error(log) or str(error)) from error
            return _whole(self._nvrtc.getCUBIN(program))
        finally:
            self._nvrtc.destroyProgram(program)


class KernelCompiler:
    """Builds kernels and keeps them, in this process and on disk. Safe for threads and for concurrent processes.

    Args:
        source_dir: read sources from this folder (``cuda/`` of a checkout) instead of those in the extension.
        cache_dir: where built kernels are kept; :func:`cache_folder` when not given.
        nvrtc: the compiler; CuPy's NVRTC when not given.

    Raises:
        MissingExtra: there is no compiler.
        InvalidArgument: ``source_dir`` holds no kernels.
    """

    def __init__(
        self,
        source_dir: Path | None = None,
        cache_dir: Path | None = None,
        *,
        nvrtc: Nvrtc | None = None,
    ) -> None:
        self.sources = _read_sources(source_dir)
        self.nvrtc: Nvrtc = CupyNvrtc() if nvrtc is None else nvrtc
        self.cache_dir = cache_folder() if cache_dir is None else cache_dir

    def cubin(self, source: str, defines: Mapping[str, int], arch: int) -> bytes:
        """Machine code of ``cuda/<source>.cu`` with ``defines`` for one architecture, such as 90.

        Raises:
            InvalidArgument: no such source.
            KernelError: it does not compile; names the source, its constants and the first error.
        """
        name = f"{source}.cu"
        if name not in self.sources:
            known = ", ".join(sorted(n for n in self.sources if n.endswith(".cu")))
            raise InvalidArgument(f"no kernel source {name}: there are {known}")
        headers = included(name, self.sources)
        flags = tuple(f"-D{key}={value}" for key, value in sorted(defines.items()))
        options = (*OPTIONS, *flags, f"-arch=sm_{arch}")
        key = self._key(name, headers, options)
        with _built_lock:
            future = _built.get(key)
            mine = future is None
            if future is None:
                future = _built[key] = Future()
        if not mine:
            return future.result()
        try:
            cubin = self._load(key)
            if cubin is None:
                cubin = self._compile(name, headers, options)
                self._store(key, cubin)
        except BaseException as error:
            with _built_lock:
                del _built[key]
            future.set_exception(error)
            future.exception()  # collected here: the caller gets the error itself
            raise
        future.set_result(cubin)
        return cubin

    def _key(self, name: str, headers: Mapping[str, str], options: Iterable[str]) -> str:
        digest = hashlib.sha256()
        parts = [self.nvrtc.identity(), *options, name, self.sources[name]]
        for part in (*parts, *(text for item in headers.items() for text in item)):
            data = part.encode()
            digest.update(struct.pack("<Q", len(data)) + data)
        return digest.hexdigest()

    def _compile(self, name: str, headers: Mapping[str, str], options: tuple[str, ...]) -> bytes:
        try:
            return self.nvrtc.compile(name, self.sources[name], headers, options)
        except KernelError as error:
            given = " ".join(option for option in options if option[:2] in {"-D", "-a"})
            raise KernelError(f"{name} does not compile with {given}: {error}") from error

    def _load(self, key: str) -> bytes | None:
        """A kept kernel, or ``None`` where there is none or it is damaged (it is then built anew)."""
        if self.cache_dir is None:
            return None
        try:
            data = (self.cache_dir / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        head = len(MAGIC) + hashlib.sha256().digest_size
        if data[:head] != MAGIC + hashlib.sha256(data[head:]).digest():
            return None
        return data[head:]

    def _store(self, key: str, cubin: bytes) -> None:
        """Keep a kernel: written beside its place and renamed, so that no reader sees half of one."""
        if self.cache_dir is None:
            return
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.cache_dir, prefix=f"{key}.", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + hashlib.sha256(cubin).digest() + cubin)
                Path(name).replace(self.cache_dir / f"{key}.cubin")
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(name).unlink()
                raise
        except OSError as error:
            warnings.warn(
                f"built kernels cannot be kept in {self.cache_dir} ({error.strerror}): each process builds its own;"
                " set KVCATCH_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=4,
            )


_built: dict[str, Future[bytes]] = {}
_built_lock = threading.Lock()
_first_build = threading.Lock()
"""Held for the empty program that NVRTC's identity is read from, which comes before every kernel. It must: where the
first builds of a process run side by side, NVRTC 13.0 fails in all threads but one, with
``NVRTC_ERROR_BUILTIN_OPERATION_FAILURE``, and goes on failing there."""


def cache_folder() -> Path | None:
    """Where built kernels are kept: ``KVCATCH_CACHE_DIR``, or kvcatch's folder among the user's caches.

    ``None`` where the user has no home: kernels are then built by each process.
    """
    if chosen := os.environ.get("KVCATCH_CACHE_DIR"):
        return Path(chosen).expanduser() / "kernels"
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "kvcatch" / "kernels"


def choose_arch(capability: int, known: Iterable[int], device: str = "the GPU") -> int:
    """The architecture to build for: the GPU's own, or the newest known one of its generation that is not newer.

    Args:
        capability: the GPU's compute capability, such as 90 for 9.0.
        known: what the compiler builds for.
        device: what the GPU is called in a message.

    Raises:
        KernelError: the GPU is older than the kernels need, or newer than the compiler knows.
    """
    if capability < MIN_ARCH:
        raise KernelError(
            f"{device} has compute capability {capability / 10:.1f}: the kernels need {MIN_ARCH / 10:.1f} or newer"
        )
    fitting = [arch for arch in known if arch // 10 == capability // 10 and arch <= capability]
    if not fitting:
        raise KernelError(
            f"{device} has compute capability {capability / 10:.1f}, which this NVRTC does not know:"
            " install a newer nvidia-cuda-nvrtc"
        )
    return max(fitting)


def included(name: str, sources: Mapping[str, str]) -> dict[str, str]:
    """The project's headers that a source includes, directly or not, by name; others are the compiler's affair."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for header in re.findall(r'^\s*#\s*include\s+"([^"]+)"', sources[waiting.pop()], re.M):
            if header in sources and header not in found:
                found[header] = sources[header]
                waiting.append(header)
    return dict(sorted(found.items()))


def _read_sources(source_dir: Path | None) -> dict[str, str]:
    if source_dir is None:
        from kvcatch import _core

        return dict(_core.cuda_sources())
    sources = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(source_dir.glob("*"))
        if path.suffix in {".cu", ".cuh"}
    }
    if not any(name.endswith(".cu") for name in sources):
        raise InvalidArgument(f"no kernel sources (*.cu) in {source_dir}")
    return sources


def _cuda_include() -> Path:
    """The folder of ``cuda_fp16.h`` and its like: the pip package's, or an installed toolkit's."""
    tried: list[Path] = []
    with contextlib.suppress(Exception):  # absent, or it cannot say: the next place is asked
        finder = importlib.import_module("cuda.pathfinder")
        if found := finder.find_nvidia_header_directory("cudart"):
            tried.append(Path(found))
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"))
    tried += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    with contextlib.suppress(Exception):
        import cupy

        if toolkit := cupy.cuda.get_cuda_path():
            tried.append(Path(toolkit) / "include")
    tried.append(Path("/usr/local/cuda/include"))
    for folder in tried:
        if (folder / "cuda_fp8.h").is_file():
            return folder
    raise MissingExtra(
        "the CUDA kernels need CUDA's headers (nvidia-cuda-runtime): pip install 'kvcatch[cuda]'"
    )


def _first_error(log: str) -> str:
    """The first error of a compiler's log, on one line."""
    lines = [" ".join(line.split()) for line in log.splitlines()]
    return next((line for line in lines if "error" in line), next(filter(None, lines), ""))


def _whole(cubin: bytes) -> bytes:
    """A cubin as long as its own header says: CuPy takes its last byte, a zero, for the end of a text and drops it."""
    if cubin[:4] != b"\x7fELF":
        return cubin
    phoff, shoff = struct.unpack_from("<QQ", cubin, 32)
    phsize, phnum, shsize, shnum = struct.unpack_from("<HHHH", cubin, 54)
    return cubin.ljust(max(phoff + phsize * phnum, shoff + shsize * shnum), b"\0")
