"""The page of a look: every number at its place, nothing that is unknown, and the adapter reads it back."""

from __future__ import annotations

import pytest
from exporter_make import make_look, make_numbers, text_of, values_of

from kvcatch.laws import GATES
from kvcatch.observe import Reader
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.exporter.device import DeviceMemory
from kvcatch.observe.exporter.histogram import RequestHistograms

pytest.importorskip("prometheus_client", reason="needs the observe extra")

# What has no field in a sample: settings, shapes and parts that no other engine tells.
BEYOND_A_SAMPLE = {
    "kvcatch_engine_info",
    "kvcatch_numbers_age_seconds",
    "kvcatch_watermark_blocks",
    "kvcatch_pinned_blocks",
    "kvcatch_host_blocks",
    "kvcatch_kv_cache_bytes",
    "kvcatch_device_memory_bytes",
    "kvcatch_pool_blocks_total",
    "kvcatch_requests_waiting_by_gate",
    "kvcatch_oldest_waiting_seconds",
    "kvcatch_refused_steps_total",
    "kvcatch_sequences",
    "kvcatch_runs_per_sequence",
    "kvcatch_free_runs",
    "kvcatch_free_run_fragmentation_share",
    "kvcatch_pages",
    "kvcatch_compactions_total",
    "kvcatch_blocks_moved_total",
    "kvcatch_copies_on_write_total",
    "kvcatch_step_seconds_total",
    "kvcatch_sampled_used_share",
    "kvcatch_sampled_requests_running",
    "kvcatch_sampled_requests_waiting",
    "kvcatch_holdings_blocks",
    "kvcatch_holdings_reserved_blocks",
    "kvcatch_holdings_sequences",
}


def test_every_number_is_at_its_place() -> None:
    values = values_of(text_of(make_look()))

    def at(name: str, /, **labels: str) -> float:
        return values[f"kvcatch_{name}", tuple(sorted(labels.items()))]

    assert [at("blocks", state=s) for s in ("free", "cached", "active")] == [20, 30, 50]
    assert (at("reserved_blocks"), at("pinned_blocks"), at("available_blocks")) == (5, 3, 44)
    assert (at("largest_run_blocks"), at("num_blocks"), at("max_num_seqs")) == (12, 100, 8)
    assert (at("host_blocks", state="free"), at("host_blocks", state="used")) == (6, 2)
    assert at("numbers_age_seconds") == 0.5
    requests = [at(f"requests_{name}") for name in ("running", "waiting", "swapped")]
    assert requests == [4, 2, 1]
    assert at("finished_total", reason="stop") == 7
    assert at("rejected_total", gate="never_fits") == 1
    assert at("requests_waiting_by_gate", gate="not_looked_at") == 1
    assert {gate: at("head_refused", gate=gate) for gate in GATES} == {
        gate: float(gate == "capacity") for gate in GATES
    }
    assert (at("head_required", unit="blocks"), at("head_available", unit="blocks")) == (60, 44)
    assert at("oldest_waiting_seconds") == 2.5
    assert at("refused_steps_total", gate="capacity") == 3
    assert at("preemptions_total", kind="swap") == 2
    assert (at("hit_tokens_total", tier="device"), at("hit_tokens_total", tier="host")) == (100, 8)
    assert at("looked_up_tokens_total") == 500
    assert at("pool_blocks_total", event="evicted") == 9
    assert (at("steps_total"), at("step_tokens_total")) == (90, 900)
    assert (at("prompt_tokens_total"), at("generated_tokens_total")) == (400, 300)
    assert at("runs_per_sequence", stat="mean") == 1.5
    assert (at("free_runs", blocks="1"), at("free_runs", blocks="4-7")) == (3, 2)
    # 7 pages cannot be given back as they are; 5 of these not even after eviction.
    assert [at("pages", state=s) for s in ("empty", "cached", "held")] == [3, 2, 5]
    assert (at("slots", state="used"), at("slots", state="padding")) == (100, 20)
    assert at("step_seconds_total", part="execute") == 2
    assert at("holdings_blocks", by="owner", name="other") == 25
    assert at("holdings_reserved_blocks", by="tenant", name="acme") == 5
    assert at("engine_info", device="cuda:0", law="full_prompt", version="1") == 1


def test_device_memory_and_its_kv_share() -> None:
    values = values_of(text_of(make_look()))
    parts = {
        dict(labels)["part"]: value / 2**30
        for (name, labels), value in values.items()
        if name == "kvcatch_device_memory_bytes"
    }
    assert parts == {"total": 140, "used": 100, "process": 90, "kv": 4, "process_other": 86}


def names_of(text: str) -> set[str]:
    return {name for name, _ in values_of(text)}


