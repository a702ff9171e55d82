"""The metrics page of one engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument, MissingExtra
from kvcatch.observe.exporter.device import DeviceReader
from kvcatch.observe.exporter.holdings import NameGate, top_holdings
from kvcatch.observe.exporter.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcatch.observe.exporter.source import Numbers, Source

__all__ = ["CONTENT_TYPE", "Exporter"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the page."""

_MAX_TAGS = 8


class Exporter:
    """Makes the metrics page of one engine.

    The engine's thread gives :class:`Numbers` between two steps; :meth:`page` does the rest in another.

    Args:
        source: The engine.
        tags: Tags of sequences by which holdings are told, besides ``owner``.
        top_k: Names of each that are told; the rest is one series, ``other``.
        sample_every_s: Seconds between two looks at what changes with every step.
        is_alive: Whether the engine still runs; sampling ends with it.

    Raises:
        MissingExtra: prometheus_client is not installed.
        InvalidArgument: More than eight tags, or ``top_k`` below 1 or above 100.
    """

    def __init__(
        self,
        source: Source,
        *,
        tags: Sequence[str] = ("tenant", "route"),
        top_k: int = 10,
        sample_every_s: float = 0.1,
        is_alive: Callable[[], bool] | None = None,
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra(
                "a metrics page needs prometheus-client: pip install 'kvcatch[observe]'"
            ) from error
        if len(tags) > _MAX_TAGS:
            raise InvalidArgument(f"tags = {list(tags)!r}: at most {_MAX_TAGS}")
        if not 1 <= top_k <= 100:
            raise InvalidArgument(f"top_k = {top_k}: must be from 1 to 100")
        self._source, self._top_k = source, top_k
        self._gates = {by: NameGate() for by in ("owner", *tags)}
        self._device = DeviceReader(source.device)
        self.sampler = Sampler(source, sample_every_s, is_alive)
        self._lock = threading.Lock()
        self._last: Numbers | None = None
        self._generate: Any = prometheus_client.generate_latest
        self._registry = prometheus_client.CollectorRegistry()
        self._process = prometheus_client.ProcessCollector(registry=None)
        self._registry.register(self)

    def start(self) -> None:
        """Begin to sample."""
        self.sampler.start()

    def stop(self) -> None:
        """End sampling."""
        self.sampler.stop()

    @property
    def has_numbers(self) -> bool:
        """Whether a page was made before, whose numbers another can show again."""
        return self._last is not None

    def page(self, numbers: Numbers | None) -> bytes:
        """The page as Prometheus text; call it on any thread but the engine's.

        Args:
            numbers: Of the engine, just taken; None where it is busy with one long step: the last ones
                are shown again, with their age.

        Raises:
            InvalidArgument: None, and there were none before.
        """
        with self._lock:
            if numbers is not None:
                self._last = numbers
            if self._last is None:
                raise InvalidArgument("numbers = None: none were taken before")
            text: bytes = self._generate(self._registry)
        return text

    def describe(self) -> list[Any]:
        """Nothing: the metrics are known when they are collected. For prometheus_client."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics. For prometheus_client, and for a registry of one's own."""
        from kvcatch.observe.exporter.collector import Look, families

        numbers, source, sampler = self._last, self._source, self.sampler
        if numbers is not None:
            look = Look(
                source.model_name,
                source.limits,
                source.info,
                source.device,
                source.kv_cache_bytes,
                numbers,
                max(0.0, time.monotonic() - numbers.taken_at),
                source.pool_stats(),
                {
                    by: top_holdings(source.holdings(by), by, self._top_k, gate)
                    for by, gate in self._gates.items()
                },
                self._device.read(),
                {
                    "used_share": sampler.used_share.values(),
                    "running": sampler.running.values(),
                    "waiting": sampler.waiting.values(),
                },
            )
            yield from families(look)
        yield from self._process.collect()
