"""``kvcatch watch``: running engines side by side, live or from recordings; in the terminal or as a page."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import Ticker, app, make_console, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.watch import Fleet, Row, Rules


@app.command()
def watch(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="URL|unix:PATH|FILE", help="Endpoints; or recordings, to look through."
        ),
    ],
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1)
    ] = 1.0,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="That a verdict is made of.", min=1)
    ] = 60.0,
    history: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long curves are kept.", min=10)
    ] = 3600.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For an endpoint to answer.", min=0.1)
    ] = 5.0,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME@VERSION", help="For example vllm@0.32.")
    ] = None,
    engine_args: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The engine's command line: limits are read from it."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="KVCATCH_TOKEN", help="That the endpoints want."),
    ] = None,
    at: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Where in a recording to begin.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve it as a page instead.")] = False,
    host: Annotated[str, typer.Option(help="Address of the page.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.", min=0, max=65535)] = 9118,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print one state, and leave.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    screenshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the screen as SVG, after a window, and leave."),
    ] = None,
) -> None:
    """Watch engines: KV usage, the queue by reason, the head's worst case against what is available.

    Beside them preemptions, TTFT, hit rate and the gate that keeps requests out, per rank. With --once the
    exit code is 0 when every endpoint answered, else 1.

    Example: kvcatch watch http://10.0.0.1:8000 http://10.0.0.2:8000 --engine vllm@0.32
    """
    with one_line_errors():
        if as_json and not once:
            raise InvalidArgument("--json goes with --once")
        if sum((web, once, screenshot is not None)) > 1:
            raise InvalidArgument("--web, --once and --screenshot exclude each other")
        rules = _rules(interval, window, history, engine, engine_args)
        fleet = _fleet(sources, rules, timeout, token)
        if at is not None and (fleet.is_live or web):
            raise InvalidArgument("--at goes with recordings in the terminal")
        if once:
            raise typer.Exit(_once(fleet, at, as_json=as_json))
        if web:
            from kvcatch.watch.web import serve

            with suppress(KeyboardInterrupt):
                serve(fleet, host, port, lambda text: make_console().print(text))
            return
        _screen(fleet, at, screenshot)


def _rules(
    interval: float, window: float, history: float, engine: str | None, engine_args: str | None
) -> Rules:
    from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args
    from kvcatch.watch import Rules

    return Rules(
        interval_s=interval,
        window_s=max(window, 2 * interval),
        history_s=max(history, window),
        diagnose_s=max(2.0, interval),
        version=None if engine is None else EngineVersion.parse(engine),
        limits=Limits() if engine_args is None else read_engine_args(engine_args),
    )


def _fleet(sources: list[str], rules: Rules, timeout: float, token: str | None) -> Fleet:
    from kvcatch.observe.scrape import is_endpoint
    from kvcatch.watch import Fleet, read_recordings

    urls = [source for source in sources if is_endpoint(source)]
    if not urls:
        with Ticker() as ticker:
            ticker.say("reading")
            fleet = read_recordings([Path(source) for source in sources], rules)
    elif len(urls) < len(sources):
        raise InvalidArgument("endpoints and recordings are not watched together")
    else:
        fleet = Fleet.of_urls(urls, rules, timeout_s=timeout, token=token)
    if rules.version is not None and not fleet.is_live:
        found = {engine for endpoint in fleet.endpoints for engine, _ in endpoint.replicas}
        if rules.version.name not in (*found, "llamacpp"):
            raise InvalidArgument(
                f"--engine {rules.version.name}: the recordings are of {', '.join(sorted(found))}"
            )
    return fleet


def _once(fleet: Fleet, at: float | None, *, as_json: bool) -> int:
    from kvcatch.watch import rows, state

    if fleet.is_live:
        asyncio.run(fleet.look(2))
    if as_json:
        print(json.dumps(state(fleet, at), indent=2, allow_nan=False))  # noqa: T201
    else:
        _print(rows(fleet, at))
    return 1 if any(endpoint.error for endpoint in fleet.endpoints) else 0


def _print(found: list[Row]) -> None:
    from kvcatch.watch.draw import number, percent, seconds

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_labels = any(row.label for row in found)
    for name in ("endpoint", "replica") if has_labels else ("endpoint",):
        table.add_column(name, overflow="fold")
    table.add_column("gate", no_wrap=True)
    for name in ("KV", "running", "waiting", "preempted", "TTFT", "hit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        values, figures = row.values, row.figures
        table.add_row(
            row.endpoint.removeprefix("http://"),
            *([row.label] if has_labels else []),
            row.gate,
            percent(values.get("kv_usage_share")),
            number(values.get("running_requests")),
            number(values.get("waiting_requests")),
            number(figures.get("preemptions")),
            seconds(figures.get("ttft_seconds")),
            percent(figures.get("hit_share")),
        )
    console = make_console()
    console.print(table)
    for endpoint, reason in dict.fromkeys((row.endpoint, row.reason) for row in found):
        if reason:
            console.print(f"{endpoint}: {reason}")
    shares = {row.replica.engine: row.replica.usage_of for row in found if row.replica is not None}
    for engine, usage_of in shares.items():
        console.print(f"KV of {engine}: {usage_of}")


def _screen(fleet: Fleet, at: float | None, screenshot: Path | None) -> None:
    from kvcatch.watch.screen import WatchApp, picture

    if screenshot is not None:
        drawn = asyncio.run(picture(WatchApp(fleet, at), fleet.rules.window_s))
        screenshot.write_text(drawn, encoding="utf-8")
        make_console().print(f"{screenshot}, {len(drawn):,} bytes")
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidArgument("not a terminal: use --once, --web or --screenshot")
    WatchApp(fleet, at).run()
