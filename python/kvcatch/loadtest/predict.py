"""Where the first request should wait, by the engine's own law and the tokens that were seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.laws import NO_STEP, QueuedRequest, RunningRequest, State, blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.laws import Law, Refusal

__all__ = ["Limits", "Prediction", "predict"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of the server.

    Attributes:
        law: its admission law.
        num_blocks: blocks of its pool, null blocks counted.
        block_size: tokens per block.
        null_blocks: of them, those nobody can hold.
        max_num_seqs: sequences that may run; ``None`` when it is not known.
        max_model_len: most tokens of a request; ``None`` when it is not known.
        watermark: share of the pool that an admission leaves.
    """

    law: Law
    num_blocks: int
    block_size: int
    null_blocks: int = 0
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    watermark: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Where the first request waits.

    Attributes:
        first_refusal: its number; ``None`` when none up to the last number asked does.
        refusal: by which gate, with the arithmetic.
        least: number when all outputs are complete, that is with the most blocks taken.
        most: number when nothing was generated yet.
    """

    first_refusal: int | None
    refusal: Refusal | None
    least: int
    most: int


def predict(
    limits: Limits,
    prompt_tokens: int,
    output_tokens: int,
    generated: Sequence[Sequence[int]],
    max_concurrency: int,
) -> Prediction:
    """Apply the law to each request as it was added.

    Args:
        limits: of the server.
        prompt_tokens: of every request.
        output_tokens: of every request.
        generated: for each request added, the tokens that those before it had generated. Beyond the
            last one the same pace is assumed.
        max_concurrency: how far to look.
    """
    step = _pace(generated)
    found: Refusal | None = None
    number = None
    for candidate in range(1, max_concurrency + 1):
        if candidate <= len(generated):
            tokens = list(generated[candidate - 1])
        else:
            tokens = [
                min(output_tokens, round(step * (candidate - 1 - index)))
                for index in range(candidate - 1)
            ]
        refusal = _asked(limits, prompt_tokens, output_tokens, tokens)
        if refusal is not None:
            number, found = candidate, refusal
            break
    return Prediction(
        number,
        found,
        _bound(limits, prompt_tokens, output_tokens, output_tokens),
        _bound(limits, prompt_tokens, output_tokens, 0),
    )


def _pace(generated: Sequence[Sequence[int]]) -> float:
    """Tokens that a request generates between two additions."""
    last = next((tokens for tokens in reversed(generated) if tokens), None)
    return 0.0 if not last else last[0] / len(last)


def _asked(
    limits: Limits, prompt_tokens: int, output_tokens: int, generated: Sequence[int]
) -> Refusal | None:
    running = tuple(
        RunningRequest(prompt_tokens, min(tokens, output_tokens), output_tokens)
        for tokens in generated
    )
    usable = limits.num_blocks - limits.null_blocks
    held = sum(request.held(limits.block_size) for request in running)
    if held > usable:
        running = running[: usable // max(1, blocks_for(prompt_tokens, limits.block_size))]
        held = usable
    state = State(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        free=usable - held,
        null_blocks=limits.null_blocks,
        running=running,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        watermark=limits.watermark,
    )
    return limits.law.rule(state, QueuedRequest(prompt_tokens, output_tokens), NO_STEP).refusal


def _bound(limits: Limits, prompt: int, output: int, each: int) -> int:
    """Number of the first refusal when every request has generated ``each`` tokens; 1 past those that fit."""
    fits, waits = 0, limits.num_blocks + 2  # every request takes a block at least
    while waits - fits > 1:
        middle = (fits + waits) // 2
        if _asked(limits, prompt, output, [each] * (middle - 1)) is None:
            fits = middle
        else:
            waits = middle
    return waits