def test_what_is_unknown_has_no_series() -> None:
    nothing = make_numbers(head=None, oldest_waiting_seconds=None, host_blocks={})
    look = make_look(numbers=nothing, memory=None, kv_cache_bytes=None, holdings={})
    gone = names_of(text_of(make_look())) - names_of(text_of(look))
    assert gone == {
        "kvcatch_device_memory_bytes",
        "kvcatch_kv_cache_bytes",
        "kvcatch_head_required",
        "kvcatch_head_available",
        "kvcatch_oldest_waiting_seconds",
        "kvcatch_host_blocks",
        "kvcatch_holdings_blocks",
        "kvcatch_holdings_reserved_blocks",
        "kvcatch_holdings_sequences",
    }
    # The driver tells of the device, and not of this process.
    half = make_look(memory=DeviceMemory(140 << 30, 100 << 30, None))
    parts = {dict(k[1]).get("part") for k in values_of(text_of(half)) if "device_memory" in k[0]}
    assert parts == {"total", "used"}


def test_odd_labels_survive() -> None:
    look = make_look(model_name='a "model"\\ \n {b="c"} # é')
    assert values_of(text_of(look)) == values_of(text_of(make_look()))
    (sample,) = Reader("x").read(text_of(look), 1.0)
    # Escaped, for it is printed: what separates labels, and what a terminal acts on.
    assert sample.replica == 'model_name=a "model"\\x5c \\n {b="c"} # é'


def test_the_adapter_reads_every_name() -> None:
    known = {metric.name for metric in FAMILIES["kvcatch"].metrics}
    known |= {name + "_total" for name in known}
    unread = set()
    for name in names_of(text_of(make_look())):
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        is_histogram = base != name and f"{base}_sum" in known
        if name not in known and not is_histogram:
            unread.add(base if "sampled" in name else name)
    assert unread == BEYOND_A_SAMPLE


def test_the_adapter_reads_the_right_values() -> None:
    times = RequestHistograms()
    for value in (0.02, 0.5, 3.0):
        times.ttft.add(value)
        times.queue.add(value / 2)
    for value in (0.01, 0.03):
        times.itl.add(value)
    times.prompt_tokens.add(100)
    times.output_tokens.add(20)
    times.asked_tokens.add(50)
    times.e2e.add(4)
    times.tpot.add(0.02)
    numbers = make_numbers(histograms=times.values())
    (sample,) = Reader("x").read(text_of(make_look(numbers=numbers)), 1.0)
    right = {
        "running_requests": 4,
        "waiting_requests": 2,
        "swapped_requests": 1,
        "kv_usage_share": 0.5,
        "num_blocks": 100,
        "free_blocks": 44,
        "used_blocks": 50,
        "cached_blocks": 30,
        "active_blocks": 50,
        "clean_blocks": 20,
        "reserved_blocks": 5,
        "largest_run_blocks": 12,
        "block_size_tokens": 16,
        "used_tokens": 100,
        "max_num_seqs": 8,
        "token_budget_tokens": 512,
        "max_model_len_tokens": 2048,
        "head_gate": "capacity",
        "head_required_blocks": 60,
        "head_available_blocks": 44,
        "preemptions_total": 3,
        "prompt_tokens_total": 400,
        "generated_tokens_total": 300,
        "steps_total": 90,
        "step_tokens_total": 900,
        "finished_total": 9,
        "started_total": 3,
        "prefix_query_tokens_total": 500,
        "prefix_hit_tokens_total": 100,
        "device_hit_tokens_total": 100,
        "host_hit_tokens_total": 8,
        "ttft_seconds_sum": pytest.approx(3.52),
        "queue_seconds_sum": pytest.approx(1.76),
        "queue_count": 3,
        "itl_seconds_sum": pytest.approx(0.04),
        "itl_count": 2,
        "tpot_seconds_sum": 0.02,
        "tpot_count": 1,
        "e2e_seconds_sum": 4,
        "e2e_count": 1,
        "rejected_total": 1,
        # The bucket that holds it: powers of two.
        "largest_prompt_tokens": 128,
        "finished_prompt_tokens_sum": 100,
        "finished_output_tokens_sum": 20,
        "asked_output_tokens_sum": 50,
        "asked_output_count": 1,
    }
    told = {key: value for key, value in sample.to_dict().items() if value is not None}
    for key in ("t_seconds", "engine", "replica", "endpoint"):
        del told[key]
    assert told == right


def test_pages_from_before_tiers_are_read() -> None:
    body = (
        'kvcatch_hit_tokens_total{model_name="m"} 7\nkvcatch_requests_running{model_name="m"} 1\n'
    )
    (sample,) = Reader("x").read(body, 1.0)
    assert (sample.prefix_hit_tokens_total, sample.device_hit_tokens_total) == (7, None)


def test_no_gate_refuses() -> None:
    (sample,) = Reader("x").read(text_of(make_look(numbers=make_numbers(head=None))), 1.0)
    assert sample.head_gate is None
