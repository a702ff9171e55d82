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

__all__ = ["UNIX", "Page", "Scraper", "is_endpoint", "metrics_url", "page_url", "shown_url"]

UNIX = "unix:"
"""Begins the address of a Unix socket."""

_MAX_REDIRECTS = 3
_PAGE = "#"


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

    ``unix:PATH`` is a Unix socket, as kvcatch's plugin for vLLM makes; it stays as it is.

    Raises:
        InvalidArgument: It is no http or https address and no socket.
    """
    if text.strip().startswith(UNIX):
        path = text.strip().removeprefix(UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or "\0" in path:
            raise InvalidArgument(f"url = {text!r}: unix: and the path of a socket")
        return UNIX + path
    parts = urlsplit(text.strip())
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"url = {text!r}: must be an address such as http://127.0.0.1:8000")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def page_url(endpoint: str, page: str) -> str:
    """The address of another page beside a metrics page, such as ``/snapshot``."""
    if endpoint.startswith(UNIX):
        return f"{endpoint}{_PAGE}{page}"
    parts = urlsplit(endpoint)
    root = parts.path.rsplit("/", 1)[0]
    return urlunsplit((parts.scheme, parts.netloc, root + page, "", ""))


def shown_url(endpoint: str) -> str:
    """An address as it may be shown and kept: without a user's name and password."""
    if endpoint.startswith(UNIX) or "@" not in endpoint:
        return endpoint
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_endpoint(text: str) -> bool:
    """Whether a source is an address rather than a file."""
    return "://" in text or text.startswith(UNIX)


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

    Use it as ``async with``. A ``token`` is sent to every address that is no socket.

    Raises:
        MissingExtra: httpx is not installed.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_BODY_BYTES,
        token: str | None = None,
    ) -> None:
        self._httpx = _httpx()
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._token = token
        self._ssl = self._httpx.create_ssl_context()
        # One client per host: httpx looks through its whole pool at each request, which for a fleet
        # costs more than the request.
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def __aenter__(self) -> Scraper:
        return self

    async def __aexit__(self, *_: object) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    def _client(self, endpoint: str) -> httpx.AsyncClient:
        socket = None
        if endpoint.startswith(UNIX):
            host = endpoint.partition(_PAGE)[0]
            socket = host.removeprefix(UNIX)
        else:
            host = endpoint.split("/", 3)[2] if endpoint.count("/") > 2 else endpoint
        client = self._clients.get(host)
        if client is None:
            # Compressing a page costs the engine more than sending it.
            headers = {"accept": "text/plain, application/json", "accept-encoding": "identity"}
            if self._token is not None and socket is None:
                headers["authorization"] = f"Bearer {self._token}"
            client = self._clients[host] = self._httpx.AsyncClient(
                verify=self._ssl,
                timeout=self._timeout_s,
                follow_redirects=socket is None,
                max_redirects=_MAX_REDIRECTS,
                headers=headers,
                transport=None if socket is None else self._httpx.AsyncHTTPTransport(uds=socket),
            )
        return client

    async def fetch(self, endpoint: str) -> Page:
        """The page of one endpoint; never raises for what the endpoint does."""
        try:
            # The client's timeout is per read: a body that drips in is bounded by this one.
            async with asyncio.timeout(2 * self._timeout_s):
                return Page(endpoint, await self._body(endpoint))
        except ScrapeError as error:
            return Page(endpoint, error=f"{shown_url(endpoint)}: {error}")
        except TimeoutError:
            limit = 2 * self._timeout_s
            return Page(endpoint, error=f"{shown_url(endpoint)}: no whole answer in {limit:g} s")

    async def fetch_all(self, endpoints: Sequence[str]) -> list[Page]:
        """The pages of all endpoints, in order."""
        return list(await asyncio.gather(*(self.fetch(endpoint) for endpoint in endpoints)))

    async def _body(self, endpoint: str) -> bytes:
        httpx = self._httpx
        try:
            client, url = self._client(endpoint), endpoint
            if endpoint.startswith(UNIX):
                url = "http://localhost" + (endpoint.partition(_PAGE)[2] or "/metrics")
            async with client.stream("GET", url) as answer:
                if answer.status_code == 401:
                    raise ScrapeError("HTTP 401: it wants a token (--token)")
                if answer.status_code != 200:
                    raise ScrapeError(f"HTTP {answer.status_code}")
                parts: list[bytes] = []
                # What is said to be too long is not read at all.
                size = self._announced(answer.headers.get("content-length"))
                if size > self._max_bytes:
                    raise ScrapeError(f"a body of more than {self._max_bytes:,} bytes")
                size = 0
                async for part in answer.aiter_bytes():
                    size += len(part)
                    if size > self._max_bytes:
                        raise ScrapeError(f"a body of more than {self._max_bytes:,} bytes")
                    parts.append(part)
                return b"".join(parts)
        except httpx.TooManyRedirects:
            raise ScrapeError(f"more than {_MAX_REDIRECTS} redirects: a loop?") from None
        except httpx.TimeoutException:
            raise ScrapeError(f"no answer in {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ScrapeError(reason) from None

    @staticmethod
    def _announced(length: str | None) -> int:
        return int(length) if length and length.isascii() and length.isdigit() else 0

    async def version(self, endpoint: str, engine: str) -> EngineVersion | None:
        """What ``/version`` beside a vLLM's metrics says; None when it says nothing."""
        if engine != "vllm":
            return None
        page = await self.fetch(page_url(endpoint, "/version"))
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
