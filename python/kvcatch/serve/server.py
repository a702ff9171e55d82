"""Runs the application until it is told to stop: then no new connection, all that was accepted is answered, end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from typing import TYPE_CHECKING

import uvicorn

from kvcatch.engine.aio import AsyncEngine
from kvcatch.errors import InvalidArgument
from kvcatch.serve.app import ServeSettings, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import Receive, Scope, Send

    from kvcatch.engine.engine import Engine
    from kvcatch.models.tokenizer import Tokenizer

__all__ = ["bind", "serve"]

ENDS = (signal.SIGINT, signal.SIGTERM)

LONGEST_DRAIN = 86_400
"""Seconds; a day."""

LAST_SECONDS = 5
"""After the drain, for answers to be written out; calls whose body never came are cancelled then."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; nobody can connect before :func:`serve` listens on it.

    Args:
        host: address or name, IPv4 or IPv6.
        port: 0 for one that is free.

    Raises:
        OSError: it is taken, not of this machine, or not allowed; ``filename`` is the address.
    """
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise OSError(error.errno, error.strerror or str(error), f"{host}:{port}") from None
    return bound


async def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    bound: socket.socket,
    *,
    drain_seconds: float = 120.0,
    ready: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; a second SIGINT does not wait for what is under way.

    Args:
        engine: what answers.
        tokenizer: of its model.
        settings: model name, key, limits.
        bound: from :func:`bind`; closed at the end.
        drain_seconds: how long accepted requests may take to finish once told to stop; then they end with an
            error.
        ready: called once connections are accepted.

    Returns:
        How many requests were cut off because ``drain_seconds`` were over.

    Raises:
        EngineDied: the engine ended by an error while it served.
        InvalidArgument: ``drain_seconds`` is no length of time, or above :data:`LONGEST_DRAIN`.
    """
    if not 0 <= drain_seconds <= LONGEST_DRAIN:
        bound.close()
        raise InvalidArgument(
            f"drain_seconds = {drain_seconds}: must be between 0 and {LONGEST_DRAIN}"
        )
    cut_off = 0
    async with AsyncEngine(engine) as running:
        app = create_app(running, tokenizer, settings)

        async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
            # At the very end uvicorn cancels calls whose body never came: no traceback for these.
            with contextlib.suppress(asyncio.CancelledError):
                await app(scope, receive, send)

        config = uvicorn.Config(
            quiet,
            interface="asgi3",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(drain_seconds) + LAST_SECONDS,
        )
        server = uvicorn.Server(config)

        async def watch() -> None:
            nonlocal cut_off
            while not server.started:
                await asyncio.sleep(0.01)
            if ready is not None:
                ready()
            while not server.should_exit:
                await asyncio.sleep(0.05)
            await asyncio.sleep(drain_seconds)
            names = await running.call(lambda: list(engine.requests))
            cut_off = len(names)
            for name in names:
                running.abort(name)

        watching = asyncio.create_task(watch())
        try:
            with _signals_spent():
                await server.serve(sockets=[bound])
        finally:
            watching.cancel()
            bound.close()
        await running.call(lambda: None)  # raises if it died
    return cut_off


@contextlib.contextmanager
def _signals_spent() -> Iterator[None]:
    """Uvicorn raises the signal that ended it once more at its end: here it has done its work by then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
