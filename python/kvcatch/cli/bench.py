"""``kvcatch bench``: replay a workload against allocator policies."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcatch.bench import (
    CACHE_COLUMNS,
    DEFAULT_POLICIES,
    PLACEMENT_COLUMNS,
    BenchConfig,
    BenchResult,
    Column,
    each_policy,
)
from kvcatch.cli.common import app, fail, make_console, one_line_errors
from kvcatch.errors import InvalidArgument
from kvcatch.workload.generators import WORKLOADS, generate
from kvcatch.workload.readers import read_trace
from kvcatch.workload.replay import (
    BANDWIDTH_GB_S,
    DESCRIPTOR_US,
    MAX_PASSED_OVER,
    Order,
    ReplayResult,
    ReplaySettings,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.workload.request import Workload

GENERATED_REQUESTS = 1_000
DONE_EVERY_SECONDS = 5.0

MAX_REQUESTS = 10_000_000
"""Most requests of one replay."""


@app.command()
def bench(
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
        int | None,
        typer.Option(
            metavar="N",
            help="Only the first N requests.  "
            f"[default: a whole trace; {GENERATED_REQUESTS} built-in]",
        ),
    ] = None,
    num_blocks: Annotated[
        int, typer.Option(metavar="N", help="Blocks of the pool, one of them the null block.")
    ] = 8_192,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens per block.")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", help="Sequences that run at once.")
    ] = 64,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="PLACEMENT or PLACEMENT+EVICTION, such as bitmap+slru; repeat it to compare.  "
            f"[default: {', '.join(DEFAULT_POLICIES)}]",
        ),
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="fcfs, or cache_aware[:WINDOW]: longest cached prefix among the first WINDOW (64) "
            f"waiting, nobody passed over more than {MAX_PASSED_OVER} times.",
        ),
    ] = "fcfs",
    watermark: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Share of the pool that stays available after an admission."
        ),
    ] = 0.0,
    page_blocks: Annotated[int, typer.Option(metavar="N", help="Blocks per page.")] = 128,
    descriptor_us: Annotated[
        float,
        typer.Option(
            metavar="US",
            help="Transfer model: µs per descriptor, one for each run (default: vLLM PR 55841).",
        ),
    ] = DESCRIPTOR_US,
    bandwidth: Annotated[
        float, typer.Option(metavar="GB/S", help="Transfer model: GB/s (default: vLLM PR 35990).")
    ] = BANDWIDTH_GB_S,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the built-in workloads.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="OUT.html", help="Also write a self-contained report with plots."),
    ] = None,
) -> None:
    """Replay a workload against allocator policies and compare them.

    Every policy starts with an empty pool and gets the same requests, order, admission and
    watermark: closed loop, one decode token per sequence and step, as vLLM's scheduler does.

    Example: kvcatch bench --trace conversation.jsonl --num-blocks 60000 --policy bitmap+slru
    """
    with one_line_errors():
        config = BenchConfig(
            policies=tuple(policy or DEFAULT_POLICIES),
            num_blocks=num_blocks,
            block_size=block_size,
            page_blocks=page_blocks,
            seed=seed,
            settings=ReplaySettings(
                max_num_seqs=max_num_seqs,
                order=Order.parse(order),
                watermark=watermark,
                descriptor_us=descriptor_us,
                bandwidth_gb_s=bandwidth,
            ),
        )
        if report is not None:
            _check_report(report)
        try:
            work = load_workload(trace, workload, requests, seed)
        except KeyboardInterrupt:
            fail("interrupted while reading the workload; no policy was run", 130)
        for note in work.notes:
            print(f"kvcatch: note: {note}", file=sys.stderr)  # noqa: T201
        result, stopped = _run(work, config)
        _show(result, as_json=as_json)
        if report is not None and result.policies:
            from kvcatch.report import html_report

            report.write_text(html_report(result), encoding="utf-8")
            print(f"kvcatch: report written to {report}", file=sys.stderr)  # noqa: T201
        if stopped:
            fail(stopped, 130)
        if not any(row.finished for row in result.policies.values()):
            fail(f"no request fits {num_blocks} blocks of {block_size} tokens; none was run", 1)


def _check_report(report: Path) -> None:
    """Refuse early what would fail only after the whole bench."""
    from kvcatch.report import require_report

    require_report()
    if report.is_dir():
        raise InvalidArgument(f"--report {report}: is a folder")
    if not report.parent.is_dir():
        raise InvalidArgument(f"--report {report}: there is no folder {report.parent}")


def load_workload(
    trace: Path | None, name: str | None, requests: int | None, seed: int
) -> Workload:
    """The workload that --trace, --workload, --requests and --seed name."""
    if trace is not None and name is not None:
        raise InvalidArgument("--trace and --workload exclude each other")
    if requests is not None and not 1 <= requests <= MAX_REQUESTS:
        raise InvalidArgument(f"--requests {requests}: must be between 1 and {MAX_REQUESTS}")
    if trace is not None:
        return read_trace(trace, requests)
    return generate(name or "chat", requests or GENERATED_REQUESTS, seed)


def _run(work: Workload, config: BenchConfig) -> tuple[BenchResult, str]:
    """The results so far, and what to say when the user stopped it (else an empty string)."""
    done: dict[str, ReplayResult] = {}
    shown = _Shown(len(work), config.policies)
    try:
        with shown:
            for name, result in each_policy(work, config, shown.advance):
                done[name] = result
                shown.finish(name, result)
    except KeyboardInterrupt:
        complete = ", ".join(done) or "none"
        return BenchResult(work, config, done), (
            f"interrupted: {len(done)} of {len(config.policies)} policies done ({complete}); "
            f"{shown.where} was left out"
        )
    return BenchResult(work, config, done), ""


class _Shown:
    """Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, requests: int, policies: Sequence[str]) -> None:
        self.requests = requests
        self.where = f"{policies[0]} at 0 of {requests} requests"
        self.last = time.monotonic()
        self.bar: Progress | None = None
        console = make_console(stderr=True)
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                auto_refresh=False,
            )
            self.tasks = {
                name: self.bar.add_task(name, total=requests, start=False) for name in policies
            }

    def __enter__(self) -> None:
        if self.bar is not None:
            self.bar.start()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, policy: str, done: int, total: int) -> None:
        self.where = f"{policy} at {done} of {total} requests"
        now = time.monotonic()
        if self.bar is not None:
            task = self.tasks[policy]
            if done == 0 or not self.bar.tasks[task].started:
                self.bar.start_task(task)
            self.bar.update(task, completed=done)
            if now - self.last > 0.1 or done == total:
                self.bar.refresh()
                self.last = now
        elif now - self.last > DONE_EVERY_SECONDS:
            self.last = now
            print(f"kvcatch: {self.where}", file=sys.stderr, flush=True)  # noqa: T201

    def finish(self, policy: str, result: ReplayResult) -> None:
        if self.bar is None:
            line = f"kvcatch: {policy}: {result.finished} requests in {result.seconds:.1f} s"
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def _show(result: BenchResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))  # noqa: T201
        return
    if not result.policies:
        return
    console = make_console()
    work, config = result.workload, result.config
    console.print(
        f"{work.name}: {len(work):,} requests, {work.prompt_tokens:,} prompt tokens, "
        f"{work.output_tokens:,} output tokens"
    )
    console.print(
        f"{config.num_blocks:,} blocks of {config.block_size} tokens, "
        f"{config.settings.max_num_seqs} sequences, order {config.settings.order}, "
        f"watermark {config.settings.watermark:g}, pages of {config.page_blocks} blocks"
    )
    dropped = max(row.never_fits for row in result.policies.values())
    if dropped:
        console.print(f"{dropped:,} requests do not fit the empty pool and were dropped")
    for columns in (PLACEMENT_COLUMNS, CACHE_COLUMNS):
        console.print(_bench_table(result, columns))
        for column in columns:
            if column.meaning:
                console.print(f"  {column.title + ':':<13}{column.meaning}")


def _bench_table(result: BenchResult, columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # The name gives way where the line is full: no figure is ever cut.
    table.add_column("policy", overflow="fold", min_width=8)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name, row in result.policies.items():
        table.add_row(name, *(column.text(row) for column in columns))
    return table
