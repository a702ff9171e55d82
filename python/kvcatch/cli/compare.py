"""``kvcatch compare``: two recordings under like load, and what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import Ticker, app, make_console, one_line, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.observe.compare import Comparison, Figure

_MOST_TEXT = 30


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A recording.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Loads further apart are not alike.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare two recordings under like load: two versions, or two sets of flags.

    Utilisation, preemptions, block fill, hit rate, queue, TTFT and ITL; what changed is named, with the 99 %
    interval of the difference. Unlike loads are refused. Exit code 0: compared; 1: the loads are not alike; 2: bad
    input.

    Example: kvcatch compare before.jsonl.gz after.jsonl.gz
    """
    with one_line_errors():
        from kvcatch.observe.compare import compare as compare_sides
        from kvcatch.observe.compare import pair_sides, read_sides

        for name in (first, second):
            if "://" in name:
                raise InvalidArgument(f"{name}: record it first with kvcatch record")
        with Ticker() as ticker:
            ticker.say("reading")
            pairs = pair_sides(read_sides(Path(first)), read_sides(Path(second)))
            found = [compare_sides(a, b, tolerance=tolerance, seed=seed) for a, b in pairs]
        if as_json:
            facts = {"comparisons": [item.to_dict() for item in found]}
            print(json.dumps(facts, indent=2, allow_nan=False))  # noqa: T201
        else:
            for item in found:
                _show(item)
        raise typer.Exit(0 if all(item.is_like for item in found) else 1)


def _show(item: Comparison) -> None:
    console = make_console()
    for name, side in (("A", item.a), ("B", item.b)):
        console.print(f"{name}: {one_line(f'{side.version} {side.replica} {side.name}')}")
    if item.unlike:
        console.print("not compared: the loads are not alike")
        for text in item.unlike:
            console.print(f"  {text}")
    _print_settings(item)
    console.print(_figures([figure for figure in item.figures if figure.role == "load"], "load"))
    if item.unlike:
        for text in item.notes:
            console.print(f"note: {text}")
        return
    outcomes = [figure for figure in item.figures if figure.role == "outcome"]
    console.print(_figures(outcomes, "outcome"))
    changed = item.changed()
    if changed:
        names = ", ".join(f"{figure.name} ({figure.change})" for figure in changed)
        console.print(f"changed: {names}")
    elif any(figure.change == "same" for figure in outcomes):
        console.print("changed: nothing that can be told from chance")
    for text in item.notes:
        console.print(f"note: {text}")


def _print_settings(item: Comparison) -> None:
    if not item.settings:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "A", "B"):
        table.add_column(name, overflow="fold", max_width=_MOST_TEXT)
    for row in item.settings:
        table.add_row(*(one_line(text) for text in row))
    make_console().print(table)


def _figures(figures: list[Figure], title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for name in ("A", "B", "B - A, 99 % interval", "change"):
        table.add_column(name, justify="left" if name == "change" else "right", no_wrap=True)
    for figure in figures:
        interval = ""
        if figure.low is not None and figure.high is not None:
            interval = f"{figure.low:+,.4g} to {figure.high:+,.4g}"
        table.add_row(figure.name, _number(figure.a), _number(figure.b), interval, figure.change)
    return table


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.4g}"
