"""Which gate holds in one interval, by elimination, with the numbers that rule the others out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvcatch.laws import GATES
from kvcatch.observe.diagnose.context import PROMPT_HEAVY
from kvcatch.observe.window import queue

if TYPE_CHECKING:
    from kvcatch.observe.diagnose.context import Context, Room
    from kvcatch.observe.diagnose.verdict import GateName
    from kvcatch.observe.sample import EngineSample
    from kvcatch.observe.window import Interval

__all__ = ["STALL_S", "Finding", "classify"]

STALL_S = 10.0
"""Requests wait, none runs and no step ends for so long: the engine stands still."""

_STALL_RUNNING_S = 60.0
_EMPTY = 0.05
_HEADROOM = 1.05
"""A pool that holds less than this many longest requests may not serve one: null block, speculative blocks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What holds in an interval, for some of those that wait.

    Attributes:
        gate: The gate; None where nothing is shown to hold.
        waiting: Requests it keeps out.
        text: The arithmetic.
        confidence: 0 to 1.
        also: What else is so in it.
    """

    gate: GateName | None
    waiting: float
    text: str
    confidence: float
    also: tuple[GateName, ...] = ()


def classify(interval: Interval, context: Context, stalled_s: float) -> list[Finding]:
    """The gates of one interval; empty when nobody waits or nothing is known.

    Args:
        interval: What to explain.
        context: Facts of the window.
        stalled_s: How long the standstill is that this interval is part of; 0 when it is in none.
    """
    state = interval.state
    waiting = queue(state) or 0.0
    if waiting <= 0 or interval.is_restart:
        return []
    if state.head_gate in GATES:
        text = f"the engine says so: its head is refused at {state.head_gate}"
        required, available = state.head_required_blocks, state.head_available_blocks
        if required is not None and available is not None:
            text += f", which asks {required:,.0f} blocks; {available:,.0f} are available"
        return [Finding(cast("GateName", state.head_gate), waiting, text, 0.97)]
    room = context.room(state)
    found: list[Finding] = []
    deferred = min(waiting, state.waiting_deferred_requests or 0.0)
    rest = waiting - deferred
    if deferred:
        text = f"{deferred:,.0f} of {waiting:,.0f} waiting are deferred by the engine's own count"
        also: tuple[GateName, ...] = ()
        if stalled_s and not state.running_requests:
            # Loads that go on look the same for a while; what they wait for may be each other's blocks.
            text += f"; nothing runs, no token for {stalled_s:,.0f} s"
            if state.kv_usage_share:
                text += f", {state.kv_usage_share:.1%} of the pool held"
            also = ("stall",)
        found.append(Finding("deferred", deferred, text, 0.95, also))
    if rest > 0:
        found.append(_rest(interval, context, room, rest, deferred, stalled_s))
    return found


def _rest(
    interval: Interval,
    context: Context,
    room: Room,
    waiting: float,
    deferred: float,
    stalled_s: float,
) -> Finding:
    state = interval.state
    running = state.running_requests
    cap = context.cap
    # vLLM's deferred requests count against max_num_seqs, too.
    counted = (running or 0.0) + (deferred if context.version.name == "vllm" else 0.0)
    if stalled_s and running:
        # Whatever the limits: with no token for so long nobody leaves.
        return _stalled(state, context, room, waiting, stalled_s)
    if running is not None and cap is not None and counted >= cap and not context.is_cap_inferred:
        text = f"{running:,.0f} running"
        text += f" + {deferred:,.0f} deferred" if counted > running else ""
        return Finding("max_num_seqs", waiting, f"{text} >= max_num_seqs {cap:,.0f}", 0.95)
    if stalled_s:
        return _stalled(state, context, room, waiting, stalled_s)
    if (
        context.version.name == "llamacpp"
        and state.used_tokens
        and state.pool_tokens
        and state.used_tokens > state.pool_tokens
    ):
        return Finding("capacity", waiting, room.text, 0.95)
    if _reserves_output(context) and not context.all_may_be_longest(state):
        return _worst_case(interval, context, room, waiting)
    confidence = 0.6 if room.is_assumed else 0.9
    if room.kind == "full":
        return Finding("capacity", waiting, room.text, confidence)
    if room.kind == "watermark":
        return Finding("watermark", waiting, room.text, confidence)
    again = min(waiting, interval.preempted_waiting)
    if again >= 0.5 * waiting and room.kind == "tight":
        # A preempted request goes to the head of the queue: what it needs back is what the queue waits for.
        who = f"all {waiting:,.0f}" if again == waiting else f"{again:,.0f} of {waiting:,.0f}"
        text = (
            f"{who} waiting were preempted (running fell without completions) and "
            f"need their blocks back; {room.text}"
        )
        return Finding("capacity", waiting, text, 0.85)
    is_reason_unknown = state.waiting_deferred_requests is None
    if cap is not None and running is not None and context.is_at_cap(counted):
        if context.limits.lora and is_reason_unknown and context.version.name == "vllm":
            return _perhaps_deferred(state, context, room, waiting)
        what = f"running + deferred stay at {counted:,.0f}" if counted > running else ""
        text = (
            f"{what or f'running stays at {running:,.0f}'} while {waiting:,.0f} wait and who ends is replaced "
            f"(max_num_seqs inferred as {cap:,.0f}); {room.text}"
        )
        return Finding("max_num_seqs", waiting, text, 0.8 if not room.is_assumed else 0.65)
    if context.flows(interval) and context.fills_steps(interval):
        return _token_budget(interval, context, room, waiting)
    if interval.is_prefilling:
        text = (
            f"{running or 0:,.0f} running generated {interval.generated_tokens or 0:,.0f} tokens in "
            f"{interval.steps or 0:,.0f} steps: the others compute prompts; {room.text}"
        )
        return Finding("token_budget", waiting, text, 0.75)
    if room.kind == "tight" and interval.prompt_tokens_per_s == 0:
        estimate = context.estimate(state, room)
        if estimate:
            return Finding("capacity", waiting, f"{room.text}; {estimate}", 0.6)
        length = max(waiting, interval.queue_after or 0.0)
        none = "nothing deferred" if not is_reason_unknown else "deferred requests not exported"
        behind = f" and {length - 1:,.0f} wait behind it" if length > 1 else ""
        text = (
            f"{room.text}; {running or 0:,.0f} running, no prompt computed, {none}: the "
            f"head needs more than is free{behind}"
        )
        gate: GateName = "head_of_line" if length > 1 else "capacity"
        return Finding(gate, waiting, text, 0.55 if room.is_assumed else 0.8)
    if (
        room.kind == "roomy"
        and running
        and is_reason_unknown
        and (context.limits.lora or interval.prompt_tokens_per_s == 0)
    ):
        return _perhaps_deferred(state, context, room, waiting)
    return Finding(None, waiting, "nothing that was seen explains the queue", 0.0)


def _token_budget(interval: Interval, context: Context, room: Room, waiting: float) -> Finding:
    rate = interval.prompt_tokens_per_s or 0.0
    ceiling = max(rate, context.ceiling_tokens_per_s or 0.0)
    text = (
        f"prompts are computed at {rate:,.0f} tokens/s of {ceiling:,.0f} reached while "
        f"{waiting:,.0f} wait"
    )
    if context.limits.token_budget:
        text += f" (budget {context.limits.token_budget:,} tokens a step)"
    return Finding(
        "token_budget", waiting, f"{text}; {room.text}", 0.7 if room.is_assumed else 0.85
    )


def _perhaps_deferred(state: EngineSample, context: Context, room: Room, waiting: float) -> Finding:
    running = state.running_requests or 0.0
    text = f"{room.text}; {running:,.0f} running, {waiting:,.0f} wait"
    if context.limits.lora:
        loras = context.limits.max_loras or 1
        text += f"; LoRA is on with max_loras {loras}: requests of other adapters are set aside"
        return Finding("deferred", waiting, text, 0.75)
    text += ": neither KV nor prompt computation; this version does not export a reason"
    return Finding("deferred", waiting, text, 0.4, ("max_num_seqs",))


def _stalled(
    state: EngineSample, context: Context, room: Room, waiting: float, stalled_s: float
) -> Finding:
    running = state.running_requests or 0.0
    usage = state.kv_usage_share
    still = f"{waiting:,.0f} wait, {running:,.0f} run, no token for {stalled_s:,.0f} s"
    if usage is None and room.free is not None and state.num_blocks:
        usage = 1 - room.free / state.num_blocks
    if running:
        return Finding("stall", waiting, still, 0.8)
    concurrency = context.concurrency(state)
    if concurrency is not None and concurrency < _HEADROOM and (usage or 0.0) <= _EMPTY:
        longest = context.longest_tokens(state) or 0
        tokens = context.limits.pool_tokens or state.pool_tokens
        pool = f"{tokens:,.0f} tokens" if tokens else f"{state.num_blocks or 0:,.0f} blocks"
        text = (
            f"the pool of {pool} holds {concurrency:.3f} requests of the {longest:,.0f} tokens that "
            f"are accepted; {still}"
        )
        return Finding("never_fits", waiting, text, 0.85, ("stall",))
    if usage is None or usage <= _EMPTY:
        share = "unknown" if usage is None else f"{usage:.1%} of the pool in use"
        return Finding("stall", waiting, f"{still}; {share}", 0.85)
    if room.free is not None and room.free < 1:
        text = f"{still}; no block is free and those that hold them need more: a deadlock"
        return Finding("capacity", waiting, text, 0.8, ("stall",))
    text = (
        f"{still}; {usage:.1%} of the pool is held by requests that do not run and {room.text}: the "
        "head of the queue needs more and nobody behind it is tried, a deadlock"
    )
    return Finding("head_of_line", waiting, text, 0.8, ("stall",))


def _reserves_output(context: Context) -> bool:
    name, policy = context.version.name, (context.limits.policy or "").upper()
    if name == "trtllm":
        return policy not in ("MAX_UTILIZATION", "1")
    return name in ("tgi", "llamacpp")


def _worst_case(interval: Interval, context: Context, room: Room, waiting: float) -> Finding:
    """Engines that reserve prompt and whole output: a low usage does not tell what is promised."""
    state = interval.state
    prompt, generated = interval.prompt_tokens_per_s, interval.generated_tokens_per_s
    if (
        prompt
        and generated is not None
        and prompt >= PROMPT_HEAVY * max(generated, 1)
        and context.flows(interval)
    ):
        return _token_budget(interval, context, room, waiting)
    if room.kind == "full":
        return Finding("capacity", waiting, room.text, 0.85)
    if not state.running_requests:
        return Finding(None, waiting, "nothing runs and nothing is held", 0.0)
    if context.is_cap_inferred and room.kind == "unknown":
        # Without a pool in the metrics nothing tells a full batch from a full promise.
        also: tuple[GateName, ...] = ("max_num_seqs",)
    else:
        also = ()
    asked = ""
    if state.asked_output_count and state.asked_output_tokens_sum:
        mean = state.asked_output_tokens_sum / state.asked_output_count
        asked = f"; requests ask for {mean:,.0f} output tokens on average"
        size = context.limits.block_size or state.block_size_tokens
        if size and context.usual_prompt_tokens:
            blocks = -(-(context.usual_prompt_tokens + mean) // size)
            asked += f", so one reserves {blocks:,.0f} blocks"
    longest = context.longest_tokens(state)
    if not asked and room.longest is not None and longest:
        asked = (
            f"; max_tokens left out counts as the longest length, {longest:,.0f} tokens = "
            f"{room.longest:,.0f} {room.unit}"
        )
    if context.version.name == "tgi" and state.token_budget_tokens:
        asked += f"; the batch may grow to {state.token_budget_tokens:,.0f} tokens"
    # What is free by the gauge is promised: it says nothing of who may enter.
    text = (
        f"{room.free_text or room.text}, yet {waiting:,.0f} wait behind {state.running_requests:,.0f} running: prompt "
        f"and whole output of each are reserved until it ends{asked}"
    )
    return Finding("worst_case", waiting, text, 0.8 if not also else 0.6, also)
