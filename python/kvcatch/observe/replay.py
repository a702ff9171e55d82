"""Serves a recording back as a metrics page, moment by moment."""

from __future__ import annotations

import socket
import threading
import time
from bisect import bisect_right
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.observe.errors import RecordingError
from kvcatch.observe.record import moments

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Replay", "make_server"]


class Replay:
    """The body that a recording held at each moment.

    Args:
        path: The recording.
        speed: Seconds of it per second.
        loop: Begin again at its end, instead of staying there.

    Raises:
        RecordingError: It is not a recording, or is empty.
    """

    def __init__(self, path: Path, *, speed: float = 1.0, loop: bool = False) -> None:
        times = [at for at, _ in moments(path)]
        if not times:
            raise RecordingError(f"{path}: no row in it")
        self._times = [at - times[0] for at in times]
        self._path, self._speed, self._loop = path, speed, loop
        # Bodies are made when they are asked for: all of them would not fit into memory.
        self._rows = moments(path)
        self._row = -1
        self._body: str | None = None
        self._lock = threading.Lock()
        self._start = time.monotonic()

    @property
    def rows(self) -> int:
        """How many bodies, failed scrapes counted."""
        return len(self._times)

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self._times[-1]

    def at(self, seconds: float) -> str | None:
        """The body at a time of the recording; None where its scrape failed."""
        if self._loop and self.seconds > 0:
            seconds %= self.seconds
        wanted = max(0, bisect_right(self._times, seconds) - 1)
        with self._lock:
            if wanted < self._row:
                self._rows, self._row = moments(self._path), -1
            if wanted > self._row:
                for _ in range(wanted - self._row - 1):
                    next(self._rows)
                _, make = next(self._rows)
                self._row, self._body = wanted, make()
            return self._body

    def now(self) -> str | None:
        """The body of this moment."""
        return self.at((time.monotonic() - self._start) * self._speed)


def make_server(replay: Replay, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server with ``/metrics``; port 0 takes a free one.

    Raises:
        InvalidArgument: The address cannot be listened on.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = replay.now()
            if body is None:
                self.send_error(503, "no body at this moment of the recording")
                return
            data = body.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return None

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is no fault."""

    try:
        return Server((host, port), Handler)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{host}:{port}: {reason}") from None
