"""A look with a number in every field, for the tests of the exporter and of the dashboards."""

from __future__ import annotations

from typing import Any

from kvcatch.observe.exporter.collector import Look, families
from kvcatch.observe.exporter.device import DeviceMemory
from kvcatch.observe.exporter.histogram import Histogram, RequestHistograms
from kvcatch.observe.exporter.holdings import Holding
from kvcatch.observe.exporter.source import Numbers

STATS: dict[str, Any] = {
    "counters": {
        "blocks_allocated": 50,
        "blocks_evicted": 9,
        "blocks_committed": 40,
        "blocks_deduplicated": 1,
        "copies_on_write": 2,
    },
    "runs": {"free_run_histogram": {"1": 3, "4-7": 2}, "fragmentation": 0.5},
    "sequences": {"sequences": 4, "mean": 1.5, "p99": 3, "max": 3},
    "pages": {"total": 10, "empty": 3, "pinned": 7, "held": 5},
    "tokens": {"slots": 120, "used": 100},
}


def make_numbers(**changes: Any) -> Numbers:
    values: dict[str, Any] = {
        "taken_at": 0.0,
        "blocks": {"free": 20, "cached": 30, "active": 50},
        "reserved_blocks": 5,
        "pinned_blocks": 3,
        "available_blocks": 44,
        "largest_run_blocks": 12,
        "host_blocks": {"free": 6, "used": 2},
        "running": 4,
        "waiting": 2,
        "swapped": 1,
        "waiting_by_gate": {"capacity": 1, "not_looked_at": 1},
        "head": ("capacity", 60, 44, "blocks"),
        "oldest_waiting_seconds": 2.5,
        "finished": {"stop": 7, "length": 2},
        "rejected": {"never_fits": 1},
        "refused_steps": {"capacity": 3},
        "preemptions": {"recompute": 1, "swap": 2},
        "steps": 90,
        "step_tokens": 900,
        "prompt_tokens": 400,
        "generated_tokens": 300,
        "looked_up_tokens": 500,
        "hit_tokens": {"device": 100, "host": 8},
        "compactions": 1,
        "blocks_moved": 6,
        "step_seconds": {"schedule": 0.1, "execute": 2.0},
        "histograms": RequestHistograms().values(),
    }
    return Numbers(**(values | changes))


def make_look(**changes: Any) -> Look:
    values: dict[str, Any] = {
        "model_name": "m",
        "limits": {
            "num_blocks": 100,
            "block_size_tokens": 16,
            "max_num_seqs": 8,
            "token_budget_tokens": 512,
            "max_model_len_tokens": 2048,
            "watermark_blocks": 1,
        },
        "info": {"version": "1", "law": "full_prompt"},
        "device": "cuda:0",
        "kv_cache_bytes": 4 << 30,
        "numbers": make_numbers(),
        "age_seconds": 0.5,
        "stats": STATS,
        "holdings": {
            "owner": [Holding("req-1", 30, 5, 1), Holding("other", 25, 0, 3)],
            "tenant": [Holding("acme", 40, 5, 2)],
        },
        "memory": DeviceMemory(140 << 30, 100 << 30, 90 << 30),
        "sampled": dict.fromkeys(("used_share", "running", "waiting"), Histogram((0.5,)).values()),
    }
    return Look(**(values | changes))


def text_of(look: Look) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    class One:
        def collect(self) -> Any:
            return families(look)

        def describe(self) -> Any:
            return []

    registry = CollectorRegistry()
    registry.register(One())  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def values_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and sorted labels, the model's left out."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found
