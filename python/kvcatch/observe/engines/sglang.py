"""SGLang: names of 0.5, and what its token usage leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.observe.engines.table import Family, Metric

if TYPE_CHECKING:
    from kvcatch.observe.sample import EngineSample

__all__ = ["SGLANG"]

_P = "sglang:"


def _finish(sample: EngineSample) -> None:
    if sample.waiting_requests is not None:
        # The grammar queue stands beside the waiting queue.
        sample.waiting_requests += sample.waiting_deferred_requests or 0.0
    size = sample.block_size_tokens
    if sample.num_blocks is None and sample.pool_tokens and size:
        sample.num_blocks = sample.pool_tokens // size
    if sample.num_blocks is not None and size:
        free, cached = sample.available_tokens, sample.evictable_tokens
        if free is not None and cached is not None:
            sample.free_blocks = (free + cached) // size
        elif sample.kv_usage_share is not None:
            sample.free_blocks = float(int(sample.num_blocks * (1 - sample.kv_usage_share)))


SGLANG = Family(
    engine="sglang",
    prefixes=(_P,),
    identity=("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"),
    usage_of=(
        "tokens that requests hold, of max_total_num_tokens; evictable (cached) tokens and mamba "
        "state are left out"
    ),
    finish=_finish,
    metrics=(
        # With priorities on, one series per priority besides the plain one.
        Metric(_P + "num_running_reqs", "running_requests", "sum", where={"priority": ""}),
        Metric(_P + "num_running_reqs", "running_requests", "sum"),
        Metric(_P + "num_queue_reqs", "waiting_requests", "sum", where={"priority": ""}),
        Metric(_P + "num_queue_reqs", "waiting_requests", "sum"),
        Metric(_P + "num_grammar_queue_reqs", "waiting_deferred_requests"),
        Metric(_P + "num_paused_reqs", "swapped_requests"),
        Metric(_P + "full_token_usage", "kv_usage_share"),
        Metric(_P + "token_usage", "kv_usage_share"),
        Metric(_P + "max_total_num_tokens", "pool_tokens"),
        Metric(_P + "num_pages", "num_blocks"),
        Metric(_P + "page_size", "block_size_tokens"),
        Metric(_P + "kv_available_tokens", "available_tokens"),
        Metric(_P + "kv_evictable_tokens", "evictable_tokens"),
        Metric(_P + "kv_used_tokens", "used_tokens"),
        Metric(_P + "num_used_tokens", "used_tokens"),
        Metric(_P + "context_len", "max_model_len_tokens"),
        Metric(_P + "max_running_requests", "max_num_seqs"),
        Metric(_P + "new_token_ratio", "new_token_ratio", optional=True),
        Metric(_P + "num_retracted_requests", "preemptions_total", "sum"),
        Metric(_P + "prompt_tokens", "prompt_tokens_total", "sum"),
        Metric(_P + "generation_tokens", "generated_tokens_total", "sum"),
        Metric(_P + "num_requests", "finished_total", "sum"),
        Metric(_P + "cached_tokens", "prefix_hit_tokens_total", "sum"),
        Metric(_P + "cache_hit_rate", "hit_share", optional=True),
        Metric(_P + "gen_throughput", "generated_tokens_per_second", optional=True),
        Metric(_P + "time_to_first_token_seconds_count", "started_total", "sum"),
        Metric(_P + "time_to_first_token_seconds_sum", "ttft_seconds_sum", "sum"),
        Metric(_P + "inter_token_latency_seconds_sum", "itl_seconds_sum", "sum"),
        Metric(_P + "inter_token_latency_seconds_count", "itl_count", "sum"),
        Metric(_P + "e2e_request_latency_seconds_sum", "e2e_seconds_sum", "sum"),
        Metric(_P + "e2e_request_latency_seconds_count", "e2e_count", "sum"),
        Metric(_P + "queue_time_seconds_sum", "queue_seconds_sum", "sum"),
        Metric(_P + "queue_time_seconds_count", "queue_count", "sum"),
        Metric(_P + "prompt_tokens_histogram_bucket", "largest_prompt_tokens", "bucket"),
    ),
)
