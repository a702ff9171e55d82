"""Where the plugin publishes: the name of its Unix socket, and the address of its port."""

from __future__ import annotations

import ipaddress
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvcatch.errors import InvalidArgument

__all__ = ["LONGEST_PATH", "Listen", "default_folder", "make_folder", "socket_path"]

LONGEST_PATH = 107
"""Bytes of a Unix socket's path, on Linux."""

LEAST_TOKEN = 16
"""Signs of a token that guards a port others can reach."""


def default_folder() -> Path:
    """``$XDG_RUNTIME_DIR/kvcatch``, or ``kvcatch-UID`` in the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "kvcatch"
    return Path(tempfile.gettempdir()) / f"kvcatch-{os.getuid()}"


def make_folder(folder: Path) -> None:
    """Make the default folder, for its owner alone.

    Raises:
        InvalidArgument: It is there and is somebody else's, or open to others.
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise InvalidArgument(f"{folder}: not a folder of this user")
    if facts.st_mode & 0o077:
        raise InvalidArgument(f"{folder}: open to other users; chmod 700 it")


def socket_path(text: str | None, name: str) -> Path | None:
    """The path of a socket.

    Args:
        text: What the operator gave: empty for the default, ``off`` for none, a folder, or a path in
            which ``{name}``, ``{pid}`` and ``{rank}`` are filled in.
        name: ``engine-RANK`` or ``frontend-INDEX``.

    Raises:
        InvalidArgument: It is too long, or holds an unknown name in braces.
    """
    if text in ("off", "none"):
        return None
    rank = name.rpartition("-")[2]
    if not text:
        path = default_folder() / f"vllm-{os.getpid()}-{name}.sock"
    else:
        try:
            path = Path(text.format(pid=os.getpid(), rank=rank, name=name)).expanduser()
        except (KeyError, IndexError, ValueError):
            raise InvalidArgument(
                f"socket path {text!r}: only {{pid}}, {{rank}} and {{name}} are filled in"
            ) from None
        if path.is_dir():
            path /= f"vllm-{os.getpid()}-{name}.sock"
        elif name.startswith("frontend") and "{name}" not in text:
            path = path.with_name(f"{path.name}.{name}")
    # The socket is bound under a longer name first.
    if len(os.fsencode(path)) + len(".new") > LONGEST_PATH:
        raise InvalidArgument(
            f"socket path {path}: {len(os.fsencode(path))} bytes; {LONGEST_PATH - 4} at most"
        )
    return path


@dataclass(frozen=True, slots=True)
class Listen:
    """A port.

    Attributes:
        host: Address to listen on.
        port: Number; 0 for any.
        token: What a reader must show; None for loopback without one.
    """

    host: str
    port: int
    token: str | None = None

    @classmethod
    def parse(cls, text: str, token: str | None, rank: int = 0) -> Listen:
        """``HOST:PORT``, ``[V6]:PORT`` or ``PORT`` (then loopback); a rank adds itself to the port.

        Raises:
            InvalidArgument: It is none of them, or is reachable from outside and has no token, or one
                of fewer than 16 signs.
        """
        host, _, number = text.strip().rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        if not (number.isascii() and number.isdecimal()) or int(number) > 65535 - rank:
            raise InvalidArgument(f"listen = {text!r}: must be HOST:PORT, such as 127.0.0.1:9109")
        port = int(number) + (rank if int(number) else 0)
        if token is not None and (len(token) < LEAST_TOKEN or not token.isascii()):
            raise InvalidArgument(f"token: {len(token)} signs; {LEAST_TOKEN} at least, ASCII only")
        if token is None and not _is_loopback(host):
            raise InvalidArgument(
                f"listen = {text!r}: others can reach it, so it needs a token (KVCATCH_VLLM_TOKEN)"
            )
        return cls(host, port, token)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
