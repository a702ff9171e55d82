"""What is wrong besides a queue: preemption storms, leaks, a prefix cache that stopped hitting."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.observe.diagnose.verdict import Evidence

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
_IDLE_S = 30.0
_LEASE_S = 480.0
"""vLLM's longest default before an aborted transfer gives its blocks back."""


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


def conservation(
    total: float,
    available: float,
    evictable: float,
    protected: float = 0.0,
    session_held: float = 0.0,
) -> float:
    """Tokens (or blocks) that are missing: ``total - available - evictable - protected - session_held``.

    More than 0 on an idle engine is a leak, less than 0 a double free: something was given back twice.
    """
    return total - available - evictable - protected - session_held


def leak_slope(requests: Sequence[float], used_blocks: Sequence[float]) -> float:
    """Blocks that stay held per finished request, from samples taken while idle (least squares).

    Raises:
        InvalidArgument: There are fewer than two different request counts.
    """
    n = len(requests)
    if n != len(used_blocks) or len(set(requests)) < 2:
        raise InvalidArgument(f"{n} idle samples: needs two different request counts at least")
    mean_x, mean_y = sum(requests) / n, sum(used_blocks) / n
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(requests, used_blocks, strict=True))
    return above / sum((x - mean_x) ** 2 for x in requests)


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
        most = max(
            (item.state.running_requests or 0) + (item.state.waiting_requests or 0)
            for item in found
        )
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


def _held(state: EngineSample) -> tuple[float, str] | None:
    """What an idle engine still holds, and of what; None when that is not known."""
    if state.pool_tokens and state.available_tokens is not None:
        if state.evictable_tokens is None:
            return None
        missing = conservation(
            state.pool_tokens,
            state.available_tokens,
            state.evictable_tokens,
            state.protected_tokens or 0.0,
            state.session_held_tokens or 0.0,
        )
        text = (
            f"{state.pool_tokens:,.0f} total - {state.available_tokens:,.0f} available - "
            f"{state.evictable_tokens:,.0f} evictable = {missing:,.0f} tokens"
        )
        return missing, text
    if state.clean_blocks is not None and state.cached_blocks is not None and state.num_blocks:
        missing = state.num_blocks - state.clean_blocks - state.cached_blocks
        text = (
            f"{state.num_blocks:,.0f} total - {state.clean_blocks:,.0f} free - "
            f"{state.cached_blocks:,.0f} cached = {missing:,.0f} blocks"
        )
        return missing, text
    if state.used_blocks is not None and state.num_blocks:
        return state.used_blocks, f"{state.used_blocks:,.0f} of {state.num_blocks:,.0f} blocks held"
    if state.kv_usage_share is not None:
        return state.kv_usage_share, f"{state.kv_usage_share:.2%} of the pool held"
    return None


def _is_idle(state: EngineSample) -> bool:
    others = (state.waiting_requests, state.waiting_deferred_requests, state.swapped_requests)
    return state.running_requests == 0 and not any(others)


def find_leak(samples: Sequence[EngineSample], context: Context) -> Fault | None:
    """What is held while nothing runs or waits, for longer than a lease of a transfer can last."""
    if any(sample.pinned_objects is not None for sample in samples):
        return _pin_leak(samples)
    last_busy = [index for index, sample in enumerate(samples) if not _is_idle(sample)]
    tail = samples[last_busy[-1] + 1 :] if last_busy else samples
    slope = _slope(samples)
    if slope is not None:
        return slope
    if not tail:
        return _backlog(samples)
    held = [_held(sample) for sample in tail]
    if any(item is None for item in held) or not held[-1]:
        return None
    values = [item[0] for item in held if item is not None]
    missing, text = held[-1]
    if min(values) <= 1e-4 and max(values) >= -1e-4:
        return None
    seconds = tail[-1].t_seconds - tail[0].t_seconds
    has_transfers = any(sample.transfer_descriptors_sum is not None for sample in tail)
    needed = _LEASE_S if has_transfers else _IDLE_S
    is_exact = tail[-1].evictable_tokens is not None and len(set(values)) == 1
    if is_exact and not has_transfers:
        # The engine's own sum of everything: a whole window of it is enough.
        needed = min(_IDLE_S, samples[-1].t_seconds - samples[0].t_seconds)
    start, end = tail[0].t_seconds, tail[-1].t_seconds
    if (len(tail) < 3 and not is_exact) or seconds < needed:
        if len(tail) < 3 or not has_transfers:
            return None
        note = f"{text}: a transfer's lease may hold it for up to {needed:,.0f} s, after that it is a leak"
        return Fault("leak", Evidence(start, end, note), note, 0.4, is_certain=False)
    evidence = Evidence(start, end, f"idle for {seconds:,.0f} s: {text}")
    if missing < 0:
        size = context.limits.block_size or tail[-1].block_size_tokens
        pages = f" = {-missing / size:,.0f} pages of {size:,.0f}" if size else ""
        text = f"{text}{pages} too many: given back twice (a double free)"
    return Fault("leak", evidence, text, 0.9)


