"""When moving blocks between two steps pays, by the plan's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcatch import BlockPool, CompactionPlan

__all__ = ["CompactionRule", "Paid"]


@dataclass(frozen=True, slots=True)
class Paid:
    """A plan that pays, with the two sides of the comparison in seconds (or blocks for pages)."""

    plan: CompactionPlan
    gain: float
    cost: float


@dataclass(frozen=True, slots=True)
class CompactionRule:
    """Looks for a plan every ``every`` steps and keeps it when it gains more than it costs.

    ``runs``: each run less saves one descriptor (one copy call) of the next transfer or swap of those
    sequences: gain ``(runs before - runs after) * descriptor_seconds``, cost the plan's predicted copy
    time. ``pages``: each page emptied gives back ``blocks_per_page`` blocks: gain half of them, cost the
    blocks moved.

    Attributes:
        objective: ``runs`` or ``pages``.
        bytes_per_block: of the pool.
        bandwidth: bytes per second a copy reads and writes together; measured, not assumed.
        descriptor_seconds: cost of one more copy call or transfer descriptor.
        every: steps between two looks.
        max_moves: blocks moved between two steps at most, so that no step waits long.
    """

    objective: str
    bytes_per_block: int
    bandwidth: float
    descriptor_seconds: float = 5e-6
    every: int = 16
    max_moves: int = 64

    def plan(self, pool: BlockPool) -> Paid | None:
        """A plan that pays now; ``None`` when there is none."""
        plan = pool.plan_compaction(
            self.objective,  # type: ignore[arg-type]
            max_moves=self.max_moves,
            bytes_per_block=self.bytes_per_block,
            bandwidth=self.bandwidth,
        )
        if not plan.num_moves:
            return None
        if self.objective == "runs":
            gain = (plan.runs_before - plan.runs_after) * self.descriptor_seconds
            cost = plan.seconds or 0.0
        else:
            emptied = plan.empty_pages_after - plan.empty_pages_before
            gain, cost = emptied * pool.blocks_per_page / 2, float(plan.num_moves)
        return Paid(plan, gain, cost) if gain > cost else None
