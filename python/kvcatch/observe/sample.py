"""One look at one engine: the record that every adapter fills.

A field that the engine does not export is None, never 0. Names carry units; what counts up since the
engine started ends in ``_total``, ``_sum`` or ``_count``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["COUNTERS", "FIELDS", "EngineSample"]


@dataclass(slots=True)
class EngineSample:
    """What one engine (one rank of it) said at one moment.

    Attributes:
        t_seconds: When; Unix time, or seconds since the start of a recording.
        engine: ``vllm``, ``sglang``, ``trtllm``, ``tgi``, ``dynamo``, ``lmcache``, ``kvcatch``.
        replica: The labels that tell it from others behind the same endpoint.
        endpoint: Where it was read.
        covers_seconds: Seconds before ``t_seconds`` that a periodic log line sums up; None for a scrape.
        running_requests: Requests that hold blocks and are computed.
        waiting_requests: Requests that wait, for whatever reason.
        waiting_capacity_requests: Of those, the ones the scheduler could not take, **for whatever cause**.
        waiting_deferred_requests: Of those, the ones set aside: a KV load, a grammar, a LoRA slot.
        swapped_requests: Requests in host memory, or paused.
        kv_usage_share: What the engine calls KV usage, 0 to 1; ``usage_of`` of its adapter says of what.
        num_blocks: Blocks of the pool, null block counted where there is one.
        free_blocks: Blocks that may be handed out, cached ones counted.
        used_blocks: Blocks that requests hold.
        cached_blocks: Blocks that nobody references and that can be found by hash.
        active_blocks: Blocks that requests reference.
        clean_blocks: Blocks with nothing in them.
        reserved_blocks: Blocks promised and not handed out.
        largest_run_blocks: Longest run that may be handed out; only where contiguity can be required.
        block_size_tokens: Tokens per block of the attention groups.
        pool_tokens: Tokens the pool holds, where the engine itself says so.
        available_tokens: Tokens of clean space.
        evictable_tokens: Tokens of cached, unreferenced space.
        protected_tokens: Tokens that running requests reference.
        session_held_tokens: Tokens that open sessions keep.
        used_tokens: Tokens that requests hold.
        max_concurrency: Requests of the longest length that fit, as the engine prints it.
        max_model_len_tokens: Most tokens of a request.
        max_num_seqs: Sequences that may run at once.
        token_budget_tokens: Tokens of one step; for TGI, of one batch.
        new_token_ratio: SGLang's expected share of outstanding output.
        largest_prompt_tokens: No finished prompt was longer (upper bound from a histogram).
        head_gate: Gate that keeps the queue's head out, where the engine says so (kvcatch).
        head_required_blocks: What that gate asks of the head, promised output counted.
        head_available_blocks: What there is of it.
        preemptions_total: Requests that lost their blocks.
        prompt_tokens_total: Prompt tokens of requests whose prompt is done.
        generated_tokens_total: Tokens generated.
        steps_total: Engine steps.
        step_tokens_total: Tokens over all steps.
        finished_total: Requests that ended.
        started_total: Requests that got their first token.
        prefix_query_tokens_total: Prompt tokens looked up in the prefix cache.
        prefix_hit_tokens_total: Of those, found.
        hit_share: Hit rate where only a gauge is exported, 0 to 1.
        ttft_seconds_sum: Sum of times to first token.
        itl_seconds_sum: Sum of the times between two tokens.
        itl_count: How many of them.
        queue_seconds_sum: Sum of times in the queue.
        queue_count: How many of them.
        asked_output_tokens_sum: Sum of the most tokens that finished requests asked for.
        asked_output_count: How many of them.
        rejected_total: Requests refused at the door.
        pinned_objects: Cache objects that must not be evicted (LMCache).
        failed_allocations_total: Allocations or evictions that failed (LMCache).
        transfer_descriptors_sum: Descriptors of KV transfers; its presence tells of a connector.
        active_objects: Cache objects in use (LMCache).
        cache_bytes: Bytes the local cache holds (LMCache).
        forced_unpins_total: Pins taken back by force (LMCache).
        kv_fetch_requests: Requests whose KV is being fetched.
        external_query_tokens_total: Prompt tokens looked up in an external cache.
        external_hit_tokens_total: Of those, found.
        cached_prompt_tokens_total: Prompt tokens that were not computed, wherever they were found.
        computed_prompt_tokens_total: Prompt tokens that were computed.
        device_hit_tokens_total: Hits in device memory.
        host_hit_tokens_total: Hits in host memory.
        request_preemptions_sum: Preemptions of finished requests.
        e2e_seconds_sum: Sum of times from arrival to the last token.
        e2e_count: How many of them.
        tpot_seconds_sum: Sum over requests of their mean time per output token.
        tpot_count: How many of them.
        finished_prompt_tokens_sum: Prompt tokens of finished requests.
        finished_output_tokens_sum: Output tokens of finished requests.
        block_lifetime_seconds_sum: Sum of the times blocks were kept.
        block_idle_seconds_sum: Sum of the times blocks were idle before they were evicted.
        block_reuse_gap_seconds_sum: Sum of the times between two uses of a block.
        prompt_tokens_per_second: As the engine states it.
        generated_tokens_per_second: As the engine states it.
        process_start_seconds: Unix time of the process start; a change is a restart.
    """

    t_seconds: float
    engine: str
    replica: str = ""
    endpoint: str = ""
    covers_seconds: float | None = None
    running_requests: float | None = None
    waiting_requests: float | None = None
    waiting_capacity_requests: float | None = None
    waiting_deferred_requests: float | None = None
    swapped_requests: float | None = None
    kv_usage_share: float | None = None
    num_blocks: float | None = None
    free_blocks: float | None = None
    used_blocks: float | None = None
    cached_blocks: float | None = None
    active_blocks: float | None = None
    clean_blocks: float | None = None
    reserved_blocks: float | None = None
    largest_run_blocks: float | None = None
    block_size_tokens: float | None = None
    pool_tokens: float | None = None
    available_tokens: float | None = None
    evictable_tokens: float | None = None
    protected_tokens: float | None = None
    session_held_tokens: float | None = None
    used_tokens: float | None = None
    max_concurrency: float | None = None
    max_model_len_tokens: float | None = None
    max_num_seqs: float | None = None
    token_budget_tokens: float | None = None
    new_token_ratio: float | None = None
    largest_prompt_tokens: float | None = None
    head_gate: str | None = None
    head_required_blocks: float | None = None
    head_available_blocks: float | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generated_tokens_total: float | None = None
    steps_total: float | None = None
    step_tokens_total: float | None = None
    finished_total: float | None = None
    started_total: float | None = None
    prefix_query_tokens_total: float | None = None
    prefix_hit_tokens_total: float | None = None
    hit_share: float | None = None
    ttft_seconds_sum: float | None = None
    itl_seconds_sum: float | None = None
    itl_count: float | None = None
    queue_seconds_sum: float | None = None
    queue_count: float | None = None
    asked_output_tokens_sum: float | None = None
    asked_output_count: float | None = None
    rejected_total: float | None = None
    pinned_objects: float | None = None
    failed_allocations_total: float | None = None
    transfer_descriptors_sum: float | None = None
    active_objects: float | None = None
    cache_bytes: float | None = None
    forced_unpins_total: float | None = None
    kv_fetch_requests: float | None = None
    external_query_tokens_total: float | None = None
    external_hit_tokens_total: float | None = None
    cached_prompt_tokens_total: float | None = None
    computed_prompt_tokens_total: float | None = None
    device_hit_tokens_total: float | None = None
    host_hit_tokens_total: float | None = None
    request_preemptions_sum: float | None = None
    e2e_seconds_sum: float | None = None
    e2e_count: float | None = None
    tpot_seconds_sum: float | None = None
    tpot_count: float | None = None
    finished_prompt_tokens_sum: float | None = None
    finished_output_tokens_sum: float | None = None
    block_lifetime_seconds_sum: float | None = None
    block_idle_seconds_sum: float | None = None
    block_reuse_gap_seconds_sum: float | None = None
    prompt_tokens_per_second: float | None = None
    generated_tokens_per_second: float | None = None
    process_start_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every field, unknown ones as None, for JSON."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(item.name for item in fields(EngineSample))

FIELDS = frozenset(_NAMES) - {"t_seconds", "engine", "replica", "endpoint", "covers_seconds"}
"""Fields that an adapter may fill."""

COUNTERS = tuple(name for name in _NAMES if name.endswith(("_total", "_sum", "_count")))
"""Fields that only grow while the engine lives; a smaller value means that it was restarted."""
