"""Two recordings under like load, side by side: what changed, and what only seems to have.

Every figure is a ratio of sums over the intervals of the loaded part of a recording (or a quantile of summed
buckets). Its uncertainty comes from a block bootstrap: stretches of neighbouring intervals are drawn again, for
neighbours depend on each other. A difference counts as one when its 99 % interval leaves 0 out.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvcatch.errors import InvalidArgument
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.histograms import quantiles, read_latencies
from kvcatch.observe.limits import EngineVersion
from kvcatch.observe.record import is_recording
from kvcatch.observe.source import read_file
from kvcatch.observe.window import by_replica, delta, is_restart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvcatch.observe.histograms import BucketHistory
    from kvcatch.observe.sample import EngineSample

    Array = NDArray[np.float64]

__all__ = ["Comparison", "Figure", "Side", "compare", "pair_sides", "read_sides"]

TOLERANCE = 0.1
"""Loads whose figures differ by more are not alike."""

ROUNDS = 2_000
MIN_STRETCHES = 8
"""Fewer stretches of intervals to draw from give no interval."""

_STRETCH_S = 10.0
_INTERVAL = (0.005, 0.995)
_LEAST_CHANGE = 0.01
"""A change of less than 1 % is none, however certain."""

_SETTINGS = (
    "num_blocks",
    "block_size_tokens",
    "pool_tokens",
    "max_num_seqs",
    "max_model_len_tokens",
    "token_budget_tokens",
)

Role = Literal["load", "outcome"]
Better = Literal["less", "more", "neither"]


@dataclass(slots=True)
class Side:
    """One replica of one recording.

    Attributes:
        name: The file.
        engine: Which engine.
        replica: Which one of several.
        version: In words.
        config: What the engine says of its settings.
        samples: In order of time.
        buckets: Histograms by ``ttft`` and ``itl``.
    """

    name: str
    engine: str
    replica: str
    version: str
    config: dict[str, str]
    samples: list[EngineSample]
    buckets: dict[str, BucketHistory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both sides.

    Attributes:
        name: With its unit.
        role: ``load`` (must be alike) or ``outcome``.
        a: Of the first recording; None where it is not known.
        b: Of the second.
        low: Of the difference b - a: end of its 99 % interval; None where it cannot be told.
        high: The other end.
        change: ``same``, ``better``, ``worse``, ``different`` or ``unknown``.
    """

    name: str
    role: Role
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None
    change: str = "unknown"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "role": self.role,
            "a": self.a,
            "b": self.b,
            "difference": None if self.a is None or self.b is None else self.b - self.a,
            "difference_low_99": self.low,
            "difference_high_99": self.high,
            "change": self.change,
        }


@dataclass(slots=True)
class Comparison:
    """Two sides compared.

    Attributes:
        a: The first.
        b: The second.
        unlike: Why the loads are not alike, one line each; empty where they are.
        figures: Load first, then outcomes; outcomes only where loads are alike.
        settings: What differs in version and configuration: name, of a, of b.
        notes: What is doubtful.
    """

    a: Side
    b: Side
    unlike: list[str]
    figures: list[Figure]
    settings: list[tuple[str, str, str]]
    notes: list[str]

    @property
    def is_like(self) -> bool:
        """Whether the loads are alike, so that the comparison means something."""
        return not self.unlike

    def changed(self) -> list[Figure]:
        """Outcomes that changed."""
        return [
            figure
            for figure in self.figures
            if figure.role == "outcome" and figure.change not in ("same", "unknown")
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "a": {"file": self.a.name, "engine": self.a.version, "replica": self.a.replica},
            "b": {"file": self.b.name, "engine": self.b.version, "replica": self.b.replica},
            "is_like_load": self.is_like,
            "unlike": self.unlike,
            "settings": [{"name": name, "a": a, "b": b} for name, a, b in self.settings],
            "figures": [figure.to_dict() for figure in self.figures],
            "changed": [figure.name for figure in self.changed()],
            "notes": self.notes,
        }


