"""Histograms that cost an engine's step next to nothing: a search in a tuple and two additions.

They need no Prometheus: the collector reads them when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["Histogram", "HistogramValues", "RequestHistograms"]

TTFT_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
"""Seconds; wide, for a queue makes a first token wait for minutes."""
ITL_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0),
)
"""Seconds; fine where a reader notices, and a tail for tokens between which a request was preempted."""
QUEUE_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
"""Seconds."""
E2E_BOUNDS = (
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0),
)
"""Seconds."""
TOKEN_BOUNDS = tuple(float(1 << power) for power in range(21))
"""Tokens: powers of two up to 2**20."""


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """A histogram as it was at one moment.

    Attributes:
        bounds: Upper bounds, inclusive, ascending; above the last is one bucket more.
        counts: Observations per bucket, not cumulated; one more than bounds.
        total: Sum of what was observed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many observations."""
        return sum(self.counts)

    def cumulated(self) -> list[tuple[str, float]]:
        """Pairs of ``le`` and the count up to it, as Prometheus wants them."""
        pairs, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return pairs


class Histogram:
    """Counts observations in buckets. One thread adds; any may take :meth:`values`."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def values(self) -> HistogramValues:
        """A copy of what it holds now."""
        return HistogramValues(self._bounds, tuple(self._counts), self._total)


class RequestHistograms:
    """What an engine notes of its requests.

    Attributes:
        ttft: Seconds from arrival to a request's first token.
        itl: Seconds between two tokens of a branch, preemptions included.
        queue: Seconds from arrival to first admission.
        e2e: Seconds from arrival to the last token of requests that were not cut off.
        tpot: Mean seconds per token after the first, one observation a finished request.
        prompt_tokens: Prompt tokens of finished requests.
        output_tokens: Tokens they generated, all branches.
        asked_tokens: Most tokens they could have generated, all branches.
    """

    __slots__ = (
        "asked_tokens",
        "e2e",
        "itl",
        "output_tokens",
        "prompt_tokens",
        "queue",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.queue = Histogram(QUEUE_BOUNDS)
        self.e2e = Histogram(E2E_BOUNDS)
        self.tpot = Histogram(ITL_BOUNDS)
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.output_tokens = Histogram(TOKEN_BOUNDS)
        self.asked_tokens = Histogram(TOKEN_BOUNDS)

    def values(self) -> dict[str, HistogramValues]:
        """All of them as they are now, by name."""
        return {name: getattr(self, name).values() for name in self.__slots__}
