"""Adds requests one at a time until one waits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.loadtest.client import Gauges, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.loadtest.client import ServerClient

__all__ = ["Probe", "Ramp", "RampSettings", "ramp"]

POLL_SECONDS = 0.1
WAITING_POLLS = 5
"""So many looks in a row must show a waiting request: one alone may see it between two steps."""

MIN_PATIENCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RampSettings:
    """How a server is loaded.

    Attributes:
        prompt_tokens: of every request.
        output_tokens: of every request; enough that the first still runs when the last is added.
        max_concurrency: requests under way at most.
        patience: times the longest TTFT so far that a request may take to start before it counts as
            waiting, where /metrics does not tell.
    """

    prompt_tokens: int
    output_tokens: int
    max_concurrency: int
    patience: float = 8.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "max_concurrency"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name} = {value!r}: must be a positive whole number")
        if not self.patience >= 1:
            raise InvalidArgument(f"patience = {self.patience}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Probe:
    """One request that was added.

    Attributes:
        number: how many were under way with it.
        outcome: ``entered``, ``waited``, ``refused`` (the server said no), ``lost`` or ``stopped``.
        ttft: seconds to its first token.
        generated: tokens that each request before it had generated when it was sent.
        gauges: what /metrics said when it was decided.
        detail: the server's words where it said no.
    """

    number: int
    outcome: str
    ttft: float | None
    generated: tuple[int, ...]
    gauges: Gauges
    detail: str = ""


@dataclass(slots=True)
class Ramp:
    """What adding requests showed.

    Attributes:
        prompt_tokens: as the server counts them.
        probes: one per request, in order.
        ended_early: a request ended before the ramp was over: its blocks were free again, so the
            outputs were too short.
        interrupted: stopped by the user.
        preemptions: that the server counted meanwhile; ``None`` where it does not.
        seconds: it took.
    """

    prompt_tokens: int
    probes: list[Probe] = field(default_factory=list)
    ended_early: int | None = None
    interrupted: bool = False
    preemptions: int | None = None
    seconds: float = 0.0

    @property
    def first_refusal(self) -> int | None:
        """The concurrency at which a request first waited or was refused."""
        return next((p.number for p in self.probes if p.outcome in ("waited", "refused")), None)


async def ramp(
    client: ServerClient,
    settings: RampSettings,
    progress: Callable[[Probe], None] | None = None,
) -> Ramp:
    """Add one request after the other, each once the one before has started, until one waits.

    Cancelling it ends all requests; what was seen so far is in the result when it is stopped by
    ``KeyboardInterrupt`` through :func:`asyncio.run`.

    Args:
        client: prepared here.
        settings: lengths and limits.
        progress: called after each request.

    Raises:
        ServerError: the server cannot be reached, or refuses a single request.
    """
    started = time.monotonic()
    result = Ramp(await client.prepare(settings.prompt_tokens))
    before = await client.gauges()
    streams: list[Stream] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for number in range(1, settings.max_concurrency + 1):
            ended = next((s for s in streams if s.ended is not None), None)
            if ended is not None:
                result.ended_early = ended.number
                break
            generated = tuple(stream.tokens for stream in streams)
            stream = Stream(number, time.monotonic())
            streams.append(stream)
            tasks.append(
                asyncio.create_task(
                    client.run(stream, settings.prompt_tokens, settings.output_tokens)
                )
            )
            probe = await _watch(client, stream, streams, settings, generated)
            result.probes.append(probe)
            if progress is not None:
                progress(probe)
            if probe.outcome != "entered":
                break
    except asyncio.CancelledError:
        result.interrupted = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        after = await client.gauges()
        if before.preemptions is not None and after.preemptions is not None:
            result.preemptions = max(0, after.preemptions - before.preemptions)
        result.seconds = time.monotonic() - started
    return result


async def _watch(
    client: ServerClient,
    stream: Stream,
    streams: list[Stream],
    settings: RampSettings,
    generated: tuple[int, ...],
) -> Probe:
    """Wait until a request has started, waits, or is refused."""
    slowest = max((s.first - s.sent for s in streams if s.first is not None), default=0.0)
    patience = max(MIN_PATIENCE, settings.patience * slowest)
    seen_waiting = 0

    def probe(outcome: str, gauges: Gauges, detail: str = "") -> Probe:
        ttft = None if stream.first is None else stream.first - stream.sent
        return Probe(stream.number, outcome, ttft, generated, gauges, detail)

    while True:
        await asyncio.sleep(POLL_SECONDS)
        if _begun(stream):
            return probe("entered", Gauges())
        if stream.ended is not None:
            refused = stream.status is not None and stream.status >= 400
            return probe("refused" if refused else "lost", await client.gauges(), stream.error)
        gauges = await client.gauges()
        if _begun(stream):
            continue
        seen_waiting = seen_waiting + 1 if gauges.waiting else 0
        waited = time.monotonic() - stream.sent
        if gauges.waiting is None:
            if waited > patience and stream.number > 1:
                return probe("waited", gauges)
        elif seen_waiting >= WAITING_POLLS and stream.number > 1:
            return probe("waited", gauges)


def _begun(stream: Stream) -> bool:
    """Whether the first token has come; another task notes it meanwhile."""
    return stream.first is not None
