"""What only vLLM's front end knows: times to first token, between tokens and in the queue.

``Totals`` adds up what a stat logger is told; its page has a socket of its own beside the engine cores'.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["BUCKETS", "FrontEndPages", "Histogram", "Totals"]

BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4,
    0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 25.0, 40.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histograms, in seconds."""

_P = "kvcatch_vllm_"


class Histogram:
    """Counts by bucket, and their sum; seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count values; what is no time (negative, not finite) is left out."""
        for value in values:
            if 0 <= value < 1e9:
                self.counts[bisect_left(BUCKETS, value)] += 1
                self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bound and how many values were at or below it, as Prometheus wants them."""
        rows, seen = [], 0
        for bound, count in zip((*BUCKETS, None), self.counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound is None else str(bound), float(seen)))
        return rows


class Totals:
    """Sums of one engine's iterations, as its front end saw them.

    Attributes:
        rank: The engine's index.
        faults: Times a record could not be read; vLLM did not notice.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.faults = 0
        self.lock = threading.Lock()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(),
            "inter_token_latency_seconds": Histogram(),
            "request_queue_time_seconds": Histogram(),
            "e2e_request_latency_seconds": Histogram(),
        }
        self.counters = {"generation_tokens": 0, "prompt_tokens": 0, "front_end_finished": 0}
        self.gauges: dict[str, float] = {}

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take in one iteration, of whatever vLLM knows of it; never raises."""
        try:
            with self.lock:
                if scheduler_stats is not None:
                    self.gauges["front_end_running"] = scheduler_stats.num_running_reqs
                    self.gauges["front_end_waiting"] = scheduler_stats.num_waiting_reqs
                if iteration_stats is not None:
                    self._iteration(iteration_stats)
        except Exception:
            self.faults += 1

    def _iteration(self, stats: Any) -> None:
        found = self.histograms
        found["time_to_first_token_seconds"].add(stats.time_to_first_tokens_iter)
        found["inter_token_latency_seconds"].add(
            # 0.10 calls them by their other name.
            stats.inter_token_latencies_iter
            if hasattr(stats, "inter_token_latencies_iter")
            else stats.time_per_output_tokens_iter
        )
        finished = stats.finished_requests
        found["request_queue_time_seconds"].add(item.queued_time for item in finished)
        found["e2e_request_latency_seconds"].add(item.e2e_latency for item in finished)
        self.counters["generation_tokens"] += stats.num_generation_tokens
        self.counters["prompt_tokens"] += stats.num_prompt_tokens
        self.counters["front_end_finished"] += len(finished)


class FrontEndPages:
    """Pages of one front-end process: all its engines."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.engines: dict[int, Totals] = {}

    def page(self, path: str, *, is_whole: bool = False) -> tuple[str, bytes] | None:
        """Content type and body of a page; None where there is none."""
        del is_whole
        if path == "/metrics":
            from prometheus_client import CollectorRegistry, generate_latest

            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Collector(self.collect))
            return "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)
        if path in ("/", "/health"):
            data = {"status": "ok", "pid": os.getpid(), "engines": sorted(self.engines)}
            return "application/json", json.dumps(data).encode() + b"\n"
        return None

    def collect(self) -> Iterator[Any]:
        """Metric families of this moment."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        labels = ("model_name", "engine")
        families: dict[str, Any] = {}
        for rank, totals in sorted(self.engines.items()):
            own = (self.model, str(rank))
            with totals.lock:
                for name, histogram in totals.histograms.items():
                    family = families.setdefault(
                        name, HistogramMetricFamily(_P + name, _text(name), labels=labels)
                    )
                    family.add_metric(own, histogram.cumulative(), histogram.total)
                for name, count in (*totals.counters.items(), ("front_end_faults", totals.faults)):
                    family = families.setdefault(
                        name, CounterMetricFamily(_P + name, _text(name), labels=labels)
                    )
                    family.add_metric(own, count)
                for name, value in totals.gauges.items():
                    family = families.setdefault(
                        name, GaugeMetricFamily(_P + name, _text(name), labels=labels)
                    )
                    family.add_metric(own, value)
        yield from families.values()


class _Collector:
    """What a registry of prometheus_client asks."""

    def __init__(self, collect: Callable[[], Iterator[Any]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Any]:
        return self._collect()


def _text(name: str) -> str:
    return f"{name.replace('_', ' ').capitalize()}, as the front end saw it."
