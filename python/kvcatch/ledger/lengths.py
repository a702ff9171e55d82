"""How long requests are: one length, or a histogram of them from a CSV."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

__all__ = ["LengthDistribution", "prefill_steps"]

MAX_LENGTH = 2**40
MAX_ROWS = 5_000_000
MAX_LINE = 4096
"""Characters of a row; a longer one, and a device without an end, is no CSV of lengths."""


def prefill_steps(prompt_tokens: int, max_num_batched_tokens: int) -> int:
    """Steps a prompt fills alone when each takes at most ``max_num_batched_tokens``.

    Raises:
        InvalidArgument: a number below 1.
    """
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise InvalidArgument(f"{name} = {value}: must be 1 or more")
    return -(-prompt_tokens // max_num_batched_tokens)


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InvalidArgument(f"{path}:{number}: a line of {MAX_LINE} characters or more")
        yield line


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Total lengths (prompt and output) of requests, each with its weight.

    Attributes:
        lengths: Lengths in tokens, ascending, no two alike.
        weights: How many requests have each.
        source: Where it came from.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    source: str = "given"

    @classmethod
    def of(cls, pairs: Iterable[tuple[object, float]], source: str = "given") -> LengthDistribution:
        """From (length, weight) pairs in any order.

        Raises:
            InvalidArgument: no pair, a length below 1, a weight below 0, or none above it.
        """
        counts: dict[int, float] = {}
        for length, weight in pairs:
            if (
                isinstance(length, bool)
                or not isinstance(length, int)
                or not 1 <= length <= MAX_LENGTH
            ):
                raise InvalidArgument(
                    f"{source}: length {length!r}: not a whole number of 1 token or more"
                )
            if not 0 <= weight < math.inf:
                raise InvalidArgument(
                    f"{source}: weight {weight!r} of length {length}: not a number of 0 or more"
                )
            counts[length] = counts.get(length, 0.0) + weight
        counts = {length: weight for length, weight in sorted(counts.items()) if weight > 0}
        if not counts or not math.isfinite(sum(counts.values())):
            raise InvalidArgument(f"{source}: no lengths")
        return cls(tuple(counts), tuple(counts.values()), source)

    @classmethod
    def one(cls, length: int) -> LengthDistribution:
        """Every request has the same length."""
        return cls.of([(length, 1.0)], f"mean length {length}")

    @classmethod
    def read(cls, path: Path) -> LengthDistribution:
        """A CSV: one length a row, or ``length,count``; a first row of words is a header.

        Raises:
            InvalidArgument: a row that is neither; the message names file and line.
        """
        pairs = []
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for number, row in enumerate(csv.reader(_lines(path, file)), 1):
                if number > MAX_ROWS:
                    raise InvalidArgument(f"{path}: more than {MAX_ROWS} rows")
                cells = [cell.strip() for cell in row]
                if not any(cells) or (
                    number == 1 and not cells[0][:1].isdigit() and cells[0][:1] != "-"
                ):
                    continue
                pairs.append(cls._pair(path, number, cells))
        return cls.of(pairs, str(path))

    @staticmethod
    def _pair(path: Path, number: int, cells: list[str]) -> tuple[int, float]:
        where = f"{path}:{number}"
        if len(cells) > 2:
            raise InvalidArgument(
                f"{where}: {len(cells)} columns; expected a length, or a length and a count"
            )
        try:
            length = int(cells[0])
            weight = float(cells[1]) if len(cells) == 2 else 1.0
        except ValueError:
            raise InvalidArgument(
                f"{where}: {','.join(cells)[:60]!r}: not a length or a length and a count"
            ) from None
        if not 1 <= length <= MAX_LENGTH or not 0 <= weight < math.inf:
            raise InvalidArgument(f"{where}: {','.join(cells)[:60]!r}: out of range")
        return length, weight

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weights)

    def mean(self, of: Callable[[int], float] = float) -> float:
        """The mean of a function of the length; of the length itself without one."""
        pairs = zip(self.lengths, self.weights, strict=True)
        return math.fsum(of(length) * weight for length, weight in pairs) / self.total

    def percentile(self, percent: float) -> int:
        """The smallest length that at least ``percent`` of the requests do not exceed."""
        wanted = self.total * percent / 100
        for length, reached in zip(self.lengths, accumulate(self.weights), strict=True):
            if reached >= wanted * (1 - 1e-12):
                return length
        return self.lengths[-1]

    def share_over(self, limit: int) -> float:
        """Share of the requests longer than ``limit`` tokens."""
        pairs = zip(self.lengths, self.weights, strict=True)
        return math.fsum(weight for length, weight in pairs if length > limit) / self.total

    def up_to(self, limit: int) -> LengthDistribution | None:
        """Only the requests of at most ``limit`` tokens; None where there is none."""
        kept = [pair for pair in zip(self.lengths, self.weights, strict=True) if pair[0] <= limit]
        return LengthDistribution.of(kept, self.source) if kept else None
