"""The engine's settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvcatch import evictions, placements
from kvcatch.errors import InvalidArgument
from kvcatch.laws import OWN_LAWS

__all__ = ["EngineConfig", "Preemption", "QueueOrder", "Victim"]

QueueOrder = Literal["fcfs", "priority", "cache_aware"]
Preemption = Literal["recompute", "swap"]
Victim = Literal["newest", "lowest_priority", "cheapest"]


MOST = (1 << 31) - 1
"""Of any count: block tables hold 32-bit numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and policies of the engine.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: tokens one step may compute (the token budget).
        max_model_len: most tokens of a request, prompt and output.
        long_prefill_threshold: most prompt tokens of one request per step; 0 for no such limit.
        law: admission law: ``full_prompt``, ``first_chunk``, ``worst_case`` or ``estimate``.
        watermark: share of the pool that an admission leaves available while something runs.
        order: of the waiting queue: ``fcfs``; ``priority`` (lowest number, then arrival);
            ``cache_aware`` (longest cached prefix among the first ``window``).
        window: requests that ``cache_aware`` looks at.
        max_passed_over: admissions of requests behind one before it goes first.
        preemption: ``recompute`` frees the blocks, ``swap`` copies them to the host pool.
        victim: who is preempted: ``newest``, ``lowest_priority`` or ``cheapest`` (fewest computed
            tokens). The oldest is never one, so that something always finishes.
        host_blocks: blocks of the host pool that ``swap`` copies to; when it is full a victim is
            recomputed.
        placement: which free block is handed out.
        eviction: which cached block is given up.
        prefix_cache: share the blocks of equal prefixes.
        compaction: ``off``, or between steps a plan of this objective when it pays.
        seed: of what the requests leave open.

    Raises:
        InvalidArgument: a value that cannot be, or two that contradict each other.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int
    long_prefill_threshold: int = 0
    law: str = "full_prompt"
    watermark: float = 0.0
    order: QueueOrder = "fcfs"
    window: int = 64
    max_passed_over: int = 16
    preemption: Preemption = "recompute"
    victim: Victim = "newest"
    host_blocks: int = 0
    placement: str = "bitmap"
    eviction: str = "lru"
    prefix_cache: bool = True
    compaction: Literal["off", "runs", "pages"] = "off"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            ("num_blocks", 1),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("long_prefill_threshold", 0),
            ("window", 1),
            ("max_passed_over", 1),
            ("host_blocks", 0),
        )
        for name, least in counts:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
                raise InvalidArgument(
                    f"{name} = {value!r}: must be a whole number from {least} to {MOST}"
                )
        names = (
            ("law", tuple(OWN_LAWS)),
            ("order", get_args(QueueOrder)),
            ("preemption", get_args(Preemption)),
            ("victim", get_args(Victim)),
            ("compaction", ("off", "runs", "pages")),
            ("placement", tuple(placements())),
            ("eviction", tuple(evictions())),
        )
        for name, known in names:
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"{name} = {getattr(self, name)!r}: must be one of {', '.join(known)}"
                )
        if not 0 <= self.watermark < 1:
            raise InvalidArgument(f"watermark = {self.watermark}: must be at least 0 and below 1")
        if self.max_model_len > self.capacity:
            raise InvalidArgument(
                f"max_model_len = {self.max_model_len}: the pool holds {self.num_blocks} blocks of"
                f" {self.block_size} = {self.capacity} tokens; lower it or add blocks"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InvalidArgument(
                f"max_num_seqs = {self.max_num_seqs}: more than max_num_batched_tokens"
                f" {self.max_num_batched_tokens}, of which each sequence takes at least one per step"
            )
        if self.preemption == "swap" and not self.host_blocks:
            raise InvalidArgument('preemption = "swap": needs host_blocks')

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_blocks * self.block_size
