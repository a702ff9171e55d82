"""Serves the plugin's pages on a Unix socket, and on a port where one is asked for.

Everything here runs in threads of its own. What goes wrong is one line in the log, and vLLM serves on.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import logging
import os
import socket
import socketserver
import stat
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from kvcatch.errors import InvalidArgument
from kvcatch.vllm.observe.address import Listen, default_folder, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Pages", "Publisher", "clear_stale"]

_log = logging.getLogger("vllm.kvcatch.observe")

_TIMEOUT_S = 5.0
_MOST_READERS = 8
_IDLE_S = 10.0


class Pages(Protocol):
    """Whose pages are served."""

    def page(self, path: str, *, is_whole: bool = False) -> tuple[str, bytes] | None:
        """Content type and body of a page; None where there is none."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answer with a page."""
        server = self.server
        if not server.readers.acquire(blocking=False):
            self._answer(503, "text/plain", b"too many readers at once\n")
            return
        try:
            if server.token is not None:
                given = self.headers.get("Authorization", "").encode("latin-1", "replace")
                if not hmac.compare_digest(given, b"Bearer " + server.token.encode()):
                    self._answer(401, "text/plain", b"a token is needed\n")
                    return
            elif server.is_port and not _names_loopback(self.headers.get("Host", "")):
                # A web page whose name was made to mean this machine.
                self._answer(403, "text/plain", b"this port answers to its loopback name only\n")
                return
            parts = urlsplit(self.path)
            wanted = parse_qs(parts.query).get("all", ["0"])[0]
            try:
                found = server.pages.page(parts.path, is_whole=wanted in ("1", "true"))
            except Exception as error:
                _log.debug("kvcatch: %s failed", parts.path, exc_info=True)
                text = f"{type(error).__name__}: {error}\n"
                self._answer(500, "text/plain", text.encode("utf-8", "replace"))
                return
            if found is None:
                self._answer(404, "text/plain", b"no such page\n")
            else:
                self._answer(200, *found)
        finally:
            server.readers.release()

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if code != 200:
            self.send_header("Connection", "close")
            self.close_connection = True
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """A Unix socket's client has no address."""
        return str(self.client_address)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: no line per request."""


def _names_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    return name.strip("[]").lower() in ("localhost", "127.0.0.1", "::1") or name.startswith("127.")


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, pages: Pages, listening: socket.socket, token: str | None) -> None:
        # The socket is made, bound and listening already.
        socketserver.BaseServer.__init__(self, listening.getsockname(), _Handler)
        self.socket = listening
        self.pages = pages
        self.token = token
        self.is_port = listening.family != socket.AF_UNIX
        self.readers = threading.BoundedSemaphore(_MOST_READERS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nobody's concern."""
        _log.debug("kvcatch: a reader went away", exc_info=True)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a reader, and never wait for it without end."""
        connection, address = super().get_request()
        connection.settimeout(_TIMEOUT_S)
        return connection, address


class Publisher:
    """Serves pages until it is closed, or the process ends.

    Args:
        pages: Whose.
        check: Called about every ten seconds; a line it returns is logged once.
    """

    def __init__(self, pages: Pages, check: Callable[[], str | None] | None = None) -> None:
        self.pages = pages
        self.path: Path | None = None
        self.port: int | None = None
        self._check = check
        self._servers: list[_Server] = []
        self._lock_file: int | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        atexit.register(self.close)

    def serve_socket(self, path: Path) -> bool:
        """Serve on a Unix socket that only this user can open; False (and one log line) if that fails."""
        try:
            listening = self._bind(path)
        except (InvalidArgument, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            text = reason if str(path) in reason else f"{path}: {reason}"
            _log.warning("kvcatch: observe is not published on the socket: %s", text)
            return False
        self.path = path
        self._start(listening, None)
        _log.info("kvcatch: observe is published on unix:%s", path)
        return True

    def serve_port(self, listen: Listen) -> bool:
        """Serve on a port; False (and one log line) if that fails."""
        try:
            family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
            listening = socket.create_server((listen.host, listen.port), family=family, backlog=16)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            _log.warning(
                "kvcatch: observe is not published on %s:%d: %s", listen.host, listen.port, reason
            )
            return False
        self.port = listening.getsockname()[1]
        self._start(listening, listen.token)
        guard = "with a token" if listen.token else "on loopback"
        _log.info("kvcatch: observe is published on %s:%d, %s", listen.host, self.port, guard)
        return True

    def _bind(self, path: Path) -> socket.socket:
        if path.parent == default_folder():
            make_folder(path.parent)
            clear_stale(path.parent)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise InvalidArgument(f"{path}: is there and is no socket: not touched")
        self._lock_file = _lock(path)
        if self._lock_file is None:
            raise InvalidArgument(
                f"{path}: another running process serves on it; put {{pid}} or {{rank}} into "
                "KVCATCH_VLLM_SOCKET"
            )
        fresh = path.with_name(path.name + ".new")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fresh.unlink(missing_ok=True)
            listening.bind(str(fresh))
            # Nobody can connect before listen(), so nobody gets in before the mode is set.
            fresh.chmod(0o600)
            listening.listen(16)
            fresh.rename(path)
        except OSError:
            listening.close()
            self._unlock(path)
            raise
        return listening

    def _start(self, listening: socket.socket, token: str | None) -> None:
        server = _Server(self.pages, listening, token)
        self._servers.append(server)
        name = "kvcatch-observe"
        serve = threading.Thread(target=server.serve_forever, args=(0.25,), name=name, daemon=True)
        serve.start()
        if self._check is not None and len(self._servers) == 1:
            threading.Thread(target=self._watch, name=f"{name}-idle", daemon=True).start()

    def _watch(self) -> None:
        told = ""
        while not self._closed.wait(_IDLE_S):
            try:
                found = (self._check() if self._check is not None else None) or ""
            except Exception:
                _log.debug("kvcatch: the check at idle failed", exc_info=True)
                continue
            if found and found != told:
                _log.warning("kvcatch: %s", found)
            told = found

    def close(self) -> None:
        """Stop serving and remove the socket. Harmless twice, and in a forked child."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        atexit.unregister(self.close)
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._unlock(self.path)

    def _unlock(self, path: Path) -> None:
        if self._lock_file is not None:
            with contextlib.suppress(OSError):
                _lock_name(path).unlink()
            with contextlib.suppress(OSError):
                os.close(self._lock_file)
            self._lock_file = None


def _lock_name(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int | None:
    """A lock that ends with its process; None where another one has it."""
    name = _lock_name(path)
    while True:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        try:
            if os.stat(name).st_ino == os.fstat(lock).st_ino:  # noqa: PTH116
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)  # its owner removed it meanwhile


def clear_stale(folder: Path) -> int:
    """Remove sockets that crashed processes left in the default folder; returns how many."""
    gone = 0
    for path in folder.glob("vllm-*.sock"):
        with contextlib.suppress(OSError):
            lock = _lock(path)
            if lock is None:
                continue
            path.unlink(missing_ok=True)
            _lock_name(path).unlink(missing_ok=True)
            os.close(lock)
            gone += 1
    return gone
