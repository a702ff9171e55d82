"""From numbers to Prometheus metrics, group by group. Needs prometheus_client.

Every series carries ``model_name``. What is unknown has no series: a missing one is never written as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvcatch.laws import GATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from kvcatch.observe.exporter.device import DeviceMemory
    from kvcatch.observe.exporter.histogram import HistogramValues
    from kvcatch.observe.exporter.holdings import Holding
    from kvcatch.observe.exporter.source import Numbers

__all__ = ["Look", "families"]

_P = "kvcatch_"

LIMITS = {
    "num_blocks": "Blocks of the pool.",
    "block_size_tokens": "Tokens per block.",
    "max_num_seqs": "Sequences that may run at once.",
    "token_budget_tokens": "Most tokens of one step.",
    "max_model_len_tokens": "Most tokens of a request.",
    "watermark_blocks": "Blocks that an admission leaves available while something runs.",
}
"""What does not change; by the key of ``Source.limits``."""


@dataclass(frozen=True, slots=True)
class Look:
    """All that one page shows.

    Attributes:
        model_name: Label of every series.
        limits: See ``Source.limits``.
        info: See ``Source.info``.
        device: Where the KV cache lies.
        kv_cache_bytes: Its size; None where unknown.
        numbers: Of the engine, between two steps.
        age_seconds: Since then.
        stats: Of the pool.
        holdings: By ``owner`` and by tag.
        memory: Of the device; None where there is no GPU.
        sampled: Histograms of what was sampled beside the engine, by what they count.
    """

    model_name: str
    limits: Mapping[str, float]
    info: Mapping[str, str]
    device: str
    kv_cache_bytes: int | None
    numbers: Numbers
    age_seconds: float
    stats: Mapping[str, Any]
    holdings: Mapping[str, Sequence[Holding]] = field(default_factory=dict)
    memory: DeviceMemory | None = None
    sampled: Mapping[str, HistogramValues] = field(default_factory=dict)


class _Page:
    """Makes metric families with the label of the model."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), [((), value)])

    def gauges(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        rows: Sequence[tuple[Sequence[str], float]],
    ) -> Metric:
        family = GaugeMetricFamily(_P + name, text, labels=["model_name", *labels])
        for values, value in rows:
            family.add_metric([self._model, *values], value)
        return family

    def gauges_by(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        return self.gauges(name, text, [label], [((key,), value) for key, value in counts.items()])

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_P + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def counters_by(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(_P + name, text, labels=["model_name", label])
        for key, value in counts.items():
            family.add_metric([self._model, key], value)
        return family

    def histogram(self, name: str, text: str, values: HistogramValues) -> Metric:
        family = HistogramMetricFamily(_P + name, text, labels=["model_name"])
        family.add_metric([self._model], values.cumulated(), values.total)
        return family


def families(look: Look) -> Iterator[Metric]:
    """All metrics of a look."""
    page = _Page(look.model_name)
    for group in (_capacity, _requests, _reuse, _scheduling, _efficiency, _latency, _holdings):
        yield from group(page, look)


def _capacity(page: _Page, look: Look) -> Iterator[Metric]:
    numbers, memory = look.numbers, look.memory
    info = {**look.info, "device": look.device}
    yield page.gauges(
        "engine_info", "Settings of the engine.", list(info), [(list(info.values()), 1)]
    )
    yield page.gauge("numbers_age_seconds", "Age of this page's numbers.", look.age_seconds)
    for key, value in look.limits.items():
        yield page.gauge(key, LIMITS[key], value)
    text = "Blocks of the pool by state; they add up to the pool."
    yield page.gauges_by("blocks", text, "state", numbers.blocks)
    text = "Blocks that must not move or be evicted."
    yield page.gauge("pinned_blocks", text, numbers.pinned_blocks)
    text = "Blocks promised and not handed out."
    yield page.gauge("reserved_blocks", text, numbers.reserved_blocks)
    text = "free + cached - pinned cached - reserved."
    yield page.gauge("available_blocks", text, numbers.available_blocks)
    text = "Longest run that may be handed out."
    yield page.gauge("largest_run_blocks", text, numbers.largest_run_blocks)
    if numbers.host_blocks:
        text = "Blocks of the host pool by state."
        yield page.gauges_by("host_blocks", text, "state", numbers.host_blocks)
    if look.kv_cache_bytes is not None:
        text = "Bytes of the KV cache, allocated once."
        yield page.gauges_by("kv_cache_bytes", text, "device", {look.device: look.kv_cache_bytes})
    if memory is None:
        return
    rows = {"total": memory.total_bytes, "used": memory.used_bytes}
    if memory.process_bytes is not None:
        rows["process"] = memory.process_bytes
        if look.kv_cache_bytes is not None:
            rows["kv"] = look.kv_cache_bytes
            rows["process_other"] = memory.process_bytes - look.kv_cache_bytes
    text = (
        "Memory of the device: total; used by all processes; by this process, which is kv and "
        "process_other."
    )
    cells = [((look.device, key), float(value)) for key, value in rows.items()]
    yield page.gauges("device_memory_bytes", text, ["device", "part"], cells)


def _requests(page: _Page, look: Look) -> Iterator[Metric]:
    numbers, times = look.numbers, look.numbers.histograms
    yield page.gauge("requests_running", "Branches with blocks.", numbers.running)
    yield page.gauge("requests_waiting", "Branches that wait.", numbers.waiting)
    yield page.gauge("requests_swapped", "Branches in the host pool.", numbers.swapped)
    text = "Branches ended, by reason."
    yield page.counters_by("finished", text, "reason", numbers.finished)
    text = "Requests refused at the door, by gate."
    yield page.counters_by("rejected", text, "gate", numbers.rejected)
    text = "Prompt tokens computed; recomputed ones again."
    yield page.counter("prompt_tokens", text, numbers.prompt_tokens)
    yield page.counter("generated_tokens", "Tokens sampled.", numbers.generated_tokens)
    lengths = {
        "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of finished requests."),
        "output_tokens": ("request_output_tokens", "Tokens that finished requests generated."),
        "asked_tokens": ("request_asked_tokens", "Tokens that finished requests might generate."),
    }
    for key, (name, text) in lengths.items():
        if key in times:
            yield page.histogram(name, text, times[key])


def _reuse(page: _Page, look: Look) -> Iterator[Metric]:
    numbers, counters = look.numbers, look.stats["counters"]
    text = "Prompt tokens looked up in the prefix cache, at first admissions."
    yield page.counter("looked_up_tokens", text, numbers.looked_up_tokens)
    text = (
        "Tokens not computed because they were found on the device, or copied back from the host."
    )
    yield page.counters_by("hit_tokens", text, "tier", numbers.hit_tokens)
    events = ("allocated", "evicted", "committed", "deduplicated")
    text = "Blocks handed out, evicted, made findable, replaced by an equal one."
    yield page.counters_by(
        "pool_blocks", text, "event", {event: counters[f"blocks_{event}"] for event in events}
    )


def _scheduling(page: _Page, look: Look) -> Iterator[Metric]:
    numbers, head = look.numbers, look.numbers.head
    text = "Branches that wait, by the gate that refused them when last looked at."
    yield page.gauges_by("requests_waiting_by_gate", text, "gate", numbers.waiting_by_gate)
    text = "1 for the gate that keeps the queue's head out, 0 for the others."
    refusing: dict[str, float] = {
        gate: float(head is not None and gate == head[0]) for gate in GATES
    }
    yield page.gauges_by("head_refused", text, "gate", refusing)
    if head is not None:
        _, required, available, unit = head
        text = "What the gate asks of the queue's head."
        yield page.gauges_by("head_required", text, "unit", {unit: required})
        text = "What there is of it."
        yield page.gauges_by("head_available", text, "unit", {unit: available})
    if numbers.oldest_waiting_seconds is not None:
        text = "Since the arrival of who waits longest."
        yield page.gauge("oldest_waiting_seconds", text, numbers.oldest_waiting_seconds)
    text = "Steps that refused the head, by gate."
    yield page.counters_by("refused_steps", text, "gate", numbers.refused_steps)
    text = "Branches that lost their blocks."
    yield page.counters_by("preemptions", text, "kind", numbers.preemptions)
    sampled = {
        "used_share": ("sampled_used_share", "Active and reserved blocks, of all blocks."),
        "running": ("sampled_requests_running", "Branches with blocks."),
        "waiting": ("sampled_requests_waiting", "Branches that wait."),
    }
    for key, (name, text) in sampled.items():
        if key in look.sampled:
            more = f"{text} One observation a sample, some a second."
            yield page.histogram(name, more, look.sampled[key])


def _efficiency(page: _Page, look: Look) -> Iterator[Metric]:
    numbers, stats = look.numbers, look.stats
    runs, sequences, pages = stats["runs"], stats["sequences"], stats["pages"]
    yield page.gauge("sequences", "Sequences that hold blocks.", sequences["sequences"])
    known = {key: sequences[key] for key in ("mean", "p99", "max") if sequences[key] is not None}
    yield page.gauges_by("runs_per_sequence", "Runs of block ids per sequence.", "stat", known)
    text = "Runs of free blocks, by their length in blocks."
    yield page.gauges_by("free_runs", text, "blocks", runs["free_run_histogram"])
    text = "1 - longest run of free blocks / free blocks."
    yield page.gauge("free_run_fragmentation_share", text, runs["fragmentation"])
    text = "Pages: empty could be given back, cached if blocks were evicted, held not."
    by_state = {
        "empty": pages["empty"],
        "cached": pages["pinned"] - pages["held"],
        "held": pages["held"],
    }
    yield page.gauges_by("pages", text, "state", by_state)
    slots, used = stats["tokens"]["slots"], stats["tokens"]["used"]
    text = "Slots of active blocks: with a token in them, and padding."
    yield page.gauges_by("slots", text, "state", {"used": used, "padding": slots - used})
    yield page.counter("steps", "Steps that computed something.", numbers.steps)
    yield page.counter("step_tokens", "Tokens computed in them.", numbers.step_tokens)
    yield page.counter("compactions", "Compaction plans applied.", numbers.compactions)
    yield page.counter("blocks_moved", "Blocks moved by them.", numbers.blocks_moved)
    text = "Blocks copied because a shared one was written to."
    yield page.counter("copies_on_write", text, stats["counters"]["copies_on_write"])


def _latency(page: _Page, look: Look) -> Iterator[Metric]:
    numbers = look.numbers
    names = {
        "ttft": ("time_to_first_token_seconds", "From arrival to the first token."),
        "itl": ("inter_token_latency_seconds", "Between two tokens of a branch."),
        "tpot": ("time_per_output_token_seconds", "Mean per token after the first, by request."),
        "queue": ("request_queue_time_seconds", "From arrival to the first admission."),
        "e2e": ("e2e_request_latency_seconds", "From arrival to the last token."),
    }
    for key, (name, text) in names.items():
        if key in numbers.histograms:
            yield page.histogram(name, text, numbers.histograms[key])
    text = "Time of steps by part."
    yield page.counters_by("step_seconds", text, "part", numbers.step_seconds)


def _holdings(page: _Page, look: Look) -> Iterator[Metric]:
    rows = [(by, holding) for by, holdings in look.holdings.items() for holding in holdings]
    texts = {
        "blocks": "Blocks held, by owner and by tag; the largest by name, the rest as other.",
        "reserved_blocks": "Blocks promised, likewise.",
        "sequences": "Sequences, likewise.",
    }
    for key, text in texts.items():
        cells = [((by, holding.name), float(getattr(holding, key))) for by, holding in rows]
        yield page.gauges(f"holdings_{key}", text, ["by", "name"], cells)
