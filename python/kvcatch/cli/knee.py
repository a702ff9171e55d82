"""``kvcatch knee`` on what others run, and ``kvcatch serve --find-knee``: print the knee, propose a water level."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvcatch.cli.common import Ticker, app, fail, make_console, one_line, one_line_errors

if TYPE_CHECKING:
    from kvcatch.engine.engine import Engine
    from kvcatch.engine.knee import Knee, KneeLevel, KneeLoad
    from kvcatch.observe.knee import KneeReport
    from kvcatch.observe.source import Source

__all__ = ["knee", "measure_knee"]


@app.command()
def knee(
    source: Annotated[
        str, typer.Argument(metavar="URL|unix:PATH|FILE", help="An endpoint or a recording.")
    ],
    engine_args: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The engine's command line: limits are read from it."),
    ] = None,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to look at an endpoint.", min=1)
    ] = 300.0,
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
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture: .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say from which utilisation on TTFT climbs, and the water level that follows, or that it cannot be told.

    A point is an interval in which requests got their first token: their mean TTFT over the utilisation they met
    when they arrived. Exit code 0: there is a knee; 1: it cannot be told; 2: bad input.

    Example: kvcatch knee incident.jsonl.gz --plot knee.png
    """
    with one_line_errors():
        from kvcatch.loadtest.plot import check_plot
        from kvcatch.observe.knee import find_knees
        from kvcatch.observe.limits import Limits, read_engine_args

        if plot is not None:
            check_plot(plot)
        limits = Limits() if engine_args is None else read_engine_args(engine_args)
        read = _read(source, window, interval, timeout, token)
        reports = find_knees(read.samples, limits.joined(read.limits), seed=seed)
        if plot is not None:
            from kvcatch.observe.knee_plot import write_knee_plot

            write_knee_plot(plot, reports)
        if as_json:
            facts = {
                "replicas": [report.to_dict() for report in reports],
                "notes": read.notes,
            }
            print(json.dumps(facts, indent=2, allow_nan=False))  # noqa: T201
        else:
            for report in reports:
                _print_report(report)
            for note in read.notes:
                make_console().print(f"note: {one_line(note)}")
        found = any(report.knee.water_level is not None for report in reports)
        raise typer.Exit(0 if found else 1)


def _read(source: str, window: float, interval: float, timeout: float, token: str | None) -> Source:
    from kvcatch.observe.scrape import is_endpoint
    from kvcatch.observe.source import read_endpoints, read_file

    if not is_endpoint(source):
        return read_file(Path(source))
    with Ticker() as ticker:
        ticker.say(f"looking at {source} for {window:g} s")
        (read,) = asyncio.run(
            read_endpoints(
                [source], window_s=window, interval_s=interval, timeout_s=timeout, token=token
            )
        )
    if not read.samples:
        fail(read.notes[0] if read.notes else f"{read.name}: no sample", 2)
    return read


def _print_report(report: KneeReport) -> None:
    from kvcatch.observe.knee import DEPLOYED_LEVELS

    console, found = make_console(), report.knee
    who = " ".join(one_line(part) for part in (report.engine, report.replica) if part)
    requests = sum(look.started for look in report.looks)
    console.print(f"{who}: {len(report.looks):,} intervals with {requests:,.0f} first tokens")
    if report.looks:
        used = [look.utilisation for look in report.looks]
        ttft = sorted(look.ttft_seconds for look in report.looks)
        console.print(
            f"  utilisation {min(used):.0%} to {max(used):.0%} of: {report.usage_of}; "
            f"TTFT median {ttft[len(ttft) // 2]:.3f} s, most {ttft[-1]:.3f} s"
        )
    if found.utilisation is None or found.water_level is None:
        console.print(f"no water level: {found.reason}")
    else:
        console.print(
            f"TTFT climbs from {found.utilisation:.0%} on (90 % interval {found.low:.0%} to "
            f"{found.high:.0%}, p = {found.p_value:.3f}), x {found.rise:.1f} to the highest"
        )
        console.print(f"water level {found.water_level:g}")
        others = ", ".join(f"{name} {level:.2f}" for name, level in DEPLOYED_LEVELS)
        console.print(f"deployed without having been measured: {others}")
    for note in report.notes:
        console.print(f"note: {note}")


def measure_knee(
    engine: Engine,
    *,
    seconds: float,
    prompt_tokens: int | None,
    output_tokens: int | None,
    as_json: bool,
) -> None:
    """Run the load on an idle engine with a line per level on stderr, then print the answer on stdout.

    Raises:
        InvalidArgument: requests of these lengths can never run.
    """
    from kvcatch.engine.knee import KneeLoad, find_knee

    load = KneeLoad.for_engine(
        engine, seconds=seconds, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    notes = make_console(stderr=True)
    notes.print(
        f"requests of {load.prompt_tokens} + about {load.output_tokens} tokens, 1 to "
        f"{load.max_concurrency} at once, for about {load.seconds:g} s"
    )

    def progress(level: KneeLevel) -> None:
        notes.print(
            f"{level.concurrency} at once: {level.utilisation:.0%} of the pool, first token after "
            f"{level.ttft() * 1e3:.0f} ms"
        )

    knee, levels = find_knee(engine, load, progress)
    if as_json:
        _print_json(load, knee, levels)
    else:
        _print(knee, levels)


def _print_json(load: KneeLoad, knee: Knee, levels: list[KneeLevel]) -> None:
    facts = {
        "prompt_tokens": load.prompt_tokens,
        "output_tokens_mean": load.output_tokens,
        "knee": knee.to_dict(),
        "levels": [level.to_dict() for level in levels],
    }
    print(json.dumps(facts, indent=2))  # noqa: T201


def _print(knee: Knee, levels: list[KneeLevel]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("at once", "requests", "pool used", "TTFT median", "TTFT p95", "preemptions"):
        table.add_column(name, justify="right")
    for level in levels:
        table.add_row(
            str(level.concurrency),
            str(len(level.points)),
            f"{level.utilisation:.0%}",
            f"{level.ttft() * 1e3:,.0f} ms",
            f"{level.ttft(0.95) * 1e3:,.0f} ms",
            str(level.preemptions),
        )
    console = make_console()
    console.print(table)
    if knee.utilisation is None or knee.water_level is None:
        console.print(f"no water level proposed: {knee.reason}")
        return
    console.print(
        f"TTFT climbs from {knee.utilisation:.0%} of the pool used (90 % interval {knee.low:.0%} to "
        f"{knee.high:.0%}), x {knee.rise:.1f} to the highest; {knee.num_points} requests"
    )
    console.print(f"proposed: --water-level {knee.water_level:g}")
