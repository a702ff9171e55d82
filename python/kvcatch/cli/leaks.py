"""``kvcatch leaks``: does an idle engine still hold blocks, and who does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import (
    MAX_ROWS,
    Ticker,
    app,
    fail,
    make_console,
    one_line,
    one_line_errors,
)
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.observe.leaks import Holder, LeakCheck
    from kvcatch.observe.limits import Limits
    from kvcatch.observe.source import Source
    from kvcatch.observe.zombies import SnapshotCheck

CANNOT_TELL = 3


@app.command()
def leaks(
    source: Annotated[
        str,
        typer.Argument(
            metavar="URL|unix:PATH|FILE", help="An endpoint, a recording, or a pool's snapshot."
        ),
    ],
    engine_args: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The engine's command line: limits are read from it."),
    ] = None,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to look at an endpoint.", min=1)
    ] = 40.0,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks at it.", min=0.1)
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For an endpoint to answer.", min=0.1)
    ] = 5.0,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="KVCATCH_TOKEN", help="That the endpoint wants."),
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER,...", help="Of a snapshot: owners that are alive; '' for nobody."
        ),
    ] = None,
    now: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Of a snapshot: the pool's clock, for its pins."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check the conservation law of an idle engine: what nothing uses must be free or cached.

    While requests run it says so: a backlog is not a leak. On kvcatch it names who holds the blocks.
    Exit code 0: conserved; 1: a leak or a double free; 2: bad input; 3: cannot be told.

    Example: kvcatch leaks http://127.0.0.1:8000 || kvcatch leaks snapshot.json --live req-17
    """
    with one_line_errors():
        from kvcatch.observe.limits import Limits, read_engine_args
        from kvcatch.observe.scrape import is_endpoint

        limits = Limits() if engine_args is None else read_engine_args(engine_args)
        if not is_endpoint(source) and Path(source).exists() and _is_snapshot(Path(source)):
            _of_snapshot(Path(source), live, now, as_json=as_json)
            return
        if live is not None or now is not None:
            raise InvalidArgument(f"{source}: --live and --now are for a snapshot")
        if is_endpoint(source):
            checks, notes = _of_endpoint(source, limits, window, interval, timeout, token)
        else:
            checks, notes = _of_file(Path(source), limits)
        if as_json:
            facts = {"replicas": [check.to_dict() for check in checks], "notes": notes}
            print(json.dumps(facts, indent=2, allow_nan=False))  # noqa: T201
        else:
            for check in checks:
                _show(check)
            for note in notes:
                make_console().print(f"note: {one_line(note)}")
        raise typer.Exit(_code([check.state for check in checks]))


def _code(states: list[str]) -> int:
    if any(state in ("leak", "double_free") for state in states):
        return 1
    return 0 if states and all(state == "conserved" for state in states) else CANNOT_TELL


def _is_snapshot(path: Path) -> bool:
    from kvcatch.observe.errors import RecordingError
    from kvcatch.observe.record import is_recording

    with path.open("rb") as file:
        if file.read(4096).lstrip()[:1] != b"{":
            return False
    try:
        return not is_recording(path)
    except RecordingError:
        return True  # JSON over several lines


def _of_snapshot(path: Path, live: str | None, now: float | None, *, as_json: bool) -> None:
    from kvcatch.observe.zombies import check_snapshot
    from kvcatch.snapshot import Snapshot

    owners = None if live is None else [name.strip() for name in live.split(",") if name.strip()]
    check = check_snapshot(Snapshot.read(path), owners, now_s=now)
    if as_json:
        print(json.dumps(check.to_dict(), indent=2, allow_nan=False))  # noqa: T201
    else:
        _show_snapshot(check)
    raise typer.Exit(_code([check.state]))


def _of_file(path: Path, limits: Limits) -> tuple[list[LeakCheck], list[str]]:
    from kvcatch.observe.leaks import check_leaks, holders
    from kvcatch.observe.record import is_recording, series_rows
    from kvcatch.observe.source import read_file

    source = read_file(path)
    checks = check_leaks(source.samples, limits.joined(source.limits))
    if any(check.engine == "kvcatch" for check in checks) and is_recording(path):
        last: dict[str, float] = {}
        for _, values in series_rows(path, lambda name: name == "kvcatch_holdings_blocks"):
            last = values
        _name_holders(checks, holders(last.items()))
    _look_inside(checks, source)
    return checks, source.notes


