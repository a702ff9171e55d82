"""Many endpoints looked at side by side, each at its own pace; what goes wrong at one stops no other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from kvcatch.errors import InvalidArgument
from kvcatch.observe.errors import MetricsError
from kvcatch.observe.limits import Limits
from kvcatch.observe.prometheus import Reader
from kvcatch.observe.scrape import Scraper, metrics_url, shown_url
from kvcatch.observe.source import read_file
from kvcatch.watch.history import Budget
from kvcatch.watch.replica import Replica, Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvcatch.observe.limits import EngineVersion
    from kvcatch.observe.sample import EngineSample

__all__ = ["Endpoint", "Fleet", "public_name", "read_recordings"]

MAX_BYTES = 16 * 2**20
"""A larger body is refused: an endpoint of hundreds of ranks is far below it."""

MAX_ROWS = 600_000
"""Rows of history of all replicas together, about 110 MB."""

MAX_REPLICAS = 256
"""Replicas kept of one endpoint; those that are gone make place first."""

MAX_ENDPOINTS = 1000

_LONGEST_PAUSE_S = 5.0

_BURST = 10
"""Endpoints looked at together. Bursts are spread over the interval, so that none holds the screen up; one
endpoint at a time would cost half as much again: the processor sleeps and wakes in between."""


def public_name(url: str) -> str:
    """An address as it may be shown: without a user's name and password, ``/metrics`` left out."""
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(shown_url(url))
    path = "" if parts.path == "/metrics" else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


class Endpoint:
    """What is known of one endpoint, or of one recording.

    Args:
        name: As shown.
        rules: What holds for all.
        budget: Rows of history of the fleet.
        url: Where its metrics are; None for a recording.

    Attributes:
        replicas: By engine and labels, in the order in which they were first seen.
        error: Why the last look brought nothing; None when it did.
        error_since_s: Unix time of the first of the looks in a row that brought nothing.
        seen_s: Time of the last look that brought something.
        looks: Looks so far.
        failures: Looks in a row that brought nothing.
        notes: What is doubtful, one line each.
        has_told_version: It was asked for its version since it last came up.
    """

    def __init__(self, name: str, rules: Rules, budget: Budget, url: str | None = None) -> None:
        self.name, self.url = name, url
        self.replicas: dict[tuple[str, str], Replica] = {}
        self.error: str | None = None
        self.error_since_s: float | None = None
        self.seen_s: float | None = None
        self.looks = 0
        self.failures = 0
        self.notes: list[str] = []
        self.has_told_version = False
        self._rules, self._budget = rules, budget
        self._reader = Reader(name)
        self._names: dict[str, int] = {}
        self._version: EngineVersion | None = None
        self._limits = Limits()

    def read(self, body: bytes, at_s: float) -> None:
        """Take a body.

        Raises:
            MetricsError: It cannot be believed; nothing is kept of it.
        """
        samples = self._reader.read(body, at_s)
        self.looks += 1
        restarts = self.restarts
        self.take(samples, self._reader.names)
        if self.restarts != restarts:
            # Another version may have come up, with other names.
            self._reader, self._names, self._version = Reader(self.name), {}, None
            self.has_told_version = False
        self.error = self.error_since_s = None
        self.failures = 0
        self.seen_s = at_s

    def take(
        self,
        samples: Iterable[EngineSample],
        names: dict[str, set[str]],
        *,
        keeps_all: bool = False,
    ) -> None:
        """Take samples of its replicas, in order of time."""
        touched: dict[tuple[str, str], Replica] = {}
        for sample in samples:
            key = sample.engine, sample.replica
            replica = self.replicas.get(key)
            if replica is None:
                if not self._make_place():
                    continue
                replica = Replica(sample, self._rules, self._budget, keeps_all=keeps_all)
                self.replicas[key] = replica
                self._know(replica, names)
            elif key not in touched and len(names.get(sample.engine, ())) != self._names.get(
                sample.engine
            ):
                self._know(replica, names)
            touched[key] = replica
            replica.add(sample)
        for engine, found in names.items():
            self._names[engine] = len(found)
        for key, replica in self.replicas.items():
            if key in touched:
                replica.diagnose_if_due()
            elif replica.gone_since_s is None:
                replica.gone_since_s = replica.last.t_seconds

    def know(self, version: EngineVersion | None, limits: Limits | None = None) -> None:
        """Say what the endpoint itself tells of its version and limits."""
        self._version = version or self._version
        self._limits = limits or self._limits
        for replica in self.replicas.values():
            self._know(replica, self._reader.names)

    def fail(self, error: str, at_s: float) -> None:
        """A look brought nothing, for this reason."""
        self.looks += 1
        self.failures += 1
        for name in (self.name, "" if self.url is None else shown_url(self.url)):
            error = error.removeprefix(f"{name}: ")
        self.error = error
        if self.error_since_s is None:
            self.error_since_s = at_s

    def replicas_list(self) -> list[Replica]:
        """Its replicas, in the order in which they were first seen."""
        return list(self.replicas.values())

    @property
    def restarts(self) -> int:
        """Restarts seen, of all its replicas."""
        return sum(replica.restarts for replica in self.replicas.values())

    def _know(self, replica: Replica, names: dict[str, set[str]]) -> None:
        replica.know(self._version, self._limits, names.get(replica.engine, ()))

    def _make_place(self) -> bool:
        if len(self.replicas) < MAX_REPLICAS:
            return True
        gone = [
            (replica.gone_since_s, key)
            for key, replica in self.replicas.items()
            if replica.gone_since_s is not None
        ]
        if not gone:
            note = f"only the first {MAX_REPLICAS} replicas are kept"
            if note not in self.notes:
                self.notes.append(note)
            return False
        self.replicas.pop(min(gone)[1]).history.release()
        return True


