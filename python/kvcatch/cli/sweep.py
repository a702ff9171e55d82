"""``kvcatch sweep``: replay grids over a workload, on all cores or on a Ray cluster."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcatch.cli.bench import load_workload
from kvcatch.cli.common import Ticker, app, fail, make_console, one_line_errors
from kvcatch.errors import InvalidArgument
from kvcatch.laws import LAWS, OWN_LAWS
from kvcatch.sweep import Grid, Row, SweepResult, sweep, sweep_on_ray
from kvcatch.workload.generators import WORKLOADS
from kvcatch.workload.replay import Order, ReplaySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_SHOWN = 60
"""Rows of the table; --json and --csv have all of them."""


@app.command("sweep")
def sweep_command(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Mooncake JSONL, Azure LLM CSV or BurstGPT CSV; known by content."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Built-in: {', '.join(WORKLOADS)}.  [default: chat]"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N requests.")
    ] = None,
    num_blocks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Pool sizes in blocks, null block counted.  [8192]"),
    ] = None,
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Pool sizes in tokens: equal memory at every block size."
        ),
    ] = None,
    block_size: Annotated[str, typer.Option(metavar="N,...", help="Tokens per block.")] = "16",
    policy: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="PLACEMENT or PLACEMENT+EVICTION."),
    ] = "bitmap",
    law: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Admission laws: {', '.join(OWN_LAWS)}.")
    ] = "full_prompt",
    watermark: Annotated[
        str,
        typer.Option(metavar="SHARE,...", help="Share of the pool an admission leaves available."),
    ] = "0",
    max_num_seqs: Annotated[
        str, typer.Option(metavar="N,...", help="Sequences that run at once.")
    ] = "64",
    order: Annotated[
        str, typer.Option(metavar="ORDER", help="fcfs, or cache_aware[:WINDOW].")
    ] = "fcfs",
    token_budget: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens one step computes at most.  [default: whole prompts]"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Output every request asks for.  [default: what it generates]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of workload and evictions.")] = 0,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes.  [default: one per core]")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on Ray: a local one, or that of --ray-address.")
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster, such as auto. Implies --ray."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="Also write the rows as CSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay a workload at every combination of pool size, block size, policy, law and watermark.

    Each list is comma-separated. Ctrl-C stops the sweep and keeps the rows that are done.

    Example: kvcatch sweep --num-blocks 4096,8192 --law full_prompt,worst_case --watermark 0,0.02
    """
    with one_line_errors():
        grid = Grid(
            num_blocks=_whole(
                "--num-blocks", "8192" if num_blocks is None and kv_tokens is None else num_blocks
            ),
            kv_tokens=_whole("--kv-tokens", kv_tokens),
            block_sizes=_whole("--block-size", block_size),
            policies=_names("--policy", policy),
            laws=_names("--law", law),
            watermarks=_shares("--watermark", watermark),
            max_num_seqs=_whole("--max-num-seqs", max_num_seqs),
            seed=seed,
            settings=ReplaySettings(
                order=Order.parse(order), token_budget=token_budget, max_tokens=max_tokens
            ),
        )
        if workload == "":
            raise InvalidArgument(f"--workload '': there are {', '.join(WORKLOADS)}")
        if csv is not None and not csv.parent.is_dir():
            raise InvalidArgument(f"--csv {csv}: there is no folder {csv.parent}")
        if csv is not None and csv.is_dir():
            raise InvalidArgument(f"--csv {csv}: is a folder")
        if csv is not None and not os.access(csv if csv.exists() else csv.parent, os.W_OK):
            raise InvalidArgument(f"--csv {csv}: may not be written")
        if (ray or ray_address is not None) and workers is not None:
            raise InvalidArgument("--workers and --ray exclude each other")
        try:
            work = load_workload(trace, workload, requests, seed)
        except KeyboardInterrupt:
            fail("interrupted while reading the workload; nothing was replayed", 130)
        for note in work.notes:
            print(f"kvcatch: note: {note}", file=sys.stderr)  # noqa: T201
        on_ray = ray or ray_address is not None
        rows = sweep_on_ray(work, grid, ray_address) if on_ray else sweep(work, grid, workers)
        done, stopped = _collect(rows, len(grid.points()))
        result = SweepResult.sorted(work, grid, done)
        if as_json:
            print(json.dumps(result.to_dict(), indent=2, allow_nan=False))  # noqa: T201
        elif done:
            _show(result)
        if csv is not None and done:
            _write(csv, result.to_csv())
            print(f"kvcatch: {len(done)} rows written to {csv}", file=sys.stderr)  # noqa: T201
        if stopped:
            fail(f"interrupted: {len(done)} of {len(grid.points())} replays done", 130)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _parts(name: str, text: str | None) -> list[str]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidArgument(f"{name} {text!r}: an empty value in the list")
    return parts


