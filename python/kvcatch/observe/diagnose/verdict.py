"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvcatch.laws import GATES

__all__ = ["DIAGNOSES", "Diagnosis", "Evidence", "Span", "Verdict", "runbook"]

GateName = Literal[
    "worst_case",
    "capacity",
    "watermark",
    "max_num_seqs",
    "token_budget",
    "head_of_line",
    "deferred",
    "contiguity",
    "never_fits",
    "stall",
    "preemption_storm",
    "leak",
    "prefix_cache_broken",
    "healthy",
    "not_enough_evidence",
]

DIAGNOSES = (
    *GATES,
    "stall",
    "preemption_storm",
    "leak",
    "prefix_cache_broken",
    "healthy",
    "not_enough_evidence",
)
"""Every word a diagnosis can start with: the gates of admission, and what is wrong besides them."""


def runbook(gate: str) -> str:
    """Where the runbook explains a gate."""
    return f"docs/runbook.md#{gate}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that was seen.

    Attributes:
        start_s: When it began, in the time of the samples.
        end_s: When it ended.
        text: What was seen.
    """

    start_s: float
    end_s: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"start_s": round(self.start_s, 3), "end_s": round(self.end_s, 3), "text": self.text}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the timeline.

    Attributes:
        start_s: Its start.
        end_s: Its end.
        gate: What kept requests out in it; ``unexplained`` where nothing is shown to.
        waiting_request_seconds: How many waited, times how long.
    """

    start_s: float
    end_s: float
    gate: str
    waiting_request_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "start_s": round(self.start_s, 3),
            "end_s": round(self.end_s, 3),
            "gate": self.gate,
            "waiting_request_seconds": round(self.waiting_request_seconds, 1),
        }


@dataclass(slots=True)
class Verdict:
    """One replica's diagnosis.

    Attributes:
        gate: What kept waiting requests out for most request-seconds.
        also: What else is so, most important first.
        confidence: 0 to 1.
        evidence: What was seen, with times.
        arithmetic: The comparison that decides.
        advice: What to change on this engine and version.
        engine: Engine and version in words.
        replica: Which one.
        endpoint: Where it was read.
        waiting_request_seconds: By gate.
        timeline: Gate by gate, in order of time.
        usage_of: What the engine's KV percentage is a share of.
    """

    gate: GateName
    also: list[GateName] = field(default_factory=list)
    confidence: float = 0.0
    evidence: list[Evidence] = field(default_factory=list)
    arithmetic: str = ""
    advice: list[str] = field(default_factory=list)
    engine: str = ""
    replica: str = ""
    endpoint: str = ""
    waiting_request_seconds: dict[str, float] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    usage_of: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong as far as can be seen."""
        return self.gate == "healthy"

    @property
    def badness(self) -> tuple[int, float, float]:
        """Sorts verdicts: who says nothing, who is healthy, who waits least, who waits most."""
        rank = {"not_enough_evidence": 0, "healthy": 1}.get(self.gate, 2)
        waited = sum(self.waiting_request_seconds.values())
        # Requests that wait unexplained are worse than a healthy neighbour.
        return (2 if waited > 0 else rank), waited, self.confidence

    def to_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The verdict with units in the names, for JSON."""
        data: dict[str, Any] = {
            "gate": self.gate,
            "also": list(self.also),
            "confidence": round(self.confidence, 2),
            "evidence": [item.to_dict() for item in self.evidence],
            "arithmetic": self.arithmetic,
            "advice": list(self.advice),
            "engine": self.engine,
            "replica": self.replica,
            "endpoint": self.endpoint,
            "kv_usage_is_share_of": self.usage_of,
            "waiting_request_seconds": {
                gate: round(value, 1) for gate, value in self.waiting_request_seconds.items()
            },
            "runbook": runbook(self.gate),
        }
        if timeline:
            data["timeline"] = [span.to_dict() for span in self.timeline]
        return data


@dataclass(slots=True)
class Diagnosis:
    """The diagnosis of all replicas; the one that is worst off speaks for all.

    Attributes:
        verdicts: One per replica, worst first.
        notes: What was not read, and what is doubtful.
    """

    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Verdict:
        """The replica that is worst off."""
        return self.verdicts[0]

    def to_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """The worst verdict, and all of them under ``replicas`` where there are several."""
        data = self.worst.to_dict(timeline=timeline)
        data["notes"] = self.notes
        if len(self.verdicts) > 1:
            data["replicas"] = [verdict.to_dict(timeline=timeline) for verdict in self.verdicts]
        return data
