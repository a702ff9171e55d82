"""kvcatch's own admission laws. Pure functions of (state, request, step)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcatch.laws.decision import NO_STEP
from kvcatch.laws.gates import (
    before_memory,
    blocks_text,
    chunk_tokens,
    compare,
    outgrows,
    output_limit,
    own_blocks,
)
from kvcatch.laws.state import blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.laws.decision import Decision, Step
    from kvcatch.laws.state import QueuedRequest, RunningRequest, State

ESTIMATE_CLIP = 4_096
"""An estimating law expects no more output tokens than this of one request (as SGLang does)."""


def full_prompt(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Enters iff its whole prompt fits: blocks(prompt) + watermark <= available.

    The watermark counts only while something runs. Only the blocks of the first chunk are handed
    out now; what comes later may still preempt. What never fits is turned away.
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    required = own_blocks(state, request, request.tokens)
    chunk = chunk_tokens(state, request, step)
    busy = state.count_running + step.admitted > 0
    return compare(
        state,
        request,
        required,
        available(state, step),
        f"prompt {blocks_text(state, request, request.tokens, str(request.tokens))}",
        watermark=state.watermark_blocks if busy else 0,
        whole=blocks_for(request.tokens, state.block_size),
        takes=first_blocks(state, request, chunk),
        step_tokens=chunk,
        warning=outgrows(state, request),
    )


def first_chunk(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Enters iff the chunk of its prompt that this step computes fits, plus the watermark.

    What never fits as a whole is turned away.
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    chunk = chunk_tokens(state, request, step)
    tokens = max(request.hit_tokens, request.computed_tokens) + chunk
    required = own_blocks(state, request, tokens)
    busy = state.count_running + step.admitted > 0
    return compare(
        state,
        request,
        required,
        available(state, step),
        f"first chunk {blocks_text(state, request, tokens, str(tokens))}",
        watermark=state.watermark_blocks if busy else 0,
        whole=blocks_for(request.tokens, state.block_size),
        takes=required,
        step_tokens=chunk,
        warning=outgrows(state, request),
    )


def worst_case(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Enters iff prompt and all it may generate fit beside all that is promised to others.

    ceil((prompt + max_tokens) / block_size) <= available. Nobody is ever preempted. A request
    that did not say how much it wants reserves up to ``max_model_len``.
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    output = output_limit(state, request, "worst_case")
    total = request.prompt_tokens + output
    required = own_blocks(state, request, total)
    chunk = chunk_tokens(state, request, step)
    takes = first_blocks(state, request, chunk)
    reserved = promised_blocks(state, "worst_case")
    return compare(
        state,
        request,
        required,
        state.unclaimed - reserved - step.taken - step.promised,
        "worst case " + blocks_text(state, request, total, f"({request.prompt_tokens} + {output})"),
        gate="worst_case",
        whole=blocks_for(total, state.block_size),
        takes=takes,
        promises=max(0, required - takes),
        step_tokens=chunk,
    )


def estimate(state: State, request: QueuedRequest, step: Step = NO_STEP) -> Decision:
    """Enters iff its prompt and expected output fit beside the expected growth of those that run.

    ceil((prompt + min(output, 4096)) / block_size) <= available - growth, where growth is
    ceil(new_token_ratio * sum of min(outstanding output, 4096) / block_size).
    """
    if (decision := before_memory(state, request, step)) is not None:
        return decision
    output = output_limit(state, request, "estimate") - request.generated
    expected = request.tokens + min(output, ESTIMATE_CLIP)
    required = own_blocks(state, request, expected)
    grows = expected_growth(state, "estimate")
    growth = blocks_for(math.ceil(grows), state.block_size)
    chunk = chunk_tokens(state, request, step)
    takes = first_blocks(state, request, chunk)
    return compare(
        state,
        request,
        required,
        available(state, step) - growth,
        f"estimate {blocks_text(state, request, expected, str(expected))} "
        f"(growth of the running: {growth})",
        whole=blocks_for(request.tokens + 1, state.block_size),
        takes=takes,
        promises=max(0, required - takes),
        step_tokens=chunk,
        warning=outgrows(state, request),
    )


def available(state: State, step: Step) -> int:
    """Blocks that may be taken: free + cached - pinned - reserved - what this step used up."""
    return state.unclaimed - (state.reserved or 0) - step.taken - step.promised


def first_blocks(state: State, request: QueuedRequest, chunk: int) -> int:
    """Blocks handed out for what is computed or found already and the first chunk."""
    return own_blocks(state, request, max(request.hit_tokens, request.computed_tokens) + chunk)


def promised_blocks(state: State, law: str) -> int:
    """Blocks promised to those that run under a law that reserves: as given, or what they still need."""
    if state.reserved is not None:
        return state.reserved
    return outstanding(state, state.running, law)


def outstanding(state: State, running: Iterable[RunningRequest], law: str) -> int:
    """Blocks that those that run still need to finish in the worst case."""
    return sum(
        max(
            0,
            blocks_for(item.prompt_tokens + output_limit(state, item, law), state.block_size)
            - item.held(state.block_size),
        )
        for item in running
    )


def expected_growth(state: State, law: str) -> float:
    """Output tokens that those that run are expected to need still."""
    return state.new_token_ratio * sum(
        min(max(0, output_limit(state, item, law) - item.generated), ESTIMATE_CLIP)
        for item in state.running
    )
