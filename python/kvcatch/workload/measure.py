"""What a replay measures beside time: runs, the least possible runs, samples of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvcatch._core import BlockPool

MAX_SAMPLES = 200
"""A replay is sampled at most this many times, evenly over its steps."""


def quantile(values: Sequence[int], q: float) -> int:
    """The value that a share ``q`` of the sorted values does not exceed (0 for no values)."""
    if not values:
        return 0
    return sorted(values)[int((len(values) - 1) * q)]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean (0 for no values)."""
    return sum(values) / len(values) if values else 0.0


def histogram(values: Sequence[int]) -> dict[str, int]:
    """How many values fall into each power-of-two bucket: ``1``, ``2-3``, ``4-7``..."""
    buckets: dict[int, int] = {}
    for value in values:
        exponent = value.bit_length() - 1
        buckets[exponent] = buckets.get(exponent, 0) + 1
    return {bucket_name(exponent): buckets[exponent] for exponent in sorted(buckets)}


def bucket_name(exponent: int) -> str:
    """Name of the bucket of lengths from ``2**exponent`` to ``2**(exponent + 1) - 1``."""
    low = 1 << exponent
    return str(low) if exponent == 0 else f"{low}-{2 * low - 1}"


@dataclass(slots=True)
class Samples:
    """Snapshots of a pool, thinned so that there are never more than ``MAX_SAMPLES``."""

    every: int = 1
    rows: list[dict[str, Any]] = field(default_factory=list)

    def is_due(self, step: int) -> bool:
        """Whether this step is one to look at."""
        return step % self.every == 0

    def take(self, step: int, pool: BlockPool) -> None:
        """Add a sample; every other one is dropped once there are too many."""
        state = pool.snapshot()
        self.rows.append(
            {
                "step": step,
                "free": state["blocks"]["free"],
                "cached": state["blocks"]["cached"],
                "active": state["blocks"]["active"],
                "largest_free_run": state["runs"]["largest_run"],
                "free_run_histogram": state["runs"]["free_run_histogram"],
                "pages_pinned": state["pages"]["pinned"],
                "pages_total": state["pages"]["total"],
            }
        )
        if len(self.rows) >= MAX_SAMPLES:
            self.every *= 2
            self.rows = [row for row in self.rows if row["step"] % self.every == 0]

    def mean(self, name: str) -> float:
        """Mean of one column over the samples."""
        return mean([row[name] for row in self.rows])


class LeastRuns:
    """The fewest runs each sequence could have had, given which blocks it shared with others.

    Every block gets an ideal address. The blocks that a sequence does not share follow one another
    on an endless line; they follow the shared prefix directly when the address behind it is not
    held by another sequence's block, and start a line of their own when it is. A prefix that grew
    in several such pieces stays in pieces. The runs counted over these addresses are forced by
    sharing alone: no placement can do better while those blocks stay where they are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._address = np.full(num_blocks, -1, dtype=np.int64)
        self._lines: list[npt.NDArray[np.int32]] = []

    def admit(self, blocks: npt.NDArray[np.int32], shared: int) -> None:
        """A sequence was admitted with ``blocks``, of which the first ``shared`` were hit."""
        self._extend(blocks, shared)

    def finish(self, blocks: npt.NDArray[np.int32], known: int) -> int:
        """A sequence ends, having grown by the blocks from ``known`` on: its least runs."""
        self._extend(blocks, known)
        addresses = self._address[blocks]
        return 1 + int(np.count_nonzero(np.diff(addresses) != 1))

    def _extend(self, blocks: npt.NDArray[np.int32], known: int) -> None:
        new = blocks[known:]
        if not len(new):
            return
        line, place = len(self._lines), 0
        if known:
            behind = int(self._address[blocks[known - 1]]) + 1
            before_line, before_place = behind >> 32, behind & 0xFFFF_FFFF
            held = self._lines[before_line]
            if before_place >= len(held) or self._address[held[before_place]] != behind:
                line, place = before_line, before_place
        if line == len(self._lines):
            self._lines.append(new)
        else:
            self._lines[line] = np.concatenate([self._lines[line][:place], new])
        begin = (line << 32) + place
        self._address[new] = np.arange(begin, begin + len(new))
