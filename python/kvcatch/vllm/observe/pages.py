"""What the plugin publishes: JSON of refusals, holdings and all of it; and Prometheus text."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.vllm.observe.records import ALL_BEHIND
from kvcatch.vllm.observe.view import Copy, Held, Layout, counts, layout, take, unowned_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcatch.vllm.observe.observer import Observer

__all__ = ["FORMAT", "VERSION", "EnginePages", "Names"]

FORMAT = "kvcatch.vllm"
VERSION = 1

_P = "kvcatch_vllm_"
_LAYOUT_S = 5.0
"""Prometheus text shows runs and tags at most so old: they cost time per block."""

_MOST_VALUES = 20
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Names:
    """How an engine is called in what is published.

    Attributes:
        model: Served name of the model.
        rank: Data-parallel rank.
        vllm: vLLM's version.
        kvcatch: kvcatch's version.
    """

    model: str
    rank: int
    vllm: str
    kvcatch: str


class EnginePages:
    """Builds the pages of one engine core. Called from the publisher's threads only.

    Args:
        observer: Of its scheduler.
        names: How it is called.
        top_k: Requests and values of a tag that are told one by one; the rest is summed.
        blocks_per_page: Blocks of a page; 0 where it is not known.
    """

    def __init__(
        self, observer: Observer, names: Names, top_k: int = 20, blocks_per_page: int = 0
    ) -> None:
        self.observer = observer
        self.names = names
        self.top_k = top_k
        self.blocks_per_page = blocks_per_page
        self._layout: Layout | None = None
        self._layout_s = -_LAYOUT_S

    def paths(self) -> tuple[str, ...]:
        """Pages there are."""
        return ("/metrics", "/snapshot", "/refusals", "/holdings", "/health")

    def page(self, path: str, *, is_whole: bool = False) -> tuple[str, bytes] | None:
        """Content type and body of a page; None where there is none.

        Args:
            path: Which.
            is_whole: All requests, not the top k.
        """
        if path == "/metrics":
            return "text/plain; version=0.0.4; charset=utf-8", self.metrics()
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "/": self.index,
            "/snapshot": lambda: self.snapshot(is_whole=is_whole),
            "/refusals": self.refusals,
            "/holdings": lambda: self.holdings(is_whole=is_whole),
            "/health": lambda: {"status": "ok"},
        }
        make = makers.get(path)
        if make is None:
            return None
        return "application/json", json.dumps(make(), allow_nan=False).encode() + b"\n"

    def index(self) -> dict[str, Any]:
        """Which pages there are."""
        return {**self._head(), "pages": list(self.paths())}

    def _head(self) -> dict[str, Any]:
        observer, now = self.observer, self.observer.clock()
        return {
            "format": FORMAT,
            "version": VERSION,
            "kvcatch": self.names.kvcatch,
            "vllm": self.names.vllm,
            "model": self.names.model,
            "engine": self.names.rank,
            "pid": os.getpid(),
            "time_unix_seconds": round(time.time(), 3),
            "observed_seconds": round(now - observer.started_s, 3),
            "steps": observer.steps,
            "empty_steps": observer.empty_steps,
            "last_step_seconds_ago": round(now - observer.last_step_s, 3),
            "observer": {"faults": observer.faults, "spent_seconds": round(observer.spent_s, 6)},
        }

    def refusals(self) -> dict[str, Any]:
        """Who is refused now, by which gate, with what arithmetic; and who was."""
        return {**self._head(), **self._refusals(take(self.observer))}

    def _refusals(self, copy: Copy) -> dict[str, Any]:
        now = copy.at_s
        head = None
        if copy.head is not None and copy.head.last_s >= copy.last_step_s:
            head = copy.head.to_dict(now)
        return {
            "limits": self._limits(copy),
            "queue": {
                "running": copy.running,
                "paused_sessions": copy.sessions,
                "waiting": copy.waiting,
                "deferred": copy.deferred,
                "waiting_by_gate": counts(copy),
                "as_vllm_reports_by_gate": copy.reported,
            },
            "head": head,
            "waiting": [self._waiting(copy, at, head) for at in range(len(copy.queue))],
            "recent": [refused.to_dict(now) for refused in reversed(copy.recent)],
            "waiting_request_seconds": {
                name: round(value, 3) for name, value in copy.seconds.items()
            },
            "refused_steps": copy.steps,
        }

    def _limits(self, copy: Copy) -> dict[str, Any]:
        scheduler = self.observer.scheduler
        sizes = list(self.observer.block_sizes)
        return {
            "num_blocks": copy.num_blocks,
            "usable_blocks": copy.usable,
            "block_size_tokens": sizes,
            "watermark_blocks": self.observer.watermark_blocks,
            "max_num_seqs": copy.slots,
            "token_budget_tokens": scheduler.max_num_scheduled_tokens,
            "max_model_len_tokens": scheduler.max_model_len,
            "policy": str(getattr(getattr(scheduler, "policy", None), "value", "fcfs")),
        }

    def _waiting(self, copy: Copy, at: int, head: dict[str, Any] | None) -> dict[str, Any]:
        item = copy.queue[at]
        sizes = self.observer.block_sizes
        data: dict[str, Any] = {"request": item.request_id, "tokens": item.tokens}
        most = sum(-(-item.tokens // size) for size in sizes)
        if item.deferred:
            data |= {"gate": "deferred", "detail": item.deferred}
        elif head is None:
            data |= {"gate": "next_step", "detail": "no step has looked at it yet"}
        elif item.request_id == head["request"] or head["gate"] in ALL_BEHIND:
            data |= {"gate": head["gate"], "detail": head["detail"]}
        else:
            fits = "would fit" if most <= copy.free else "would not fit either"
            detail = (
                f"behind {head['request']}, which nothing passes; it needs at most {most:,} blocks, "
                f"{copy.free:,} are free: it {fits}"
            )
            data |= {"gate": "head_of_line", "detail": detail}
        data["most_blocks"] = most
        data["held_blocks"] = item.held_blocks
        return data

    def holdings(self, *, is_whole: bool = False) -> dict[str, Any]:
        """Who holds the blocks: by request, by tag; runs, pages, and what is held by nobody."""
        copy = take(self.observer)
        return {**self._head(), **self._holdings(copy, self._laid_out(copy), is_whole=is_whole)}

    def _laid_out(self, copy: Copy) -> Layout:
        laid = layout(self.observer, copy, self.blocks_per_page)
        self._layout, self._layout_s = laid, copy.at_s
        return laid

    def _holdings(self, copy: Copy, laid: Layout, *, is_whole: bool) -> dict[str, Any]:
        shown = laid.held if is_whole else laid.held[: self.top_k]
        rest = laid.held[len(shown) :]
        runs = sum(item.runs for item in laid.held)
        idle = copy.running == 0 and copy.waiting == 0
        leak: list[int] = []
        if idle and laid.unaccounted:
            leak = unowned_blocks(self.observer, copy)
        return {
            "blocks": {
                "total": copy.num_blocks,
                "null": 1,
                "free": copy.free,
                "held": laid.held_blocks,
                "retired": laid.retired_blocks,
                "unaccounted": laid.unaccounted,
            },
            "conservation": {
                "is_idle": idle,
                "law": f"{copy.usable:,} usable = {copy.free:,} free + {laid.held_blocks:,} held + "
                f"{laid.retired_blocks:,} retired + {laid.unaccounted:,} unaccounted",
                "holds": laid.unaccounted == 0 and (not idle or not laid.held),
                "zombies": [item.to_dict() for item in laid.zombies[: self.top_k]],
                "unowned_block_ids": leak,
            },
            "requests": len(laid.held),
            "holdings": [item.to_dict() for item in shown],
            "others": {"requests": len(rest), "blocks": sum(item.blocks for item in rest)},
            "by_tag": {
                tag: [
                    {"value": value, "requests": number, "blocks": blocks}
                    for value, number, blocks in values
                ]
                for tag, values in _by_tag(laid.held, self.top_k).items()
            },
            "runs": {
                "held_runs": runs,
                "mean_per_request": round(runs / len(laid.held), 3) if laid.held else 0.0,
                "most_per_request": max((item.runs for item in laid.held), default=0),
                "free_run_histogram": laid.free_runs,
                "largest_free_run": laid.largest_run,
            },
            "pages": {
                "blocks_per_page": laid.blocks_per_page,
                "total": laid.pages,
                "pinned": laid.pinned_pages,
            },
        }

    def snapshot(self, *, is_whole: bool = False) -> dict[str, Any]:
        """Everything, of one moment."""
        copy = take(self.observer)
        laid = self._laid_out(copy)
        return {
            **self._head(),
            **self._refusals(copy),
            **self._holdings(copy, laid, is_whole=is_whole),
        }

    def check_idle(self) -> str | None:
        """One line on blocks that are not free though nothing runs or waits; None when all are."""
        copy = take(self.observer)
        if copy.running or copy.waiting:
            return None
        if copy.free == copy.usable:
            return None
        facts = self._holdings(copy, self._laid_out(copy), is_whole=False)
        names = [item["request"] for item in facts["holdings"][:5]]
        who = f"held by {', '.join(names)}" if names else "in nobody's table"
        return f"idle, and {copy.usable - copy.free:,} blocks are not free ({who}): {facts['conservation']['law']}"

    # -- Prometheus -----------------------------------------------------------------------------

    def metrics(self) -> bytes:
        """Prometheus text."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        return generate_latest(registry)

    def collect(self) -> Iterator[Any]:
        """Metric families of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        observer = self.observer
        copy = take(observer, with_tables=False)
        if copy.at_s - self._layout_s >= _LAYOUT_S:
            self._laid_out(take(observer))
        laid = self._layout
        now, head, seconds, steps = copy.at_s, copy.head, copy.seconds, copy.steps
        names, own = ("model_name", "engine"), (self.names.model, str(self.names.rank))

        def one(kind: Any, name: str, value: float, text: str) -> Any:
            family = kind(_P + name, text, labels=names)
            family.add_metric(own, value)
            return family

        def many(kind: Any, name: str, label: str, values: dict[str, float], text: str) -> Any:
            family = kind(_P + name, text, labels=(*names, label))
            for key, value in values.items():
                family.add_metric((*own, key), value)
            return family

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        scheduler = observer.scheduler
        for name, value, text in (
            ("requests_running", copy.running, "Requests that run."),
            ("requests_waiting", copy.waiting, "Requests that wait, deferred ones counted."),
            ("requests_deferred", copy.deferred, "Waiting requests the scheduler set aside."),
            ("paused_sessions", copy.sessions, "Streaming sessions that wait and keep a slot."),
            ("num_blocks", copy.num_blocks, "Blocks of the pool, null block counted."),
            ("free_blocks", copy.free, "Blocks that may be handed out, cached ones counted."),
            (
                "block_size_tokens",
                min(observer.block_sizes),
                "Tokens per block, least of all groups.",
            ),
            ("watermark_blocks", observer.watermark_blocks, "Blocks of the watermark."),
            ("max_num_seqs", copy.slots, "Sequences that may run at once."),
            ("token_budget_tokens", scheduler.max_num_scheduled_tokens, "Tokens of one step."),
            ("max_model_len_tokens", scheduler.max_model_len, "Most tokens of a request."),
            ("last_step_age_seconds", now - copy.last_step_s, "Seconds since the last step."),
        ):
            yield one(gauge, name, value, text)
        for name, value, text in (
            ("steps", observer.steps, "Steps that computed something."),
            ("empty_steps", observer.empty_steps, "Steps that computed nothing."),
            ("step_tokens", observer.step_tokens, "Tokens scheduled."),
            ("finished", observer.finished, "Requests that ended."),
            ("observer_faults", observer.faults, "Times a hook of the plugin failed."),
            ("observer_seconds", observer.spent_s, "Seconds spent in the hooks of schedule."),
        ):
            yield one(counter, name, value, text)
        if observer.preemptions is not None:
            yield one(counter, "preemptions", observer.preemptions, "Requests preempted.")
        by_gate = {name: float(value) for name, value in counts(copy).items()}
        text = "Waiting requests by the gate that keeps them out."
        yield many(gauge, "waiting", "gate", by_gate, text)
        text = "Request-seconds waited, by gate."
        yield many(counter, "waiting_request_seconds", "gate", seconds, text)
        text = "Steps in which the head of the queue was refused, by gate."
        yield many(counter, "refused_steps", "gate", {k: float(v) for k, v in steps.items()}, text)
        if head is not None and head.refusal() is not None and copy.waiting:
            text = "1 for the gate that keeps the head of the queue out."
            yield many(gauge, "head_refused", "gate", {head.gate: 1.0}, text)
            yield many(
                gauge, "head_required", "unit", {head.unit: head.required}, "What it asked for."
            )
            yield many(
                gauge, "head_available", "unit", {head.unit: head.available}, "What there was."
            )
            waited = now - head.first_s
            yield one(gauge, "head_refused_seconds", waited, "How long it has been refused.")
        if laid is not None:
            yield from self._layout_families(laid, one, many, gauge)

    def _layout_families(self, laid: Layout, one: Any, many: Any, gauge: Any) -> Iterator[Any]:
        runs = sum(item.runs for item in laid.held)
        for name, value, text in (
            ("held_blocks", laid.held_blocks, "Blocks in at least one table."),
            ("retired_blocks", laid.retired_blocks, "Blocks whose return is put off."),
            ("unaccounted_blocks", laid.unaccounted, "Blocks neither free nor in a table."),
            ("zombie_requests", len(laid.zombies), "Ended requests that hold blocks."),
            ("zombie_blocks", sum(item.blocks for item in laid.zombies), "Blocks those hold."),
            ("held_runs", runs, "Runs of consecutive blocks over all requests."),
            ("holding_requests", len(laid.held), "Requests that hold blocks."),
            ("largest_free_run_blocks", laid.largest_run, "Longest run of free blocks."),
        ):
            yield one(gauge, name, value, text)
        if laid.pages:
            yield one(gauge, "pages", laid.pages, "Pages of the pool.")
            yield one(gauge, "pinned_pages", laid.pinned_pages, "Pages with a block in use.")
        histogram = {name: float(number) for name, number in laid.free_runs.items()}
        yield many(gauge, "free_runs", "length", histogram, "Runs of free blocks by length.")
        from prometheus_client.core import GaugeMetricFamily

        labels = ("model_name", "engine", "tag", "value")
        family = GaugeMetricFamily(_P + "tag_blocks", "Blocks held, by source.", labels=labels)
        for tag, values in _by_tag(laid.held, min(self.top_k, _MOST_VALUES)).items():
            for source, _, blocks in values:
                own = (self.names.model, str(self.names.rank), tag, source)
                family.add_metric(own, blocks)
        yield family


class _Collector:
    """What a registry of prometheus_client asks."""

    def __init__(self, pages: EnginePages) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Any]:
        return self._pages.collect()


def _by_tag(held: list[Held], top_k: int) -> dict[str, list[tuple[str, int, int]]]:
    """Value, requests and blocks by tag, most blocks first; beyond the top k summed as ``other``."""
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for item in held:
        for tag, value in item.tags.items():
            entry = sums[tag][value]
            entry[0] += 1
            entry[1] += item.blocks
    found: dict[str, list[tuple[str, int, int]]] = {}
    for tag in sorted(sums)[:_MOST_VALUES]:
        values = sorted(sums[tag].items(), key=lambda row: (-row[1][1], row[0]))
        rows = [(value, number, blocks) for value, (number, blocks) in values[:top_k]]
        rest = [row for _, row in values[top_k:]]
        if rest:
            rest += [[number, blocks] for value, number, blocks in rows if value == _OTHER]
            rows = [row for row in rows if row[0] != _OTHER]
            rows.append((_OTHER, sum(row[0] for row in rest), sum(row[1] for row in rest)))
        found[tag] = rows
    return found
