"""A snapshot of kvcatch's pool: blocks of owners that are no longer alive, and pins past their deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.observe.leaks import LeakState
    from kvcatch.snapshot import Holding, Snapshot

__all__ = ["Lease", "SnapshotCheck", "check_snapshot"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A pin: blocks that a transfer reads.

    Attributes:
        owner: Who pinned them; None where it said nothing.
        blocks: How many.
        deadline_s: On the pool's clock; None where it has none: held until it is unpinned.
        overdue_s: Seconds past the deadline; None where the time or the deadline is not known.
    """

    owner: str | None
    blocks: int
    deadline_s: float | None
    overdue_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "owner": self.owner,
            "blocks": self.blocks,
            "deadline_seconds": self.deadline_s,
            "overdue_seconds": self.overdue_s,
        }


@dataclass(slots=True)
class SnapshotCheck:
    """What a snapshot says of leaks.

    Attributes:
        state: ``leak``, ``conserved``, or ``unknown`` where it cannot be told who is alive.
        arithmetic: The numbers.
        zombies: Holdings of owners that are not alive, most blocks first.
        unowned_blocks: Blocks of sequences without an owner: nobody can say whether they are alive.
        leases: Pins, those furthest past their deadline first.
    """

    state: LeakState
    arithmetic: str
    zombies: list[Holding] = field(default_factory=list)
    unowned_blocks: int = 0
    leases: list[Lease] = field(default_factory=list)

    @property
    def is_leak(self) -> bool:
        """Whether something is held by nobody who is alive, or longer than was promised."""
        return self.state == "leak"

    def to_dict(self) -> dict[str, Any]:
        """With units in the names, for JSON."""
        return {
            "state": self.state,
            "arithmetic": self.arithmetic,
            "zombies": [holding.to_dict() for holding in self.zombies],
            "unowned_blocks": self.unowned_blocks,
            "leases": [lease.to_dict() for lease in self.leases],
        }


def check_snapshot(
    snapshot: Snapshot, live: Iterable[str] | None = None, *, now_s: float | None = None
) -> SnapshotCheck:
    """Zombies and overdue pins of a snapshot, whose own sums were checked when it was read.

    Args:
        snapshot: The pool's.
        live: Owners that are alive; empty: the engine was idle, nobody is; None: not known.
        now_s: The pool's clock (``pool.now``) when the snapshot was taken; None: not known.
    """
    leases = [_lease(pin, now_s) for pin in snapshot.pins]
    leases.sort(key=lambda lease: (-(lease.overdue_s or 0.0), lease.owner or ""))
    overdue = [lease for lease in leases if (lease.overdue_s or 0.0) > 0]
    unowned = sum(s["blocks"] for s in snapshot.sequences if s["owner"] is None)
    blocks = snapshot.blocks
    law = " + ".join(f"{blocks[name]:,} {name}" for name in ("free", "cached", "active"))
    law += f"{' + 1 null' if blocks['null'] else ''} = {blocks['total']:,} blocks"
    zombies = [] if live is None else snapshot.zombies(live)
    facts = []
    if zombies:
        held = sum(holding.blocks for holding in zombies)
        own = sum(holding.own_blocks for holding in zombies)
        facts.append(
            f"{len(zombies):,} owners that are not alive hold {held:,} blocks, {own:,} of them alone"
        )
    if overdue:
        late = max(lease.overdue_s or 0.0 for lease in overdue)
        facts.append(
            f"{len(overdue):,} pins of {sum(lease.blocks for lease in overdue):,} blocks are past their "
            f"deadline, by up to {late:,.1f} s"
        )
    if facts:
        return SnapshotCheck("leak", f"{law}; {'; '.join(facts)}", zombies, unowned, leases)
    doubts = []
    if live is None and snapshot.sequences:
        owners = len(snapshot.holdings_by_owner())
        doubts.append(
            f"{owners:,} owners hold blocks: --live says who is alive, --live '' that nobody is"
        )
    elif unowned:
        doubts.append(f"{unowned:,} blocks of sequences without an owner")
    if now_s is None and any(lease.deadline_s is not None for lease in leases):
        doubts.append("pins have deadlines: --now gives the pool's clock (pool.now)")
    if doubts:
        return SnapshotCheck("unknown", f"{law}; {'; '.join(doubts)}", [], unowned, leases)
    return SnapshotCheck("conserved", f"{law}; nobody holds what is not his", [], unowned, leases)


def _lease(pin: dict[str, Any], now_s: float | None) -> Lease:
    deadline = pin.get("deadline")
    due = float(deadline) if isinstance(deadline, (int, float)) else None
    overdue = None if due is None or now_s is None else round(max(0.0, now_s - due), 3)
    owner = pin.get("owner")
    return Lease(owner if isinstance(owner, str) else None, pin["blocks"], due, overdue)