def _slope(samples: Sequence[EngineSample]) -> Fault | None:
    """Idle moments hold more the more requests have ended."""
    idle: dict[float, tuple[float, float]] = {}
    for sample in samples:
        if (
            sample.used_blocks is not None
            and sample.finished_total is not None
            and _is_idle(sample)
        ):
            known = idle.get(sample.finished_total)
            if known is None or sample.used_blocks < known[0]:
                idle[sample.finished_total] = (sample.used_blocks, sample.t_seconds)
    rows = sorted((done, held, at) for done, (held, at) in idle.items())
    rows = [row for row in rows if row[1] > 0]
    if len(rows) < 3 or any(b[1] <= a[1] for a, b in itertools.pairwise(rows)):
        return None
    slope = leak_slope([row[0] for row in rows], [row[1] for row in rows])
    blocks = next((s.num_blocks for s in reversed(samples) if s.num_blocks), None)
    text = (
        f"idle and still held: {rows[0][1]:,.0f} blocks after {rows[0][0]:,.0f} requests, "
        f"{rows[-1][1]:,.0f} after {rows[-1][0]:,.0f}: {slope:.2f} blocks per request"
    )
    if blocks:
        end = rows[-1][0] + (blocks - rows[-1][1]) / slope
        text += f"; the pool of {blocks:,.0f} is gone after about {end:,.0f} requests"
    return Fault("leak", Evidence(rows[0][2], rows[-1][2], text), text, 0.9)


def _backlog(samples: Sequence[EngineSample]) -> Fault | None:
    usage = [s.kv_usage_share for s in samples if s.kv_usage_share is not None]
    if len(usage) < 2 or min(usage) < 0.95:
        return None
    running = [s.running_requests or 0.0 for s in samples]
    if min(running) < 1:
        return None
    text = (
        f"{min(usage):.0%} to {max(usage):.0%} KV with {min(running):,.0f} to {max(running):,.0f} "
        "running: a backlog, not a leak; a leak shows only when nothing runs"
    )
    return Fault(
        "leak", Evidence(samples[0].t_seconds, samples[-1].t_seconds, text), text, 0.0, False
    )


def _pin_leak(samples: Sequence[EngineSample]) -> Fault | None:
    rows = [(s.t_seconds, s.failed_allocations_total) for s in samples]
    pinned = [s.pinned_objects for s in samples if s.pinned_objects is not None]
    if len(pinned) < 3 or rows[-1][0] - rows[0][0] < _IDLE_S:
        return None
    grows = all(b >= a for a, b in itertools.pairwise(pinned))
    first, last = rows[0][1], rows[-1][1]
    if first is None or last is None or last - first < 10 or not grows or pinned[-1] < 1:
        return None
    text = (
        f"pinned objects only grow, {pinned[0]:,.0f} to {pinned[-1]:,.0f}, and {last - first:,.0f} "
        "evictions failed: pins are not given back"
    )
    return Fault("leak", Evidence(rows[0][0], rows[-1][0], text), text, 0.8)


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
