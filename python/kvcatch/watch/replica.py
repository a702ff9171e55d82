"""One replica of one endpoint: its samples, its history, what keeps its requests out."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcatch.observe.diagnose import diagnose_replica
from kvcatch.observe.diagnose.context import Context
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.window import is_restart
from kvcatch.watch.history import AT, History, between, figures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.observe.diagnose import Verdict
    from kvcatch.observe.sample import EngineSample
    from kvcatch.watch.history import Budget

__all__ = ["Replica", "Rules"]

_MOST_CHANGES = 500


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every replica that is watched.

    Attributes:
        interval_s: Between two looks.
        window_s: Over which a verdict and the figures are made.
        history_s: How long curves are kept.
        diagnose_s: Between two verdicts.
        version: As the user gave it; holds for replicas of that engine.
        limits: As the user gave them.
    """

    interval_s: float = 1.0
    window_s: float = 60.0
    history_s: float = 3600.0
    diagnose_s: float = 2.0
    version: EngineVersion | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def most_rows(self) -> int:
        """Rows of one replica's history."""
        return min(200_000, int(self.history_s / self.interval_s) + 1)


class Replica:
    """What is known of one replica.

    Args:
        first: Its first sample; not added.
        rules: What holds for all.
        budget: For its history.
        keeps_all: Keep every sample, so that any moment can be diagnosed (recordings).

    Attributes:
        engine: Key of its adapter.
        labels: What tells it from others behind the same endpoint.
        version: Engine and version as far as known.
        limits: Limits as far as known.
        history: Its curves.
        unit: Of available and longest: ``blocks`` or ``tokens``.
        last: Its newest sample.
        gone_since_s: It is no longer in its endpoint's answers since then; None while it is.
        restarts: How many restarts were seen.
    """

    def __init__(
        self, first: EngineSample, rules: Rules, budget: Budget, *, keeps_all: bool = False
    ) -> None:
        self.engine, self.labels = first.engine, first.replica
        self.version = EngineVersion(first.engine)
        self.limits = rules.limits
        self.history = History(rules.most_rows, budget)
        self.unit = "blocks"
        self.last = first
        self.gone_since_s: float | None = None
        self.restarts = 0
        self._rules = rules
        self._keeps_all = keeps_all
        self._samples: list[EngineSample] = []
        self._verdict: Verdict | None = None
        self._due_s = 0.0
        self._changes: deque[tuple[float, Verdict]] = deque(maxlen=_MOST_CHANGES)
        self._asked: tuple[int, Verdict] | None = None

    def know(self, version: EngineVersion | None, limits: Limits, names: Iterable[str]) -> None:
        """Say what is known of version and limits; names of metrics tell a version where nothing else does."""
        given = self._rules.version
        if given is not None and given.name in (self.engine, "llamacpp") and given.low:
            self.version = given
        elif version is not None and version.name == self.engine:
            self.version = version
        else:
            low, high = FAMILIES[self.engine].version_range(set(names))
            source = "inferred from metric names" if low or high else "unknown"
            self.version = EngineVersion(self.engine, low, high, source)
        self.limits = self._rules.limits.joined(limits)

    @property
    def usage_of(self) -> str:
        """What its KV usage is a percentage of."""
        return FAMILIES[self.engine].usage_of

    def add(self, sample: EngineSample) -> None:
        """Take a sample that is newer than the last; one that is not is passed over."""
        samples = self._samples
        if samples and sample.t_seconds <= samples[-1].t_seconds:
            return
        if samples and is_restart(samples[-1], sample):
            self.restarts += 1
        samples.append(sample)
        self.last, self.gone_since_s = sample, None
        if not self._keeps_all:
            oldest = sample.t_seconds - self._rules.window_s
            if samples[0].t_seconds < oldest - 0.25 * self._rules.window_s:
                del samples[: self._count(oldest)]
        room = Context(self.version, self.limits).room(sample)
        self.unit = room.unit
        row = {name: getattr(sample, name, None) for name in AT}
        head = sample.head_required_blocks if room.unit == "blocks" else None
        row |= {"available": room.free, "longest": room.longest, "head": head}
        row["restarts"] = self.restarts
        self.history.append(row)

    def diagnose_if_due(self) -> None:
        """Make the verdict anew, when it is older than ``diagnose_s``."""
        now_s = self.last.t_seconds
        if not self._keeps_all and now_s >= self._due_s:
            self._due_s = now_s + self._rules.diagnose_s - 0.5 * self._rules.interval_s
            verdict = self._diagnose(len(self._samples))
            before, self._verdict = self._verdict, verdict
            if before is None or (before.gate, before.also) != (verdict.gate, verdict.also):
                self._changes.append((now_s, verdict))

    def verdict_at(self, at_s: float | None) -> Verdict | None:
        """The verdict over the window that ends at a time; None: the newest. None when there is none."""
        if self._keeps_all:
            count = len(self._samples) if at_s is None else self._count(at_s)
            if not count:
                return None
            if self._asked is None or self._asked[0] != count:
                self._asked = count, self._diagnose(count)
            return self._asked[1]
        if at_s is None or at_s >= self.last.t_seconds:
            return self._verdict
        return next((verdict for since, verdict in reversed(self._changes) if since <= at_s), None)

    def figures_at(self, at_s: float | None) -> dict[str, float | None]:
        """Figures over the window that ends at a time; None: at the newest sample."""
        end = self.last.t_seconds if at_s is None else at_s
        return figures(between(self.history.rows, end - self._rules.window_s, end))

    def row_at(self, at_s: float | None) -> dict[str, float | None]:
        """The last row at or before a time; empty when nothing was seen shortly before it."""
        rows = self.history.rows
        index = (
            len(rows) - 1
            if at_s is None
            else int(rows[:, 0].searchsorted(at_s + 1e-6, "right")) - 1
        )
        if index < 0 or (at_s is not None and at_s - rows[index, 0] > self.hold_s):
            return {}
        values = {name: float(rows[index, number]) for name, number in AT.items()}
        return {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124

    @property
    def hold_s(self) -> float:
        """How long a value is taken to hold after it was seen."""
        return max(2.5 * self._rules.interval_s, 3.0)

    def _count(self, at_s: float) -> int:
        return bisect_right(self._samples, at_s + 1e-6, key=lambda sample: sample.t_seconds)

    def _diagnose(self, count: int) -> Verdict:
        end = self._samples[count - 1].t_seconds
        first = self._count(end - self._rules.window_s - 2e-6)
        return diagnose_replica(self._samples[first:count], self.version, self.limits)
