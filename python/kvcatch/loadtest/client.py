"""One OpenAI-compatible server: streamed completions of fixed lengths, and the few metrics that tell who waits."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument, KvcatchError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Gauges", "ServerClient", "ServerError", "Stream"]

WORDS = (
    "block",
    "token",
    "queue",
    "page",
    "table",
    "prefix",
    "hash",
    "decode",
    "batch",
    "layer",
    "head",
    "model",
    "cache",
    "router",
)

GAUGES: dict[str, tuple[str, ...]] = {
    "running": ("kvcatch_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("kvcatch_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions": (
        "kvcatch_preemptions_total",
        "vllm:num_preemptions_total",
        "sglang:num_retracted_reqs_total",
    ),
}
"""Which series say who runs, who waits, and who lost its blocks: kvcatch, vLLM V1, SGLang."""

NUM_BLOCKS = re.compile(
    r'^kvcatch_num_blocks\{[^}]*\} (?P<a>[0-9.e+]+)|num_gpu_blocks="(?P<b>\d+)"', re.MULTILINE
)
BLOCK_SIZE = re.compile(
    r'^kvcatch_block_size_tokens\{[^}]*\} (?P<a>[0-9.e+]+)|block_size="(?P<b>\d+)"', re.MULTILINE
)


class ServerError(KvcatchError):
    """The server cannot be reached, or does not answer as an OpenAI-compatible one does."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What /metrics says now; ``None`` where it does not say."""

    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None


@dataclass(slots=True)
class Stream:
    """One request under way.

    Attributes:
        number: first, second...
        sent: seconds on the monotonic clock; ``first`` and ``ended`` are too, ``None`` until then.
        tokens: pieces that came: tokens, where the server sends each on its own.
        status: HTTP status, ``None`` until it comes.
        error: what the server said instead of an answer.
        prompt_tokens: as the server counted them.
    """

    number: int
    sent: float
    first: float | None = None
    ended: float | None = None
    tokens: int = 0
    status: int | None = None
    error: str = ""
    prompt_tokens: int | None = None


@dataclass(slots=True)
class ServerClient:
    """Sends requests of fixed lengths.

    Args:
        url: the server's, with or without ``/v1``.
        model: name to ask for; the first one listed where it is ``None``.
        api_key: bearer token.
        token_range: ids that prompts are made of; every prompt differs from its first token on.
        seed: of the prompts.
        timeout: seconds without a byte after which a request counts as lost.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    token_range: tuple[int, int] = (1000, 9000)
    seed: int = 0
    timeout: float = 600.0
    _http: Any = None
    _base: str = ""
    _extras: dict[str, Any] = field(default_factory=dict)
    _as_text: bool = False

    async def __aenter__(self) -> ServerClient:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingExtra("httpx is not installed: pip install 'kvcatch[observe]'") from error
        if not re.match(r"https?://[^/]+", self.url):
            raise InvalidArgument(f"URL {self.url!r}: must begin with http:// or https://")
        self._base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(self.timeout, connect=10), limits=limits
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def prepare(self, prompt_tokens: int) -> int:
        """Find the model, learn what the server takes, and return its count of prompt tokens.

        Raises:
            ServerError: it cannot be reached, lists no model, or refuses a request of one token.
        """
        if self.model is None:
            listed = await self._get_json("/v1/models")
            models = [card.get("id") for card in listed.get("data", []) if isinstance(card, dict)]
            if not models:
                raise ServerError(f"{self._base}/v1/models lists no model")
            self.model = str(models[0])
        said = ""
        # What not every server takes is tried first, then left out.
        for as_text in (False, True):
            for extras in ({"ignore_eos": True}, {}):
                self._as_text, self._extras = as_text, extras
                got = await self._post(self._body(-1, prompt_tokens, 1, stream=False))
                if got.status_code == 200:
                    usage = got.json().get("usage") or {}
                    return int(usage.get("prompt_tokens") or prompt_tokens)
                said = _said(got)
                if got.status_code not in (400, 422):
                    break
        raise ServerError(f"{self._base} refused one request of {prompt_tokens} tokens: {said}")

    async def run(self, stream: Stream, prompt_tokens: int, output_tokens: int) -> None:
        """Send one request and note in ``stream`` what comes. An error of the server is noted, not raised."""
        import httpx

        body = self._body(stream.number, prompt_tokens, output_tokens, stream=True)
        try:
            async with self._http.stream("POST", f"{self._base}/v1/completions", json=body) as got:
                stream.status = got.status_code
                if got.status_code != 200:
                    await got.aread()
                    stream.error = _said(got)
                else:
                    async for data in _events(got):
                        if "error" in data:
                            stream.error = str(data["error"])[:200]
                        elif data.get("choices"):
                            stream.tokens += 1
                            if stream.first is None:
                                stream.first = time.monotonic()
                        if data.get("usage"):
                            stream.prompt_tokens = data["usage"].get("prompt_tokens")
        except httpx.HTTPError as error:
            stream.error = f"{type(error).__name__}: {error}"
        finally:
            stream.ended = time.monotonic()

    async def gauges(self) -> Gauges:
        """What /metrics says; all unknown where there is none."""
        import httpx

        try:
            got = await self._http.get(f"{self._base}/metrics", timeout=5)
        except httpx.HTTPError:
            return Gauges()
        if got.status_code != 200:
            return Gauges()
        text = got.text
        found = {field: _total(text, names) for field, names in GAUGES.items()}
        return Gauges(**found, num_blocks=_one(NUM_BLOCKS, text), block_size=_one(BLOCK_SIZE, text))

    def _body(self, number: int, prompt: int, output: int, *, stream: bool) -> dict[str, Any]:
        chooser = random.Random(f"{self.seed}/{number}")
        if self._as_text:
            words: Any = " ".join(chooser.choice(WORDS) for _ in range(prompt))
        else:
            low, high = self.token_range
            words = [chooser.randrange(low, high) for _ in range(prompt)]
        body = {"model": self.model, "prompt": words, "max_tokens": output, "temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._extras

    async def _get_json(self, path: str) -> dict[str, Any]:
        import httpx

        try:
            got = await self._http.get(f"{self._base}{path}")
        except httpx.HTTPError as error:
            raise ServerError(f"{self._base}{path}: {type(error).__name__}: {error}") from error
        try:
            data = got.json()
        except ValueError as error:
            raise ServerError(f"{self._base}{path}: not JSON: {got.text[:60]!r}") from error
        if got.status_code != 200 or not isinstance(data, dict):
            raise ServerError(f"{self._base}{path}: {_said(got)}")
        return data

    async def _post(self, body: dict[str, Any]) -> Any:
        import httpx

        try:
            return await self._http.post(f"{self._base}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{self._base}: {type(error).__name__}: {error}") from error


async def _events(got: Any) -> AsyncIterator[dict[str, Any]]:
    async for line in got.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            try:
                data = json.loads(line[6:])
            except ValueError:
                continue
            if isinstance(data, dict):
                yield data


def _said(got: Any) -> str:
    """Status and message of an answer that is an error."""
    try:
        error = got.json().get("error")
        message = error.get("message") if isinstance(error, dict) else got.json().get("message")
    except (ValueError, AttributeError):
        message = None
    return f"HTTP {got.status_code}: {str(message or got.text)[:200]}"


def _total(text: str, names: tuple[str, ...]) -> int | None:
    """Sum over the series of the first name that occurs; ``None`` where none does."""
    for name in names:
        values = re.findall(
            rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE
        )
        if values:
            return int(sum(float(value) for value in values))
    return None


def _one(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found["a"] or found["b"]))
