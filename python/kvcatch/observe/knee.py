"""The knee of a running engine: TTFT over utilisation, from a recording or an endpoint's samples.

Every interval between two looks in which requests got their first token gives a point: their mean TTFT, and
the utilisation at the first look after they had arrived, which is what they met. The fit is
``changepoint.fit_knee``; neighbouring points depend on each other, so its bootstrap keeps them together.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.observe.changepoint import Knee, KneePoint, fit_knee
from kvcatch.observe.diagnose import diagnose_replica
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.window import by_replica, delta, is_restart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcatch.observe.sample import EngineSample

__all__ = ["DEPLOYED_LEVELS", "KneeReport", "Look", "find_knees", "knee_looks"]

DEPLOYED_LEVELS = (
    ("llm-d endpoint picker, kvCacheUtilThreshold", 0.80),
    ("KEDA example", 0.60),
    ("vLLM dashboard, orange", 0.90),
    ("vLLM dashboard, red", 0.98),
    ("ml-memguard, warns", 0.80),
    ("ml-memguard, sheds", 0.92),
)
"""Water levels that are deployed without having been measured: what a fitted one is set beside."""

MAX_POINTS = 1_500
"""More are merged, neighbours in time into one."""

_OTHER_GATES = ("max_num_seqs", "token_budget", "deferred", "stall")
"""What makes TTFT climb without the pool."""

_LENGTHS_FOLLOW = 0.5


@dataclass(frozen=True, slots=True)
class Look:
    """One interval in which requests got their first token.

    Attributes:
        t_seconds: Its end.
        utilisation: At the first look after they had arrived, 0 to 1.
        ttft_seconds: Mean.
        started: How many.
        prompt_tokens: Mean of their prompts; None where that is not known.
    """

    t_seconds: float
    utilisation: float
    ttft_seconds: float
    started: float
    prompt_tokens: float | None


@dataclass(slots=True)
class KneeReport:
    """The knee of one replica.

    Attributes:
        knee: The fit; its ``reason`` says why it cannot be told.
        looks: What was fitted.
        engine: Which engine.
        replica: Which one of several.
        endpoint: Where it was read.
        usage_of: What its utilisation is a share of.
        notes: What is doubtful, one line each.
    """

    knee: Knee
    looks: list[Look]
    engine: str = ""
    replica: str = ""
    endpoint: str = ""
    usage_of: str = ""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """With units in the names, for JSON."""
        return {
            "engine": self.engine,
            "replica": self.replica,
            "endpoint": self.endpoint,
            "utilisation_is_share_of": self.usage_of,
            "knee": self.knee.to_dict(),
            "intervals": len(self.looks),
            "requests": sum(look.started for look in self.looks),
            "notes": self.notes,
            "deployed_levels": [{"where": name, "level": level} for name, level in DEPLOYED_LEVELS],
        }

    def points(self) -> list[KneePoint]:
        """What was fitted, for the fit."""
        return [KneePoint(look.utilisation, look.ttft_seconds) for look in self.looks]


def find_knees(
    samples: Iterable[EngineSample], limits: Limits | None = None, *, seed: int = 0
) -> list[KneeReport]:
    """Fit every replica on its own.

    Args:
        samples: Of any engines, in any order.
        limits: What /metrics does not say, for telling what requests waited for.
        seed: Of the bootstrap.
    """
    reports = []
    for (endpoint, engine, replica), group in by_replica(samples).items():
        report = _of_replica(group, engine, limits or Limits(), seed)
        report.endpoint, report.engine, report.replica = endpoint, engine, replica
        report.usage_of = FAMILIES[engine].usage_of if engine in FAMILIES else ""
        reports.append(report)
    return reports


def knee_looks(samples: Sequence[EngineSample]) -> list[Look]:
    """The intervals of one replica, in order of time, that tell of TTFT and utilisation."""
    known = [sample for sample in samples if _used(sample) is not None]
    times = [sample.t_seconds for sample in known]
    found = []
    for before, after in itertools.pairwise(samples):
        if is_restart(before, after):
            continue
        started, seconds = (
            delta(before, after, "started_total"),
            delta(before, after, "ttft_seconds_sum"),
        )
        if not started or not seconds:
            continue
        ttft = seconds / started
        arrived = after.t_seconds - ttft
        if arrived < samples[0].t_seconds:
            continue  # before the window
        place = bisect_left(times, arrived)
        used = _used(known[place]) if place < len(known) else None
        if used is None or times[place] > after.t_seconds:
            continue
        prompts = delta(before, after, "prompt_tokens_total")
        found.append(
            Look(after.t_seconds, used, ttft, started, prompts / started if prompts else None)
        )
    return found


def _used(sample: EngineSample) -> float | None:
    """Share of the pool that requests hold or were promised; never above 1."""
    share = sample.kv_usage_share
    if share is not None and sample.reserved_blocks and sample.num_blocks:
        share += sample.reserved_blocks / sample.num_blocks
    return None if share is None else min(1.0, share)


def _of_replica(
    samples: Sequence[EngineSample], engine: str, limits: Limits, seed: int
) -> KneeReport:
    looks = _merged(knee_looks(samples))
    points = [KneePoint(look.utilisation, look.ttft_seconds) for look in looks]
    notes = []
    if not looks:
        last = samples[-1]
        lacks = [
            name
            for name, value in (
                ("KV usage", _used(last)),
                ("TTFT", last.ttft_seconds_sum),
                ("started requests", last.started_total),
            )
            if value is None
        ]
        reason = (
            f"{' and '.join(lacks)} are not exported" if lacks else "no request got a first token"
        )
        knee = replace(fit_knee([]), reason=reason)
    else:
        # Eight runs at least: the signs of fewer cannot make a p-value of 5 %.
        run = max(1, min(round(len(points) ** 0.5), len(points) // 8))
        knee = fit_knee(points, seed=seed, run_length=run)
        if knee.num_points < 20:
            knee = replace(
                knee, reason=f"{len(points)} intervals with a first token: at least 20 are needed"
            )
    follows = _lengths_follow(looks)
    if follows is not None:
        notes.append(
            f"longer prompts came at higher utilisation (rank correlation {follows:.2f}): some of the climb "
            "is theirs"
        )
    if not knee.reason:
        other = _other_gate(samples, engine, limits)
        if other:
            knee = replace(knee, reason=other)
    return KneeReport(knee, looks, notes=notes)


def _merged(looks: list[Look]) -> list[Look]:
    """At most MAX_POINTS, neighbours in time merged, each weighted by its requests."""
    size = -(-len(looks) // MAX_POINTS)
    if size <= 1:
        return looks
    merged = []
    for at in range(0, len(looks), size):
        part = looks[at : at + size]
        weight = sum(look.started for look in part)

        def mean(values: list[float], part: list[Look] = part, weight: float = weight) -> float:
            return sum(v * look.started for v, look in zip(values, part, strict=True)) / weight

        prompts = [look.prompt_tokens for look in part if look.prompt_tokens is not None]
        merged.append(
            Look(
                part[-1].t_seconds,
                mean([look.utilisation for look in part]),
                mean([look.ttft_seconds for look in part]),
                weight,
                mean(prompts) if len(prompts) == len(part) else None,
            )
        )
    return merged


def _lengths_follow(looks: Sequence[Look]) -> float | None:
    """Rank correlation of prompt length and utilisation where it is high; None else."""
    pairs = [(look.utilisation, look.prompt_tokens) for look in looks if look.prompt_tokens]
    if len(pairs) < 20:
        return None
    ranks = [_ranks([pair[side] or 0.0 for pair in pairs]) for side in (0, 1)]
    if any(float(np.std(row)) == 0 for row in ranks):
        return None
    found = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    return found if found > _LENGTHS_FOLLOW else None


def _ranks(values: Sequence[float]) -> Any:
    """Ranks, equal values sharing their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


def _other_gate(samples: Sequence[EngineSample], engine: str, limits: Limits) -> str:
    """Why a climb is not the pool's; empty where it is, or where nobody waited."""
    verdict = diagnose_replica(samples, EngineVersion(engine), limits)
    waited = verdict.waiting_request_seconds
    total = sum(waited.values())
    if not total:
        return ""
    gate, most = max(waited.items(), key=lambda item: item[1])
    if gate not in _OTHER_GATES or most < 0.5 * total:
        return ""
    return (
        f"{most / total:.0%} of {total:,.0f} waiting request-seconds were spent at {gate}, not at the pool: "
        "that makes TTFT climb"
    )
