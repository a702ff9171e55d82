"""vLLM: every metric name from 0.6 to 0.33 with the versions it was seen in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.observe.engines.table import Family, Metric
from kvcatch.observe.engines.vllm_plugin import PREFIX, ROWS

if TYPE_CHECKING:
    from kvcatch.observe.engines.table import Labels
    from kvcatch.observe.sample import EngineSample

__all__ = ["VLLM"]

_P = "vllm:"


def _number(labels: Labels, name: str) -> float | None:
    try:
        value = float(labels.get(name, ""))
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None


def _read_info(labels: Labels) -> dict[str, float]:
    """Fields of ``cache_config_info``, whose labels are the whole CacheConfig as text.

    ``block_size`` is the smallest over the groups of a hybrid model, so it is never multiplied with
    ``num_gpu_blocks``: tokens come from ``kv_cache_size_tokens`` (0.24.0 on) or stay unknown.
    """
    found = {
        "num_blocks": _number(labels, "num_gpu_blocks"),
        "block_size_tokens": _number(labels, "effective_attention_block_size")
        or _number(labels, "block_size"),
        "pool_tokens": _number(labels, "kv_cache_size_tokens"),
        "max_concurrency": _number(labels, "kv_cache_max_concurrency"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _finish(sample: EngineSample) -> None:
    reasons = (sample.waiting_capacity_requests, sample.waiting_deferred_requests)
    if sample.waiting_requests is not None and None not in reasons:
        sample.waiting_requests = max(sample.waiting_requests, sum(part or 0.0 for part in reasons))
    blocks, usage = sample.num_blocks, sample.kv_usage_share
    if usage is None and blocks is not None and blocks > 1 and sample.free_blocks is not None:
        # The plugin's page counts blocks; the share is vLLM's own.
        usage = sample.kv_usage_share = 1 - sample.free_blocks / (blocks - 1)
    if blocks is not None and usage is not None and blocks > 1:
        # BlockPool.get_usage = 1 - free / (num_gpu_blocks - 1): the null block is never handed out.
        sample.free_blocks = float(round((1 - usage) * (blocks - 1)))
        sample.used_blocks = blocks - 1 - sample.free_blocks
    if sample.max_model_len_tokens is None and sample.pool_tokens and sample.max_concurrency:
        sample.max_model_len_tokens = float(round(sample.pool_tokens / sample.max_concurrency))


VLLM = Family(
    engine="vllm",
    prefixes=(_P, PREFIX),
    identity=("model_name", "engine"),
    usage_of=(
        "blocks that requests reference, of all blocks but the null block; cached blocks nobody "
        "references count as free"
    ),
    info=(_P + "cache_config_info",),
    read_info=_read_info,
    finish=_finish,
    metrics=(
        Metric(_P + "num_requests_running", "running_requests"),
        Metric(_P + "num_requests_waiting", "waiting_requests"),
        Metric(
            _P + "num_requests_waiting_by_reason",
            "waiting_capacity_requests",
            first=(0, 22, 1),
            where={"reason": "capacity"},
        ),
        Metric(
            _P + "num_requests_waiting_by_reason",
            "waiting_deferred_requests",
            first=(0, 22, 1),
            where={"reason": "deferred"},
        ),
        Metric(_P + "num_requests_swapped", "swapped_requests", last=(0, 9, 0)),
        # Both names from 0.9.2 to 0.11.2; the new one is believed.
        Metric(_P + "kv_cache_usage_perc", "kv_usage_share", first=(0, 9, 2)),
        Metric(_P + "gpu_cache_usage_perc", "kv_usage_share", first=(0, 3, 3), last=(0, 11, 2)),
        Metric(_P + "num_preemptions", "preemptions_total", "sum", first=(0, 5, 4)),
        Metric(_P + "prompt_tokens", "prompt_tokens_total", "sum"),
        Metric(_P + "generation_tokens", "generated_tokens_total", "sum"),
        Metric(_P + "request_success", "finished_total", "sum"),
        Metric(_P + "prefix_cache_queries", "prefix_query_tokens_total", "sum", first=(0, 9, 2)),
        Metric(_P + "prefix_cache_hits", "prefix_hit_tokens_total", "sum", first=(0, 9, 2)),
        Metric(
            _P + "gpu_prefix_cache_queries",
            "prefix_query_tokens_total",
            "sum",
            first=(0, 7, 3),
            last=(0, 11, 2),
        ),
        Metric(
            _P + "gpu_prefix_cache_hits",
            "prefix_hit_tokens_total",
            "sum",
            first=(0, 7, 3),
            last=(0, 11, 2),
        ),
        # A gauge of -1 stands for "off": the reader takes a negative optional value as unknown.
        Metric(
            _P + "gpu_prefix_cache_hit_rate",
            "hit_share",
            first=(0, 6, 2),
            last=(0, 9, 0),
            optional=True,
        ),
        Metric(_P + "iteration_tokens_total_count", "steps_total", "sum"),
        Metric(_P + "iteration_tokens_total_sum", "step_tokens_total", "sum"),
        Metric(_P + "time_to_first_token_seconds_count", "started_total", "sum"),
        Metric(_P + "time_to_first_token_seconds_sum", "ttft_seconds_sum", "sum"),
        Metric(_P + "inter_token_latency_seconds_sum", "itl_seconds_sum", "sum", first=(0, 10, 2)),
        Metric(_P + "inter_token_latency_seconds_count", "itl_count", "sum", first=(0, 10, 2)),
        Metric(_P + "time_per_output_token_seconds_sum", "itl_seconds_sum", "sum", last=(0, 13, 0)),
        Metric(_P + "time_per_output_token_seconds_count", "itl_count", "sum", last=(0, 13, 0)),
        Metric(_P + "request_queue_time_seconds_sum", "queue_seconds_sum", "sum", first=(0, 6, 6)),
        Metric(_P + "request_queue_time_seconds_count", "queue_count", "sum", first=(0, 6, 6)),
        Metric(
            _P + "time_in_queue_requests_sum",
            "queue_seconds_sum",
            "sum",
            first=(0, 6, 6),
            last=(0, 9, 0),
        ),
        Metric(
            _P + "time_in_queue_requests_count",
            "queue_count",
            "sum",
            first=(0, 6, 6),
            last=(0, 9, 0),
        ),
        Metric(_P + "request_prompt_tokens_bucket", "largest_prompt_tokens", "bucket"),
        Metric(_P + "request_params_max_tokens_sum", "asked_output_tokens_sum", "sum"),
        Metric(_P + "request_params_max_tokens_count", "asked_output_count", "sum"),
        Metric(_P + "admission_rejections", "rejected_total", "sum", first=(0, 32, 0)),
        Metric(_P + "num_requests_kv_fetch_by_stage", "kv_fetch_requests", "sum", first=(0, 32, 0)),
        Metric(
            _P + "external_prefix_cache_queries",
            "external_query_tokens_total",
            "sum",
            first=(0, 11, 2),
        ),
        Metric(
            _P + "external_prefix_cache_hits", "external_hit_tokens_total", "sum", first=(0, 11, 2)
        ),
        Metric(_P + "prompt_tokens_cached", "cached_prompt_tokens_total", "sum", first=(0, 16, 0)),
        Metric(
            _P + "prompt_tokens_by_source",
            "computed_prompt_tokens_total",
            "sum",
            first=(0, 16, 0),
            where={"source": "local_compute"},
        ),
        Metric(
            _P + "prompt_tokens_cached_by_source",
            "device_hit_tokens_total",
            "sum",
            first=(0, 32, 0),
            where={"source": "device"},
        ),
        Metric(
            _P + "prompt_tokens_cached_by_source",
            "host_hit_tokens_total",
            "sum",
            first=(0, 32, 0),
            where={"source": "host"},
        ),
        Metric(
            _P + "request_num_preemptions_sum", "request_preemptions_sum", "sum", first=(0, 30, 0)
        ),
        Metric(_P + "e2e_request_latency_seconds_sum", "e2e_seconds_sum", "sum"),
        Metric(_P + "e2e_request_latency_seconds_count", "e2e_count", "sum"),
        Metric(
            _P + "request_time_per_output_token_seconds_sum",
            "tpot_seconds_sum",
            "sum",
            first=(0, 11, 0),
        ),
        Metric(
            _P + "request_time_per_output_token_seconds_count",
            "tpot_count",
            "sum",
            first=(0, 11, 0),
        ),
        Metric(_P + "request_prompt_tokens_sum", "finished_prompt_tokens_sum", "sum"),
        Metric(_P + "request_generation_tokens_sum", "finished_output_tokens_sum", "sum"),
        Metric(
            _P + "kv_block_lifetime_seconds_sum",
            "block_lifetime_seconds_sum",
            "sum",
            first=(0, 12, 0),
        ),
        Metric(
            _P + "kv_block_idle_before_evict_seconds_sum",
            "block_idle_seconds_sum",
            "sum",
            first=(0, 12, 0),
        ),
        Metric(
            _P + "kv_block_reuse_gap_seconds_sum",
            "block_reuse_gap_seconds_sum",
            "sum",
            first=(0, 12, 0),
        ),
        Metric(_P + "nixl_num_descriptors_sum", "transfer_descriptors_sum", "sum"),
        Metric(_P + "mooncake_num_descriptors_sum", "transfer_descriptors_sum", "sum"),
        *ROWS,
    ),
)
"""Names as the engine wrote them; ``num_requests_waiting_by_reason{reason="capacity"}`` means that the
scheduler could not take the request, for whatever cause, max_num_seqs included."""
