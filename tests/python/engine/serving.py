"""A real server on loopback around the toy engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("torch", reason="needs the engine extra")

from toy import VOCAB, ToyRunner

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine
from kvcatch.errors import InvalidArgument
from kvcatch.serve.app import ServeSettings, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvcatch.engine.aio import AsyncEngine


class ToyTokenizer:
    """Token t is one character; the last ends an output."""

    eos_ids = (VOCAB - 1,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % (VOCAB - 1) for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if any(not message["content"] for message in messages):
            raise InvalidArgument("a message is empty")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def token_text(self, token: int) -> str:
        return chr(0x4E00 + token)

    def detokeniser(self) -> ToyTokenizer:
        return self

    def push(self, tokens: Iterable[int]) -> str:
        return "".join(self.token_text(token) for token in tokens)

    def finish(self) -> str:
        return ""


class SlowRunner(ToyRunner):
    """A toy whose steps take ``pause`` seconds."""

    pause = 0.0

    def forward(self, items: Any, pool: Any) -> Any:
        if self.pause:
            threading.Event().wait(self.pause)
        return super().forward(items, pool)


@dataclass
class Served:
    url: str
    engine: Engine
    runner: SlowRunner
    stop: Callable[[], None]
    running: AsyncEngine

    def run(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the engine's thread."""
        return asyncio.run(self.running.call(function))

    def client(self, **options: Any) -> Any:
        openai = pytest.importorskip("openai", reason="needs the test extra")
        settings = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)


def start(governor: Any = None, settings: dict[str, Any] | None = None, **options: Any) -> Served:
    import uvicorn

    from kvcatch.engine.aio import AsyncEngine

    numbers: dict[str, Any] = {
        "num_blocks": 100,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **options,
    }
    config = EngineConfig(**numbers)
    runner, tokenizer = SlowRunner(config), ToyTokenizer()
    engine = Engine(config, runner, tokenizer, governor=governor)
    running = AsyncEngine(engine)
    running.start()
    app = create_app(running, tokenizer, ServeSettings(**{"model_name": "toy", **(settings or {})}))  # type: ignore[arg-type]
    server_config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    socket = server_config.bind_socket()
    server = uvicorn.Server(server_config)
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(20)
        asyncio.run(running.stop())

    return Served(f"http://127.0.0.1:{socket.getsockname()[1]}", engine, runner, stop, running)
