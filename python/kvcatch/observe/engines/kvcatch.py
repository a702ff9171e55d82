"""kvcatch's own exporter: the only one that says which gate holds the queue's head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.observe.engines.table import Family, Metric

if TYPE_CHECKING:
    from kvcatch.observe.sample import EngineSample

__all__ = ["KVCATCH"]

_P = "kvcatch_"


def _finish(sample: EngineSample) -> None:
    clean, cached = sample.clean_blocks, sample.cached_blocks
    if sample.free_blocks is None and clean is not None and cached is not None:
        sample.free_blocks = clean + cached
    sample.used_blocks = sample.active_blocks
    if sample.kv_usage_share is None and sample.num_blocks and sample.active_blocks is not None:
        sample.kv_usage_share = sample.active_blocks / sample.num_blocks


KVCATCH = Family(
    engine="kvcatch",
    prefixes=(_P,),
    identity=("model_name",),
    usage_of="active blocks, of all blocks of the pool; cached blocks are not counted",
    finish=_finish,
    metrics=(
        Metric(_P + "requests_running", "running_requests"),
        Metric(_P + "requests_waiting", "waiting_requests"),
        Metric(_P + "requests_swapped", "swapped_requests"),
        Metric(_P + "blocks", "clean_blocks", where={"state": "free"}),
        Metric(_P + "blocks", "cached_blocks", where={"state": "cached"}),
        Metric(_P + "blocks", "active_blocks", where={"state": "active"}),
        Metric(_P + "num_blocks", "num_blocks"),
        Metric(_P + "block_size_tokens", "block_size_tokens"),
        Metric(_P + "reserved_blocks", "reserved_blocks"),
        Metric(_P + "available_blocks", "free_blocks"),
        Metric(_P + "largest_run_blocks", "largest_run_blocks"),
        Metric(_P + "head_refused", "head_gate", "label", label="gate"),
        Metric(_P + "preemptions", "preemptions_total", "sum"),
        Metric(_P + "finished", "finished_total", "sum"),
        Metric(_P + "steps", "steps_total", "sum"),
        Metric(_P + "prompt_tokens", "prompt_tokens_total", "sum"),
        Metric(_P + "generated_tokens", "generated_tokens_total", "sum"),
        Metric(_P + "hit_tokens", "prefix_hit_tokens_total", "sum"),
    ),
)
