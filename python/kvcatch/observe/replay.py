"""Serves a recording back as a metrics page, moment by moment."""

from __future__ import annotations

import time
from bisect import bisect_right
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.observe.errors import RecordingError
from kvcatch.observe.record import bodies

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
        rows = list(bodies(path))
        if not rows:
            raise RecordingError(f"{path}: no row in it")
        first = rows[0][0]
        self._times = [at - first for at, _ in rows]
        self._bodies = [body for _, body in rows]
        self._speed, self._loop = speed, loop
        self._start = time.monotonic()

    @property
    def rows(self) -> int:
        """How many bodies, failed scrapes counted."""
        return len(self._bodies)

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self._times[-1]

    def at(self, seconds: float) -> str | None:
        """The body at a time of the recording; None where its scrape failed."""
        if self._loop and self.seconds > 0:
            seconds %= self.seconds
        return self._bodies[max(0, bisect_right(self._times, seconds) - 1)]

    def now(self) -> str | None:
        """The body of this moment."""
        return self.at((time.monotonic() - self._start) * self._speed)


def make_server(replay: Replay, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server with ``/metrics``; port 0 takes a free one.

    Raises:
        InvalidArgument: The address cannot be listened on.
    """

    class Handler(BaseHTTPRequestHandler):
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
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return None

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise InvalidArgument(f"{host}:{port}: {error.strerror or error}") from None