class Fleet:
    """All that is watched.

    Args:
        rules: What holds for every replica.
        timeout_s: For an endpoint to answer.
        max_bytes: A larger body is refused.
        token: Shown to every address that is no socket.

    Attributes:
        endpoints: In the order given; recordings too.
    """

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_BYTES,
        token: str | None = None,
    ) -> None:
        self.rules = rules or Rules()
        self.endpoints: list[Endpoint] = []
        self.budget = Budget(MAX_ROWS)
        self._timeout_s, self._max_bytes, self._token = timeout_s, max_bytes, token
        # Unix time that never steps back.
        self._zero_s = time.time() - time.monotonic()

    @classmethod
    def of_urls(
        cls,
        urls: Sequence[str],
        rules: Rules | None = None,
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_BYTES,
        token: str | None = None,
    ) -> Fleet:
        """A fleet of running engines; nothing is looked at yet.

        Raises:
            InvalidArgument: A URL is none or is given twice, or there are too many.
        """
        fleet = cls(rules, timeout_s=timeout_s, max_bytes=max_bytes, token=token)
        if len(urls) > MAX_ENDPOINTS:
            raise InvalidArgument(f"{len(urls)} endpoints: at most {MAX_ENDPOINTS:,} are watched")
        seen: set[str] = set()
        for url in map(metrics_url, urls):
            name = public_name(url)
            if url in seen:
                raise InvalidArgument(f"url = {name!r} is given twice")
            seen.add(url)
            fleet.endpoints.append(Endpoint(name, fleet.rules, fleet.budget, url))
        return fleet

    @property
    def is_live(self) -> bool:
        """Whether running engines are watched, and not recordings."""
        return any(endpoint.url is not None for endpoint in self.endpoints)

    def now_s(self) -> float:
        """Unix time."""
        return self._zero_s + time.monotonic()

    async def run(self) -> None:
        """Look at every endpoint until cancelled.

        Raises:
            MissingExtra: httpx is not installed.
        """
        live = [endpoint for endpoint in self.endpoints if endpoint.url is not None]
        async with self._scraper() as scraper, asyncio.TaskGroup() as group:
            bursts = -(-len(live) // _BURST)
            for number, endpoint in enumerate(live):
                offset = self.rules.interval_s * (number // _BURST) / bursts
                group.create_task(self._follow(scraper, endpoint, offset))

    async def look(self, looks: int) -> None:
        """Look at every endpoint so many times, an interval apart.

        Raises:
            MissingExtra: httpx is not installed.
        """
        live = [endpoint for endpoint in self.endpoints if endpoint.url is not None]
        async with self._scraper() as scraper:
            start = time.monotonic()
            for number in range(looks):
                due = start + number * self.rules.interval_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await asyncio.gather(*(self._look(scraper, endpoint) for endpoint in live))

    def _scraper(self) -> Scraper:
        return Scraper(timeout_s=self._timeout_s, max_bytes=self._max_bytes, token=self._token)

    async def _follow(self, scraper: Scraper, endpoint: Endpoint, offset_s: float) -> None:
        interval = self.rules.interval_s
        due = time.monotonic() + offset_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._look(scraper, endpoint)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # A time limit that ran out at the same moment may have swallowed it.
                raise asyncio.CancelledError
            pause = interval
            if endpoint.failures:
                # Who does not answer is asked less often.
                pause = max(
                    interval, min(_LONGEST_PAUSE_S, interval * 2.0 ** min(endpoint.failures, 20))
                )
            # A look that took longer than the interval is not made up for.
            due = max(due + pause, time.monotonic())

    async def _look(self, scraper: Scraper, endpoint: Endpoint) -> None:
        assert endpoint.url is not None
        at_s = self.now_s()
        page = await scraper.fetch(endpoint.url)
        if page.body is None:
            endpoint.fail(page.error or "no answer", at_s)
            return
        try:
            endpoint.read(page.body, round(at_s, 3))
        except MetricsError as error:
            endpoint.fail(str(error), at_s)
            return
        if not endpoint.has_told_version:
            engines = {engine for engine, _ in endpoint.replicas}
            if "vllm" in engines:
                endpoint.know(await scraper.version(endpoint.url, "vllm"))
            endpoint.has_told_version = True


def read_recordings(paths: Sequence[Path], rules: Rules | None = None) -> Fleet:
    """A fleet of recordings (or logs), to be looked through.

    The interval is that of the recordings, and all of them is kept.

    Raises:
        RecordingError: One is none.
        MetricsError: One is a metrics page that cannot be believed.
        OSError: One cannot be opened.
    """
    sources = [read_file(path) for path in paths]
    times = [sorted({sample.t_seconds for sample in source.samples}) for source in sources]
    gaps = [after - before for moments in times for before, after in pairwise(moments)]
    span = max((moments[-1] - moments[0] for moments in times if moments), default=0.0)
    interval = max(median(gaps), 0.001) if gaps else 1.0
    rules = replace(rules or Rules(), interval_s=interval, history_s=span + 2 * interval)
    fleet = Fleet(rules)
    for source in sources:
        endpoint = Endpoint(public_name(source.name), fleet.rules, fleet.budget)
        endpoint.know(source.version, source.limits)
        endpoint.notes += source.notes
        samples = sorted(source.samples, key=lambda sample: sample.t_seconds)
        endpoint.take(samples, source.names, keeps_all=True)
        endpoint.looks = len(samples)
        endpoint.seen_s = samples[-1].t_seconds if samples else None
        fleet.endpoints.append(endpoint)
    return fleet
