"""Leaks: what an engine still holds while nothing runs and nothing waits. One law per engine, stated here alone.

The law is a conservation law, checked on an idle engine: ``total = available + evictable (+ protected +
session_held)``. Cached blocks that nobody references are not leaked, a backlog is not a leak, and a transfer's
lease may hold blocks for minutes after the last request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvcatch.errors import InvalidArgument
from kvcatch.observe.window import by_replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvcatch.observe.limits import Limits
    from kvcatch.observe.sample import EngineSample

__all__ = [
    "LAWS",
    "Holder",
    "LeakCheck",
    "LeakState",
    "check_leaks",
    "check_replica",
    "conservation",
    "holders",
    "leak_slope",
    "look_inside",
]

LeakState = Literal["leak", "double_free", "backlog", "lease", "too_short", "unknown", "conserved"]
"""``leak`` and ``double_free`` are faults, ``conserved`` is none; the others cannot be told: requests run
(``backlog``), a transfer's lease may still hold it (``lease``), the engine was not idle for long enough
(``too_short``), or it does not export what the law needs (``unknown``)."""

LAWS = {
    "vllm": "idle: KV usage is 0, for cached blocks nobody references count as free",
    "sglang": "idle: max_total_num_tokens = available + evictable + protected + session held",
    "trtllm": "idle: no used block, kv_cache_max_blocks = kv_cache_free_blocks",
    "kvcatch": "idle: num_blocks = free + cached (+ the null block), nothing active, nothing reserved",
    "dynamo": "idle: KV usage is 0",
    "tgi": "TGI exports no KV figure: its law cannot be checked from outside",
    "lmcache": "pinned objects go down again and evictions do not fail",
}
"""What must hold, by engine, in the terms of what it exports."""

IDLE_S = 30.0
"""An engine must have been idle for so long before what it holds is called leaked."""

LEASE_S = 480.0
"""vLLM's longest default before an aborted transfer gives its blocks back."""

