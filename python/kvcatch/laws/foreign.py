"""The admission laws of other people's engines, each with the file and the versions it is from.

Pure functions of (state, request, step), written anew from the engines' published sources.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcatch.laws.decision import NO_STEP, Decision
from kvcatch.laws.gates import (
    before_memory,
    blocks_text,
    chunk_tokens,
    compare,
    no_slot,
    outgrows,
    output_limit,
    over_long,
    own_blocks,
    refuse,
    tokens_left,
)
from kvcatch.laws.own import ESTIMATE_CLIP, expected_growth, first_blocks, promised_blocks
from kvcatch.laws.state import blocks_for

if TYPE_CHECKING:
    from kvcatch.laws.decision import Step
    from kvcatch.laws.state import QueuedRequest, State

V0_WATERMARK = 0.01
"""vLLM V0's fixed watermark: 1 % of the pool."""


def vllm_v0(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Law of vLLM V0 (before 0.8), ``vllm/core/block_manager*.py: can_allocate``.

    blocks(prompt) <= free - int(0.01 * num_blocks), always; a request for which
    num_blocks - blocks(prompt) is below the watermark is dropped. Prefix hits are not subtracted.
    """
    request = replace(request, hit_tokens=0, active_hit_tokens=0)
    state = replace(state, chunked_prefill=False)
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    required = own_blocks(state, request, request.tokens)
    watermark = int(V0_WATERMARK * state.num_blocks)
    return compare(
        state,
        request,
        required,
        state.unclaimed - step.taken,
        f"prompt {blocks_text(state, request, request.tokens, str(request.tokens))}",
        watermark=watermark,
        whole=blocks_for(request.tokens, state.block_size) + watermark,
        takes=required,
        step_tokens=chunk_tokens(state, request, step),
        warning=outgrows(state, request),
    )


def vllm_first_chunk(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Law of vLLM V1 before 0.19.1, ``vllm/v1/core/kv_cache_manager.py: allocate_slots``.

    Only the chunk of this step is compared with the free blocks; nothing looks at the rest of the
    prompt, so a prompt that never fits enters, too. ``max_tokens`` plays no part.
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    chunk = chunk_tokens(state, request, step)
    tokens = max(request.hit_tokens, request.computed_tokens) + chunk
    required = own_blocks(state, request, tokens)
    whole = blocks_for(request.tokens, state.block_size)
    warning = outgrows(state, request)
    if whole > state.usable:
        warning = (
            f"cannot finish its prompt: ceil({request.tokens} / {state.block_size}) = {whole} "
            f"blocks > {state.usable} usable"
        )
    return compare(
        state,
        request,
        required,
        vllm_available(state, request, step),
        f"first chunk {blocks_text(state, request, tokens, str(tokens))}",
        takes=required,
        step_tokens=chunk,
        warning=warning,
    )


def vllm_full_prompt(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Law of vLLM 0.19.1 and later, ``vllm/v1/core/kv_cache_manager.py: allocate_slots``.

    With ``scheduler_reserve_full_isl`` (the default): blocks(all its tokens) - active hits +
    int(watermark * num_blocks) <= free blocks, the watermark only while something runs and from
    0.24 on. Handed out are the blocks of the first chunk alone. ``max_tokens`` plays no part. A
    request that never fits stays at the head of the queue. Blocks reserved for prompts in flight
    are kept from asynchronous KV loads alone.
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    required = own_blocks(state, request, request.tokens)
    chunk = 0 if request.loading else chunk_tokens(state, request, step)
    busy = state.count_running + step.admitted > 0
    return compare(
        state,
        request,
        required,
        vllm_available(state, request, step),
        f"prompt {blocks_text(state, request, request.tokens, str(request.tokens))}",
        watermark=state.watermark_blocks if busy else 0,
        whole=blocks_for(request.tokens, state.block_size),
        is_final=False,
        takes=required if request.loading else first_blocks(state, request, chunk),
        step_tokens=chunk,
        warning=outgrows(state, request),
    )


def vllm_available(state: State, request: QueuedRequest, step: Step) -> int:
    """Length of vLLM's free queue, clean and cached; what is reserved binds loads alone."""
    reserved = (state.reserved or 0) if request.loading else 0
    return state.unclaimed - reserved - step.taken


def sglang_estimate(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """SGLang 0.5, ``python/sglang/srt/managers/schedule_policy.py: PrefillAdder.add_one_req``.

    In tokens: uncached prompt + min(max_new, 4096) + one page < available + evictable -
    new_token_ratio * sum of min(outstanding output of the running, 4096) - what this pass has
    set aside. The ratio decays from 0.7 to 0.098 and rises after a retraction. An output limit
    beyond the context length is cut, not refused.
    """
    if (decision := over_long(state, replace(request, max_tokens=None))) is not None:
        return decision
    page, pool = state.block_size, state.usable * state.block_size
    if request.tokens >= pool:
        text = f"prompt {request.tokens} >= pool of {pool} tokens"
        return refuse(
            request, "never_fits", request.tokens, pool, text, unit="tokens", is_final=True
        )
    if (decision := no_slot(state, request, step)) is not None:
        return decision
    if request.deferred:
        return refuse(request, "deferred", 1, 0, request.deferred, unit="requests")
    budget = None if state.token_budget is None else state.token_budget - step.tokens
    extend = request.tokens - request.hit_tokens
    chunk = extend
    if budget is not None and state.chunked_prefill and blocks_for(extend, page) * page > budget:
        chunk = budget // page * page
    if budget is not None and (chunk <= 0 or (not state.chunked_prefill and extend > budget)):
        text = f"budget {state.token_budget} - admitted {step.tokens} = {max(0, budget)} tokens"
        asked = page if state.chunked_prefill else extend
        return refuse(request, "token_budget", asked, budget, text, unit="tokens")
    output = min(
        max(0, output_limit(state, request, "sglang_estimate") - request.generated),
        max(0, pool - request.tokens - 2),
        ESTIMATE_CLIP,
    )
    required = extend + output + page
    evictable_hits = request.hit_tokens - request.active_hit_tokens
    growth = expected_growth(state, "sglang_estimate")
    left = math.floor(state.unclaimed * page - growth - step.claimed_tokens - evictable_hits)
    text = (
        f"{extend} prompt + {output} output + {page} page = {required} tokens; "
        f"{state.unclaimed * page} available and evictable - {growth:.0f} expected growth - "
        f"{step.claimed_tokens} set aside - {evictable_hits} locked = {left}"
    )
    if required >= pool:
        return refuse(request, "never_fits", required, pool, text, unit="tokens")
    if required >= left:
        return refuse(request, "capacity", required, left, text, unit="tokens")
    is_cut = chunk < extend
    paged = blocks_for(chunk, page) * page
    return Decision(
        request,
        required,
        left,
        text,
        takes=blocks_for(chunk, page) + evictable_hits // page,
        step_tokens=paged,
        claimed_tokens=paged + (0 if is_cut else output) + page + evictable_hits,
        warning=outgrows(state, request),
    )


def guaranteed_no_evict(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """TensorRT-LLM GUARANTEED_NO_EVICT (the default).

    ``cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp: GuaranteedNoEvictScheduler`` and
    ``kvCacheManager.cpp: getRemainingBlocksToCompletion``: ceil((prompt + max_new_tokens) /
    block_size) <= free - what those that run still need to finish. Free counts reusable blocks;
    reuse is not subtracted. ``max_tokens`` left out means up to the maximum sequence length.
    """
    request = replace(request, hit_tokens=0, active_hit_tokens=0)
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    output = output_limit(state, request, "guaranteed_no_evict")
    total = request.prompt_tokens + output
    required = own_blocks(state, request, total)
    reserved = promised_blocks(state, "guaranteed_no_evict")
    chunk = chunk_tokens(state, request, step)
    takes = first_blocks(state, request, chunk)
    return compare(
        state,
        request,
        required,
        state.unclaimed - reserved - step.taken - step.promised,
        "to completion "
        + blocks_text(state, request, total, f"({request.prompt_tokens} + {output})"),
        gate="worst_case",
        whole=blocks_for(total, state.block_size),
        takes=takes,
        promises=max(0, required - takes),
        step_tokens=chunk,
    )


def static_batch(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """TensorRT-LLM STATIC_BATCH: as GUARANTEED_NO_EVICT, and only while nothing runs.

    ``cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp: StaticBatchScheduler``.
    """
    if state.count_running and over_long(state, request) is None:
        text = f"static batch: nobody enters until all {state.count_running} running are done"
        return refuse(request, "max_num_seqs", 1, 0, text, unit="sequences")
    return guaranteed_no_evict(state, request, step)


def max_utilization(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """TensorRT-LLM MAX_UTILIZATION: the next step has to fit; later some may be paused.

    ``cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp: MaxUtilizationScheduler`` and
    ``kvCacheManager.cpp: getNeededBlocksOneStep``: ceil(prompt / block_size) <= free - blocks
    that those that run need for their next token.
    """
    request = replace(request, hit_tokens=0, active_hit_tokens=0)
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    tokens = request.tokens + state.spec_tokens
    required = own_blocks(state, request, tokens)
    growth = sum(
        max(
            0,
            blocks_for(item.tokens + 1 + state.spec_tokens, state.block_size)
            - item.held(state.block_size),
        )
        for item in state.running
    )
    return compare(
        state,
        request,
        required,
        state.unclaimed - growth - step.taken,
        f"prompt {blocks_text(state, request, tokens, str(tokens))} "
        f"(next step of the running: {growth})",
        whole=blocks_for(tokens, state.block_size),
        takes=required,
        step_tokens=chunk_tokens(state, request, step),
        warning=outgrows(state, request),
    )


def tgi_worst_case(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """TGI v3, ``backends/v3/src/queue.rs: next_batch`` and ``block_allocator.rs: allocate``.

    ceil((input + max_new_tokens + speculate - 1) / block_size) <= free blocks, all of them handed
    out at once; block 0 is for health checks. The prompts of one batch stay within
    ``max_batch_prefill_tokens`` (here: the token budget), rounded up to whole blocks.
    """
    if (decision := over_long(state, request)) is not None:
        return decision
    output = output_limit(state, request, "tgi_worst_case")
    total = request.prompt_tokens + output + state.spec_tokens - 1
    if state.token_budget is not None:
        budget = blocks_for(state.token_budget, state.block_size) * state.block_size
        if step.tokens + request.prompt_tokens > budget:
            text = f"prompts {step.tokens} + {request.prompt_tokens} > prefill budget {budget}"
            left = budget - step.tokens
            return refuse(request, "token_budget", request.prompt_tokens, left, text, unit="tokens")
    if (decision := no_slot(state, request, step)) is not None:
        return decision
    required = own_blocks(state, request, total)
    speculated = f" + {state.spec_tokens}" if state.spec_tokens else ""
    return compare(
        state,
        request,
        required,
        state.unclaimed - (state.reserved or 0) - step.taken,
        "worst case "
        + blocks_text(
            state, request, total, f"({request.prompt_tokens} + {output}{speculated} - 1)"
        ),
        gate="worst_case",
        whole=blocks_for(total, state.block_size),
        takes=required,
        step_tokens=request.prompt_tokens,
    )


def slot(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """llama.cpp's server: a free slot is enough; tokens are not counted.

    With a unified cache the slots together may ask for more than it holds: then running chats
    end with an error.
    """
    if (decision := over_long(state, request)) is not None:
        return decision
    if (decision := no_slot(state, request, step)) is not None:
        return decision
    pool = state.usable * state.block_size
    in_use = sum(item.tokens for item in state.running) + step.claimed_tokens
    wants = in_use + request.tokens
    warning = f"overcommitted: {in_use} + {request.tokens} = {wants} > {pool} tokens"
    left = tokens_left(state, step)
    return Decision(
        request,
        1,
        1 if state.max_num_seqs is None else state.max_num_seqs - state.count_running,
        "a free slot",
        takes=0,
        step_tokens=request.tokens if left is None else min(left, request.tokens),
        claimed_tokens=request.tokens,
        warning=warning if wants > pool else "",
    )
