"""``kvcatch advise``: what to change for this traffic, each with its effect in a replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcatch.advice import Advice, Deployment, Effect, advise, read_traffic
from kvcatch.advice.traffic import SAMPLED_REQUESTS
from kvcatch.cli.common import Ticker, app, fail, make_console, one_line_errors
from kvcatch.errors import InvalidArgument
from kvcatch.laws import find_law, settings_of
from kvcatch.ledger.engines import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcatch.advice import Counsel, Lengths

GIB = 2**30
MAX_REQUESTS = 1_000_000


@app.command("advise")
def advise_command(
    *,
    traffic: Annotated[
        Path,
        typer.Argument(
            metavar="TRAFFIC",
            help="A trace, a CSV with prompt_tokens,output_tokens, or an engine's /metrics text.",
        ),
    ],
    engine: Annotated[
        str,
        typer.Option(metavar="NAME@VERSION", help="vllm@0.32, sglang@0.5, trtllm@1.2, tgi@3.3."),
    ],
    num_blocks: Annotated[
        int, typer.Option(metavar="N", help="Blocks of the pool, null block counted.")
    ],
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens per block.  [default: the engine's]")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", help="Sequences that may run at once.")
    ] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of a request.")
    ] = None,
    watermark: Annotated[
        float, typer.Option(metavar="SHARE", help="Share an admission leaves available.")
    ] = 0.0,
    token_budget: Annotated[
        int, typer.Option(metavar="N", help="Tokens one step computes.")
    ] = 8_192,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Output clients ask for.  [default: they leave it open]"),
    ] = None,
    memory_utilization: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the device in use today.")
    ] = None,
    device_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of the device (GiB).")
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(metavar="N", help="As kvcatch plan prints it.")
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another law of that engine, such as max_utilization."),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(metavar="N", help="First requests of a trace; or how many are drawn."),
    ] = SAMPLED_REQUESTS,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn from histograms.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what to change for this traffic, and what changes nothing, by replaying it.

    All requests wait from the first step on: the replay shows the engine under full load, counted
    in its steps. Every figure stands beside the one of today's settings.

    Example: kvcatch advise lengths.csv --engine vllm@0.32 --num-blocks 18724 --max-num-seqs 128
    """
    with one_line_errors():
        parsed = Engine.parse(engine)
        if not 1 <= requests <= MAX_REQUESTS:
            raise InvalidArgument(f"--requests {requests}: must be between 1 and {MAX_REQUESTS}")
        if seed < 0:
            raise InvalidArgument(f"--seed {seed}: must be 0 or more")
        if device_gib is not None and not 0 < device_gib <= 1e6:
            raise InvalidArgument(f"--device-gib {device_gib}: must be above 0 and at most 1e6")
        if watermark and settings_of(parsed).watermark is None:
            raise InvalidArgument(f"--watermark {watermark}: {parsed} has no such setting")
        deployment = Deployment(
            parsed,
            find_law(parsed, law),
            num_blocks,
            parsed.block_size if block_size is None else block_size,
            max_num_seqs,
            max_model_len,
            watermark,
            token_budget,
            max_tokens,
            memory_utilization,
            None if device_gib is None else int(device_gib * GIB),
            kv_bytes_per_token,
        )
        try:
            with Ticker() as ticker:
                ticker.say(f"reading {traffic}")
                found = read_traffic(traffic, requests, seed)
                counsel = advise(deployment, found, lambda what: ticker.say(f"replaying {what}"))
        except KeyboardInterrupt:
            fail("interrupted: no advice was given", 130)
        for note in counsel.traffic.workload.notes:
            print(f"kvcatch: note: {note}", file=sys.stderr)  # noqa: T201
        if as_json:
            print(json.dumps(counsel.to_dict(), indent=2, allow_nan=False))  # noqa: T201
        else:
            _show(counsel)


def _show(counsel: Counsel) -> None:
    console, deployment, traffic = make_console(), counsel.deployment, counsel.traffic
    how = "" if traffic.is_exact else " (drawn from histograms)"
    console.print(
        f"{traffic.workload.name}: {len(traffic.workload):,} requests{how}; {deployment.engine}, law "
        f"{deployment.law.name}, {deployment.num_blocks:,} blocks of {deployment.block_size} tokens"
    )
    lengths = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lengths.add_column("tokens")
    for title in ("P50", "P90", "P99", "P99.9"):
        lengths.add_column(title, justify="right", no_wrap=True)
    for name in ("prompt", "output", "total"):
        lengths.add_row(name, *_percentiles(getattr(traffic, name)))
    console.print(lengths)
    console.print(_effects("today", [("", counsel.today)]))
    for advice in counsel.advice:
        flag = f" ({advice.flag})" if advice.flag else ""
        console.print(f"{advice.setting}{flag}: {advice.current} -> {advice.proposed}")
        console.print(f"  {advice.reason}")
        console.print(_effects("replayed", _rows(advice)))
    if not counsel.advice:
        console.print("nothing to change: the replay shows no setting that does better")
    for left in counsel.not_advised:
        console.print(f"leave {left.setting}: {left.reason}", overflow="fold")


def _rows(advice: Advice) -> list[tuple[str, Effect]]:
    rows = [(f"{advice.current} (today)", advice.before)]
    rows += [(item.value, item.effect) for item in advice.tried if item.value != advice.current]
    return rows


def _percentiles(lengths: Lengths) -> list[str]:
    texts = []
    for percent in (50.0, 90.0, 99.0, 99.9):
        low, high = lengths.percentile(percent)
        if high is None:
            texts.append(f"> {low:,}")
        else:
            texts.append(f"{low:,}" if low == high else f"{low:,}-{high:,}")
    return texts


def _effects(title: str, rows: Sequence[tuple[str, Effect]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    columns: tuple[tuple[str, Callable[[Effect], str]], ...] = (
        ("steps", lambda item: f"{item.steps:,}"),
        ("preempted", lambda item: f"{item.preemptions:,}"),
        ("wait p50", lambda item: f"{item.waiting_steps_p50:,}"),
        ("p99", lambda item: f"{item.waiting_steps_p99:,}"),
        ("hit tokens", lambda item: f"{item.hit_tokens:,}"),
        ("prefill", lambda item: f"{item.prefill_tokens:,}"),
        ("use", lambda item: f"{item.utilisation:.1%}"),
    )
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, effect in rows:
        table.add_row(name, *(text(effect) for _, text in columns))
    return table
