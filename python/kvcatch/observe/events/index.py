"""What is resident: a tree of block hashes kept up from events, with where blocks lie, how long, and how shared.

Events carry hashes and parents, so a chain of blocks is a path from a root. A second block under one parent
means that two requests share everything up to that parent: hits show as branches, for an engine publishes no
event when it finds a block (vLLM does for requests that ask for full reports: ``reused_blocks``).
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.observe.events.wire import Cleared, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.observe.events.wire import Batch, BlockHash

__all__ = ["BlockIndex", "SharedPrefix"]

UNSTATED = "unstated"
"""The medium of an event whose version names none: the device."""

MAX_BLOCKS = 4_000_000
MAX_GONE = 200_000
MAX_REQUESTS = 10_000
_SAMPLES = 20_000

_Key = tuple[int, "BlockHash"]


class _Node:
    __slots__ = ("block_size", "branches", "depth", "is_rooted", "lora", "parent", "places")

    def __init__(
        self, parent: _Key | None, depth: int, block_size: int, lora: str | None, *, is_rooted: bool
    ) -> None:
        self.parent = parent
        self.depth = depth  # blocks from the first known one, itself counted
        self.block_size = block_size
        self.lora = lora
        self.is_rooted = is_rooted
        self.branches = 0  # different continuations ever stored under it
        self.places: dict[str, float] = {}  # medium -> when it was stored there


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several stored chains have in common.

    Attributes:
        tokens: Its length; at least so many where its beginning was not seen.
        branches: Different continuations stored under it so far.
        resident_branches: Of those, the ones that are there now.
        lora: Adapter it belongs to.
        is_rooted: Its beginning was seen.
    """

    tokens: int
    branches: int
    resident_branches: int
    lora: str | None
    is_rooted: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "branches": self.branches,
            "resident_branches": self.resident_branches,
            "lora": self.lora,
            "is_rooted": self.is_rooted,
        }


@dataclass(slots=True)
class _Request:
    blocks: int = 0
    runs: int = 0
    last_block: int | None = None


