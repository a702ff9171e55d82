"""Builds a CUDA source for the CPU: the same file that NVRTC compiles, by g++ with ``kvemu.h`` in the GPU's place.

Builds are kept in ``target/cuda_host`` (or ``KVCATCH_CUDA_HOST_CACHE``) under a key of every file and flag that went
in. ``KVCATCH_CXX`` names another compiler.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cuda_host.kernel import Module
from kvcatch.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "CUDA",
    "HERE",
    "SANITIZERS",
    "BuildError",
    "Unavailable",
    "build",
    "build_all",
    "prune",
    "unavailable",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CUDA = ROOT / "cuda"

CHECKS = "alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
"""Checks of the compiler that a plain build has too, with the runtime's own handlers."""

SANITIZERS: dict[str, list[str]] = {
    "": [
        "-O2",
        f"-fsanitize={CHECKS}",
        "-fno-sanitize-recover=all",
        "-Werror=uninitialized",
        "-Wno-error=maybe-uninitialized",
    ],
    "asan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address"],
    "tsan": ["-O1", "-fsanitize=thread"],
    "ubsan": [
        "-O1",
        f"-fsanitize=undefined,{CHECKS}",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=all",
    ],
}
RUNTIME: dict[str, list[str]] = {
    "": ["-DKVEMU_CHECKS"],
    "asan": ["-DKVEMU_ASAN"],
    # Its library calls would be seen as the kernel's.
    "tsan": ["-DKVEMU_TSAN", "-fno-builtin"],
    "ubsan": [],
}
COMMON = ["-std=c++20", "-fPIC", "-g1", "-gdwarf-4", "-fvisibility=hidden", "-DKV_EMU"]
# nvcc lets code read a vector as other types; g++ must not assume that it does not.
KERNEL = [
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-fstack-clash-protection",  # a large frame meets the guard page rather than leaps over it
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-class-memaccess",  # bits copied into __half2: it is what they are
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-Werror=return-type",
]


class Unavailable(Exception):
    """There is no compiler, or no CUDA headers, to build kernels with."""


class BuildError(KernelError):
    """A source does not compile; holds what the compiler said."""


def compiler() -> str:
    """The C++ compiler.

    Raises:
        Unavailable: there is none.
    """
    name = os.environ.get("KVCATCH_CXX", "g++")
    if not (path := shutil.which(name)):
        raise Unavailable(f"no C++ compiler {name}: install g++, or name one in KVCATCH_CXX")
    return path


@functools.cache
def compiler_version() -> str:
    """What the compiler says it is."""
    return subprocess.run(
        [compiler(), "--version"], check=True, capture_output=True, text=True
    ).stdout


@functools.cache
def cuda_headers() -> Path:
    """The folder of cuda_fp8.h and its like, from NVIDIA's wheels, ``CUDA_HOME`` or ``/usr/local/cuda``.

    Raises:
        Unavailable: there is none.
    """
    roots = [Path(p) / "nvidia/cu13" for p in sys.path if p]
    roots += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    for root in roots:
        folder = root / "include"
        if (folder / "cuda_fp8.h").is_file() and (folder / "crt/host_defines.h").is_file():
            return folder
    raise Unavailable(
        "no CUDA headers: install nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl (the test extra has them)"
    )


def unavailable() -> str:
    """Why kernels cannot be built here; empty where they can."""
    try:
        compiler()
        cuda_headers()
    except Unavailable as why:
        return str(why)
    return ""


