"""A load of equal requests on an OpenAI-compatible server, over plain asyncio streams.

A client on the server's own cores takes time from it: this one reads bytes and notes when they came. Prompts are token
ids, so that every server computes the same; each prompt is new, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Load", "Measured", "measure", "served_model"]

IDS = (1000, 9000)
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once.

    Attributes:
        requests: all sent together.
        prompt_tokens: of each.
        output_tokens: of each; end tokens are ignored.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.prompt_tokens} tokens, {self.output_tokens} out"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of a load.

    Attributes:
        throughput: output tokens per second, from the first byte sent to the last received.
        ttft_median: seconds to the first piece of text; ``ttft_mean`` is the mean.
        itl: seconds from a token to the next, the mean over all requests from their first token to the last.
        gap: the median time between two pieces of a request.
    """

    throughput: float
    ttft_median: float
    ttft_mean: float
    itl: float
    gap: float


@dataclass(slots=True)
class _Answer:
    sent: float
    pieces: list[float]
    tokens: int = 0


def served_model(url: str) -> str:
    """The first model that a server lists."""
    head, body = asyncio.run(_get(url, "/v1/models"))
    if " 200 " not in head:
        raise SystemExit(f"{url}/v1/models: {head}")
    return str(json.loads(body)["data"][0]["id"])


def measure(url: str, model: str, load: Load, seed: int) -> Measured:
    """Run one round; prompts differ by ``seed``."""
    return asyncio.run(_round(url, model, load, seed))


async def _round(url: str, model: str, load: Load, seed: int) -> Measured:
    bodies = []
    for number in range(load.requests):
        chooser = random.Random(f"{seed}/{number}")
        prompt = [chooser.randrange(*IDS) for _ in range(load.prompt_tokens)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(json.dumps(body).encode())
    begin = time.perf_counter()
    answers = await asyncio.gather(*(_ask(url, body) for body in bodies))
    wall = time.perf_counter() - begin
    for answer in answers:
        if answer.tokens != load.output_tokens:
            raise SystemExit(f"{url}: {answer.tokens} tokens, asked for {load.output_tokens}")
    ttfts = [answer.pieces[0] - answer.sent for answer in answers]
    spans = [answer.pieces[-1] - answer.pieces[0] for answer in answers]
    gaps = [
        later - sooner
        for answer in answers
        for sooner, later in zip(answer.pieces, answer.pieces[1:], strict=False)
    ]
    return Measured(
        load.requests * load.output_tokens / wall,
        statistics.median(ttfts),
        statistics.mean(ttfts),
        sum(spans) / (load.requests * (load.output_tokens - 1)),
        statistics.median(gaps),
    )


async def _ask(url: str, body: bytes) -> _Answer:
    answer = _Answer(time.perf_counter(), [])
    reader, writer = await _send(url, "POST", "/v1/completions", body)
    try:
        async with asyncio.timeout(TIMEOUT):
            head = (await reader.readline()).decode()
            if " 200 " not in head:
                raise SystemExit(f"{url}: {head} {(await reader.read(2000)).decode()}")
            # Chunk sizes are lines of their own: they do not begin as events do.
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    break
                data = json.loads(line[6:])
                if data.get("choices"):
                    answer.pieces.append(time.perf_counter())
                if data.get("usage"):
                    answer.tokens = data["usage"]["completion_tokens"]
    finally:
        writer.close()
    return answer


async def _get(url: str, path: str) -> tuple[str, bytes]:
    reader, writer = await _send(url, "GET", path, b"")
    async with asyncio.timeout(TIMEOUT):
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), body


async def _send(
    url: str, method: str, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer
