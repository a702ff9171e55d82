"""Runs the application until it is told to stop: then no new connection, all that was accepted is answered, end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn

from kvcatch.engine.aio import AsyncEngine
from kvcatch.serve.app import ServeSettings, create_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.engine.engine import Engine
    from kvcatch.models.tokenizer import Tokenizer

__all__ = ["serve"]


async def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_seconds: float = 120.0,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        engine: what answers.
        tokenizer: of its model.
        settings: model name, key, limits.
        host: address to listen on; loopback unless others are to reach it.
        port: 0 for one that is free.
        drain_seconds: how long accepted requests may take to finish once told to stop.
        ready: called with the port once connections are accepted.

    Raises:
        OSError: the address cannot be listened on.
    """
    async with AsyncEngine(engine) as running:
        app = create_app(running, tokenizer, settings)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        socket = config.bind_socket()
        server = uvicorn.Server(config)

        async def announce() -> None:
            while not server.started:
                await asyncio.sleep(0.01)
            if ready is not None:
                ready(socket.getsockname()[1])

        announcing = asyncio.create_task(announce())
        try:
            await server.serve(sockets=[socket])
        finally:
            announcing.cancel()
            socket.close()
