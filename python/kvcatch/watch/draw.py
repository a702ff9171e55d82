"""What the terminal shows, as styled text: the list of replicas, the verdict, the three curves."""

from __future__ import annotations

import textwrap
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from kvcatch.watch.history import AT, between, bins
from kvcatch.watch.plot import braille
from kvcatch.watch.view import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.watch.view import Row

__all__ = ["curve_lines", "fleet_lines", "number", "percent", "seconds", "verdict_lines"]

_CALM, _BAD, _DIM, _UNSURE = "green", "bold red", "dim", "yellow"
_COLOURS = ("cyan", "yellow", "magenta")
_AXIS = 8
_UNITS = ((3, "k"), (6, "M"), (9, "G"), (300, ""))


def _style(row: Row) -> str:
    if row.status in ("waiting", "unseen"):
        return _DIM
    if row.is_well:
        return _CALM
    return _UNSURE if row.gate == "not_enough_evidence" else _BAD


def number(value: float | None) -> str:
    """A count in at most five signs; ``?`` for unknown."""
    if value is None:
        return "?"
    if value < 1e4:
        return f"{value:.0f}"
    return next(
        f"{value / 10**power:.0f}{unit}" for power, unit in _UNITS if value < 10 ** (power + 4)
    )


def percent(value: float | None) -> str:
    """A share of 1 as a percentage; ``?`` for unknown."""
    return "?" if value is None else f"{value:.0%}"


def seconds(value: float | None) -> str:
    """A length of time; ``?`` for unknown."""
    if value is None:
        return "?"
    return f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:,.1f} s"


_HEAD = f"{'gate':<20} {'KV':>4} {'run':>5} {'wait':>5} {'preempt':>7} {'TTFT':>7} {'hit':>4}"


def _cells(row: Row) -> str:
    values, figures = row.values, row.figures
    return (
        f"{percent(values.get('kv_usage_share')):>4} {number(values.get('running_requests')):>5} "
        f"{number(values.get('waiting_requests')):>5} {number(figures.get('preemptions')):>7} "
        f"{seconds(figures.get('ttft_seconds')):>7} {percent(figures.get('hit_share')):>4}"
    )


def _cut(text: str, width: int) -> str:
    """The text in so many signs; of a longer one the end is kept, which tells hosts and ports apart."""
    if len(text) <= width:
        return text.ljust(width)
    return "..." + text[len(text) - width + 3 :] if width > 3 else text[-width:]


def fleet_lines(
    found: Sequence[Row], chosen: int, first: int, width: int, height: int
) -> list[Text]:
    """The head line, and the rows from ``first`` on that fit into the height."""
    names = max(8, width - len(_HEAD) - 3)
    lines = [Text(f"  {'endpoint':<{names}} {_HEAD}"[:width], _DIM, no_wrap=True)]
    for index, row in enumerate(found[first : first + height - 1], first):
        name = f"{row.endpoint} {row.label}".rstrip()
        line = Text(no_wrap=True, overflow="crop")
        line.append("> " if index == chosen else "  ", "bold")
        line.append(_cut(name, names), "bold" if index == chosen else "")
        line.append(f" {row.gate:<20} ", _style(row))
        if row.status == "ok":
            line.append(_cells(row))
        elif row.since_s is not None:
            line.append(
                f"since {clock(row.since_s)}{f': {row.reason}' if row.reason else ''}", _DIM
            )
        lines.append(line)
    return lines


def verdict_lines(row: Row | None, width: int, height: int) -> list[Text]:
    """What keeps the requests of one replica out, with its arithmetic and the first thing to change."""
    if row is None:
        return [Text("nothing is watched", _DIM)]
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(row.gate, _style(row))
    body: list[tuple[str, str]] = []
    if row.status == "ok" and row.verdict is not None and row.replica is not None:
        verdict = row.verdict
        also = f" (also {', '.join(verdict.also)})" if verdict.also else ""
        title.append(f"{also}, confidence {verdict.confidence:.2f}, {row.replica.version.title}")
        body.append((verdict.arithmetic, ""))
        body += [(f"change: {text}", _DIM) for text in verdict.advice]
    elif row.since_s is not None:
        title.append(f" since {clock(row.since_s)}")
        body.append((row.reason or "its endpoint answers without it", ""))
    lines = [title]
    for text, style in body:
        lines += [Text(part, style, no_wrap=True) for part in textwrap.wrap(text, max(width, 20))]
    if len(lines) > height:
        lines = lines[:height]
        lines[-1] = Text(lines[-1].plain[: width - 4] + " ...", lines[-1].style, no_wrap=True)
    return lines


