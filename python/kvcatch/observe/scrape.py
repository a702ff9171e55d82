"""Fetch a metrics page: with timeouts, a size limit and few redirects, and never more than one failure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from kvcatch.errors import InvalidArgument, MissingExtra
from kvcatch.observe.errors import ScrapeError
from kvcatch.observe.limits import EngineVersion
from kvcatch.observe.prometheus import MAX_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

__all__ = ["Page", "Scraper", "metrics_url"]

_MAX_REDIRECTS = 3


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra(
            "looking at an engine needs httpx: pip install kvcatch[observe]"
        ) from error
    return httpx


def metrics_url(text: str) -> str:
    """The address of the metrics page: ``/metrics`` is added to an address without a path.

    Raises:
        InvalidArgument: It is no http or https address.
    """
    parts = urlsplit(text.strip())
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"url = {text!r}: must be an address such as http://127.0.0.1:8000")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


@dataclass(frozen=True, slots=True)
class Page:
    """One endpoint's answer.

    Attributes:
        endpoint: Which.
        body: What it answered; None when it did not.
        error: Why there is no body, in one line; None when there is one.
    """

    endpoint: str
    body: bytes | None = None
    error: str | None = None


class Scraper:
    """Fetches from several endpoints at once; what goes wrong at one is told and stops no other.

    Use it as ``async with``.

    Raises:
        MissingExtra: httpx is not installed.
    """

    def __init__(self, *, timeout_s: float = 5.0, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._httpx = _httpx()
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._client: httpx.AsyncClient = self._httpx.AsyncClient(
            timeout=timeout_s,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            headers={"accept": "text/plain"},
        )

    async def __aenter__(self) -> Scraper:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def fetch(self, endpoint: str) -> Page:
        """The page of one endpoint; never raises for what the endpoint does."""
        try:
            # The client's timeout is per read: a body that drips in is bounded by this one.
            async with asyncio.timeout(2 * self._timeout_s):
                return Page(endpoint, await self._body(endpoint))
        except ScrapeError as error:
            return Page(endpoint, error=str(error))
        except TimeoutError:
            return Page(endpoint, error=f"{endpoint}: no answer in {2 * self._timeout_s:g} s")

    async def fetch_all(self, endpoints: Sequence[str]) -> list[Page]:
        """The pages of all endpoints, in order."""
        return list(await asyncio.gather(*(self.fetch(endpoint) for endpoint in endpoints)))

    async def _body(self, endpoint: str) -> bytes:
        httpx = self._httpx
        try:
            async with self._client.stream("GET", endpoint) as answer:
                if answer.status_code != 200:
                    raise ScrapeError(f"{endpoint}: HTTP {answer.status_code}")
                parts, size = [], 0
                async for part in answer.aiter_bytes():
                    size += len(part)
                    if size > self._max_bytes:
                        raise ScrapeError(
                            f"{endpoint}: a body of more than {self._max_bytes:,} bytes"
                        )
                    parts.append(part)
                return b"".join(parts)
        except httpx.TooManyRedirects:
            raise ScrapeError(
                f"{endpoint}: more than {_MAX_REDIRECTS} redirects: a loop?"
            ) from None
        except httpx.TimeoutException:
            raise ScrapeError(f"{endpoint}: no answer in {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ScrapeError(f"{endpoint}: {reason}") from None

    async def version(self, endpoint: str, engine: str) -> EngineVersion | None:
        """What ``/version`` beside a vLLM's metrics says; None when it says nothing."""
        if engine != "vllm":
            return None
        parts = urlsplit(endpoint)
        root = parts.path.rsplit("/", 1)[0]
        page = await self.fetch(urlunsplit((parts.scheme, parts.netloc, root + "/version", "", "")))
        if page.body is None or len(page.body) > 10_000:
            return None
        import json

        try:
            answer = json.loads(page.body)
        except ValueError:
            return None
        text = answer.get("version") if isinstance(answer, dict) else None
        found = EngineVersion.exact("vllm", text, "/version") if isinstance(text, str) else None
        return found if found and found.low else None
