"""Dynamo: the frontend's queue and its workers' pools. Its KV usage was renamed in January 2026."""

from __future__ import annotations

from kvcatch.observe.engines.table import Family, Metric

__all__ = ["DYNAMO"]

_F, _C = "dynamo_frontend_", "dynamo_component_"

DYNAMO = Family(
    engine="dynamo",
    prefixes=("dynamo_",),
    identity=(
        "dynamo_namespace",
        "dynamo_component",
        "worker_id",
        "instance_id",
        "model",
        "model_name",
        "dp_rank",
    ),
    usage_of="as the worker's engine states it",
    metrics=(
        Metric(_F + "inflight_requests", "running_requests", "sum"),
        Metric(_F + "queued_requests", "waiting_requests", "sum"),
        Metric(_C + "gpu_cache_usage_percent", "kv_usage_share"),
        Metric(_C + "kvstats_gpu_cache_usage_percent", "kv_usage_share"),
        Metric(_C + "total_blocks", "num_blocks"),
        Metric(_C + "kvstats_total_blocks", "num_blocks"),
        Metric(_F + "model_total_kv_blocks", "num_blocks"),
        Metric(_F + "model_kv_cache_block_size", "block_size_tokens"),
        Metric(_F + "model_context_length", "max_model_len_tokens"),
        Metric(_F + "requests", "finished_total", "sum"),
        Metric(_F + "cached_tokens_sum", "prefix_hit_tokens_total", "sum"),
        Metric(_F + "kv_hit_rate", "hit_share", optional=True),
        Metric(_F + "time_to_first_token_seconds_count", "started_total", "sum"),
        Metric(_F + "time_to_first_token_seconds_sum", "ttft_seconds_sum", "sum"),
        Metric(_F + "inter_token_latency_seconds_sum", "itl_seconds_sum", "sum"),
        Metric(_F + "inter_token_latency_seconds_count", "itl_count", "sum"),
        Metric(_F + "input_sequence_tokens_sum", "prompt_tokens_total", "sum"),
        Metric(_F + "output_sequence_tokens_sum", "generated_tokens_total", "sum"),
    ),
)
"""The KV usage is 0 to 1 despite its name."""
