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
    if sample.prefix_hit_tokens_total is None:
        sample.prefix_hit_tokens_total = sample.device_hit_tokens_total


KVCATCH = Family(
    engine="kvcatch",
    prefixes=(_P,),
    identity=("model_name",),
    usage_of="active blocks, of all blocks of the pool; cached blocks are not counted",
    finish=_finish,
    metrics=(
        # capacity
        Metric(_P + "num_blocks", "num_blocks"),
        Metric(_P + "block_size_tokens", "block_size_tokens"),
        Metric(_P + "max_num_seqs", "max_num_seqs"),
        Metric(_P + "token_budget_tokens", "token_budget_tokens"),
        Metric(_P + "max_model_len_tokens", "max_model_len_tokens"),
        Metric(_P + "blocks", "clean_blocks", where={"state": "free"}),
        Metric(_P + "blocks", "cached_blocks", where={"state": "cached"}),
        Metric(_P + "blocks", "active_blocks", where={"state": "active"}),
        Metric(_P + "reserved_blocks", "reserved_blocks"),
        Metric(_P + "available_blocks", "free_blocks"),
        Metric(_P + "largest_run_blocks", "largest_run_blocks"),
        # requests
        Metric(_P + "requests_running", "running_requests"),
        Metric(_P + "requests_waiting", "waiting_requests"),
        Metric(_P + "requests_swapped", "swapped_requests"),
        Metric(_P + "finished", "finished_total", "sum"),
        Metric(_P + "rejected", "rejected_total", "sum"),
        Metric(_P + "prompt_tokens", "prompt_tokens_total", "sum"),
        Metric(_P + "generated_tokens", "generated_tokens_total", "sum"),
        Metric(_P + "request_prompt_tokens_bucket", "largest_prompt_tokens", "bucket"),
        Metric(_P + "request_prompt_tokens_sum", "finished_prompt_tokens_sum", "sum"),
        Metric(_P + "request_output_tokens_sum", "finished_output_tokens_sum", "sum"),
        Metric(_P + "request_asked_tokens_sum", "asked_output_tokens_sum", "sum"),
        Metric(_P + "request_asked_tokens_count", "asked_output_count", "sum"),
        # reuse
        Metric(_P + "looked_up_tokens", "prefix_query_tokens_total", "sum"),
        Metric(_P + "hit_tokens", "device_hit_tokens_total", "sum", where={"tier": "device"}),
        Metric(_P + "hit_tokens", "host_hit_tokens_total", "sum", where={"tier": "host"}),
        # Before tiers were told apart.
        Metric(_P + "hit_tokens", "prefix_hit_tokens_total", "sum", where={"tier": ""}),
        # scheduling
        Metric(_P + "head_refused", "head_gate", "label", label="gate"),
        Metric(_P + "head_required", "head_required_blocks", where={"unit": "blocks"}),
        Metric(_P + "head_available", "head_available_blocks", where={"unit": "blocks"}),
        Metric(_P + "preemptions", "preemptions_total", "sum"),
        # efficiency
        Metric(_P + "slots", "used_tokens", where={"state": "used"}),
        Metric(_P + "steps", "steps_total", "sum"),
        Metric(_P + "step_tokens", "step_tokens_total", "sum"),
        # latency
        Metric(_P + "time_to_first_token_seconds_sum", "ttft_seconds_sum", "sum"),
        Metric(_P + "time_to_first_token_seconds_count", "started_total", "sum"),
        Metric(_P + "inter_token_latency_seconds_sum", "itl_seconds_sum", "sum"),
        Metric(_P + "inter_token_latency_seconds_count", "itl_count", "sum"),
        Metric(_P + "time_per_output_token_seconds_sum", "tpot_seconds_sum", "sum"),
        Metric(_P + "time_per_output_token_seconds_count", "tpot_count", "sum"),
        Metric(_P + "request_queue_time_seconds_sum", "queue_seconds_sum", "sum"),
        Metric(_P + "request_queue_time_seconds_count", "queue_count", "sum"),
        Metric(_P + "e2e_request_latency_seconds_sum", "e2e_seconds_sum", "sum"),
        Metric(_P + "e2e_request_latency_seconds_count", "e2e_count", "sum"),
    ),
)