def cache_folder() -> Path:
    """Where builds are kept."""
    if named := os.environ.get("KVCATCH_CUDA_HOST_CACHE"):
        return Path(named)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "cuda_host"


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Instructions that this processor has and the emulated mma gains from."""
    if platform.machine() != "x86_64":
        return ()
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ()
    have = set(flags[1].split()) if flags else set()
    return ("-mavx2", "-mfma", "-mf16c") if {"avx2", "fma", "f16c"} <= have else ()


def included(source: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """The file and everything that it includes with quotes, each once."""
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            for folder in (path.parent, *folders):
                if (folder / name).is_file():
                    waiting.append((folder / name).resolve())
                    break


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}")


def _make(out: Path, produce: Callable[[Path], None]) -> Path:
    """Have a file produced unless it is there; one process at a time makes it, and it appears when it is whole."""
    if out.exists():
        os.utime(out)
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(out.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            unfinished = out.with_name("unfinished-" + out.name)
            produce(unfinished)
            unfinished.rename(out)
    return out


def prune(most_bytes: int = 1 << 30) -> None:
    """Delete the builds that were used longest ago, until what is kept is no more than this."""
    files = [(p.stat(), p) for p in cache_folder().rglob("*") if p.is_file()]
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda item: item[0].st_mtime):
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size


def _key(files: Iterable[Path], words: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([*words, compiler_version()]).encode())
    return digest.hexdigest()[:20]


def _sanitizing(sanitizer: str) -> list[str]:
    if sanitizer not in SANITIZERS:
        raise ValueError(
            f"sanitizer {sanitizer!r}: must be one of {', '.join(map(repr, SANITIZERS))}"
        )
    return SANITIZERS[sanitizer]


def _runtime(sanitizer: str) -> Path:
    flags = [
        *COMMON,
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        *machine_flags(),
        *RUNTIME[sanitizer],
    ]
    if sanitizer == "tsan" and "clang" not in compiler_version():
        flags.append("-fno-tree-loop-distribute-patterns")
    source = HERE / "runtime.cpp"
    key = _key(included(source, [HERE]), flags)
    command = [compiler(), *flags, "-c", str(source), "-o"]
    return _make(cache_folder() / f"runtime-{key}.o", lambda out: _run([*command, str(out)]))


def _header(flags: list[str]) -> Path | None:
    """``kvemu.h`` precompiled for these flags, which saves most of a small kernel's build."""
    if "clang" in compiler_version():
        return None
    source = HERE / "kvemu.h"
    folder = cache_folder() / f"header-{_key(included(source, [HERE]), flags)}"

    def produce(out: Path) -> None:
        # The compiler takes the precompiled form of a header that lies beside it.
        for path in included(source, [HERE]):
            shutil.copy(path, folder / path.name)
        _run([compiler(), *flags, "-x", "c++-header", str(folder / source.name), "-o", str(out)])

    return _make(folder / "kvemu.h.gch", produce).with_suffix("")


def _wrapped(source: Path) -> str:
    """The source with the launch bounds of its kernels as data, which ``__launch_bounds__`` cannot leave behind."""
    lines = [f'#include "{source}"']
    pattern = r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)\s*(\w+)\s*\("
    for bounds, name in re.findall(pattern, source.read_text()):
        threads = bounds.split(",")[0]
        lines.append(f"KVEMU_EXPORT const int kvemu_max_threads_{name} = ({threads});")
    return "\n".join(lines) + "\n"


def build(
    source: str | Path, defines: Mapping[str, int] | None = None, sanitizer: str | None = None
) -> Module:
    """Compile a source, or find it compiled, and load it.

    Args:
        source: name of a file in ``cuda/``, or the path of another.
        defines: constants by ``-D``.
        sanitizer: ``""``, ``asan``, ``tsan`` or ``ubsan``; by default that of the process (``KVCATCH_SANITIZER``).

    Raises:
        Unavailable: no compiler, or no CUDA headers.
        BuildError: it does not compile.
    """
    if sanitizer is None:
        sanitizer = os.environ.get("KVCATCH_SANITIZER", "")
    path = Path(source) if isinstance(source, Path) else CUDA / source
    return _load(path.resolve(), tuple(sorted((defines or {}).items())), sanitizer)


@functools.cache
def _load(path: Path, defines: tuple[tuple[str, int], ...], sanitizer: str) -> Module:
    return Module(_compile(path, defines, sanitizer), path)


def _compile(path: Path, defines: tuple[tuple[str, int], ...], sanitizer: str) -> Path:
    sanitizing = _sanitizing(sanitizer)
    flags = [*COMMON, *KERNEL, *sanitizing, *machine_flags()]
    system = ["-isystem", str(cuda_headers())]
    values = [f"-D{name}={value}" for name, value in defines]
    folders = [path.parent, CUDA, HERE]
    files = {*included(path, folders), *included(HERE / "kvemu.h", [HERE])}
    runtime = _runtime(sanitizer)
    key = _key(files, [*flags, *values, runtime.name])
    name = f"{path.stem}-{sanitizer or 'plain'}-{key}"

    def produce(out: Path) -> None:
        header = _header([*flags, *system])
        first = ["-include", str(header)] if header else []
        include = [f"-I{folder}" for folder in folders]
        # A plain build brings its own handlers of the compiler's checks, so their library is not linked.
        linked = [f for f in sanitizing if f.startswith("-fsanitize")] if sanitizer else []
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            wrapper, compiled = Path(scratch) / f"{path.stem}.cpp", Path(scratch) / "kernel.o"
            wrapper.write_text(_wrapped(path))
            command = [compiler(), *flags, *values, *first, *include, *system, "-c", str(wrapper)]
            _run([*command, "-o", str(compiled)])
            objects = [str(compiled), str(runtime), "-lrt", "-ldl"]
            _run([compiler(), "-shared", *linked, *objects, "-o", str(out)])

    return _make(cache_folder() / f"{name}.so", produce)


def build_all(
    requests: Iterable[tuple[str | Path, Mapping[str, int]]],
    sanitizer: str | None = None,
    jobs: int = 2,
) -> list[Module]:
    """:func:`build` several variants side by side."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda request: build(*request, sanitizer), requests))
