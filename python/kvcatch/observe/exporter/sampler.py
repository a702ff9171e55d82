"""Gauges that change with every step, sampled many times a second beside the engine.

A scrape every fifteen seconds sees one moment in fifteen seconds. The sampler turns what lies between
into histograms, from which Prometheus tells how long the pool was how full.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvcatch.observe.exporter.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.observe.exporter.source import Source

__all__ = ["Sampler"]

SHARE_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
COUNT_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)


class Sampler:
    """Reads a source's glance every so often, in a thread of its own.

    Args:
        source: What to read.
        interval_s: Seconds between two looks.
        is_alive: The thread ends when this says no; asked at every look.

    Attributes:
        used_share: Share of the pool that was active or reserved, an observation a look.
        running: Branches with blocks.
        waiting: Branches without.
    """

    def __init__(
        self, source: Source, interval_s: float = 0.1, is_alive: Callable[[], bool] | None = None
    ) -> None:
        self.used_share = Histogram(SHARE_BOUNDS)
        self.running = Histogram(COUNT_BOUNDS)
        self.waiting = Histogram(COUNT_BOUNDS)
        self._source, self._interval_s = source, interval_s
        self._is_alive = is_alive or (lambda: True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcatch-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """One look, in the caller's thread."""
        glance = self._source.glance()
        self.used_share.add(glance.used_share)
        self.running.add(glance.running)
        self.waiting.add(glance.waiting)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s) and self._is_alive():
            self.look()
