"""What every law checks beside memory, and the arithmetic they share. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.laws.decision import Decision
from kvcatch.laws.refusal import Gate, Refusal, Unit
from kvcatch.laws.state import blocks_for

if TYPE_CHECKING:
    from kvcatch.laws.decision import Step
    from kvcatch.laws.state import QueuedRequest, RunningRequest, State


def refuse(
    request: QueuedRequest,
    gate: Gate,
    required: int,
    available: int,
    arithmetic: str,
    *,
    unit: Unit = "blocks",
    is_final: bool = False,
) -> Decision:
    """A refusal as a decision."""
    refusal = Refusal(gate, required, available, arithmetic, unit)
    return Decision(request, required, available, arithmetic, refusal, is_final=is_final)


def over_long(state: State, request: QueuedRequest) -> Decision | None:
    """Refused at the door: prompt and output (at least one token) exceed ``max_model_len``."""
    if state.max_model_len is None:
        return None
    output = max(request.max_tokens or 1, request.generated + 1)
    total = request.prompt_tokens + output
    if total <= state.max_model_len:
        return None
    return refuse(
        request,
        "never_fits",
        total,
        state.max_model_len,
        f"prompt {request.prompt_tokens} + output {output} = {total} > "
        f"max_model_len {state.max_model_len}",
        unit="tokens",
        is_final=True,
    )


def tokens_left(state: State, step: Step) -> int | None:
    """Tokens of this step's budget that nobody has taken; None when the budget is not known."""
    if state.token_budget is None:
        return None
    return max(0, state.token_budget - state.running_tokens - step.tokens)


def before_memory(state: State, request: QueuedRequest, step: Step) -> Decision | None:
    """The gates that are looked at before memory, in vLLM's order; None when all are open."""
    if (decision := over_long(state, request)) is not None:
        return decision
    left = tokens_left(state, step)
    uncomputed = request.tokens - max(request.hit_tokens, request.computed_tokens)
    if left is not None and (left == 0 or (not state.chunked_prefill and uncomputed > left)):
        asked = 1 if state.chunked_prefill else uncomputed
        return refuse(
            request,
            "token_budget",
            asked,
            left,
            f"budget {state.token_budget} - running {state.running_tokens} - admitted "
            f"{step.tokens} = {left} tokens left in this step",
            unit="tokens",
        )
    if (decision := no_slot(state, request, step)) is not None:
        return decision
    if request.deferred:
        return refuse(request, "deferred", 1, 0, request.deferred, unit="requests")
    return None


def no_slot(state: State, request: QueuedRequest, step: Step) -> Decision | None:
    """Refused because ``max_num_seqs`` sequences run (or are set aside and count as if)."""
    if state.max_num_seqs is None:
        return None
    busy = state.count_running + state.num_deferred + step.admitted
    if busy < state.max_num_seqs:
        return None
    deferred = f" + deferred {state.num_deferred}" if state.num_deferred else ""
    return refuse(
        request,
        "max_num_seqs",
        1,
        state.max_num_seqs - busy,
        f"running {state.count_running + step.admitted}{deferred} = max_num_seqs "
        f"{state.max_num_seqs}",
        unit="sequences",
    )


def chunk_tokens(state: State, request: QueuedRequest, step: Step) -> int:
    """Tokens of the request that this step computes."""
    chunk = request.tokens - max(request.hit_tokens, request.computed_tokens)
    if 0 < state.long_prefill_threshold < chunk:
        chunk = state.long_prefill_threshold
    left = tokens_left(state, step)
    return chunk if left is None else min(chunk, left)


def own_blocks(state: State, request: QueuedRequest, tokens: int) -> int:
    """Blocks that ``tokens`` tokens of the request take out of the pool.

    Active hits cost nothing, evictable hits cost a block each, blocks it holds are paid.
    """
    shared = request.active_hit_tokens // state.block_size
    return max(0, blocks_for(tokens, state.block_size) - shared - request.held_blocks)


def blocks_text(state: State, request: QueuedRequest, tokens: int, of: str) -> str:
    """The arithmetic of ``own_blocks``: ``ceil(512 / 16) = 32``."""
    text = f"ceil({of} / {state.block_size})"
    shared = request.active_hit_tokens // state.block_size
    if shared:
        text += f" - {shared} active hits"
    if request.held_blocks:
        text += f" - {request.held_blocks} held"
    return f"{text} = {own_blocks(state, request, tokens)}"


def output_limit(state: State, request: QueuedRequest | RunningRequest, law: str) -> int:
    """Most tokens a request may generate; without a word from it, all that its length allows.

    Raises:
        InvalidArgument: Neither the request nor ``max_model_len`` says.
    """
    if request.max_tokens is not None:
        return request.max_tokens
    if state.max_model_len is None:
        raise InvalidArgument(
            f"law {law} reserves the whole output: give max_tokens for every request, or "
            "max_model_len"
        )
    return max(1, state.max_model_len - request.prompt_tokens)


def outgrows(state: State, request: QueuedRequest) -> str:
    """What to say of a request that may enter and can never finish; else an empty string."""
    if request.max_tokens is None:
        return ""
    total = request.prompt_tokens + request.max_tokens
    blocks = blocks_for(total, state.block_size)
    if blocks <= state.usable:
        return ""
    dies_at = state.usable * state.block_size - request.prompt_tokens + 1
    return (
        f"cannot finish: ceil({total} / {state.block_size}) = {blocks} blocks > {state.usable} "
        f"usable; stuck at output token {max(1, dies_at)}"
    )


def compare(
    state: State,
    request: QueuedRequest,
    required: int,
    available: int,
    arithmetic: str,
    *,
    gate: Gate = "capacity",
    watermark: int = 0,
    whole: int | None = None,
    is_final: bool = True,
    takes: int,
    promises: int = 0,
    step_tokens: int = 0,
    warning: str = "",
) -> Decision:
    """The comparison itself: ``required + watermark <= available``.

    Args:
        state: The pool and the limits.
        request: Who asks.
        required: Blocks it needs now.
        available: Blocks there are.
        arithmetic: How ``required`` came about.
        gate: The gate that an honest lack of blocks has.
        watermark: Blocks that must stay available.
        whole: Blocks that even an idle pool must have; None when that is not checked.
        is_final: What never fits is turned away at once.
        takes: Blocks handed out in this step.
        promises: Blocks reserved beyond those.
        step_tokens: Tokens of the step's budget.
        warning: What will go wrong although it enters.
    """
    if whole is not None and whole > state.usable:
        text = f"{whole} blocks > {state.usable} usable, even in an idle pool; {arithmetic}"
        return refuse(request, "never_fits", whole, state.usable, text, is_final=is_final)
    if required > available:
        return refuse(request, gate, required, available, f"{arithmetic} > {available}")
    if required + watermark > available:
        text = f"{arithmetic}, + watermark {watermark} = {required + watermark} > {available}"
        return refuse(request, "watermark", required + watermark, available, text)
    if state.largest_run is not None and required > state.largest_run:
        text = f"{arithmetic} in one run > largest run {state.largest_run}"
        return refuse(request, "contiguity", required, state.largest_run, text)
    mark = f", + watermark {watermark} = {required + watermark}" if watermark else ""
    return Decision(
        request,
        required + watermark,
        available,
        f"{arithmetic}{mark} <= {available}",
        takes=takes,
        promises=promises,
        step_tokens=step_tokens,
        warning=warning,
    )