class BlockIndex:
    """The index of one publisher's rank.

    Attributes:
        counts: Events by type, and blocks by what became of them: ``stored_blocks`` (new on a medium),
            ``reused_blocks`` (reported though resident), ``restored_blocks`` (stored again after they were
            removed: evicted too early), ``removed_blocks``, ``unmatched_blocks`` (removed and not known).
            Chains: ``new_chains``, ``extended_chains`` (stored under a resident block without a continuation),
            ``branched_chains`` (under one that had another), ``orphaned_chains`` (under one not known).
        first_s: Time of the first batch.
        last_s: Time of the last.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._nodes: dict[_Key, _Node] = {}
        # resident blocks by their parent, which need not be resident itself
        self._children: Counter[_Key] = Counter()
        self._blocks: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._gone: OrderedDict[_Key, float] = OrderedDict()
        self._lifetimes: deque[float] = deque(maxlen=_SAMPLES)
        self._gaps: deque[float] = deque(maxlen=_SAMPLES)
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._has_ids = False

    def __len__(self) -> int:
        """Blocks that can be found, each once however many media hold it."""
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        """Whether a hash, or a (group, hash), can be found on any medium."""
        return (key if isinstance(key, tuple) else (0, key)) in self._nodes

    def __repr__(self) -> str:
        where = ", ".join(f"{n:,} {medium}" for medium, n in sorted(self._blocks.items()))
        return f"<BlockIndex {len(self):,} blocks{': ' if where else ''}{where}>"

    def apply(self, batch: Batch) -> None:
        """Take in a batch."""
        if self.first_s is None:
            self.first_s = batch.t_seconds
        self.last_s = batch.t_seconds
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event, batch.t_seconds)
            elif isinstance(event, Removed):
                self._remove(event, batch.t_seconds)
            else:
                assert isinstance(event, Cleared)
                self.counts["cleared"] += 1
                self.clear()

    def clear(self) -> None:
        """Forget what is resident (the engine cleared its cache or was restarted); counts stay."""
        self._nodes.clear()
        self._children.clear()
        self._blocks.clear()
        self._tokens.clear()
        self._gone.clear()

    # --- stored -------------------------------------------------------------------------------------

    def _store(self, event: Stored, at: float) -> None:
        counts, nodes = self.counts, self._nodes
        counts["stored"] += 1
        group, medium = event.group or 0, event.medium or UNSTATED
        parent = None if event.parent is None else (group, event.parent)
        above = None if parent is None else nodes.get(parent)
        depth = above.depth if above is not None else 0
        rooted = above.is_rooted if above is not None else parent is None
        is_first = True
        for value in event.hashes:
            key = (group, value)
            node = nodes.get(key)
            if node is None:
                if len(nodes) >= MAX_BLOCKS:
                    counts["dropped_blocks"] += 1
                    continue
                node = nodes[key] = _Node(
                    parent, depth + 1, event.block_size, event.lora, is_rooted=rooted
                )
                if is_first:
                    self._count_chain(event, above)
                node.branches = self._children.get(key, 0)
                if parent is not None:
                    self._children[parent] += 1
                if above is not None:
                    above.branches += 1
                removed_at = self._gone.pop(key, None)
                if removed_at is not None:
                    counts["restored_blocks"] += 1
                    self._gaps.append(at - removed_at)
            is_first = False
            if medium in node.places:
                counts["reused_blocks"] += 1
            else:
                node.places[medium] = at
                counts["stored_blocks"] += 1
                self._blocks[medium] += 1
                self._tokens[medium] += node.block_size
            parent, above, depth, rooted = key, node, node.depth, node.is_rooted
        if event.request is not None:
            self._of_request(event)

    def _count_chain(self, event: Stored, above: _Node | None) -> None:
        if event.parent is None:
            self.counts["new_chains"] += 1
        elif above is None:
            self.counts["orphaned_chains"] += 1
        elif above.branches:
            self.counts["branched_chains"] += 1
        else:
            self.counts["extended_chains"] += 1

    def _of_request(self, event: Stored) -> None:
        assert event.request is not None
        known = self._requests.get(event.request)
        if known is None:
            known = self._requests[event.request] = _Request()
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)
        known.blocks += len(event.hashes)
        for block in event.block_ids:
            self._has_ids = True
            if known.last_block is None or block != known.last_block + 1:
                known.runs += 1
            known.last_block = block

    # --- removed ------------------------------------------------------------------------------------

    def _remove(self, event: Removed, at: float) -> None:
        self.counts["removed"] += 1
        group = event.group or 0
        for value in event.hashes:
            key = (group, value)
            node = self._nodes.get(key)
            medium = self._place(node, event.medium)
            if node is None or medium is None:
                self.counts["unmatched_blocks"] += 1
                continue
            self._lifetimes.append(at - node.places.pop(medium))
            self.counts["removed_blocks"] += 1
            self._blocks[medium] -= 1
            self._tokens[medium] -= node.block_size
            if node.places:
                continue
            del self._nodes[key]
            if not node.branches:
                self.counts["removed_unextended_blocks"] += 1
            if node.parent is not None:
                self._children[node.parent] -= 1
                if not self._children[node.parent]:
                    del self._children[node.parent]
            self._gone[key] = at
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)

    @staticmethod
    def _place(node: _Node | None, medium: str | None) -> str | None:
        """Which of a block's places is meant; a medium that only one of two events names still matches."""
        if node is None:
            return None
        if medium is not None and medium in node.places:
            return medium
        if UNSTATED in node.places:
            return UNSTATED
        return next(iter(node.places)) if medium is None and len(node.places) == 1 else None

    # --- what it says -------------------------------------------------------------------------------

    @property
    def resident_blocks(self) -> dict[str, int]:
        """Blocks by medium."""
        return {medium: n for medium, n in sorted(self._blocks.items()) if n}

    @property
    def resident_tokens(self) -> dict[str, int]:
        """Tokens by medium."""
        return {medium: n for medium, n in sorted(self._tokens.items()) if n}

    def shared_prefixes(self, most: int = 10) -> list[SharedPrefix]:
        """Resident prefixes with two or more continuations, those that save most tokens first.

        A prefix of ``tokens`` tokens under ``branches`` continuations was computed once instead of ``branches``
        times.
        """
        best: Iterable[tuple[_Key, _Node]] = heapq.nlargest(
            most,
            (item for item in self._nodes.items() if item[1].branches >= 2),
            key=lambda item: (item[1].branches - 1) * item[1].depth * item[1].block_size,
        )
        return [
            SharedPrefix(
                node.depth * node.block_size,
                node.branches,
                self._children.get(key, 0),
                node.lora,
                node.is_rooted,
            )
            for key, node in best
        ]

    def structure(self) -> dict[str, int]:
        """The shape of the resident tree.

        ``roots`` have no resident parent, ``leaves`` no resident continuation, ``branch_points`` two or more;
        ``shared_blocks`` lie on the way to a branch point, itself counted.
        """
        nodes = self._nodes
        shared: set[_Key] = set()
        roots = leaves = points = deepest = 0
        for key, node in nodes.items():
            roots += node.parent is None or node.parent not in nodes
            children = self._children.get(key, 0)
            leaves += not children
            deepest = max(deepest, node.depth)
            if children < 2:
                continue
            points += 1
            at: _Key | None = key
            while at is not None and at not in shared and at in nodes:
                shared.add(at)
                at = nodes[at].parent
        return {
            "roots": roots,
            "leaves": leaves,
            "branch_points": points,
            "shared_blocks": len(shared),
            "deepest_blocks": deepest,
        }

    def requests(self) -> dict[str, Any] | None:
        """Blocks and runs per request, where events name requests; None where they do not."""
        if not self._requests:
            return None
        rows = list(self._requests.values())
        facts: dict[str, Any] = {
            "requests": len(rows),
            "blocks_per_request": sum(row.blocks for row in rows) / len(rows),
            "runs_per_request": None,
        }
        if self._has_ids:
            with_ids = [row for row in rows if row.runs]
            facts["runs_per_request"] = sum(row.runs for row in with_ids) / len(with_ids)
        return facts

    def to_dict(self, most: int = 10) -> dict[str, Any]:
        """All of it with units in the names, for JSON."""
        return {
            "seconds": (self.last_s or 0.0) - (self.first_s or 0.0),
            "blocks": len(self),
            "resident_blocks": self.resident_blocks,
            "resident_tokens": self.resident_tokens,
            "structure": self.structure(),
            "counts": dict(sorted(self.counts.items())),
            "lifetime_seconds": _spread(self._lifetimes),
            "restored_after_seconds": _spread(self._gaps),
            "shared_prefixes": [item.to_dict() for item in self.shared_prefixes(most)],
            "requests": self.requests(),
        }


def _spread(values: deque[float]) -> dict[str, float] | None:
    """Median and 90 % quantile of the newest values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 3),
    }
