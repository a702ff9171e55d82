"""What kvcatch's plugin inside vLLM adds: rows of vLLM's table, under names of the plugin's own.

The plugin's page (``kvcatch.vllm.observe``) is read like any other of vLLM. It alone says which gate
holds the head of the queue.
"""

from __future__ import annotations

from kvcatch.observe.engines.table import Metric

__all__ = ["PREFIX", "ROWS"]

PREFIX = "kvcatch_vllm_"

ROWS = (
    Metric(PREFIX + "requests_running", "running_requests"),
    Metric(PREFIX + "requests_waiting", "waiting_requests"),
    Metric(PREFIX + "requests_deferred", "waiting_deferred_requests"),
    Metric(PREFIX + "num_blocks", "num_blocks"),
    Metric(PREFIX + "free_blocks", "free_blocks"),
    Metric(PREFIX + "block_size_tokens", "block_size_tokens"),
    Metric(PREFIX + "max_num_seqs", "max_num_seqs"),
    Metric(PREFIX + "token_budget_tokens", "token_budget_tokens"),
    Metric(PREFIX + "max_model_len_tokens", "max_model_len_tokens"),
    Metric(PREFIX + "head_refused", "head_gate", "label", label="gate"),
    Metric(PREFIX + "head_required", "head_required_blocks", where={"unit": "blocks"}),
    Metric(PREFIX + "head_available", "head_available_blocks", where={"unit": "blocks"}),
    Metric(PREFIX + "preemptions", "preemptions_total", "sum"),
    Metric(PREFIX + "finished", "finished_total", "sum"),
    Metric(PREFIX + "steps", "steps_total", "sum"),
    Metric(PREFIX + "step_tokens", "step_tokens_total", "sum"),
    # The front end's side: the stat logger's own socket.
    Metric(PREFIX + "generation_tokens", "generated_tokens_total", "sum"),
    Metric(PREFIX + "prompt_tokens", "prompt_tokens_total", "sum"),
    Metric(PREFIX + "time_to_first_token_seconds_sum", "ttft_seconds_sum", "sum"),
    Metric(PREFIX + "time_to_first_token_seconds_count", "started_total", "sum"),
    Metric(PREFIX + "inter_token_latency_seconds_sum", "itl_seconds_sum", "sum"),
    Metric(PREFIX + "inter_token_latency_seconds_count", "itl_count", "sum"),
    Metric(PREFIX + "request_queue_time_seconds_sum", "queue_seconds_sum", "sum"),
    Metric(PREFIX + "request_queue_time_seconds_count", "queue_count", "sum"),
    Metric(PREFIX + "e2e_request_latency_seconds_sum", "e2e_seconds_sum", "sum"),
    Metric(PREFIX + "e2e_request_latency_seconds_count", "e2e_count", "sum"),
    Metric(PREFIX + "front_end_running", "running_requests"),
    Metric(PREFIX + "front_end_waiting", "waiting_requests"),
)
"""Rows after vLLM's own: where a page has both, vLLM's are believed."""