_RANK: dict[LeakState, int] = {
    "leak": 0,
    "double_free": 0,
    "lease": 1,
    "too_short": 2,
    "unknown": 3,
    "backlog": 4,
    "conserved": 5,
}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds blocks of kvcatch's pool.

    Attributes:
        owner: Its name; empty where sequences have none, ``other`` for all that the page does not name.
        blocks: In its tables.
    """

    owner: str
    blocks: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"owner": self.owner, "blocks": self.blocks}


@dataclass(slots=True)
class LeakCheck:
    """What the law says of one replica.

    Attributes:
        state: See ``LeakState``.
        arithmetic: The numbers.
        start_s: From when on it was looked at, in the time of the samples.
        end_s: To when.
        idle_s: Seconds it was idle at the end of the window.
        held: What is missing, in ``unit``; None where that is not known.
        unit: ``tokens``, ``blocks``, ``share`` (of the pool) or ``objects``.
        confidence: 0 to 1, of a leak.
        is_full: A backlog that fills the pool, as a leak would.
        engine: Which engine.
        replica: Which one of several.
        endpoint: Where it was read.
        holders: Who holds it, where the engine says so.
    """

    state: LeakState
    arithmetic: str
    start_s: float = 0.0
    end_s: float = 0.0
    idle_s: float = 0.0
    held: float | None = None
    unit: str = ""
    confidence: float = 0.0
    is_full: bool = False
    engine: str = ""
    replica: str = ""
    endpoint: str = ""
    holders: list[Holder] = field(default_factory=list)

    @property
    def is_leak(self) -> bool:
        """Whether something was lost, or given back twice."""
        return self.state in ("leak", "double_free")

    @property
    def law(self) -> str:
        """What must hold on this engine."""
        return LAWS.get(self.engine, "")

    def to_dict(self) -> dict[str, Any]:
        """With units in the names, for JSON."""
        return {
            "state": self.state,
            "arithmetic": self.arithmetic,
            "law": self.law,
            "idle_seconds": round(self.idle_s, 3),
            "held": self.held,
            "held_unit": self.unit or None,
            "confidence": self.confidence,
            "engine": self.engine,
            "replica": self.replica,
            "endpoint": self.endpoint,
            "holders": [holder.to_dict() for holder in self.holders],
        }


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


def check_leaks(samples: Iterable[EngineSample], limits: Limits | None = None) -> list[LeakCheck]:
    """The law on every replica on its own, what is worst first."""
    found = []
    for (endpoint, engine, replica), group in by_replica(samples).items():
        check = check_replica(group, block_size=limits.block_size if limits else None)
        check.engine, check.replica, check.endpoint = engine, replica, endpoint
        found.append(check)
    return sorted(found, key=lambda check: _RANK[check.state])


def check_replica(samples: Sequence[EngineSample], *, block_size: float | None = None) -> LeakCheck:
    """The law on the samples of one replica, in order of time.

    Args:
        samples: One at least.
        block_size: Tokens per block (SGLang: page), where /metrics does not say.
    """
    if any(sample.pinned_objects is not None for sample in samples):
        return _pins(samples)
    busy = [index for index, sample in enumerate(samples) if not _is_idle(sample)]
    tail = samples[busy[-1] + 1 :] if busy else samples
    slope = _slope(samples)
    if slope is not None:
        return slope
    start, end = samples[0].t_seconds, samples[-1].t_seconds
    if not tail:
        return _busy(samples)
    held = [_held(sample) for sample in tail]
    last = held[-1]
    if last is None or any(item is None for item in held):
        engine = samples[0].engine
        return LeakCheck(
            "unknown", LAWS.get(engine, "") if engine == "tgi" else "no KV figure is exported",
            start, end,
        )  # fmt: skip
    values = [item[0] for item in held if item is not None]
    missing, unit, text = last
    start, end = tail[0].t_seconds, tail[-1].t_seconds
    seconds = end - start
    check = LeakCheck("conserved", text, start, end, seconds, missing, unit)
    if min(values) <= 1e-4 and max(values) >= -1e-4:
        if not -1e-4 <= missing <= 1e-4:
            # It was all there once since the last request ended: something else comes and goes.
            check.state = "too_short"
        return check
    has_transfers = any(sample.transfer_descriptors_sum is not None for sample in tail)
    needed = LEASE_S if has_transfers else IDLE_S
    is_exact = tail[-1].evictable_tokens is not None and len(set(values)) == 1
    if is_exact and not has_transfers:
        # The engine's own sum of everything: a whole window of it is enough.
        needed = min(IDLE_S, samples[-1].t_seconds - samples[0].t_seconds)
    if (len(tail) < 3 and not is_exact) or seconds < needed:
        check.state, check.confidence = "too_short", 0.2
        check.arithmetic = f"{text}; idle for {seconds:,.0f} s, {needed:,.0f} s are needed"
        if len(tail) >= 3 and has_transfers:
            check.state, check.confidence = "lease", 0.4
            check.arithmetic = (
                f"{text}: a transfer's lease may hold it for up to {needed:,.0f} s, after that it is "
                "a leak"
            )
        return check
    check.state, check.confidence = "leak", 0.9
    if missing < 0:
        check.state = "double_free"
        size = block_size or tail[-1].block_size_tokens
        pages = f" = {-missing / size:,.0f} pages of {size:,.0f}" if size else ""
        check.arithmetic = f"{text}{pages} too many: given back twice (a double free)"
    return check


def _held(state: EngineSample) -> tuple[float, str, str] | None:
    """What an idle engine still holds, its unit and the sum; None when that is not known."""
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
        return missing, "tokens", text
    if state.clean_blocks is not None and state.cached_blocks is not None and state.num_blocks:
        return _held_blocks(state, state.num_blocks, state.clean_blocks, state.cached_blocks)
    if state.used_blocks is not None and state.num_blocks:
        text = f"{state.used_blocks:,.0f} of {state.num_blocks:,.0f} blocks held"
        return state.used_blocks, "blocks", text
    if state.kv_usage_share is not None:
        return state.kv_usage_share, "share", f"{state.kv_usage_share:.2%} of the pool held"
    return None


def _held_blocks(
    state: EngineSample, total: float, clean: float, cached: float
) -> tuple[float, str, str]:
    missing = total - clean - cached
    text = f"{total:,.0f} total - {clean:,.0f} free - {cached:,.0f} cached"
    if state.active_blocks is not None and missing - state.active_blocks == 1:
        missing -= 1
        text += " - 1 null block"
    text += f" = {missing:,.0f} blocks"
    if not missing and state.reserved_blocks:
        reserved = state.reserved_blocks
        return reserved, "blocks", f"{text}, but {reserved:,.0f} blocks are still reserved"
    return missing, "blocks", text


def _is_idle(state: EngineSample) -> bool:
    others = (state.waiting_requests, state.waiting_deferred_requests, state.swapped_requests)
    return state.running_requests == 0 and not any(others)


def _slope(samples: Sequence[EngineSample]) -> LeakCheck | None:
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
    return LeakCheck("leak", text, rows[0][2], rows[-1][2], 0.0, rows[-1][1], "blocks", 0.9)


def _busy(samples: Sequence[EngineSample]) -> LeakCheck:
    """Requests run or wait: nothing can be said of a leak."""
    start, end = samples[0].t_seconds, samples[-1].t_seconds
    last = samples[-1]
    if last.running_requests is None:
        return LeakCheck("unknown", "running requests are not exported", start, end)
    usage = [s.kv_usage_share for s in samples if s.kv_usage_share is not None]
    running = [s.running_requests or 0.0 for s in samples]
    check = LeakCheck("backlog", "", start, end)
    if len(usage) >= 2 and min(usage) >= 0.95 and min(running) >= 1:
        check.is_full = True
        check.arithmetic = (
            f"{min(usage):.0%} to {max(usage):.0%} KV with {min(running):,.0f} to {max(running):,.0f} "
            "running: a backlog, not a leak; a leak shows only when nothing runs"
        )
        return check
    facts = [f"{last.running_requests:,.0f} running"]
    if last.waiting_requests is not None:
        facts.append(f"{last.waiting_requests:,.0f} waiting")
    if last.swapped_requests:
        facts.append(f"{last.swapped_requests:,.0f} swapped")
    check.arithmetic = (
        f"{', '.join(facts)} at the end: a backlog, not a leak; a leak shows only when nothing runs"
    )
    return check


def _pins(samples: Sequence[EngineSample]) -> LeakCheck:
    """LMCache: pinned objects that only grow while evictions fail."""
    rows = [(s.t_seconds, s.failed_allocations_total) for s in samples]
    pinned = [s.pinned_objects for s in samples if s.pinned_objects is not None]
    check = LeakCheck("too_short", "", rows[0][0], rows[-1][0], 0.0, pinned[-1], "objects")
    seconds = rows[-1][0] - rows[0][0]
    if len(pinned) < 3 or seconds < IDLE_S:
        check.arithmetic = (
            f"{pinned[-1]:,.0f} pinned objects, looked at for {seconds:,.0f} s: {IDLE_S:,.0f} s are "
            "needed"
        )
        return check
    grows = all(b >= a for a, b in itertools.pairwise(pinned))
    first, last = rows[0][1], rows[-1][1]
    failed = None if first is None or last is None else last - first
    if failed is None or failed < 10 or not grows or pinned[-1] < 1:
        check.state = "conserved"
        check.arithmetic = f"pinned objects {pinned[0]:,.0f} to {pinned[-1]:,.0f}, " + (
            "failed evictions unknown" if failed is None else f"{failed:,.0f} evictions failed"
        )
        return check
    check.state, check.confidence = "leak", 0.8
    check.arithmetic = (
        f"pinned objects only grow, {pinned[0]:,.0f} to {pinned[-1]:,.0f}, and {failed:,.0f} "
        "evictions failed: pins are not given back"
    )
    return check


def holders(series: Iterable[tuple[str, float]]) -> list[Holder]:
    """Who holds blocks, from the series of kvcatch's page (``kvcatch_holdings_blocks``), most first."""
    from kvcatch.observe.prometheus import parse_labels

    found = []
    for name, value in series:
        if not name.startswith("kvcatch_holdings_blocks{") or not value > 0:
            continue
        parsed = parse_labels(name)
        if parsed is not None and parsed[1].get("by") == "owner":
            found.append(Holder(parsed[1].get("name", ""), value))
    return sorted(found, key=lambda holder: (-holder.blocks, holder.owner))


def look_inside(check: LeakCheck, inside: Mapping[str, Any]) -> None:
    """Add what kvcatch's plugin in the engine says: its own sum when idle, and which requests hold blocks.

    Args:
        check: Of the same engine; changed in place.
        inside: The plugin's page, checked (``inside.check_inside``).
    """
    conserved, rows = inside["conservation"], inside["holdings"]
    if conserved["is_idle"]:
        check.state = "conserved" if conserved["holds"] else "leak"
        check.confidence = 0.0 if conserved["holds"] else 0.95
        check.arithmetic = conserved["law"]
        blocks = inside["blocks"]
        check.held, check.unit = float(blocks["held"] + blocks["unaccounted"]), "blocks"
        rows = conserved["zombies"] or rows
    check.holders = [Holder(row["request"], float(row["blocks"])) for row in rows if row["blocks"]]