def _whole(name: str, text: str | None) -> tuple[int, ...]:
    values = []
    for part in _parts(name, text):
        try:
            value = int(part, 10)
        except ValueError:
            raise InvalidArgument(f"{name} {part!r}: not a whole number") from None
        if not 1 <= value <= 2**48:
            raise InvalidArgument(f"{name} {value}: must be between 1 and 2**48")
        values.append(value)
    return tuple(values)


def _shares(name: str, text: str) -> tuple[float, ...]:
    values = []
    for part in _parts(name, text):
        try:
            value = float(part)
        except ValueError:
            raise InvalidArgument(f"{name} {part!r}: not a number") from None
        if not 0 <= value < 1:
            raise InvalidArgument(f"{name} {part}: must be at least 0 and below 1")
        values.append(value)
    return tuple(values)


def _names(name: str, text: str) -> tuple[str, ...]:
    return tuple(_parts(name, text))


def _collect(rows: Iterator[Row], total: int) -> tuple[list[Row], bool]:
    """Every row, with progress on stderr; and whether Ctrl-C cut it short."""
    done: list[Row] = []
    console = make_console(stderr=True)
    bar = (
        Progress(
            TextColumn("replays"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        if console.is_terminal
        else None
    )
    task = bar.add_task("", total=total) if bar else None
    ticker = Ticker()
    ticker.say(f"0 of {total} replays")
    try:
        with bar or ticker:
            for row in rows:
                done.append(row)
                ticker.say(f"{len(done)} of {total} replays")
                if bar is not None and task is not None:
                    bar.update(task, completed=len(done))
    except KeyboardInterrupt:
        # Workers have to be gone before what is done is shown.
        close = getattr(rows, "close", None)
        if close is not None:
            close()
        return done, True
    return done, False


_POINT: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("blocks", lambda row: f"{row.point.num_blocks:,}"),
    ("size", lambda row: str(row.point.block_size)),
    ("policy", lambda row: row.point.policy),
    ("law", lambda row: row.point.law),
    ("mark", lambda row: f"{row.point.watermark:g}"),
    ("seqs", lambda row: str(row.point.max_num_seqs)),
)
_FIGURES: Sequence[tuple[str, str, Callable[[Row], str]]] = (
    ("steps", "engine steps until all are done", lambda row: f"{row.steps:,}"),
    ("preempt", "sequences preempted", lambda row: f"{row.preemptions:,}"),
    ("hits", "prompt tokens found cached", lambda row: f"{row.hit_tokens:,}"),
    ("prefill", "prompt tokens computed", lambda row: f"{row.prefill_tokens:,}"),
    ("p50", "steps to first admission, median", lambda row: f"{row.waiting_steps_p50:,}"),
    ("p99", "the same, 99 %", lambda row: f"{row.waiting_steps_p99:,}"),
    ("use", "active / usable blocks, mean over time", lambda row: f"{row.utilisation:.1%}"),
)


def _show(result: SweepResult) -> None:
    console, work = make_console(), result.workload
    console.print(
        f"{work.name}: {len(work):,} requests, {work.prompt_tokens:,} prompt tokens, "
        f"{work.output_tokens:,} output tokens"
    )
    rows = result.rows
    varies = [(title, text) for title, text in _POINT if len({text(row) for row in rows}) > 1]
    same = [f"{title} {text(rows[0])}" for title, text in _POINT if (title, text) not in varies]
    settings = result.grid.settings
    budget = "whole prompts" if settings.token_budget is None else f"{settings.token_budget:,}"
    console.print(f"{', '.join(same)}, order {settings.order}, step budget {budget}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, _ in varies:
        table.add_column(title, justify="left", overflow="fold")
    for title, _, _ in _FIGURES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows[:MAX_SHOWN]:
        table.add_row(*(text(row) for _, text in varies), *(text(row) for _, _, text in _FIGURES))
    console.print(table)
    if len(rows) > MAX_SHOWN:
        console.print(f"{len(rows) - MAX_SHOWN:,} more rows: --json and --csv have all of them")
    for title, meaning, _ in _FIGURES:
        console.print(f"  {title + ':':<9}{meaning}")
    bare = [
        law for law in dict.fromkeys(row.point.law for row in rows) if not LAWS[law].has_watermark
    ]
    if bare and any(result.grid.watermarks):
        console.print(f"{', '.join(bare)}: no watermark, so replayed without one")
    dropped = max(row.never_fits for row in rows)
    if dropped:
        console.print(f"up to {dropped:,} requests do not fit the empty pool and were dropped")
