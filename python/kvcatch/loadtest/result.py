"""Measured beside predicted, and what a difference means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.loadtest.predict import Prediction
    from kvcatch.loadtest.ramp import Probe, Ramp

__all__ = ["Verdict", "judge", "to_dict"]

NORMAL, FAULT = 0.2, 0.5
"""Shares of the prediction: up to the first a difference is normal, beyond the second a fault."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the load test found.

    Attributes:
        name: ``as_predicted`` (within one request), ``normal`` (within 20 %), ``off``,
            ``configuration_fault`` (beyond 50 %), ``nothing_waited``, ``not_enough_evidence`` or
            ``not_predicted``.
        text: in one line.
        gate: what probably holds the request, where one waited.
    """

    name: str
    text: str
    gate: str | None = None


def judge(ramp: Ramp, prediction: Prediction | None, max_concurrency: int) -> Verdict:
    """Compare what was measured with what was predicted."""
    measured = ramp.first_refusal
    predicted = None if prediction is None else prediction.first_refusal
    if ramp.ended_early is not None:
        return Verdict(
            "not_enough_evidence",
            f"request {ramp.ended_early} ended before anything waited: ask for more output tokens",
        )
    if measured is None:
        if ramp.interrupted:
            return Verdict("not_enough_evidence", f"stopped after {len(ramp.probes)} requests")
        text = f"nothing waited up to {len(ramp.probes)} requests"
        if predicted is not None and predicted <= len(ramp.probes) - 1:
            return Verdict(
                _by_difference(len(ramp.probes) + 1, predicted),
                f"{text}; the law predicted that request {predicted} would",
            )
        return Verdict("nothing_waited", text)
    gate = _gate(ramp, prediction)
    if prediction is None:
        return Verdict("not_predicted", f"request {measured} was the first to wait", gate)
    if predicted is None:
        name = _by_difference(measured, max_concurrency + 1)
        text = f"request {measured} waited; by the law none up to {max_concurrency} should"
        return Verdict("off" if name == "normal" else name, text, gate)
    name = _by_difference(measured, predicted)
    return Verdict(name, f"request {measured} was the first to wait, predicted {predicted}", gate)


def _by_difference(measured: int, predicted: int) -> str:
    difference = abs(measured - predicted)
    if difference <= 1:
        return "as_predicted"
    share = difference / predicted
    if share <= NORMAL:
        return "normal"
    return "off" if share <= FAULT else "configuration_fault"


def _gate(ramp: Ramp, prediction: Prediction | None) -> str | None:
    """The law's gate where it agrees; else ``max_num_seqs`` where as many run as then entered before."""
    measured = ramp.first_refusal
    predicted = prediction
    if predicted is not None and predicted.refusal is not None and measured is not None:
        if abs(measured - (predicted.first_refusal or 0)) <= 1:
            return predicted.refusal.gate
        if measured < (predicted.first_refusal or measured):
            return "max_num_seqs"
    if predicted is None or measured is None:
        return None
    return "max_num_seqs" if predicted.refusal is None else predicted.refusal.gate


def to_dict(ramp: Ramp, prediction: Prediction | None, verdict: Verdict) -> dict[str, Any]:
    """All of it for JSON, with units in the names."""
    return {
        "verdict": verdict.name,
        "text": verdict.text,
        "gate": verdict.gate,
        "first_refusal_requests": ramp.first_refusal,
        "predicted_first_refusal_requests": prediction and prediction.first_refusal,
        "predicted_least_requests": prediction and prediction.least,
        "predicted_most_requests": prediction and prediction.most,
        "arithmetic": str(prediction.refusal) if prediction and prediction.refusal else None,
        "prompt_tokens": ramp.prompt_tokens,
        "preemptions": ramp.preemptions,
        "interrupted": ramp.interrupted,
        "seconds": ramp.seconds,
        "requests": [_probe(probe) for probe in ramp.probes],
    }


def _probe(probe: Probe) -> dict[str, Any]:
    return {
        "number": probe.number,
        "outcome": probe.outcome,
        "ttft_seconds": probe.ttft,
        "running": probe.gauges.running,
        "waiting": probe.gauges.waiting,
        "generated_before_tokens": sum(probe.generated),
        "detail": probe.detail,
    }
