"""Prometheus text of the engine: what a scheduler decides by, in blocks and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcatch.engine.engine import Engine

__all__ = ["METRICS_TYPE", "render_metrics"]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(engine: Engine, model_name: str) -> str:
    """All metrics of one engine; called between two steps, so that the numbers agree with each other."""
    model = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, kind, text, values in _metrics(engine):
        lines += [f"# HELP kvcatch_{name} {text}", f"# TYPE kvcatch_{name} {kind}"]
        for labels, value in values:
            pairs = "".join(f',{key}="{label}"' for key, label in labels.items())
            lines.append(f'kvcatch_{name}{{model_name="{model}"{pairs}}} {value}')
    return "\n".join(lines) + "\n"


Values = list[tuple[dict[str, str], float]]


def _metrics(engine: Engine) -> Iterator[tuple[str, str, str, Values]]:
    pool, scheduler, counters = engine.pool, engine.scheduler, engine.counters

    def one(value: float) -> Values:
        return [({}, value)]

    def by(label: str, counts: Mapping[Any, float]) -> Values:
        return [({label: key}, value) for key, value in counts.items()]

    states = {
        "free": pool.num_free,
        "cached": pool.num_cached,
        "active": pool.num_active,
    }
    yield (
        "blocks",
        "gauge",
        "Blocks of the pool by state; they add up to the pool.",
        by("state", states),
    )
    yield "num_blocks", "gauge", "Blocks of the pool.", one(pool.num_blocks)
    yield "block_size_tokens", "gauge", "Tokens per block.", one(pool.block_size)
    yield "reserved_blocks", "gauge", "Blocks promised and not handed out.", one(pool.num_reserved)
    yield "available_blocks", "gauge", "free + cached - pinned - reserved.", one(pool.available)
    yield (
        "largest_run_blocks",
        "gauge",
        "Longest run that may be handed out.",
        one(pool.largest_run),
    )
    yield "requests_running", "gauge", "Branches with blocks.", one(len(scheduler.running))
    yield "requests_waiting", "gauge", "Branches that wait.", one(len(scheduler.waiting))
    yield "requests_swapped", "gauge", "Branches in the host pool.", one(len(scheduler.swapped))
    refusal = scheduler.refusal
    head = {} if refusal is None else {refusal.gate: 1}
    yield (
        "head_refused",
        "gauge",
        "1 for the gate that keeps the queue's head out.",
        by("gate", head),
    )
    refused = counters.refused_steps
    yield (
        "refused_steps_total",
        "counter",
        "Steps that refused the head, by gate.",
        by("gate", refused),
    )
    preemptions = scheduler.preemptions
    yield (
        "preemptions_total",
        "counter",
        "Branches that lost their blocks.",
        by("kind", preemptions),
    )
    yield "finished_total", "counter", "Branches ended, by reason.", by("reason", counters.finished)
    yield "steps_total", "counter", "Steps that computed something.", one(counters.steps)
    yield "prompt_tokens_total", "counter", "Prompt tokens computed.", one(counters.prompt_tokens)
    yield "generated_tokens_total", "counter", "Tokens sampled.", one(counters.generated_tokens)
    yield (
        "hit_tokens_total",
        "counter",
        "Prompt tokens found in the cache.",
        one(counters.hit_tokens),
    )
    yield "compactions_total", "counter", "Compaction plans applied.", one(counters.compactions)
    yield "blocks_moved_total", "counter", "Blocks moved by them.", one(counters.blocks_moved)
    seconds = counters.seconds
    yield "step_seconds_total", "counter", "Time of steps by part.", by("part", seconds)