def _of_endpoint(
    url: str,
    limits: Limits,
    window: float,
    interval: float,
    timeout: float,
    token: str | None,
) -> tuple[list[LeakCheck], list[str]]:
    from kvcatch.observe.leaks import check_leaks
    from kvcatch.observe.scrape import metrics_url
    from kvcatch.observe.source import read_endpoints

    with Ticker() as ticker:
        ticker.say(f"looking at {url} for {window:g} s")
        (source,) = asyncio.run(
            read_endpoints(
                [url], window_s=window, interval_s=interval, timeout_s=timeout, token=token
            )
        )
    if not source.samples:
        fail(source.notes[0] if source.notes else f"{source.name}: no sample", 2)
    checks = check_leaks(source.samples, limits.joined(source.limits))
    if any(check.engine == "kvcatch" for check in checks):
        _name_holders(checks, asyncio.run(_holders(metrics_url(url), timeout, token)))
    _look_inside(checks, source)
    return checks, source.notes


def _look_inside(checks: list[LeakCheck], source: Source) -> None:
    from kvcatch.observe.leaks import look_inside

    mine = [check for check in checks if check.engine == "vllm"]
    if source.inside is not None and len(mine) == 1:
        look_inside(mine[0], source.inside)


async def _holders(endpoint: str, timeout: float, token: str | None) -> list[Holder]:
    from kvcatch.observe.leaks import holders
    from kvcatch.observe.prometheus import parse_line
    from kvcatch.observe.scrape import Scraper

    async with Scraper(timeout_s=timeout, token=token) as scraper:
        page = await scraper.fetch(endpoint)
    lines = [] if page.body is None else page.body.decode("utf-8", errors="replace").split("\n")
    parsed = [parse_line(line) for line in lines if line.startswith("kvcatch_holdings_blocks{")]
    return holders((name, float(value)) for name, value in filter(None, parsed))


def _name_holders(checks: list[LeakCheck], found: list[Holder]) -> None:
    mine = [check for check in checks if check.engine == "kvcatch"]
    if len(mine) == 1:
        mine[0].holders = found


def _show(check: LeakCheck) -> None:
    console = make_console()
    console.print(check.state.replace("_", " ") if check.state != "backlog" else "backlog, no leak")
    console.print(f"  {check.arithmetic}")
    if check.idle_s:
        console.print(f"  idle for {check.idle_s:,.0f} s")
    who = " ".join(one_line(text) for text in (check.engine, check.replica, check.endpoint) if text)
    console.print(f"on {who}" if who else "")
    if check.law:
        console.print(f"law: {check.law}")
    if check.holders:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("held by", overflow="fold", max_width=60)
        table.add_column("blocks", justify="right")
        for holder in check.holders[:MAX_ROWS]:
            table.add_row(one_line(holder.owner) or "(no owner)", f"{holder.blocks:,.0f}")
        console.print(table)
    if check.is_leak:
        console.print("see docs/runbook.md#leak")


def _show_snapshot(check: SnapshotCheck) -> None:
    console = make_console()
    console.print(check.state)
    console.print(f"  {check.arithmetic}")
    if check.zombies:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("zombie", overflow="fold", max_width=50)
        for name in ("sequences", "blocks", "own", "tokens"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in check.zombies[:MAX_ROWS]:
            table.add_row(
                one_line(item.name or ""),
                f"{item.sequences:,}",
                f"{item.blocks:,}",
                f"{item.own_blocks:,}",
                f"{item.num_tokens:,}",
            )
        console.print(table)
    if check.leases:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("pinned by", overflow="fold", max_width=50)
        for name in ("blocks", "deadline, s", "overdue, s"):
            table.add_column(name, justify="right", no_wrap=True)
        for lease in check.leases[:MAX_ROWS]:
            due = "none" if lease.deadline_s is None else f"{lease.deadline_s:,.1f}"
            late = "unknown" if lease.overdue_s is None else f"{lease.overdue_s:,.1f}"
            table.add_row(one_line(lease.owner or "(no owner)"), f"{lease.blocks:,}", due, late)
        console.print(table)
    if check.is_leak:
        console.print("see docs/runbook.md#leak")
