"""Prometheus text to EngineSamples, fast: a line whose name no table wants costs one look-up.

One ``Reader`` per endpoint; it remembers what each series means, so that the second body is cheaper
than the first. Several engines or ranks behind one endpoint become several samples.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcatch.observe.engines import FAMILIES, family_of
from kvcatch.observe.engines.table import replica_name
from kvcatch.observe.errors import MetricsError
from kvcatch.observe.sample import EngineSample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcatch.observe.engines.table import Family, Metric

__all__ = ["MAX_BODY_BYTES", "Reader", "Slot", "parse_labels", "parse_line"]

MAX_BODY_BYTES = 64 * 2**20
"""A larger body is refused: no engine's metrics come near it."""

_MAX_SERIES = 200_000
_MAX_SKIPPED = 20_000
_PROCESS_START = "process_start_time_seconds"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(,|$)')
_LINE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*(\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})|(?=[ \t]))[ \t]*(\S+)(.*)'
)
_ESCAPE = re.compile(r"\\(.)")


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def parse_labels(series: str) -> tuple[str, dict[str, str]] | None:
    """Name and labels of ``name{label="value",...}``; None when it is not well formed."""
    name, brace, rest = series.partition("{")
    name = name.strip()
    if not _NAME.fullmatch(name):
        return None
    labels: dict[str, str] = {}
    if not brace:
        return name, labels
    if not rest.endswith("}"):
        return None
    inside, at = rest[:-1], 0
    while at < len(inside):
        match = _LABEL.match(inside, at)
        if match is None or match[1] in labels:
            return None if inside[at:].strip() else (name, labels)
        labels[match[1]] = _unescape(match[2]) if "\\" in match[2] else match[2]
        at = match.end()
    return name, labels


def parse_line(line: str) -> tuple[str, str] | None:
    """Series and value of one line, exemplar and timestamp dropped; None when it is not well formed."""
    match = _LINE.fullmatch(line.strip())
    return (match[1] + (match[2] or ""), match[3]) if match else None


@dataclass(slots=True, eq=False)
class Slot:
    """One wanted series: where its value goes, and its value when it was last seen."""

    series: str
    metric: Metric | None
    bound: float = math.inf
    text: str = ""
    info: dict[str, float] = field(default_factory=dict)
    value: float = 0.0
    seen: float = -1


@dataclass(slots=True, eq=False)
class _Replica:
    family: Family
    labels: dict[str, str]
    name: str
    # field -> rows of the table that can fill it, in the table's order, each with its series
    rows: dict[str, dict[int, tuple[Metric, list[Slot]]]] = field(default_factory=dict)


