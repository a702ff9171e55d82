"""What is kept of one replica: a bounded table, one row a sample, and figures of any stretch of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["AT", "COLUMNS", "Budget", "History", "between", "bins", "figures", "thin"]

COLUMNS = (
    "t_seconds",
    "kv_usage_share",
    "running_requests",
    "waiting_requests",
    "waiting_capacity_requests",
    "waiting_deferred_requests",
    "available",
    "longest",
    "head",
    "hit_share",
    "preemptions_total",
    "ttft_seconds_sum",
    "started_total",
    "prefix_hit_tokens_total",
    "prefix_query_tokens_total",
    "prompt_tokens_total",
    "generated_tokens_total",
    "restarts",
)
"""Columns of the table. ``available``, ``longest`` and ``head`` (what the queue's head needs, where
the engine says so) are blocks, or tokens where no blocks are known;
``restarts`` counts the restarts seen so far. What is unknown is NaN, in the table alone."""

AT = {name: index for index, name in enumerate(COLUMNS)}
"""Number of each column."""

_FIRST_ROWS = 64
_LEAST_ROWS = 240


class Budget:
    """How many rows all tables of a fleet may still take; one per fleet.

    Args:
        rows: Most rows together.
    """

    def __init__(self, rows: int) -> None:
        self._left = rows

    def take(self, rows: int) -> bool:
        """Take so many; False when there are not so many left."""
        if rows > self._left:
            return False
        self._left -= rows
        return True

    def give(self, rows: int) -> None:
        """Give back."""
        self._left += rows


class History:
    """The last rows of one replica, oldest first. Grows up to ``most_rows``, or until the budget is used up.

    Args:
        most_rows: Rows kept at most.
        budget: Shared with the other tables.
    """

    def __init__(self, most_rows: int, budget: Budget) -> None:
        self._most, self._budget = max(most_rows, 2), budget
        self._start = self._end = 0
        self._kept = min(self._most, _FIRST_ROWS)
        self._taken = self._kept if budget.take(self._kept) else 0
        self._data = self._table(self._kept)

    @staticmethod
    def _table(kept: int) -> NDArray[np.float64]:
        # A quarter more than is kept: rows move to the front once in so many appends.
        return np.empty((kept + kept // 4 + 1, len(COLUMNS)))

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rows(self) -> NDArray[np.float64]:
        """The rows, a view: valid until the next append."""
        return self._data[self._start : self._end]

    def append(self, values: Mapping[str, float | None]) -> None:
        """Add a row; a column that is missing or None is unknown."""
        if self._end == len(self._data):
            self._make_room()
        row = self._data[self._end]
        for name, index in AT.items():
            value = values.get(name)
            row[index] = np.nan if value is None else value
        self._end += 1
        if len(self) > self._kept and not self._grow():
            self._start += 1

    def release(self) -> None:
        """Give its rows back to the budget; the table must not be used afterwards."""
        self._budget.give(self._taken)
        self._taken = 0

    def _make_room(self) -> None:
        kept = len(self)
        self._data[:kept] = self._data[self._start : self._end].copy()
        self._start, self._end = 0, kept

    def _grow(self) -> bool:
        wanted = min(self._most, 2 * self._kept)
        more = wanted - self._kept
        if more <= 0:
            return False
        if self._budget.take(more):
            self._taken += more
        elif wanted > _LEAST_ROWS:
            return False
        kept, data = len(self), self._table(wanted)
        data[:kept] = self.rows
        self._data, self._start, self._end, self._kept = data, 0, kept, wanted
        return True


def between(rows: NDArray[np.float64], start_s: float, end_s: float) -> NDArray[np.float64]:
    """The rows with ``start_s <= t <= end_s``, a view."""
    times = rows[:, 0]
    return rows[
        int(np.searchsorted(times, start_s, "left")) : int(np.searchsorted(times, end_s, "right"))
    ]


def _grown(rows: NDArray[np.float64], name: str) -> float | None:
    """How far a counter went up over the rows, restarts left out; None when that is unknown."""
    if len(rows) < 2:
        return None
    steps = np.diff(rows[:, AT[name]])
    steps = steps[(np.diff(rows[:, AT["restarts"]]) == 0) & (steps >= 0)]
    return float(steps.sum()) if steps.size else None


def figures(rows: NDArray[np.float64]) -> dict[str, float | None]:
    """Preemptions, TTFT, hit rate and throughput over the rows; None where that is not known.

    Returns:
        ``preemptions`` (a count over the rows), ``ttft_seconds`` (mean of the requests that got their first
        token in them), ``hit_share`` (of the prompt tokens looked up in them; else the engine's own gauge),
        ``prompt_tokens_per_second`` and ``generated_tokens_per_second``.
    """
    started, waited = _grown(rows, "started_total"), _grown(rows, "ttft_seconds_sum")
    asked, hit = _grown(rows, "prefix_query_tokens_total"), _grown(rows, "prefix_hit_tokens_total")
    share = hit / asked if asked and hit is not None else None
    if share is None and len(rows) and not np.isnan(rows[-1, AT["hit_share"]]):
        share = float(rows[-1, AT["hit_share"]])
    seconds = float(rows[-1, 0] - rows[0, 0]) if len(rows) > 1 else 0.0
    rates = {}
    for name in ("prompt_tokens", "generated_tokens"):
        tokens = _grown(rows, f"{name}_total")
        rates[f"{name}_per_second"] = (
            tokens / seconds if tokens is not None and seconds > 0 else None
        )
    return {
        "preemptions": _grown(rows, "preemptions_total"),
        "ttft_seconds": waited / started if started and waited is not None else None,
        "hit_share": share,
        **rates,
    }


_LOWEST = ("available",)
_CURVES = COLUMNS[: COLUMNS.index("hit_share")]


def bins(
    rows: NDArray[np.float64], name: str, start_s: float, end_s: float, count: int, hold_s: float
) -> NDArray[np.float64]:
    """One column over ``count`` equal bins of time; NaN where nothing is known.

    A bin shows the highest value in it, of ``available`` the lowest. Between two looks a value holds, for
    at most ``hold_s`` seconds.
    """
    found = np.full(count, np.nan)
    width = (end_s - start_s) / count
    if width <= 0:
        return found
    rows = between(rows, start_s - hold_s, end_s)
    keep = min if name in _LOWEST else max
    numbers = np.floor((rows[:, 0] - start_s) / width).clip(-1, count - 1).astype(int).tolist()
    best: dict[int, float] = {}
    # From each look on its value holds: until the next one, or for hold_s.
    looks = list(zip(numbers, rows[:, 0].tolist(), rows[:, AT[name]].tolist(), strict=True))
    for index, (number, at, value) in enumerate(looks):
        if math.isnan(value):
            continue
        if number >= 0:
            best[number] = keep(best[number], value) if number in best else value
        following = looks[index + 1][0] if index + 1 < len(looks) else count
        last = min(following, math.floor((at + hold_s - start_s) / width) + 1, count)
        found[max(number + 1, 0) : max(last, 0)] = value
    for number, value in best.items():
        found[number] = value
    return found


def thin(
    rows: NDArray[np.float64], start_s: float, end_s: float, most: int, hold_s: float
) -> dict[str, list[float | None]]:
    """The curves between two times, in at most ``most`` points, for a page that draws them.

    Rows that are few enough come as they are; else one point per bin of time.
    """
    inside = between(rows, start_s, end_s)
    if len(inside) <= most:
        columns = {name: inside[:, AT[name]] for name in _CURVES}
        restarts = inside[:, AT["restarts"]]
    else:
        columns = {
            name: bins(rows, name, start_s, end_s, most, hold_s)
            for name in (*_CURVES[1:], "restarts")
        }
        width = (end_s - start_s) / most
        middles: NDArray[np.float64] = np.asarray(start_s + width * (np.arange(most) + 0.5))
        columns = {"t_seconds": middles, **columns}
        restarts = columns.pop("restarts")
    found: dict[str, Any] = {
        name: [None if np.isnan(value) else float(value) for value in values]
        for name, values in columns.items()
    }
    steps = np.flatnonzero(np.diff(restarts) > 0) + 1
    found["restarted_at_seconds"] = [found["t_seconds"][int(step)] for step in steps]
    return found
