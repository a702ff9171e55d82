"""What to show of a fleet at one moment: a row per replica, and all of it as one record for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.observe.diagnose import runbook
from kvcatch.watch.history import thin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.observe.diagnose import Verdict
    from kvcatch.watch.fleet import Endpoint, Fleet
    from kvcatch.watch.replica import Replica

__all__ = ["Row", "clock", "curves", "head_note", "printable", "rows", "span", "state"]

HEAD_UNKNOWN = "size of the queue's head unknown: the engine does not export it"
"""Only kvcatch and its plugin in vLLM export what the first waiting request needs."""

_MOST_TEXT = 300


def printable(text: str, most: int = _MOST_TEXT) -> str:
    """Text from elsewhere as it may be shown: signs that a terminal would act on are escaped."""
    safe = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return safe if len(safe) <= most else f"{safe[: most - 3]}..."


def clock(seconds: float | None) -> str:
    """Unix time as a clock, anything smaller as seconds of the recording."""
    if seconds is None:
        return "never"
    if seconds > 1e9:
        from datetime import datetime

        return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")
    return f"{seconds:.1f} s"


@dataclass(slots=True)
class Row:
    """One replica at one moment, or an endpoint of which no replica is known yet.

    Attributes:
        key: Stands for it as long as it is watched.
        endpoint: Its endpoint, as shown.
        label: Tells it from the endpoint's other replicas; empty where there is one.
        status: ``ok``, ``unreachable``, ``gone`` (its endpoint answers without it), ``waiting`` (not looked
            at yet) or ``unseen`` (nothing is known of this moment).
        reason: Why it is unreachable.
        since_s: Since when the status holds; None for ``ok``.
        replica: Its replica; None when none is known.
        verdict: What keeps its requests out; None when there is none yet.
        values: Gauges by name of column; what is missing or None is unknown.
        figures: See ``history.figures``.
    """

    key: str
    endpoint: str
    label: str
    status: str
    reason: str = ""
    since_s: float | None = None
    replica: Replica | None = None
    verdict: Verdict | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def gate(self) -> str:
        """The verdict in one word; of who does not answer, the status."""
        if self.status in ("unreachable", "gone", "waiting", "unseen"):
            return self.status
        return self.verdict.gate if self.verdict else "not_enough_evidence"

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with it as far as can be seen."""
        return self.gate == "healthy"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: unknown is null, units are in the names."""
        replica, values = self.replica, self.values
        unit = replica.unit if replica else "blocks"
        verdict = self.verdict
        return {
            "key": self.key,
            "endpoint": self.endpoint,
            "replica": printable(replica.labels) if replica else "",
            "label": self.label,
            "status": self.status,
            "reason": self.reason,
            "since_s": self.since_s,
            "engine": replica.version.title if replica else None,
            "t_seconds": values.get("t_seconds"),
            "gate": self.gate,
            "also": list(verdict.also) if verdict else [],
            "confidence": round(verdict.confidence, 2) if verdict else None,
            "arithmetic": printable(verdict.arithmetic, 1000) if verdict else "",
            "advice": [printable(text, 1000) for text in verdict.advice] if verdict else [],
            "runbook": runbook(verdict.gate) if verdict else None,
            "kv_usage_share": values.get("kv_usage_share"),
            "kv_usage_is_share_of": replica.usage_of if replica else None,
            "running_requests": values.get("running_requests"),
            "waiting_requests": values.get("waiting_requests"),
            "waiting_by_reason": {
                "capacity": values.get("waiting_capacity_requests"),
                "deferred": values.get("waiting_deferred_requests"),
            },
            "unit": unit,
            f"available_{unit}": values.get("available"),
            f"head_needs_{unit}": values.get("head"),
            f"longest_request_{unit}": values.get("longest"),
            "head_gate": replica.last.head_gate if replica else None,
            "restarts": replica.restarts if replica else 0,
            **self.figures,
        }


def head_note(row: Row) -> str:
    """The worst case of the queue's head against what is available, in words; says what is unknown."""
    if row.replica is None or not row.values:
        return HEAD_UNKNOWN
    unit, longest, free = row.replica.unit, row.values.get("longest"), row.values.get("available")
    text, head = HEAD_UNKNOWN, row.values.get("head")
    if head is not None:
        text = f"head needs {head:,.0f} {unit}"
    elif longest is not None:
        text = f"head at most {longest:,.0f} {unit} (the longest request the engine takes)"
    there = "unknown" if free is None else f"{free:,.0f}"
    return f"{text}; available {there}"


