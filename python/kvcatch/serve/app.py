"""The application: routes, limits and errors around one engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import kvcatch
from kvcatch.engine.aio import EngineDied
from kvcatch.engine.engine import Rejected
from kvcatch.engine.governor import QueueFull
from kvcatch.engine.request import FinishReason
from kvcatch.errors import InvalidArgument, KvcatchError, MissingExtra
from kvcatch.observe.exporter.exporter import CONTENT_TYPE, Exporter
from kvcatch.serve.answers import Answer, ChatAnswer, Choice, CompletionAnswer, usage_of
from kvcatch.serve.errors import ApiError
from kvcatch.serve.metrics import EngineSource
from kvcatch.serve.schema import ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pydantic import BaseModel
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvcatch.engine.aio import AsyncEngine, Stream
    from kvcatch.engine.output import Delta
    from kvcatch.engine.sampling import SamplingParams
    from kvcatch.models.tokenizer import Tokenizer
    from kvcatch.observe.exporter.source import Numbers

__all__ = ["ServeSettings", "create_app"]

MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 30.0
"""For a body to come: a client that never sends it must not hold a connection, or the end of the server, for long."""
JSON_TYPE = "application/json"
METRICS_PATIENCE = 1.0
"""Seconds that a scrape waits for the end of a step before it shows the last numbers again."""
LONG_TEXT = 20_000
"""Characters from which a text is encoded in another thread."""
NO_KEY_NEEDED = frozenset({"/health", "/version"})

B = TypeVar("B", bound="BaseModel")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of the server.

    Attributes:
        model_name: what ``/v1/models`` lists and a body's ``model`` must say.
        api_key: bearer token that every call but ``/health`` and ``/version`` needs; ``None`` for none.
        max_body_bytes: a longer body is refused with 413.
        body_seconds: a body that is not complete so long after its head is refused with 408.

    Raises:
        InvalidArgument: an empty key, a name that UTF-8 cannot encode.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS

    def __post_init__(self) -> None:
        try:
            self.model_name.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"model_name = {self.model_name!r}: must be text that UTF-8 can encode"
            ) from None
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidArgument(
                f"api_key = {self.api_key!r}: give one that is not empty, or none"
            )


def create_app(running: AsyncEngine, tokenizer: Tokenizer, settings: ServeSettings) -> FastAPI:
    """The application over an engine that runs. The caller starts and stops the engine."""
    app = FastAPI(title="kvcatch", version=kvcatch.__version__, docs_url=None, redoc_url=None)
    started = int(time.time())
    server = _Server(running, tokenizer, settings)
    page = _MetricsPage(running, settings.model_name)
    card = {"id": settings.model_name, "object": "model", "created": started, "owned_by": "kvcatch"}

    if settings.api_key is not None:
        app.add_middleware(_KeyGuard, key=settings.api_key)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        return _error(ApiError(error.status_code, what, headers=headers))

    @app.exception_handler(KvcatchError)
    async def engine_error(_: Request, error: KvcatchError) -> Response:
        return _error(_as_api_error(error))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return _error(ApiError(500, f"internal error: {type(error).__name__}", "server_error"))

    @app.get("/health")
    async def health() -> Response:
        if not running.is_alive:
            return _error(ApiError(503, "the engine does not run", "server_error"))
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": kvcatch.__version__, "engine": "kvcatch"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return await page.answer()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return card

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await server.read(request, CompletionBody)
        params = body.sampling(16 if body.max_tokens is None else body.max_tokens, body.logprobs)
        given = body.prompts()
        length = sum(len(prompt) for prompt in given if isinstance(prompt, str))
        prompts = [
            await server.apart(length, tokenizer.encode, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in given
        ]
        answer = CompletionAnswer(
            f"cmpl-{uuid.uuid4().hex}", int(time.time()), body.model, server.text
        )
        return await server.answer(request, body, prompts, params, answer)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await server.read(request, ChatBody)
        params = body.sampling(body.limit, (body.top_logprobs or 0) if body.logprobs else None)
        messages = [message.plain() for message in body.messages]
        length = sum(len(message["content"]) for message in messages)
        prompt = await server.apart(length, tokenizer.encode_chat, messages)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        answer = ChatAnswer(name, int(time.time()), body.model, server.text)
        return await server.answer(request, body, [prompt], params, answer)

    return app


class _MetricsPage:
    """The metrics page: numbers between two steps, text in a thread of its own."""

    def __init__(self, running: AsyncEngine, model_name: str) -> None:
        self._running = running
        self._source = EngineSource(running.engine, model_name)
        self._taking: asyncio.Future[Numbers] | None = None
        self._exporter: Exporter | None = None
        try:
            self._exporter = Exporter(self._source, is_alive=lambda: running.is_alive)
        except MissingExtra as error:
            self._missing = str(error)
            return
        self._exporter.start()

    async def answer(self) -> Response:
        if self._exporter is None:
            raise ApiError(501, self._missing, "server_error")
        taking = self._taking
        if taking is None or taking.done():
            taking = asyncio.ensure_future(self._running.call(self._source.numbers))
            # One look at a time: while a long step lasts, every scrape waits for the same one.
            self._taking = taking
        limit = METRICS_PATIENCE if self._exporter.has_numbers else None
        done, _ = await asyncio.wait({taking}, timeout=limit)
        numbers = taking.result() if done else None
        text = await asyncio.to_thread(self._exporter.page, numbers)
        return Response(text, media_type=CONTENT_TYPE)


class _KeyGuard:
    """Refuses calls without the key. Plain ASGI, so that a client's disconnect passes through."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in NO_KEY_NEEDED:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "no or wrong API key", code="invalid_api_key")
                await _error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Streamed(StreamingResponse):
    """A streamed answer whose requests end with it, however it ends."""

    def __init__(self, streams: Sequence[Stream], events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._streams)