class Reader:
    """Reads the bodies of one endpoint.

    Attributes:
        endpoint: Named in every error.
        names: Names of wanted metrics met so far, by engine: they tell the version.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.names: dict[str, set[str]] = {}
        self._known: dict[str, Slot] = {}
        # Series that no table wants: most of a body, and the same ones each time.
        self._skipped: set[str] = set()
        self._by_meaning: dict[tuple[object, ...], Slot] = {}
        self._replicas: dict[tuple[str, ...], _Replica] = {}
        self._partial: list[tuple[str, dict[str, str], str, int, Slot]] = []
        self._generation = 0
        wanted: dict[str, list[tuple[Family, int, Metric]]] = {}
        self._infos: dict[str, Family] = {}
        for family in FAMILIES.values():
            for rank, metric in enumerate(family.metrics):
                names = {metric.name}
                if not metric.name.endswith(("_sum", "_count", "_bucket")):
                    names.add(metric.name + "_total")
                for name in names:
                    wanted.setdefault(name, []).append((family, rank, metric))
            for name in family.info:
                self._infos[name] = family
        self._wanted = wanted

    def read(self, body: bytes | str, t_seconds: float) -> list[EngineSample]:
        """One sample per engine and rank in the body.

        Raises:
            MetricsError: The body is HTML, empty, cut off or too large; a wanted series is there twice
                or is NaN, infinite or negative; or no engine's metrics are in it.
        """
        text = self._text(body)
        self._generation += 1
        generation, known, skipped = self._generation, self._known, self._skipped
        found = 0
        for line in text.split("\n"):
            if not line or line[0] == "#":
                continue
            end = line.rfind("}")
            if end < 0:
                series, _, rest = line.partition(" ")
            else:
                series, rest = line[: end + 1], line[end + 1 :]
            slot = known.get(series)
            if slot is None:
                if series in skipped:
                    continue
                name = series.partition("{")[0]
                if not name or name != name.strip() or "\t" in name:
                    # The format allows blanks and tabs around each part.
                    parsed = parse_line(line)
                    if parsed is not None:
                        series, rest = parsed
                        name = series.partition("{")[0]
                if not self.wants(name):
                    if len(skipped) >= _MAX_SKIPPED:
                        skipped.clear()
                    skipped.add(series)
                    continue
                if " # " in line:
                    parsed = parse_line(line)
                    if parsed is None:
                        raise self._error(f"malformed line {line[:80]!r}")
                    series, rest = parsed
                slot = self.slot(series)
                if slot is None:
                    continue
            if slot.seen == generation:
                raise self._error(f"series {series[:120]} is there twice")
            try:
                value = float(rest) if "_" not in rest else self._value(series, rest)
            except ValueError:
                value = self._value(series, rest)
            slot.value = value
            slot.seen = generation
            if not 0 <= value < math.inf:
                self._refuse(slot, value)
            found += 1
        if not found or not self.names:
            raise self._error(self._nothing(text))
        return self.assemble(t_seconds, generation)

    def _text(self, body: bytes | str) -> str:
        if len(body) > MAX_BODY_BYTES:
            raise self._error(
                f"a body of {len(body):,} bytes is more than {MAX_BODY_BYTES:,}: not read"
            )
        text = body.decode("utf-8", errors="replace") if isinstance(body, bytes) else body
        start = text[:512].lstrip("\ufeff \t\r\n").lower()
        if start.startswith(("<!doctype", "<html", "<?xml", "<head", "<body")):
            raise self._error("an HTML page, not metrics: is the path right?")
        if not start:
            raise self._error("an empty body")
        if not text.endswith("\n"):
            raise self._error(f"the body is cut off after {text[-40:]!r}")
        return text.replace("\r\n", "\n") if "\r" in text else text

    def _nothing(self, text: str) -> str:
        for line in text.split("\n"):
            name = _NAME.match(line)
            if name and family_of(name[0]):
                return f"none of the known names of {name[0].partition(':')[0]} has a value"
        return "no metrics of an engine that kvcatch knows: " + ", ".join(FAMILIES)

    def _value(self, series: str, rest: str) -> float:
        parts = rest.split()
        try:
            if "_" in rest or not 1 <= len(parts) <= 2:
                raise ValueError
            float(parts[-1])
            return float(parts[0])
        except ValueError:
            raise self._error(f"{series[:120]} has the value {rest.strip()[:40]!r}") from None

    def _refuse(self, slot: Slot, value: float) -> None:
        """An impossible value: unknown where that can be, else an error."""
        if slot.metric is None or slot.metric.optional or slot.metric.combine == "label":
            slot.seen = -1
            return
        raise self._error(f"{slot.series[:120]} is {value}: not a count")

    def _error(self, message: str) -> MetricsError:
        if not message.isprintable():
            message = "".join(
                char if char.isprintable() else char.encode("unicode_escape").decode()
                for char in message
            )
        return MetricsError(f"{self.endpoint}: {message}")

    def wants(self, name: str) -> bool:
        """Whether a table wants the metric of this name."""
        return name in self._wanted or name in self._infos or name == _PROCESS_START

    def slot(self, series: str) -> Slot | None:
        """What a series means; None when no table wants it.

        Raises:
            MetricsError: The series is not well formed, or there are too many.
        """
        if (slot := self._known.get(series)) is not None:
            return slot
        parsed = parse_labels(series)
        if parsed is None:
            raise self._error(f"malformed series {series[:80]!r}")
        name, labels = parsed
        if len(self._known) >= _MAX_SERIES:
            raise self._error(f"more than {_MAX_SERIES:,} series of known names")
        if name == _PROCESS_START:
            slot = Slot(series, None)
            self._partial.append(("", {}, "process_start_seconds", 0, slot))
            self._known[series] = slot
            return slot
        if (family := self._infos.get(name)) is not None:
            slot = Slot(series, None, info=family.read_info(labels))
            self.names.setdefault(family.engine, set()).add(name)
            self._partial.append((family.engine, self._identity(family, labels), "", 0, slot))
            self._known[series] = slot
            return slot
        # A label's own rows come first in the table: the first row whose labels agree takes it.
        for family, rank, metric in self._wanted[name]:
            if all(labels.get(key, "") == value for key, value in metric.where.items()):
                return self._place(series, family, rank, metric, labels)
        return None

    def _place(
        self, series: str, family: Family, rank: int, metric: Metric, labels: dict[str, str]
    ) -> Slot:
        meaning = (family.engine, rank, *sorted(labels.items()))
        if (known := self._by_meaning.get(meaning)) is not None:
            self._known[series] = known  # the same labels in another order
            return known
        slot = Slot(series, metric)
        if metric.combine == "bucket":
            try:
                slot.bound = float(labels.get("le", ""))
            except ValueError:
                raise self._error(f"malformed series {series[:80]!r}") from None
        elif metric.combine == "label":
            slot.text = labels.get(metric.label, "")
        self.names.setdefault(family.engine, set()).add(metric.name)
        identity = self._identity(family, labels)
        if metric.field == "rejected_total" and "engine" not in identity:
            # The front end counts these, for all engines behind it.
            self._partial.append((family.engine, identity, metric.field, rank, slot))
        else:
            key = (family.engine, *(identity.get(label, "") for label in family.identity))
            replica = self._replicas.get(key)
            if replica is None:
                replica = self._replicas[key] = _Replica(
                    family, identity, replica_name(family.identity, labels)
                )
            rows = replica.rows.setdefault(metric.field, {})
            rows.setdefault(rank, (metric, []))[1].append(slot)
        self._by_meaning[meaning] = slot
        self._known[series] = slot
        return slot

    @staticmethod
    def _identity(family: Family, labels: Mapping[str, str]) -> dict[str, str]:
        return {name: labels[name] for name in family.identity if labels.get(name)}

    def assemble(self, t_seconds: float, generation: float) -> list[EngineSample]:
        """Samples from the series seen at or after ``generation``."""
        samples = []
        for replica in self._replicas.values():
            sample = EngineSample(t_seconds, replica.family.engine, replica.name, self.endpoint)
            filled = False
            for name, rows in replica.rows.items():
                for rank in sorted(rows) if len(rows) > 1 else rows:
                    metric, slots = rows[rank]
                    alive = [slot for slot in slots if slot.seen >= generation]
                    if alive:
                        value = _combine(metric, alive)
                        if value is not None:
                            setattr(sample, name, value)
                            filled = True
                        break
            if not filled:
                continue
            for engine, labels, name, _, slot in self._partial:
                if slot.seen < generation or engine not in ("", replica.family.engine):
                    continue
                if any(replica.labels.get(key, value) != value for key, value in labels.items()):
                    continue
                if name:
                    setattr(sample, name, (getattr(sample, name) or 0.0) + slot.value)
                for key, value in slot.info.items():
                    setattr(sample, key, value)
            replica.family.finish(sample)
            samples.append(sample)
        return samples


def _combine(metric: Metric, slots: Iterable[Slot]) -> float | str | None:
    if metric.combine == "max":
        return max(slot.value for slot in slots) * metric.scale
    if metric.combine == "sum":
        return sum(slot.value for slot in slots) * metric.scale
    if metric.combine == "label":
        return next((slot.text for slot in slots if slot.value > 0), None)
    counts: dict[float, float] = {}
    for slot in slots:
        counts[slot.bound] = counts.get(slot.bound, 0.0) + slot.value
    total = counts.get(math.inf)
    if not total:
        return None
    bound = min((le for le, count in counts.items() if count >= total), default=math.inf)
    return None if math.isinf(bound) else bound