def _labels(replicas: Iterable[Replica]) -> list[str]:
    """What tells replicas apart: labels that all of them share are left out."""
    parts = [replica.labels.split(",") for replica in replicas]
    if len(parts) < 2:
        return [""] * len(parts)
    shared = set(parts[0]).intersection(*parts[1:])
    return [
        printable(",".join(part for part in mine if part not in shared) or ",".join(mine), 60)
        for mine in parts
    ]


def _rows(number: int, endpoint: Endpoint, at_s: float | None) -> list[Row]:
    name = printable(endpoint.name, 120)
    if not endpoint.replicas:
        status = "unreachable" if endpoint.error else "waiting"
        reason = printable(endpoint.error or "")
        return [Row(f"e{number}", name, "", status, reason, endpoint.error_since_s)]
    found = []
    labels = _labels(endpoint.replicas.values())
    engines = {engine for engine, _ in endpoint.replicas}
    for label, (key, replica) in zip(labels, endpoint.replicas.items(), strict=True):
        row = Row(f"e{number}:{key[0]}:{printable(key[1], 2000)}", name, label, "ok")
        if len(engines) > 1:
            row.label = f"{replica.engine} {label}".rstrip()
        row.replica = replica
        if at_s is None and endpoint.error:
            row.status, row.reason = "unreachable", printable(endpoint.error)
            row.since_s = endpoint.error_since_s
        elif at_s is None and replica.gone_since_s is not None:
            row.status, row.since_s = "gone", replica.gone_since_s
        else:
            row.values = replica.row_at(at_s)
            row.status = "ok" if row.values else "unseen"
        if row.values:
            # What was seen before an endpoint went away is not what is so now.
            row.figures, row.verdict = replica.figures_at(at_s), replica.verdict_at(at_s)
        found.append(row)
    return found


def rows(fleet: Fleet, at_s: float | None = None) -> list[Row]:
    """A row per replica at a time; None: now, or the end of a recording. Endpoints stay in their order."""
    return [
        row
        for number, endpoint in enumerate(fleet.endpoints)
        for row in _rows(number, endpoint, at_s)
    ]


def span(fleet: Fleet) -> tuple[float, float] | None:
    """First and last moment of which anything is kept; None when nothing is."""
    tables = [
        replica.history.rows
        for endpoint in fleet.endpoints
        for replica in endpoint.replicas.values()
        if len(replica.history)
    ]
    if not tables:
        return None
    return min(float(table[0, 0]) for table in tables), max(float(table[-1, 0]) for table in tables)


def curves(replica: Replica, end_s: float, seconds: float, most: int = 600) -> dict[str, Any]:
    """The curves of one replica over the seconds before a time."""
    found = thin(replica.history.rows, end_s - seconds, end_s, most, replica.hold_s)
    return {"unit": replica.unit, "hold_s": replica.hold_s, **found}


def state(
    fleet: Fleet, at_s: float | None = None, key: str | None = None, seconds: float = 600.0
) -> dict[str, Any]:
    """All endpoints at one moment, and the curves of one replica where ``key`` names it, for JSON."""
    found = rows(fleet, at_s)
    whole = span(fleet)
    end_s = at_s
    if end_s is None:
        end_s = fleet.now_s() if fleet.is_live else (whole[1] if whole else 0.0)
    data: dict[str, Any] = {
        "now_s": round(fleet.now_s(), 3) if fleet.is_live else end_s,
        "at_s": at_s,
        "is_live": fleet.is_live,
        "interval_s": fleet.rules.interval_s,
        "window_s": fleet.rules.window_s,
        "from_s": whole[0] if whole else None,
        "to_s": whole[1] if whole else None,
        "endpoints": len(fleet.endpoints),
        "unreachable": sum(endpoint.error is not None for endpoint in fleet.endpoints),
        "notes": [
            f"{printable(endpoint.name, 120)}: {printable(note, 1000)}"
            for endpoint in fleet.endpoints
            for note in endpoint.notes
        ],
        "replicas": [row.to_dict() for row in found],
    }
    chosen = next((row for row in found if row.key == key), None)
    if chosen is not None and chosen.replica is not None:
        data["curves"] = {"key": key, **curves(chosen.replica, end_s, seconds)}
        data["curves"] |= {"start_s": end_s - seconds, "end_s": end_s}
        data["head"] = head_note(chosen)
    return data
