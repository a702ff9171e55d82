"""Who holds the blocks, as series whose number is bounded: the largest by name, the rest as one.

A name is a request's or a tenant's, so there is no end of them. Per look at most ``top_k`` names and
``other``; over time a name that was not seen before has to be let in, and so many of these are let in per
hour. Whoever is not stays in ``other``: the sum is right whatever happens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["OTHER", "Holding", "NameGate", "top_holdings"]

OTHER = "other"
MAX_NAME = 128
"""Characters of a name that become a label; a longer one is cut."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner or tag value holds.

    Attributes:
        name: Which; ``other`` for all that are not named, empty for sequences without this tag.
        blocks: Blocks in its tables; one that several share counts for each.
        reserved_blocks: Promised to it.
        sequences: How many.
    """

    name: str
    blocks: int
    reserved_blocks: int
    sequences: int


class NameGate:
    """Bounds how many names become labels over time.

    Args:
        burst: New names that are let in at once.
        per_hour: New names that are let in per hour after that.
        remembered: Names known as let in, the least recently seen forgotten first.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        burst: int = 100,
        per_hour: float = 100.0,
        remembered: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst, self._per_second, self._remembered = burst, per_hour / 3600, remembered
        self._clock = clock
        self._left, self._at = float(burst), clock()
        self._known: dict[str, None] = {}

    def lets_in(self, name: str) -> bool:
        """Whether a name may be a label."""
        if name in self._known:
            self._known[name] = self._known.pop(name)
            return True
        now = self._clock()
        self._left = min(float(self._burst), self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        self._known[name] = None
        if len(self._known) > self._remembered:
            del self._known[next(iter(self._known))]
        return True


def top_holdings(
    rows: Iterable[Mapping[str, Any]], by: str, top_k: int, gate: NameGate
) -> list[Holding]:
    """The ``top_k`` largest holders by name and all others as one; nothing where no row has a name.

    Args:
        rows: Of ``BlockPool.holdings(by)``, largest first.
        by: ``owner`` or a tag.
        top_k: Most names.
        gate: Bounds names over time.
    """
    named: dict[str, Holding] = {}
    rest = [0, 0, 0]
    has_name = False
    for row in rows:
        name, parts = row[by], (row["blocks"], row["reserved_blocks"], row["sequences"])
        has_name = has_name or name is not None
        label = "" if name is None else str(name)[:MAX_NAME]
        # Only a name that is not yet taken: two long ones may be equal once they are cut.
        if len(named) < top_k and label not in named and label != OTHER and gate.lets_in(label):
            named[label] = Holding(label, *parts)
        else:
            rest = [have + more for have, more in zip(rest, parts, strict=True)]
    if not has_name:
        return []
    return [*named.values(), *([Holding(OTHER, *rest)] if any(rest) else [])]
