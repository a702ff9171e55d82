"""TensorRT-LLM: prefix ``trtllm_`` (``trtllm:`` in older documents)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.observe.engines.table import Family, Metric

if TYPE_CHECKING:
    from kvcatch.observe.sample import EngineSample

__all__ = ["TRTLLM"]


def _finish(sample: EngineSample) -> None:
    if sample.kv_usage_share is None and sample.num_blocks and sample.used_blocks is not None:
        sample.kv_usage_share = sample.used_blocks / sample.num_blocks


def _both(name: str, field: str, **rest: object) -> tuple[Metric, Metric]:
    return (
        Metric("trtllm_" + name, field, **rest),  # type: ignore[arg-type]
        Metric("trtllm:" + name, field, **rest),  # type: ignore[arg-type]
    )


TRTLLM = Family(
    engine="trtllm",
    prefixes=("trtllm_", "trtllm:"),
    identity=("model_name", "engine_type", "rank"),
    usage_of="blocks in use, of kv_cache_max_blocks (used + free = max)",
    finish=_finish,
    metrics=(
        *_both("num_requests_running", "running_requests"),
        *_both("num_requests_waiting", "waiting_requests"),
        *_both("num_paused_requests", "swapped_requests"),
        *_both("kv_cache_utilization", "kv_usage_share"),
        *_both("kv_cache_max_blocks", "num_blocks"),
        *_both("kv_cache_free_blocks", "free_blocks"),
        *_both("kv_cache_used_blocks", "used_blocks"),
        *_both("kv_cache_tokens_per_block", "block_size_tokens"),
        *_both("kv_cache_hit_rate", "hit_share", optional=True),
        *_both("prompt_tokens", "prompt_tokens_total", combine="sum"),
        *_both("generation_tokens", "generated_tokens_total", combine="sum"),
        *_both("request_success", "finished_total", combine="sum"),
        *_both("prompt_cached_tokens", "prefix_hit_tokens_total", combine="sum"),
        *_both("time_to_first_token_seconds_count", "started_total", combine="sum"),
        *_both("time_to_first_token_seconds_sum", "ttft_seconds_sum", combine="sum"),
        *_both("time_per_output_token_seconds_sum", "itl_seconds_sum", combine="sum"),
        *_both("time_per_output_token_seconds_count", "itl_count", combine="sum"),
        *_both("request_queue_time_seconds_sum", "queue_seconds_sum", combine="sum"),
        *_both("request_queue_time_seconds_count", "queue_count", combine="sum"),
    ),
)
