"""What of a window is the same for every interval: limits, the usual prompt, who may run at most."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.observe.window import delta, queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.observe.limits import EngineVersion, Limits
    from kvcatch.observe.sample import EngineSample
    from kvcatch.observe.window import Interval

__all__ = ["PROMPT_HEAVY", "Context", "Room"]

PROMPT_HEAVY = 20.0
"""Prompt tokens per generated token from which steps are mostly prefill."""

_FULL_SHARE = 0.03
"""Free share under which a pool is full whatever a request needs."""

_LEAST_STEP_TOKENS = 128.0
"""A step of fewer tokens is filled by no budget that is in use: the smallest are 512."""

_ESTIMATE_CLIP = 4096.0
"""Output tokens of the head that SGLang counts at most."""

_ASSUMED_FULL, _ASSUMED_ROOMY = 0.05, 0.4
"""Free shares that decide where no length is known; such a verdict is marked as assumed."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the pool has left, against what requests need.

    Attributes:
        kind: ``full`` (not even a usual prompt fits), ``watermark`` (only the watermark keeps it out),
            ``tight`` (a usual prompt fits, the longest does not), ``roomy`` (the longest request the
            engine takes would fit) or ``unknown``.
        text: The arithmetic.
        is_assumed: No length is known; the share alone decided.
        free: Blocks or tokens that may be handed out; None when unknown.
        usual: What a usual prompt needs of them; None when unknown.
        longest: What the longest request needs; None when unknown.
        unit: ``blocks`` or ``tokens``.
        free_text: What is free alone; empty when that is not known.
    """

    kind: str
    text: str
    is_assumed: bool = False
    free: float | None = None
    usual: float | None = None
    longest: float | None = None
    unit: str = "blocks"
    free_text: str = ""


_UNKNOWN = Room("unknown", "KV usage unknown")


@dataclass(slots=True)
class Context:
    """Facts of one replica over a window.

    Attributes:
        version: Engine and version.
        limits: Given or read limits.
        cap: Sequences that may run at once; None when neither known nor inferred.
        is_cap_inferred: It is what was seen, not what was said.
        usual_prompt_tokens: Mean prompt of those admitted in the window; None when unknown.
        ceiling_tokens_per_s: What prompt throughput reaches; None when no prompt was computed.
        waits: Longest uninterrupted standstill by interval, seconds.
    """

    version: EngineVersion
    limits: Limits
    cap: float | None = None
    is_cap_inferred: bool = False
    usual_prompt_tokens: float | None = None
    ceiling_tokens_per_s: float | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[EngineSample],
        found: Sequence[Interval],
        version: EngineVersion,
        limits: Limits,
    ) -> Context:
        """Read the facts from a window."""
        self = cls(version, limits)
        self.cap = limits.max_num_seqs or _last(samples, "max_num_seqs")
        self.usual_prompt_tokens = _usual_prompt(samples)
        rates = sorted(item.prompt_tokens_per_s for item in found if item.prompt_tokens_per_s)
        if rates:
            self.ceiling_tokens_per_s = rates[int(0.9 * (len(rates) - 1))]
        if self.cap is None:
            self.cap = self._inferred_cap(found)
            self.is_cap_inferred = self.cap is not None
        return self

    def _inferred_cap(self, found: Sequence[Interval]) -> float | None:
        """Running stays at its highest value, and who ends is replaced, whenever somebody waits.

        Gauges are written when a step's finished requests are gone, so a look may find a slot or two that
        the next step fills: running is at the cap when it is within 5 % (or one) of it.
        """
        queued = [
            item
            for item in found
            if not item.is_restart
            and item.state.running_requests is not None
            and _undeferred(item.state) > 0
        ]
        top = max((self.counted(item.state) for item in found), default=0.0)
        if len(queued) < 3 or top < 1:
            return None
        slack = max(1.0, 0.05 * top)
        exactly = near = beside = replaced = 0.0
        lines = 0
        for item in queued:
            running = self.counted(item.state)
            weight = _undeferred(item.state) * item.seconds
            if running < top - slack or not item.generated_tokens_per_s:
                beside += weight
                continue
            if self.room(item.state).kind not in ("roomy", "unknown") and not item.finished:
                continue  # nobody ends and the longest request would not fit: nothing tells a cap
            near += weight
            exactly += weight if running == top else 0.0
            replaced += item.finished or 0.0
            lines += item.finished is None
        whole = near + beside
        if not near or near < 0.8 * whole or (not replaced and lines < 3):
            return None
        if exactly < (0.25 if replaced else 0.9) * whole:
            return None
        return None if self._is_prompt_heavy(queued) else top

    def _is_prompt_heavy(self, found: Sequence[Interval]) -> bool:
        prompt = sum((item.prompt_tokens_per_s or 0) * item.seconds for item in found)
        generated = sum((item.generated_tokens_per_s or 0) * item.seconds for item in found)
        steps = sum(item.steps or 0 for item in found)
        if self.limits.token_budget and steps:
            return (prompt + generated) / steps >= 0.5 * self.limits.token_budget
        return prompt >= PROMPT_HEAVY * max(generated, 1.0)

    def counted(self, state: EngineSample) -> float:
        """What counts against max_num_seqs: vLLM's deferred requests do, too."""
        deferred = state.waiting_deferred_requests if self.version.name == "vllm" else None
        return (state.running_requests or 0.0) + (deferred or 0.0)

    def is_at_cap(self, running: float) -> bool:
        """Whether as many run as may; an inferred cap allows for slots that the next step fills."""
        if self.cap is None:
            return False
        return running >= self.cap - (max(1.0, 0.05 * self.cap) if self.is_cap_inferred else 0.0)

    def flows(self, interval: Interval) -> bool:
        """Whether prompts are being computed at a good part of what the engine reaches."""
        rate = interval.prompt_tokens_per_s
        return bool(rate and self.ceiling_tokens_per_s and rate >= 0.3 * self.ceiling_tokens_per_s)

    def fills_steps(self, interval: Interval) -> bool:
        """Whether steps hold enough tokens for a step's budget to be what keeps requests out."""
        if not interval.steps or interval.prompt_tokens_per_s is None:
            return True  # a long step is under way, or steps are not counted
        rate = interval.prompt_tokens_per_s + (interval.generated_tokens_per_s or 0.0)
        least = min(_LEAST_STEP_TOKENS, 0.25 * (self.limits.token_budget or math.inf))
        return rate * interval.seconds / interval.steps >= least

    def all_may_be_longest(self, state: EngineSample) -> bool:
        """Whether the pool holds those that run and one more at the longest length: nothing to reserve."""
        concurrency = self.concurrency(state)
        return concurrency is not None and (state.running_requests or 0.0) + 1 <= concurrency

    def estimate(self, state: EngineSample, room: Room) -> str:
        """SGLang's reason to refuse a prompt that would fit; empty where there is none."""
        if self.version.name != "sglang" or room.free is None or self.usual_prompt_tokens is None:
            return ""
        size = (self._block_size(state) or 1.0) if room.unit == "blocks" else 1.0
        need = self.usual_prompt_tokens + _ESTIMATE_CLIP
        if room.free * size >= need and not state.new_token_ratio:
            return ""
        text = f"admission counts up to {_ESTIMATE_CLIP:,.0f} output tokens of the head"
        if state.new_token_ratio:
            text += (
                f" and {state.new_token_ratio:g} of the output that those running may still make"
            )
        return text

    def longest_tokens(self, state: EngineSample) -> float | None:
        """Tokens of the longest request that the engine takes."""
        return self.limits.max_model_len or state.max_model_len_tokens

    def concurrency(self, state: EngineSample) -> float | None:
        """Longest requests that fit into the empty pool; the smaller where two statements differ."""
        longest = self.longest_tokens(state)
        tokens = self.limits.pool_tokens or state.pool_tokens
        found = [
            value
            for value in (
                self.limits.max_concurrency or state.max_concurrency,
                tokens / longest if tokens and longest else None,
            )
            if value
        ]
        if not found and longest:
            blocks, size = self._blocks(state), self._block_size(state)
            if blocks and size:
                found.append((blocks - self._null) / math.ceil(longest / size))
        return min(found, default=None)

    @property
    def _null(self) -> int:
        return 1 if self.version.name == "vllm" and self.version.since(0, 8) is not False else 0

    def _blocks(self, state: EngineSample) -> float | None:
        return state.num_blocks or self.limits.num_blocks

    def _block_size(self, state: EngineSample) -> float | None:
        size = self.limits.block_size or state.block_size_tokens
        if size is None and self.version.name == "vllm":
            return 16.0
        return size

    def room(self, state: EngineSample) -> Room:
        """What is left against what is needed, in blocks where they are known, else in tokens."""
        usage, blocks, size = state.kv_usage_share, self._blocks(state), self._block_size(state)
        longest_tokens, usual_tokens = self.longest_tokens(state), self.usual_prompt_tokens
        tokens = self.limits.pool_tokens or state.pool_tokens
        free: float | None = None
        longest: float | None = None
        usual: float | None = None
        unit, total = "blocks", blocks
        if blocks:
            free = state.free_blocks
            if free is None and usage is not None:
                free = float(math.floor((1 - usage) * (blocks - self._null)))
            if size:
                longest = math.ceil(longest_tokens / size) if longest_tokens else None
                usual = math.ceil(usual_tokens / size) if usual_tokens else None
            concurrency = self.limits.max_concurrency or state.max_concurrency
            if concurrency and longest_tokens:
                # What the engine itself computed, over all groups of a hybrid model.
                longest = math.ceil(blocks / concurrency)
                if usual_tokens:
                    usual = math.ceil(usual_tokens * longest / longest_tokens)
        elif tokens:
            unit, total = "tokens", tokens
            free = tokens * (1 - usage) if usage is not None else None
            if state.available_tokens is not None:
                free = state.available_tokens + (state.evictable_tokens or 0)
            elif state.used_tokens is not None:
                free = tokens - state.used_tokens
            longest, usual = longest_tokens, usual_tokens
        if free is not None and total:
            return self._compare(free, total, usual, longest, unit, state)
        if usage is None:
            return _UNKNOWN
        return _by_share(1 - usage)

    def _compare(
        self,
        free: float,
        total: float,
        usual: float | None,
        longest: float | None,
        unit: str,
        state: EngineSample,
    ) -> Room:
        mark = self._watermark(total) if state.running_requests else 0
        free_text = f"{max(0.0, free):,.0f} of {total:,.0f} {unit} free"
        if free < 0:
            text = f"{total - free:,.0f} {unit} in use > {total:,.0f} there are: {-free:,.0f} over"
            return Room("full", text, False, free, usual, longest, unit)
        kept = (free, usual, longest, unit, free_text)
        if usual is not None and free < usual:
            text = f"{free_text} < {usual:,.0f} for the usual prompt"
            if self.usual_prompt_tokens:
                text += f" of {self.usual_prompt_tokens:,.0f} tokens"
            return Room("full", text, False, *kept)
        if free < _FULL_SHARE * total:
            return Room("full", f"{free_text}: full", usual is None, *kept)
        if usual is not None and mark and free < usual + mark:
            text = f"{free_text} < {usual:,.0f} for the usual prompt + {mark:,.0f} watermark"
            return Room("watermark", text, False, *kept)
        if longest is not None and free >= longest + mark:
            text = f"{free_text} >= {longest:,.0f} for the longest request: KV keeps nobody out"
            return Room("roomy", text, False, *kept)
        if usual is None and longest is None:
            share = _by_share(free / total)
            return Room(share.kind, f"{free_text}; lengths unknown", True, *kept)
        if longest is None and free >= 0.5 * total:
            return Room("roomy", f"{free_text}: half the pool", True, *kept)
        text = free_text
        if usual is not None:
            text += f" >= {usual:,.0f} for the usual prompt"
        if longest is not None:
            text += f", < {longest:,.0f} for the longest request"
        return Room("tight", text, False, *kept)

    def _watermark(self, total: float) -> int:
        if self.limits.watermark:
            return int(self.limits.watermark * total)
        if self.version.name == "vllm" and self.version.since(0, 8) is False:
            return int(0.01 * total)  # V0's fixed watermark
        return 0


def _by_share(free: float) -> Room:
    text = f"{free:.1%} of the pool free; lengths unknown"
    if free < _ASSUMED_FULL:
        return Room("full", text, True)
    return Room("roomy" if free >= _ASSUMED_ROOMY else "tight", text, True)


def _undeferred(state: EngineSample) -> float:
    return (queue(state) or 0.0) - (state.waiting_deferred_requests or 0.0)


def _last(samples: Sequence[EngineSample], name: str) -> float | None:
    for sample in reversed(samples):
        if (value := getattr(sample, name)) is not None:
            return float(value)
    return None


def _usual_prompt(samples: Sequence[EngineSample]) -> float | None:
    tokens = requests = 0.0
    for before, after in itertools.pairwise(samples):
        more, started = (
            delta(before, after, name) for name in ("prompt_tokens_total", "started_total")
        )
        if more is not None and started is not None:
            tokens += more
            requests += started
    if requests and tokens:
        return tokens / requests
    last = samples[-1] if samples else None
    if last and last.prompt_tokens_total and last.started_total:
        return last.prompt_tokens_total / last.started_total
    return None
