"""The engine for many callers: one thread steps it, asyncio tasks add requests and read what they gain."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from kvcatch.errors import KvcatchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvcatch.engine.engine import Engine
    from kvcatch.engine.output import Delta
    from kvcatch.engine.request import Request
    from kvcatch.engine.sampling import SamplingParams

T = TypeVar("T")

__all__ = ["AsyncEngine", "EngineDied", "Stream"]


class EngineDied(KvcatchError, RuntimeError):
    """The engine's thread ended by an error or was stopped; nothing runs any more."""


class Stream:
    """What one request gains, as an asynchronous iterator of deltas. Ends with the request."""

    request: Request

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | EngineDied | None] = asyncio.Queue()

    def put(self, item: Delta | EngineDied | None) -> None:
        """From the engine's thread: hand on a delta, the end, or an error."""
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, EngineDied):
                    raise item
                yield item
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the request if it is still under way; its blocks are free within one step."""
        self._engine.abort(self.request.id)


class AsyncEngine:
    """Runs an engine in a thread of its own.

    Calls from other threads are carried out between two steps.

        async with AsyncEngine(engine) as running:
            async for delta in await running.add(tokens, params):
                print(delta.text)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._streams: dict[str, Stream] = {}
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvcatch-engine", daemon=True)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def drain(self) -> None:
        """Wait until nothing runs and nothing waits."""
        while self.is_alive and not await self.call(lambda: self.engine.is_idle):
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End all requests and the thread."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and has met no error."""
        return self._thread.is_alive() and self._error is None

    # --- requests -------------------------------------------------------------------------------

    async def add(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Stream:
        """Queue a prompt; the stream of what it gains. Arguments are those of :meth:`Engine.add`.

        Raises:
            InvalidArgument, Rejected: as :meth:`Engine.add`.
            EngineDied: the engine runs no more.
        """

        def add() -> Stream:
            request = self.engine.add(prompt, params, **options)
            stream.request = request
            self._streams[request.id] = stream
            return stream

        stream = Stream(self)
        try:
            return await self.call(add)
        except asyncio.CancelledError:
            # It may have been queued, or is about to be: then nobody would read it. Calls keep their order.
            self._post(lambda: self._forsake(stream), lambda: None)
            raise

    def abort(self, request_id: str) -> None:
        """End a request between two steps; does not wait. One that has ended is left alone."""

        def abort() -> None:
            self._deliver(self.engine.abort(request_id))

        self._post(abort, lambda: None)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(how: Callable[[Any], None], value: Any) -> None:
            if not done.cancelled():
                how(value)

        def work() -> None:
            try:
                result = function()
            except Exception as error:
                tell(done.set_exception, error)
            else:
                tell(done.set_result, result)

        def drop() -> None:
            tell(done.set_exception, self._died())

        def tell(how: Callable[[Any], None], value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
                loop.call_soon_threadsafe(settle, how, value)

        if not self._post(work, drop):
            raise self._died()
        return await done

    # --- the thread -----------------------------------------------------------------------------

    def _post(self, work: Callable[[], None], drop: Callable[[], None]) -> bool:
        """Queue work for the thread; ``drop`` is called instead when it ends before."""
        with self._lock:
            if self._stopping or self._error is not None:
                return False
            self._calls.append((work, drop))
            self._lock.notify()
            return True

    def _run(self) -> None:
        calls: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        try:
            while True:
                with self._lock:
                    while not self._calls and self.engine.is_idle and not self._stopping:
                        self._lock.wait()
                    if self._stopping:
                        break
                    calls, self._calls = self._calls, deque()
                while calls:
                    work, _ = calls.popleft()
                    work()
                if not self.engine.is_idle:
                    self._deliver(self.engine.step())
        except BaseException as error:
            with self._lock:
                self._error = error
        finally:
            with self._lock:
                self._stopping = True
                left, self._calls = self._calls, deque()
            died = self._died()
            for stream in self._streams.values():
                stream.put(died)
            self._streams.clear()
            for _, drop in (*calls, *left):
                drop()

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)
        # After all of the step's deltas: several branches of a request may end in one step.
        for name in {delta.request_id for delta in deltas if delta.finish is not None}:
            stream = self._streams.get(name)
            if stream is not None and stream.request.is_finished:
                stream.put(None)
                del self._streams[name]

    def _forsake(self, stream: Stream) -> None:
        """End the request of a stream that nobody got, if it was queued."""
        request = getattr(stream, "request", None)
        if request is not None:
            self._deliver(self.engine.abort(request.id))

    def _died(self) -> EngineDied:
        if self._error is not None:
            return EngineDied(f"the engine ended by {type(self._error).__name__}: {self._error}")
        return EngineDied("the engine was stopped")
