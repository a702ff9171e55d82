"""``kvcatch diagnose``: which gate keeps requests out, on an endpoint, in a recording or a log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import app, fail, make_console, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.observe.diagnose import Diagnosis, Verdict
    from kvcatch.observe.limits import EngineVersion, Limits
    from kvcatch.observe.source import Source

MAX_REPLICAS = 12
"""Rows of the table of replicas; --json has all of them."""


@app.command()
def diagnose(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="URL|unix:PATH|FILE...",
            help="Endpoints, sockets of the plugin inside vLLM, recordings or vLLM logs.",
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(metavar="NAME@VERSION", help="For example vllm@0.32.")
    ] = None,
    engine_args: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The engine's command line: limits are read from it."),
    ] = None,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to look at an endpoint.", min=1)
    ] = 30.0,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks at it.", min=0.1)
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For an endpoint to answer.", min=0.1)
    ] = 5.0,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Say what held when, interval by interval.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar="KVCATCH_TOKEN", help="Shown to every address here.", show_envvar=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say which gate keeps waiting requests out, with evidence, arithmetic and what to change.

    The gate is the one that kept requests waiting for most request-seconds. Where kvcatch's plugin is
    inside the engine, the refused request and those who hold the blocks are named. Exit code 0: healthy; 1: not
    healthy, not enough evidence, or one of several sources gave nothing; 2: bad input.

    Example: kvcatch diagnose http://127.0.0.1:8000 --engine vllm@0.32 --engine-args "--max-num-seqs 64"
    """
    with one_line_errors():
        from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args

        version = None if engine is None else EngineVersion.parse(engine)
        limits = Limits() if engine_args is None else read_engine_args(engine_args)
        found = _read(sources, window, interval, timeout, token, quiet=as_json)
        result = _diagnose(found, version, limits)
        inside = {source.name: source.inside for source in found if source.inside is not None}
        if as_json:
            data = result.to_dict(timeline=timeline)
            if inside:
                data["inside"] = inside
            print(json.dumps(data, indent=2, allow_nan=False))  # noqa: T201
        else:
            _show(result, inside, with_timeline=timeline)
        # Of a source that gave nothing nobody knows.
        is_whole = len(found) == len(sources)
        raise typer.Exit(0 if result.worst.is_healthy and is_whole else 1)


def _read(
    sources: list[str],
    window: float,
    interval: float,
    timeout: float,
    token: str | None,
    *,
    quiet: bool,
) -> list[Source]:
    from kvcatch.errors import KvcatchError
    from kvcatch.observe.scrape import is_endpoint
    from kvcatch.observe.source import read_endpoints, read_file

    notes = make_console(stderr=True)
    urls = [source for source in sources if is_endpoint(source)]
    files = [source for source in sources if not is_endpoint(source)]
    found: list[Source] = []
    failures: list[str] = []
    for name in files:
        try:
            found.append(read_file(Path(name), None if quiet else _progress(notes, name)))
        except (KvcatchError, OSError) as error:
            if len(sources) == 1:
                raise
            failures.append(
                f"{name}: {error.strerror}" if isinstance(error, OSError) else str(error)
            )
    if urls:
        if notes.is_terminal and not quiet:
            notes.print(f"looking for {window:g} s")
        looked = asyncio.run(
            read_endpoints(
                urls, window_s=window, interval_s=interval, timeout_s=timeout, token=token
            )
        )
        found += [source for source in looked if source.samples]
        failures += [note for source in looked if not source.samples for note in source.notes]
    if not found:
        fail("; ".join(failures)[:2000], 2)
    found[0].notes += failures
    return found


def _progress(console: Any, name: str) -> Any:
    def tell(rows: int) -> None:
        if console.is_terminal:
            console.print(f"{name}: {rows:,} rows", end="\r")

    return tell


def _diagnose(found: list[Source], version: EngineVersion | None, limits: Limits) -> Diagnosis:
    from kvcatch.observe.diagnose import Diagnosis, diagnose

    results = []
    for source in found:
        engines = {sample.engine for sample in source.samples}
        if version is not None and engines and version.name not in (*engines, "llamacpp"):
            raise InvalidArgument(
                f"--engine {version.name}: what {source.name} holds is of {', '.join(sorted(engines))}"
            )
        result = diagnose(
            source.samples,
            version or source.version,
            limits.joined(source.limits),
            names=source.names,
            notes=source.notes,
        )
        if source.out_of_memory and result.worst.is_healthy:
            result.worst.gate = "not_enough_evidence"
            result.worst.confidence = 0.5
            count = source.out_of_memory
            text = f"PyTorch ran out of device memory {count} times: outside the KV pool"
            result.worst.arithmetic = text
        results.append(result)
    if len(results) == 1:
        return results[0]
    merged = Diagnosis([verdict for result in results for verdict in result.verdicts])
    merged.verdicts.sort(key=lambda verdict: verdict.badness, reverse=True)
    merged.notes = [note for result in results for note in result.notes]
    return merged


def _show(result: Diagnosis, inside: dict[str, Any], *, with_timeline: bool) -> None:
    from kvcatch.observe.diagnose import runbook

    console, verdict = make_console(), result.worst
    also = f" (also {', '.join(verdict.also)})" if verdict.also else ""
    console.print(f"{verdict.gate}{also}, confidence {verdict.confidence:.2f}")
    console.print(f"  {verdict.arithmetic}")
    who = " ".join(text for text in (verdict.engine, verdict.replica, verdict.endpoint) if text)
    if who:
        console.print(f"on {who}")
    if verdict.usage_of:
        console.print(f"KV % is of: {verdict.usage_of}")
    for name, data in inside.items():
        from kvcatch.cli.inside import print_refused, print_who

        if len(inside) > 1:
            console.print(name)
        print_refused(console, data)
        print_who(console, data)
    if verdict.evidence:
        console.print("evidence")
        for item in verdict.evidence:
            console.print(f"  {_time(item.start_s)} to {_time(item.end_s)}: {item.text}")
    if verdict.waiting_request_seconds:
        console.print("waiting request-seconds by gate")
        for gate, value in verdict.waiting_request_seconds.items():
            console.print(f"  {value:>12,.1f}  {gate}")
    if verdict.advice:
        console.print("what to change")
        for text in verdict.advice:
            console.print(f"  - {text}")
    console.print(f"see {runbook(verdict.gate)}")
    if with_timeline:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("from", "to", "gate", "waiting request-seconds"):
            table.add_column(name, no_wrap=True, justify="left" if name == "gate" else "right")
        for span in verdict.timeline:
            waited = f"{span.waiting_request_seconds:,.1f}"
            table.add_row(_time(span.start_s), _time(span.end_s), span.gate, waited)
        console.print(table)
    if len(result.verdicts) > 1:
        _show_replicas(result.verdicts)
    for note in result.notes:
        console.print(f"note: {note}")


def _show_replicas(verdicts: list[Verdict]) -> None:
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("engine", "replica", "gate", "confidence"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts[:MAX_REPLICAS]:
        table.add_row(verdict.engine, verdict.replica, verdict.gate, f"{verdict.confidence:.2f}")
    console.print(table)
    if len(verdicts) > MAX_REPLICAS:
        console.print(f"{len(verdicts) - MAX_REPLICAS} more: --json has all of them")


def _time(seconds: float) -> str:
    """Unix time as a clock, anything smaller as seconds of the recording."""
    if seconds > 1e9:
        from datetime import datetime

        return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")
    return f"{seconds:.1f} s"