def read_sides(path: Path) -> list[Side]:
    """The replicas of a recording.

    Raises:
        RecordingError: It is not one, or is malformed.
        InvalidArgument: It is a log or a single page, which cannot be compared.
    """
    source = read_file(path)
    if not is_recording(path):
        raise InvalidArgument(f"{path}: not a recording; kvcatch record makes one")
    latencies = read_latencies(path)
    sides = []
    for (_, engine, replica), samples in by_replica(source.samples).items():
        version = source.version
        if version is None or version.name != engine:
            low, high = FAMILIES[engine].version_range(source.names.get(engine, set()))
            version = EngineVersion(engine, low, high, "inferred from metric names")
        config = latencies.config(engine, replica)
        for name in _SETTINGS:
            values = {getattr(sample, name) for sample in samples} - {None}
            if len(values) == 1:
                config.setdefault(name, f"{values.pop():g}")
        buckets = latencies.histograms.get((engine, replica), {})
        sides.append(Side(str(path), engine, replica, version.title, config, samples, buckets))
    return sides


def pair_sides(first: Sequence[Side], second: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Which replica is compared with which: those of one name, or the only ones there are.

    Raises:
        InvalidArgument: The replicas do not match.
    """
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    names = [{(side.engine, side.replica): side for side in sides} for sides in (first, second)]
    if names[0].keys() != names[1].keys():
        told = [
            ", ".join(sorted(" ".join(key).strip() for key in group)) or "none" for group in names
        ]
        raise InvalidArgument(f"the replicas differ: {told[0]} against {told[1]}")
    return [(side, names[1][key]) for key, side in names[0].items()]


def compare(a: Side, b: Side, *, tolerance: float = TOLERANCE, seed: int = 0) -> Comparison:
    """Compare two sides; outcomes only where the loads are alike.

    Loads are alike where prompt and output lengths are and, besides, the arrivals per second (an open loop) or
    the requests under way (a closed loop): the one of them that the load does not set is an outcome.

    Args:
        a: The first.
        b: The second.
        tolerance: Relative difference that is still alike; up to twice as much is where it may be chance.
        seed: Of the bootstrap.

    Raises:
        InvalidArgument: A tolerance that is not positive, or no load in a recording.
    """
    if not 0 < tolerance < math.inf:
        raise InvalidArgument(f"tolerance = {tolerance}: must be above 0")
    parts = [_Part(side, seed + number) for number, side in enumerate((a, b))]
    load = {name: _figure(name, "load", parts, read) for name, read in _LOAD.items()}
    unlike, notes = _unlike(load, tolerance)
    figures = list(load.values())
    if not unlike:
        for name, (better, read) in _OUTCOMES.items():
            figure = _figure(name, "outcome", parts, read, better)
            if figure.a is not None or figure.b is not None:
                figures.append(figure)
        if a.engine != b.engine:
            notes.append(
                f"KV usage of {a.engine} is of: {FAMILIES[a.engine].usage_of}; of {b.engine}: "
                f"{FAMILIES[b.engine].usage_of}"
            )
    for side, part in zip((a, b), parts, strict=True):
        if part.stretches < MIN_STRETCHES:
            notes.append(
                f"{side.name}: {part.seconds:,.0f} s under load are too short for an interval; "
                "no change can be told from chance"
            )
    return Comparison(a, b, unlike, figures, _settings(a, b), notes)


def _settings(a: Side, b: Side) -> list[tuple[str, str, str]]:
    names = sorted(a.config.keys() | b.config.keys())
    rows = [(name, a.config.get(name, "unknown"), b.config.get(name, "unknown")) for name in names]
    return [row for row in [("version", a.version, b.version), *rows] if row[1] != row[2]]


class _Part:
    """The loaded part of one side as sums per interval, and the stretches a bootstrap draws."""

    def __init__(self, side: Side, seed: int) -> None:
        self.side = side
        samples = side.samples
        busy = [number for number, sample in enumerate(samples) if _is_busy(sample)]
        if len(busy) < 2:
            raise InvalidArgument(f"{side.name}: no request ran in it, nothing to compare")
        # One look before and after belongs to it: what arrived and what ended is counted from there.
        window = samples[max(0, busy[0] - 1) : busy[-1] + 2]
        self.pairs = [
            (before, after)
            for before, after in itertools.pairwise(window)
            if not is_restart(before, after) and after.t_seconds > before.t_seconds
        ]
        if not self.pairs:
            raise InvalidArgument(f"{side.name}: no interval without a restart")
        lengths = np.array([after.t_seconds - before.t_seconds for before, after in self.pairs])
        self.seconds = float(lengths.sum())
        self._lengths = lengths
        count = len(self.pairs)
        stretch = max(round(count ** (1 / 3)), math.ceil(_STRETCH_S / float(np.median(lengths))))
        self._starts = np.arange(0, count, stretch)
        self.stretches = len(self._starts)
        rng = np.random.default_rng(seed)
        even = np.full(self.stretches, 1 / self.stretches)
        drawn = rng.multinomial(self.stretches, even, size=ROUNDS)
        # The first row is the recording itself.
        self.weights = np.vstack((np.ones(self.stretches), drawn)).astype(np.float64)

    def drawn(self, values: Array) -> Array:
        """Sums of the recording itself and of every draw, [rounds + 1, ...]."""
        summed: Array = self.weights @ np.add.reduceat(values, self._starts, axis=0)
        return summed

    def counted(self, name: str) -> Array | None:
        """How far a counter went up in each interval; None where it is not exported."""
        found = [delta(before, after, name) for before, after in self.pairs]
        if all(value is None for value in found):
            return None
        return np.array([value or 0.0 for value in found])

    def gauged(self, read: Callable[[EngineSample], float | None]) -> tuple[Array, Array] | None:
        """A gauge times seconds, and the seconds it is known for; None where it never is."""
        found = [read(before) for before, _ in self.pairs]
        known = np.array([value is not None for value in found])
        if not known.any():
            return None
        values = np.array([value or 0.0 for value in found])
        return values * self._lengths, known * self._lengths

    def seconds_each(self) -> Array:
        """Length of each interval."""
        return self._lengths


def _is_busy(sample: EngineSample) -> bool:
    return bool(sample.running_requests or sample.waiting_requests)


def _over(part: _Part, above: Array | None, below: Array | None) -> Array | None:
    if above is None or below is None:
        return None
    over, under = part.drawn(above), part.drawn(below)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(under > 0, over / under, np.nan)


def _mean(above: str, below: str) -> Callable[[_Part], Array | None]:
    return lambda part: _over(part, part.counted(above), part.counted(below))


def _gauge(read: Callable[[EngineSample], float | None]) -> Callable[[_Part], Array | None]:
    def values(part: _Part) -> Array | None:
        found = part.gauged(read)
        return None if found is None else _over(part, *found)

    return values


def _quantile(kind: str, share: float) -> Callable[[_Part], Array | None]:
    def values(part: _Part) -> Array | None:
        history = part.side.buckets.get(kind)
        if history is None:
            return None
        grown = history.between([(x.t_seconds, y.t_seconds) for x, y in part.pairs])
        if grown is None or not grown.any():
            return None
        return quantiles(history.bounds, part.drawn(grown), share)

    return values


def _first(*reads: Callable[[_Part], Array | None]) -> Callable[[_Part], Array | None]:
    """The first that is known."""

    def values(part: _Part) -> Array | None:
        for read in reads:
            found = read(part)
            if found is not None and not np.isnan(found[0]):
                return found
        return None

    return values


def _arrivals(part: _Part) -> Array | None:
    started = part.counted("started_total")
    if started is None:
        started = part.counted("finished_total")
    if started is None:
        return None
    waiting = [
        (after.waiting_requests or 0.0) - (before.waiting_requests or 0.0)
        for before, after in part.pairs
    ]
    return _over(part, started + np.array(waiting), part.seconds_each())


def _rate(name: str) -> Callable[[_Part], Array | None]:
    return lambda part: _over(part, part.counted(name), part.seconds_each())


def _under_way(sample: EngineSample) -> float | None:
    running, waiting = sample.running_requests, sample.waiting_requests
    return None if running is None or waiting is None else running + waiting


def _fill(sample: EngineSample) -> float | None:
    """Share of the slots of held blocks that have a token in them."""
    tokens, blocks, size = sample.used_tokens, sample.used_blocks, sample.block_size_tokens
    return tokens / (blocks * size) if tokens is not None and blocks and size else None


_LOAD: dict[str, Callable[[_Part], Array | None]] = {
    "prompt_tokens_mean": _first(
        _mean("finished_prompt_tokens_sum", "finished_total"),
        _mean("prompt_tokens_total", "started_total"),
        _mean("prompt_tokens_total", "finished_total"),
    ),
    "output_tokens_mean": _first(
        _mean("finished_output_tokens_sum", "finished_total"),
        _mean("generated_tokens_total", "finished_total"),
    ),
    "arrivals_per_second": _arrivals,
    "requests_under_way_mean": _gauge(_under_way),
}

_OUTCOMES: dict[str, tuple[Better, Callable[[_Part], Array | None]]] = {
    "kv_usage_share_mean": ("neither", _gauge(lambda sample: sample.kv_usage_share)),
    "block_fill_share_mean": ("more", _gauge(_fill)),
    "preemptions_per_request": ("less", _mean("preemptions_total", "finished_total")),
    "prefix_hit_share": (
        "more",
        _first(
            _mean("prefix_hit_tokens_total", "prefix_query_tokens_total"),
            _gauge(lambda sample: sample.hit_share),
        ),
    ),
    "waiting_requests_mean": ("less", _gauge(lambda sample: sample.waiting_requests)),
    "queue_seconds_mean": ("less", _mean("queue_seconds_sum", "queue_count")),
    "ttft_seconds_mean": ("less", _mean("ttft_seconds_sum", "started_total")),
    "ttft_seconds_p50": ("less", _quantile("ttft", 0.5)),
    "ttft_seconds_p95": ("less", _quantile("ttft", 0.95)),
    "itl_seconds_mean": ("less", _mean("itl_seconds_sum", "itl_count")),
    "itl_seconds_p50": ("less", _quantile("itl", 0.5)),
    "itl_seconds_p95": ("less", _quantile("itl", 0.95)),
    "generated_tokens_per_second": ("more", _rate("generated_tokens_total")),
    "finished_per_second": ("more", _rate("finished_total")),
}


def _figure(
    name: str,
    role: Role,
    parts: Sequence[_Part],
    read: Callable[[_Part], Array | None],
    better: Better = "neither",
) -> Figure:
    drawn = [read(part) for part in parts]
    a, b = (None if values is None or np.isnan(values[0]) else float(values[0]) for values in drawn)
    if a is None or b is None:
        return Figure(name, role, a, b)
    if min(part.stretches for part in parts) < MIN_STRETCHES:
        return Figure(name, role, a, b)
    assert drawn[0] is not None
    assert drawn[1] is not None
    differences = drawn[1][1:] - drawn[0][1:]
    differences = differences[~np.isnan(differences)]
    if len(differences) < ROUNDS // 2:
        return Figure(name, role, a, b)
    low, high = (float(edge) for edge in np.quantile(differences, _INTERVAL))
    change = "same"
    if (low > 0 or high < 0) and abs(b - a) > _LEAST_CHANGE * abs(a):
        change = "different"
        if better != "neither":
            change = "better" if (b > a) == (better == "more") else "worse"
    return Figure(name, role, a, b, low, high, change)


def _unlike(load: dict[str, Figure], tolerance: float) -> tuple[list[str], list[str]]:
    """Why loads are not alike, and what is doubtful."""
    apart: dict[str, str] = {}
    notes = []
    for name, figure in load.items():
        if figure.a is None or figure.b is None:
            notes.append(f"{name} is not known on both sides: whether it is alike is not known")
            continue
        larger, smaller = max(figure.a, figure.b), min(figure.a, figure.b)
        if larger <= smaller * (1 + tolerance):
            continue
        text = f"{name} {figure.a:,.4g} against {figure.b:,.4g}, more than {tolerance:.0%} apart"
        is_chance = figure.low is not None and figure.high is not None
        is_chance = is_chance and (figure.low or 0) <= 0 <= (figure.high or 0)
        if is_chance and larger <= smaller * (1 + 2 * tolerance):
            notes.append(f"{text}, but within chance")
        else:
            apart[name] = text
    lengths = [
        apart[name] for name in ("prompt_tokens_mean", "output_tokens_mean") if name in apart
    ]
    rates = [name for name in ("arrivals_per_second", "requests_under_way_mean") if name in apart]
    known = [
        name
        for name in ("arrivals_per_second", "requests_under_way_mean")
        if load[name].change != "unknown" or None not in (load[name].a, load[name].b)
    ]
    if known and len(rates) == len(known):
        lengths += [apart[name] for name in rates]
    elif not known:
        lengths.append("neither arrivals nor requests under way are known")
    return lengths, notes