class _Server:
    """One engine's answers."""

    def __init__(self, running: AsyncEngine, tokenizer: Tokenizer, settings: ServeSettings) -> None:
        self.running, self.settings = running, settings
        self.text = tokenizer.token_text

    def check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            message = f"model {name[:100]!r}: there is {self.settings.model_name!r} alone"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def apart(self, length: int, encode: Callable[[Any], list[int]], text: Any) -> list[int]:
        """The tokens of a text; in another thread where its body is long, so that others are answered meanwhile."""
        return encode(text) if length < LONG_TEXT else await asyncio.to_thread(encode, text)

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body, checked; the model it names is this one."""
        _check_form(request)
        limit, patience = self.settings.max_body_bytes, self.settings.body_seconds
        raw = bytearray()
        try:
            async with asyncio.timeout(patience):
                async for piece in request.stream():
                    raw += piece
                    if len(raw) > limit:
                        raise ApiError(413, f"the body has more than {limit} bytes")
        except TimeoutError:
            message = f"{len(raw)} bytes of the body came within {patience:g} s, not all of it"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(499, "the client left before its body was complete") from None
        try:
            body = kind.model_validate_json(bytes(raw))
        except ValidationError as error:
            raise _invalid(error) from None
        self.check_model(body.model)  # type: ignore[attr-defined]
        return body

    async def answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        answer: Answer,
    ) -> Response:
        """Queue the prompts and answer, whole or streamed."""
        streams: list[Stream] = []
        options = {"priority": body.priority, "salt": body.cache_salt}
        try:
            for prompt in prompts:
                stream = await self.running.add(prompt, params, **options)
                streams.append(stream)
        except BaseException:
            _cancel(streams)
            raise
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(streams, params.n, answer, with_usage=with_usage)
            return _Streamed(streams, events)
        collecting = asyncio.ensure_future(_collect(streams, params.n, answer))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(collecting.result())
        finally:
            leaving.cancel()
            collecting.cancel()
            _cancel(streams)


def _check_form(request: Request) -> None:
    """JSON as it is, or 415. A body without a type is taken as JSON; a web page's form is not."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:50]!r}: the body must not be compressed")
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise ApiError(415, f"Content-Type {kind[:50]!r}: must be {JSON_TYPE}")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several streams as they come, with the number of the stream."""
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                _check_end(stream, delta)
                queue.put_nowait((number, delta))
        except Exception as error:
            queue.put_nowait((number, error))
        else:
            queue.put_nowait((number, None))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        _cancel(streams)


def _check_end(stream: Stream, delta: Delta) -> None:
    """An output that ended before its time is an error, not an answer that looks complete."""
    if delta.finish is FinishReason.REJECTED and stream.request.rejection is not None:
        raise Rejected(stream.request.rejection)
    if delta.finish is FinishReason.ABORT:  # by nobody who still reads: the server's own doing
        raise EngineDied("the server stops and did not wait for this answer")


async def _collect(streams: Sequence[Stream], n: int, answer: Answer) -> dict[str, Any]:
    choices = [Choice(index) for index in range(n * len(streams))]
    async for number, delta in _merged(streams):
        choices[number * n + delta.index].add(delta)
    generated = sum(choice.num_tokens for choice in choices)
    usage = usage_of([stream.request for stream in streams], generated)
    return answer.whole(choices, usage)


async def _events(
    streams: Sequence[Stream], n: int, answer: Answer, *, with_usage: bool
) -> AsyncIterator[str]:
    choices = [Choice(index) for index in range(n * len(streams))]
    # OpenAI's chunks have the field where usage was asked for, and only there.
    none: dict[str, None] = {"usage": None} if with_usage else {}
    try:
        for opening in answer.opening(len(choices)):
            yield _event(answer.chunk([opening], **none))
        async for number, delta in _merged(streams):
            choice = choices[number * n + delta.index]
            offset = len(choice.text)
            choice.add(delta)
            if delta.text or delta.logprobs or delta.finish is not None:
                yield _event(answer.chunk([answer.piece(choice.index, offset, delta)], **none))
        if with_usage:
            generated = sum(choice.num_tokens for choice in choices)
            usage = usage_of([stream.request for stream in streams], generated)
            yield _event(answer.chunk([], usage=usage))
    except KvcatchError as error:
        yield _event(_as_api_error(error).body())
    finally:
        _cancel(streams)
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def _as_api_error(error: KvcatchError) -> ApiError:
    if isinstance(error, Rejected):
        code = "context_length_exceeded" if error.refusal.unit == "tokens" else None
        return ApiError(400, str(error), code=code)
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), "rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
        )
    if isinstance(error, EngineDied):
        return ApiError(503, str(error), "server_error")
    if isinstance(error, ValueError | TypeError):
        return ApiError(400, str(error))
    return ApiError(500, str(error), "server_error")


def _invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, with its place and value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if place:
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        given = "" if first["type"] == "missing" else f", not {shown}"
        message = f"{place}: {message}{given}"
    return ApiError(400, message, param=place)
