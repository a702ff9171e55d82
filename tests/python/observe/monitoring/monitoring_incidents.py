"""Synthetic recordings: an incident for each alert rule, and times that are none.

Each lasts 90 minutes, a row every 30 seconds; the incident is in the last 20 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.observe.record import Recorder, bodies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP_S = 30
BEGINS_S = 4200
SECONDS = 5400
KINDS = ("refused", "storm", "leak", "reuse")
QUIET = ("healthy", "full", "burst", "cold", "idle")
ALERT_OF = {
    "refused": "RefusedWhilePoolLooksFree",
    "storm": "PreemptionStorm",
    "leak": "LeakAtIdle",
    "reuse": "PrefixReuseLost",
}


@dataclass(frozen=True)
class State:
    """One moment of an engine, whoever it is; counters since its start."""

    running: float = 6
    waiting: float = 0
    active: float = 60
    preemptions: float = 0
    finished: float = 0
    looked_up: float = 0
    hits: float = 0
    refused: float = 0


def state_at(kind: str, t: float) -> State:
    """A pool of 100 blocks that finishes a request a second and finds 30 % of its prompt tokens."""
    incident = max(0.0, t - BEGINS_S)
    now = incident > 0
    # Counters stand still once nothing runs.
    busy = min(t, BEGINS_S) if kind in ("leak", "idle") else t
    usual = {
        "finished": busy,
        "looked_up": 100 * busy,
        "hits": 30 * busy,
        "preemptions": busy // 50,
    }
    if kind == "refused" and now:
        return State(running=4, waiting=9, active=20, refused=5 * incident, **usual)
    if kind == "storm" and now:
        return State(waiting=5, active=95, **(usual | {"preemptions": t // 50 + incident}))
    if kind == "leak" and now:
        return State(running=0, active=7, **usual)
    if kind == "reuse" and now:
        return State(**(usual | {"hits": 30.0 * BEGINS_S}))
    if kind == "full" and now:
        # Truly full: requests wait for blocks.
        return State(running=8, waiting=20, active=99, refused=5 * incident, **usual)
    if kind == "burst" and now:
        # A queue that is gone at every other look.
        return State(
            waiting=3 * (t % (2 * STEP_S) == STEP_S), active=30, refused=incident / 10, **usual
        )
    if kind == "cold":
        return State(**(usual | {"hits": 0.0}))
    if kind == "idle" and now:
        return State(running=0, active=0, **usual)
    return State(**usual)


def kvcatch_page(state: State) -> str:
    free = 100 - state.active
    series = {
        "requests_running": state.running,
        "requests_waiting": state.waiting,
        "requests_swapped": 0,
        "num_blocks": 100,
        "available_blocks": free,
        'blocks|state="active"': state.active,
        'blocks|state="cached"': 0,
        'blocks|state="free"': free,
        'finished_total|reason="stop"': state.finished,
        'preemptions_total|kind="recompute"': state.preemptions,
        "looked_up_tokens_total": state.looked_up,
        'hit_tokens_total|tier="device"': state.hits,
        'refused_steps_total|gate="worst_case"': state.refused,
        'refused_steps_total|gate="token_budget"': state.refused / 10,
    }
    return page("kvcatch_", 'model_name="m"', series)


def vllm_page(state: State, *, is_old: bool) -> str:
    gpu = "gpu_" if is_old else ""
    series = {
        "num_requests_running": state.running,
        "num_requests_waiting": state.waiting,
        "gpu_cache_usage_perc" if is_old else "kv_cache_usage_perc": state.active / 100,
        'request_success_total|finished_reason="stop"': state.finished,
        "num_preemptions_total": state.preemptions,
        f"{gpu}prefix_cache_queries_total": state.looked_up,
        f"{gpu}prefix_cache_hits_total": state.hits,
    }
    if not is_old:
        for reason, count in (("capacity", state.waiting), ("deferred", 0)):
            series[f'num_requests_waiting_by_reason|reason="{reason}"'] = count
    return page("vllm:", 'engine="0",model_name="m"', series)


def page(prefix: str, labels: str, series: dict[str, float]) -> str:
    lines = []
    for name, value in series.items():
        metric, _, more = name.partition("|")
        inside = ",".join(part for part in (labels, more) if part)
        lines.append(f"{prefix}{metric}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


def record(path: Path, kind: str, engine: str) -> None:
    """Write a recording; ``engine`` is kvcatch, vllm or vllm-old."""
    with Recorder(path, f"http://{engine}/metrics", 0.0) as recorder:
        for t in range(0, SECONDS + 1, STEP_S):
            state = state_at(kind, t)
            is_own = engine == "kvcatch"
            text = kvcatch_page(state) if is_own else vllm_page(state, is_old=engine == "vllm-old")
            recorder.add(float(t), text)


def series_of(path: Path, instance: str) -> Iterator[tuple[str, float, str]]:
    """Every sample of a recording with the label that a scrape adds: series, seconds, value."""
    for t, body in bodies(path):
        for line in (body or "").splitlines():
            if line and line[0] != "#":
                series, _, value = line.rpartition(" ")
                yield f'{series[:-1]},instance="{instance}"}}', t, value


FULL_HISTOGRAMS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
)


def full_vllm_page(t: float, *, is_old: bool) -> str:
    """All that the dashboard asks of vLLM, by the names of 0.8 or those of 0.32."""
    state = State(
        preemptions=t / 5, finished=2 * t, looked_up=100 * t, hits=30 * t, waiting=2, active=90
    )
    text = vllm_page(state, is_old=is_old)
    series: dict[str, float] = {
        "prompt_tokens_total": 100 * t,
        "generation_tokens_total": 50 * t,
    }
    names = list(FULL_HISTOGRAMS)
    if is_old:
        names += ["time_per_output_token_seconds", "time_in_queue_requests"]
        series["num_requests_swapped"] = 0
    else:
        names += ["inter_token_latency_seconds", "request_queue_time_seconds"]
        series['admission_rejections_total|reason="queue_full"'] = t
        series["prompt_tokens_cached_total"] = 30 * t
        series['prompt_tokens_cached_by_source_total|source="device"'] = 30 * t
    for name in names:
        for bound in ("1.0", "10.0", "+Inf"):
            series[f'{name}_bucket|le="{bound}"'] = 2 * t
        series[f"{name}_sum"] = t
        series[f"{name}_count"] = 2 * t
    text += page("vllm:", 'engine="0",model_name="m"', series)
    return text + 'vllm:cache_config_info{engine="0",num_gpu_blocks="101",block_size="16"} 1\n'
