"""What is wrong besides a queue: preemption storms, leaks, a prefix cache that stopped hitting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.observe.diagnose.verdict import Evidence
from kvcatch.observe.leaks import check_replica, conservation, leak_slope
from kvcatch.observe.window import queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.observe.diagnose.context import Context
    from kvcatch.observe.diagnose.verdict import GateName
    from kvcatch.observe.sample import EngineSample
    from kvcatch.observe.window import Interval

__all__ = [
    "Fault",
    "conservation",
    "fill_share",
    "find_leak",
    "find_prefix_fault",
    "find_storm",
    "leak_slope",
    "smallest_useful_prefix",
]

STORM_PER_REQUEST = 0.5
"""Preemptions per finished request from which a storm is spoken of: a healthy run has below 0.1."""

_STORM_LEAST = 10
_COLLAPSE = 5.0
_FROZEN_S = 600.0
_FROZEN_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong that is not an admission gate.

    Attributes:
        gate: Its name.
        evidence: What was seen, and when.
        arithmetic: The comparison.
        confidence: 0 to 1.
        is_certain: False for a note only: it is seen, and it is not a fault.
    """

    gate: GateName
    evidence: Evidence
    arithmetic: str
    confidence: float
    is_certain: bool = True


def fill_share(tokens: int, block_size: int) -> float:
    """Share of the slots of its blocks that a request of ``tokens`` tokens fills.

    A KV percentage counts blocks: 17 tokens in blocks of 16 hold 32 slots.
    """
    blocks = -(-tokens // block_size)
    return tokens / (blocks * block_size)


def smallest_useful_prefix(block_size: int, *, drops_last_block: bool = False) -> int:
    """Tokens two prompts must share before one block is hit; EAGLE and MTP give the last one up."""
    return block_size * (2 if drops_last_block else 1)


def find_storm(found: Sequence[Interval]) -> Fault | None:
    """More preemptions than work done, or generation that collapsed after one."""
    counted = sum(item.preempted for item in found)
    seen = sum(item.left for item in found)
    preempted = max(counted, seen)
    if preempted < 1:
        return None
    hit = [item for item in found if item.preempted or item.left]
    start, end = hit[0].start_s, hit[-1].end_s
    finished = [item.finished for item in found if item.finished is not None]
    if finished and preempted >= _STORM_LEAST:
        done = sum(finished)
        most = max((item.state.running_requests or 0) + (queue(item.state) or 0) for item in found)
        if not done and most <= 1:
            text = (
                f"one request alone was preempted {preempted:,.0f} times and nothing ended: it needs more "
                "than the pool has"
            )
            return Fault("never_fits", Evidence(start, end, text), text, 0.85)
        if preempted >= STORM_PER_REQUEST * max(done, 1):
            text = (
                f"{preempted:,.0f} preemptions for {done:,.0f} finished requests = "
                f"{preempted / max(done, 1):.2f} each; {STORM_PER_REQUEST} is a storm"
            )
            return Fault("preemption_storm", Evidence(start, end, text), text, 0.9)
    if not finished and preempted >= _STORM_LEAST:
        lines = [item for item in found if item.state.covers_seconds is not None]
        heavy = [
            item
            for item in lines
            if item.preempted >= max(3.0, 0.25 * (item.state.running_requests or 0))
        ]
        if len(heavy) >= 2 and len(heavy) >= 0.2 * len(lines):
            text = f"{preempted:,.0f} preemptions in {len(lines)} log lines, {len(heavy)} with a quarter of what runs"
            return Fault("preemption_storm", Evidence(start, end, text), text, 0.75)
    return _collapse(found, hit[0])


def _collapse(found: Sequence[Interval], first: Interval) -> Fault | None:
    def rates(items: Sequence[Interval]) -> list[float]:
        return sorted(
            item.generated_tokens_per_s
            for item in items
            if item.generated_tokens_per_s and item.state.running_requests
        )

    if first.state.engine == "vllm" and (first.state.kv_usage_share or 0) < 0.8:
        return None
    at = found.index(first)
    before, after = rates(found[:at]), rates(found[at + 1 :])
    if len(before) < 3 or len(after) < 3:
        return None
    old, new = before[len(before) // 2], after[len(after) // 2]
    busy = [item.state for item in found[at + 1 :] if item.state.running_requests]
    usage = [state.kv_usage_share for state in busy if state.kv_usage_share is not None]
    if new * _COLLAPSE > old or not usage or min(usage) < 0.7:
        return None
    text = f"generation fell from {old:,.0f} to {new:,.0f} tokens/s after preemption, at {usage[-1]:.0%} KV"
    return Fault("preemption_storm", Evidence(first.start_s, found[-1].end_s, text), text, 0.8)


def find_leak(samples: Sequence[EngineSample], context: Context) -> Fault | None:
    """What is held while nothing runs or waits, for longer than a lease of a transfer can last."""
    check = check_replica(samples, block_size=context.limits.block_size)
    is_note = check.state == "lease" or (check.state == "backlog" and check.is_full)
    if not check.is_leak and not is_note:
        return None
    text = check.arithmetic
    if check.is_leak and check.idle_s:
        text = f"idle for {check.idle_s:,.0f} s: {text}"
    evidence = Evidence(check.start_s, check.end_s, text)
    return Fault("leak", evidence, check.arithmetic, check.confidence, check.is_leak)


def find_prefix_fault(found: Sequence[Interval]) -> Fault | None:
    """Look-ups go on, hits stopped: they were there before, and are 0 for ten minutes and 20 requests."""
    rows = [item for item in found if item.hit_tokens is not None and item.query_tokens is not None]
    last_hit = max((at for at, item in enumerate(rows) if item.hit_tokens), default=-1)
    if last_hit < 0 or last_hit == len(rows) - 1:
        return None
    before, after = rows[: last_hit + 1], rows[last_hit + 1 :]
    asked, hits = (
        sum(getattr(item, name) or 0 for item in before) for name in ("query_tokens", "hit_tokens")
    )
    late = sum(item.query_tokens or 0 for item in after)
    requests = sum(item.started or item.finished or 0 for item in after)
    queried = [item for item in after if item.query_tokens]
    seconds = after[-1].end_s - after[0].start_s
    if seconds < _FROZEN_S or not queried or requests < _FROZEN_REQUESTS:
        return None
    if not asked or hits / asked < 0.05 or late <= 0:
        return None
    if queried[-1].end_s - queried[0].start_s < 0.5 * _FROZEN_S:
        return None
    text = (
        f"{hits / asked:.0%} of looked-up tokens hit before, none of {late:,.0f} in the last "
        f"{seconds:,.0f} s ({requests:,.0f} requests)"
    )
    evidence = Evidence(after[0].start_s, after[-1].end_s, text)
    return Fault("prefix_cache_broken", evidence, text, 0.85)
