"""Latency histograms of a recording, bucket by bucket: what quantiles are read from.

An ``EngineSample`` holds sums and counts alone; buckets are kept in recordings and read from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.engines.table import replica_name
from kvcatch.observe.prometheus import parse_labels
from kvcatch.observe.record import series_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["BucketHistory", "Latencies", "quantiles", "read_latencies"]

KINDS = {"ttft": "ttft_seconds_sum", "itl": "itl_seconds_sum"}

_Key = tuple[str, str]


@dataclass(slots=True)
class BucketHistory:
    """Cumulated buckets of one histogram of one replica, look by look.

    Attributes:
        bounds: Upper bounds in seconds, rising, infinity last.
        times: When it was looked at.
        counts: Observations up to each bound, [looks, bounds].
    """

    bounds: NDArray[np.float64]
    times: list[float]
    counts: NDArray[np.float64]

    def between(self, pairs: Sequence[tuple[float, float]]) -> NDArray[np.float64] | None:
        """Observations by bucket between two looks each, [pairs, bounds]; None where a look is missing.

        A pair across which a count went back (a restart) has none.
        """
        places = {at: number for number, at in enumerate(self.times)}
        try:
            before = [places[first] for first, _ in pairs]
            after = [places[second] for _, second in pairs]
        except KeyError:
            return None
        grown = np.diff(self.counts[after] - self.counts[before], axis=1, prepend=0.0)
        grown[(grown < 0).any(axis=1)] = 0.0
        return grown


@dataclass(slots=True)
class Latencies:
    """What a recording has beside its samples.

    Attributes:
        histograms: By (engine, replica) and ``ttft`` or ``itl``.
        infos: Engine, replica (as far as the series says) and the other labels of its configuration series.
    """

    histograms: dict[_Key, dict[str, BucketHistory]] = field(default_factory=dict)
    infos: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def config(self, engine: str, replica: str) -> dict[str, str]:
        """What a replica says of its settings; a series that names only a part of it counts for all such."""
        found: dict[str, str] = {}
        mine = set(replica.split(","))
        for name, part, labels in self.infos:
            if name == engine and (not part or mine.issuperset(part.split(","))):
                found.update(labels)
        return found


def read_latencies(path: Path) -> Latencies:
    """Read the buckets of all replicas of a recording.

    Raises:
        RecordingError: It is not a recording, or a line is malformed.
    """
    buckets: dict[str, tuple[str, str, int]] = {}
    for family in FAMILIES.values():
        for rank, metric in enumerate(family.metrics):
            for kind, wanted in KINDS.items():
                if metric.field == wanted:
                    buckets[metric.name.removesuffix("_sum") + "_bucket"] = (
                        family.engine, kind, rank,
                    )  # fmt: skip
    engines = {prefix: family for family in FAMILIES.values() for prefix in family.prefixes}

    def wants(name: str) -> bool:
        return name in buckets or (name.endswith("_info") and name.startswith(tuple(engines)))

    # (engine, replica, kind) -> rank of its name -> bound -> series
    slots: dict[tuple[str, str, str], dict[int, dict[float, list[str]]]] = {}
    found = Latencies()
    known: set[str] = set()
    times: list[float] = []
    history: dict[str, list[tuple[int, float]]] = {}
    last: dict[str, float] = {}
    for at, values in series_rows(path, wants):
        for series in values.keys() - known:
            known.add(series)
            parsed = parse_labels(series)
            if parsed is None:
                continue
            name, labels = parsed
            if name.endswith("_info"):
                family = next(
                    family for prefix, family in engines.items() if name.startswith(prefix)
                )
                replica = replica_name(family.identity, labels)
                rest = {k: v for k, v in labels.items() if k not in family.identity}
                found.infos.append((family.engine, replica, rest))
                continue
            engine, kind, rank = buckets[name]
            try:
                bound = float(labels.get("le", ""))
            except ValueError:
                continue
            replica = replica_name(FAMILIES[engine].identity, labels)
            ranks = slots.setdefault((engine, replica, kind), {})
            ranks.setdefault(rank, {}).setdefault(bound, []).append(series)
            history[series] = []
        number = len(times)
        times.append(at)
        for series, value in values.items():
            if series in history and last.get(series) != value:
                history[series].append((number, value))
                last[series] = value
    for (engine, replica, kind), ranks in slots.items():
        bounds = ranks[min(ranks)]
        if math.inf not in bounds:
            continue
        ordered = sorted(bounds)
        counts = np.stack(
            [sum(_filled(history[s], len(times)) for s in bounds[bound]) for bound in ordered],
            axis=1,
        )
        made = BucketHistory(np.array(ordered), times, counts)
        found.histograms.setdefault((engine, replica), {})[kind] = made
    return found


def _filled(changes: list[tuple[int, float]], length: int) -> NDArray[np.float64]:
    """A value at every look from its changes; 0 before the first."""
    values = np.zeros(length)
    ends = [number for number, _ in changes[1:]] + [length]
    for (number, value), end in zip(changes, ends, strict=True):
        values[number:end] = value if math.isfinite(value) else 0.0
    return values


def quantiles(
    bounds: NDArray[np.float64], counts: NDArray[np.float64], share: float
) -> NDArray[np.float64]:
    """The quantile of each row of bucket counts, by straight lines within a bucket; NaN of an empty row.

    What lies beyond the last finite bound counts as that bound.

    Args:
        bounds: [buckets], rising, infinity last.
        counts: [rows, buckets], not cumulated.
        share: 0 to 1.
    """
    cumulated = np.cumsum(counts, axis=1)
    total = cumulated[:, -1]
    place = np.minimum((cumulated < (share * total)[:, None]).sum(axis=1), len(bounds) - 1)
    rows = np.arange(len(counts))
    lower = np.where(place > 0, bounds[np.maximum(place - 1, 0)], 0.0)
    upper = bounds[place]
    below = np.where(place > 0, cumulated[rows, np.maximum(place - 1, 0)], 0.0)
    inside = counts[rows, place]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(inside > 0, (share * total - below) / inside, 0.0)
        found = np.where(np.isinf(upper), lower, lower + (upper - lower) * part)
    return np.where(total > 0, found, np.nan)