def _reasons(row: Row) -> list[tuple[str, str]]:
    total, capacity, deferred = (
        row.values.get(f"waiting_{name}requests") for name in ("", "capacity_", "deferred_")
    )
    text = [("waiting ", ""), (number(total), _COLOURS[0])]
    if capacity is None and deferred is None:
        return [*text, (" (reasons unknown)", _DIM)]
    return [
        *text,
        (" = ", ""),
        (f"capacity {number(capacity)}", _COLOURS[1]),
        (" + ", ""),
        (f"deferred {number(deferred)}", _COLOURS[2]),
    ]


def _plots(
    row: Row, width: int
) -> list[tuple[list[tuple[str, str]], tuple[str, ...], float | None]]:
    """Title, columns in front-to-back order and fixed top of each of the three plots."""
    values, replica = row.values, row.replica
    unit = replica.unit if replica else "blocks"
    usage_of = replica.usage_of if replica else ""
    if len(usage_of) > width - 10:
        usage_of = usage_of.partition(";")[0]
    kv = [("KV ", ""), (percent(values.get("kv_usage_share")), _COLOURS[0])]
    kv.append((f" = {usage_of}" if usage_of else "", _DIM))
    blocks = [(f"{unit}: ", ""), (f"available {number(values.get('available'))}", _COLOURS[0])]
    longest, head, bound = values.get("longest"), values.get("head"), "longest"
    if head is not None:
        blocks += [(", ", ""), (f"head needs {number(head)}", _COLOURS[1])]
        blocks.append((" (the request that is refused)", _DIM))
        bound = "head"
    elif longest is None:
        blocks.append((", worst case of the head unknown", _DIM))
    else:
        blocks += [
            (", ", ""),
            (f"head at most {number(longest)}", _COLOURS[1]),
            (" (longest request; its own size unknown)", _DIM),
        ]
    return [
        (kv, ("kv_usage_share",), 1.0),
        (
            _reasons(row),
            ("waiting_requests", "waiting_capacity_requests", "waiting_deferred_requests"),
            None,
        ),
        (blocks, ("available", bound), None),
    ]


def _top(values: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> float:
    known = [float(np.nanmax(part)) for part in values if not np.isnan(part).all()]
    return max([1.0, *known])


def curve_lines(
    row: Row | None, end_s: float, past_s: float, width: int, height: int
) -> list[Text]:
    """Three curves, one below the other, over the seconds before a time, and the axis of time."""
    if row is None or row.replica is None:
        return [Text("no sample yet", _DIM)]
    replica, inner = row.replica, max(width - _AXIS, 4)
    whole = replica.history.rows
    each, extra = divmod(max(height - 1, 6), 3)
    lines: list[Text] = []
    for index, (title, names, top) in enumerate(_plots(row, width)):
        line = Text(no_wrap=True, overflow="ellipsis")
        for text, style in title:
            line.append(text, style)
        lines.append(line)
        values = [
            bins(whole, name, end_s - past_s, end_s, 2 * inner, replica.hold_s) for name in names
        ]
        high = _top(values) if top is None else top
        rows_here = each - 1 + (index < extra)
        drawn = braille(values, inner, rows_here, high)
        for at, signs in enumerate(drawn):
            label = ""
            if at == 0:
                label = "100 %" if top is not None else number(high)
            elif at == len(drawn) - 1:
                label = "0"
            line = Text(f"{label:>{_AXIS - 1}} ", _DIM, no_wrap=True)
            for who, run in groupby(signs, key=itemgetter(1)):
                line.append("".join(sign for sign, _ in run), _COLOURS[who] if who >= 0 else "")
            lines.append(line)
        if all(np.isnan(part).all() for part in values) and len(drawn):
            lines[-len(drawn)] = Text(" " * _AXIS + "unknown over this time", _DIM)
    lines.append(_axis(row, end_s, past_s, width))
    return lines


def _axis(row: Row, end_s: float, past_s: float, width: int) -> Text:
    assert row.replica is not None
    inside = between(row.replica.history.rows, end_s - past_s, end_s)
    restarts = int((np.diff(inside[:, AT["restarts"]]) > 0).sum()) if len(inside) > 1 else 0
    left, right = clock(max(end_s - past_s, 0.0)), clock(end_s)
    middle = f"{restarts} restart{'s' if restarts > 1 else ''} in view" if restarts else ""
    inner = max(width - _AXIS, len(left) + len(right) + len(middle) + 2)
    gap = inner - len(left) - len(right)
    return Text(f"{'':{_AXIS}}{left}{middle:^{gap}}{right}", _DIM, no_wrap=True)
