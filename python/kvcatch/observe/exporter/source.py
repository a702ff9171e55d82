"""What an engine tells the exporter: plain numbers of one moment, taken between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvcatch.observe.exporter.histogram import HistogramValues

__all__ = ["Glance", "Numbers", "Source"]

Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One engine between two steps; the numbers agree with each other.

    Attributes:
        taken_at: ``time.monotonic()`` of the moment, in seconds.
        blocks: Blocks by state: ``free``, ``cached``, ``active``; with a null block they add up to one
            less than the pool.
        reserved_blocks: Promised and not handed out.
        pinned_blocks: Must not move or be evicted.
        available_blocks: free + cached - pinned cached - reserved.
        largest_run_blocks: Longest run that may be handed out.
        host_blocks: Blocks of the host pool by state, ``free`` and ``used``; empty where there is none.
        running: Branches with blocks.
        waiting: Branches without.
        swapped: Branches whose blocks lie in the host pool.
        waiting_by_gate: Of those that wait, by the gate that refused them when they were last looked at;
            ``not_looked_at`` for who stands behind those.
        head: Gate, required, available and unit of the refused head of the queue; None where none is.
        oldest_waiting_seconds: Since the arrival of who waits longest; None where nobody does.
        finished: Branches ended, by reason.
        rejected: Requests refused at the door, by gate.
        refused_steps: Steps that refused the head, by gate.
        preemptions: By kind.
        steps: Steps that computed something.
        step_tokens: Tokens computed in them.
        prompt_tokens: Prompt tokens computed, recomputed ones again.
        generated_tokens: Tokens sampled.
        looked_up_tokens: Prompt tokens looked up in the prefix cache at first admissions.
        hit_tokens: By tier, ``device`` and ``host``: what was not computed.
        compactions: Plans applied.
        blocks_moved: By them.
        step_seconds: Spent, by part of a step.
        histograms: Of requests, by the names of RequestHistograms.
    """

    taken_at: float
    blocks: Counts
    reserved_blocks: int
    pinned_blocks: int
    available_blocks: int
    largest_run_blocks: int
    host_blocks: Counts
    running: int
    waiting: int
    swapped: int
    waiting_by_gate: Counts
    head: tuple[str, int, int, str] | None
    oldest_waiting_seconds: float | None
    finished: Counts
    rejected: Counts
    refused_steps: Counts
    preemptions: Counts
    steps: int
    step_tokens: int
    prompt_tokens: int
    generated_tokens: int
    looked_up_tokens: int
    hit_tokens: Counts
    compactions: int
    blocks_moved: int
    step_seconds: Counts
    histograms: Mapping[str, HistogramValues] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Glance:
    """What changes with every step, read while the engine goes on; one step off at most.

    Attributes:
        used_share: Active and reserved blocks, of all blocks of the pool; 0 to 1.
        running: Branches with blocks.
        waiting: Branches without.
    """

    used_share: float
    running: int
    waiting: int


class Source(Protocol):
    """An engine that can be exported. kvcatch's engine is given one by its server."""

    @property
    def model_name(self) -> str:
        """What its clients call the model."""

    @property
    def limits(self) -> Mapping[str, float]:
        """What does not change: ``num_blocks``, ``block_size_tokens``, ``max_num_seqs`` and the like."""

    @property
    def info(self) -> Mapping[str, str]:
        """What does not change and is text: version, law, order."""

    @property
    def device(self) -> str:
        """Where the KV cache lies: ``cpu`` or ``cuda:0``."""

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of the KV cache; None where unknown."""

    def numbers(self) -> Numbers:
        """The engine now. Called on its own thread, between two steps; some microseconds."""

    def glance(self) -> Glance:
        """What changes with every step. Called on any thread, many times a second."""

    def pool_stats(self) -> Mapping[str, Any]:
        """``BlockPool.stats()``. Called on any thread; the pool's own lock keeps it whole."""

    def holdings(self, by: str) -> Sequence[Mapping[str, Any]]:
        """``BlockPool.holdings(by)``. Called on any thread."""
