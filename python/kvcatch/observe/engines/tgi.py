"""Text Generation Inference v3: no KV gauge, but the batch's token budget and the queue."""

from __future__ import annotations

from kvcatch.observe.engines.table import Family, Metric

__all__ = ["TGI"]

_P = "tgi_"

TGI = Family(
    engine="tgi",
    prefixes=(_P,),
    identity=(),
    usage_of="unknown: TGI exports no KV usage",
    metrics=(
        Metric(_P + "batch_current_size", "running_requests"),
        Metric(_P + "queue_size", "waiting_requests"),
        Metric(_P + "batch_current_max_tokens", "token_budget_tokens"),
        Metric(_P + "request_success", "finished_total", "sum"),
        Metric(_P + "request_input_length_sum", "prompt_tokens_total", "sum"),
        Metric(_P + "request_input_length_count", "started_total", "sum"),
        Metric(_P + "request_generated_tokens_sum", "generated_tokens_total", "sum"),
        Metric(_P + "request_max_new_tokens_sum", "asked_output_tokens_sum", "sum"),
        Metric(_P + "request_max_new_tokens_count", "asked_output_count", "sum"),
        Metric(_P + "request_queue_duration_sum", "queue_seconds_sum", "sum"),
        Metric(_P + "request_queue_duration_count", "queue_count", "sum"),
        Metric(_P + "request_mean_time_per_token_duration_sum", "itl_seconds_sum", "sum"),
        Metric(_P + "request_mean_time_per_token_duration_count", "itl_count", "sum"),
    ),
)
