"""The page of ``kvcatch watch --web``: a small server of its own, nothing is loaded from elsewhere."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import threading
import time
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from kvcatch.errors import InvalidArgument
from kvcatch.watch.view import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.watch.fleet import Fleet

__all__ = ["WebServer", "serve"]

ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_FRESH_S = 0.5
_MOST_CACHED = 32
_MOST_THREADS = 64
_ANSWER_S = 10.0
_LONGEST_S = 7 * 86_400.0


class WebServer:
    """Looks at a fleet and serves its page, in two threads of its own. Use it with ``with``.

    Args:
        fleet: What is watched; nobody else may look at it meanwhile.
        host: Address to listen on.
        port: 0 for any free one.

    Attributes:
        url: Of the page.

    Raises:
        InvalidArgument: The address cannot be listened on.
    """

    def __init__(self, fleet: Fleet, host: str = "127.0.0.1", port: int = 0) -> None:
        self._fleet = fleet
        self._loop = asyncio.new_event_loop()
        self._cache: OrderedDict[tuple[Any, ...], tuple[float, bytes]] = OrderedDict()
        self._is_local = _is_loopback(host)
        try:
            self._server = _Server((host, port), self._handler())
        except (OSError, UnicodeError) as error:
            self._loop.close()
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"{host}:{port}: {reason}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/"
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._look, daemon=True),
            threading.Thread(target=self._server.serve_forever, daemon=True),
        ]

    def __enter__(self) -> WebServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._loop.call_soon_threadsafe(self._stop)
        for thread in self._threads:
            thread.join(timeout=5)

    def wait(self) -> None:
        """Wait until looking ends, which it does only by an error.

        Raises:
            BaseException: What ended it.
        """
        while not self._done.wait(0.5):
            pass
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._fleet.is_live:
            self._task = self._loop.create_task(self._fleet.run())
            self._task.add_done_callback(self._ended)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._error = task.exception()
            self._done.set()

    def _stop(self) -> None:
        self._loop.stop()

    def answer(self, query: str) -> bytes:
        """The state as JSON, made by the thread that looks, at most every half second per question.

        Raises:
            InvalidArgument: A parameter is no number.
        """
        asked = parse_qs(query)
        at_s = _number(asked, "at")
        seconds = _number(asked, "seconds") or 600.0
        key = asked["key"][0] if "key" in asked else None

        async def make() -> bytes:
            question = (at_s, seconds, key)
            made_s, body = self._cache.get(question, (-math.inf, b""))
            if time.monotonic() - made_s > _FRESH_S:
                found = state(self._fleet, at_s, key, min(max(seconds, 1e-3), _LONGEST_S))
                body = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
                self._cache[question] = time.monotonic(), body
                while len(self._cache) > _MOST_CACHED:
                    self._cache.popitem(last=False)
            return body

        asked_for = make()
        try:
            future = asyncio.run_coroutine_threadsafe(asked_for, self._loop)
        except RuntimeError:  # it has ended meanwhile
            asked_for.close()
            raise
        return future.result(timeout=_ANSWER_S)

    def is_expected(self, host: str | None) -> bool:
        """Whether a request's Host may be answered: a page of another name must not read a local one."""
        if not self._is_local:
            return True
        return host is not None and _is_loopback(urlsplit(f"//{host}").hostname or "")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                try:
                    expected = server.is_expected(self.headers.get("Host"))
                except ValueError:
                    expected = False
                if not expected:
                    self.respond(403, b"unexpected Host\n", "text/plain")
                elif parts.path in ASSETS:
                    name, kind = ASSETS[parts.path]
                    self.respond(200, _asset(name), kind)
                elif parts.path == "/state.json":
                    try:
                        self.respond(200, server.answer(parts.query), "application/json")
                    except InvalidArgument as error:
                        self.respond(400, f"{error}\n".encode(), "text/plain; charset=utf-8")
                    except (TimeoutError, RuntimeError):
                        self.respond(503, b"no answer in time\n", "text/plain")
                else:
                    self.respond(404, b"not found\n", "text/plain")

            def respond(self, code: int, body: bytes, kind: str) -> None:
                self.send_response(code)
                for name, value in {**HEADERS, "Content-Type": kind}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def version_string(self) -> str:
                return "kvcatch"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                return None

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            import socket

            self.address_family = socket.AF_INET6
        self._slots = threading.BoundedSemaphore(_MOST_THREADS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, while there are not too many."""
        if not self._slots.acquire(timeout=1.0):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then make place for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no fault."""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _number(asked: dict[str, list[str]], name: str) -> float | None:
    if name not in asked:
        return None
    try:
        value = float(asked[name][0])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgument(f"{name} = {asked[name][0]!r:.40}: not a number")
    return value


def _asset(name: str) -> bytes:
    return files("kvcatch.watch").joinpath("page", name).read_bytes()


def serve(fleet: Fleet, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until interrupted; ``say`` is told where it is.

    Raises:
        InvalidArgument: The address cannot be listened on.
        MissingExtra: httpx is not installed.
    """
    with WebServer(fleet, host, port) as server:
        say(f"{server.url} (Ctrl-C ends it)")
        server.wait()
