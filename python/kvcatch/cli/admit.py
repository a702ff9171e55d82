"""``kvcatch admit``: who enters, who waits at which gate, with the arithmetic."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import app, make_console, one_line_errors, read_text
from kvcatch.errors import InvalidArgument
from kvcatch.laws import LAWS, State, find_law, null_blocks
from kvcatch.laws.ask import Question, parse_requests, parse_running, read_question
from kvcatch.ledger.engines import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.laws import Decision

MAX_JSON_BYTES = 64 * 2**20
"""A larger question is refused."""

MAX_GROUPS = 40
"""Rows of the table; --json has every request."""


@app.command()
def admit(
    *,
    request: Annotated[
        list[str] | None,
        typer.Option(
            metavar="IN[:OUT][xN]",
            help="A waiting request: prompt tokens, most output tokens, how many of them. "
            "Repeat it; the order is the queue's.",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks of the pool, null block counted.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Tokens per block.")] = None,
    used: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks that are neither free nor cached.")
    ] = None,
    free: Annotated[
        int | None, typer.Option(metavar="N", help="Clean blocks, instead of --used.")
    ] = None,
    cached: Annotated[
        int | None, typer.Option(metavar="N", help="Evictable prefix blocks.")
    ] = None,
    pinned: Annotated[
        int | None, typer.Option(metavar="N", help="Of the cached blocks, pinned ones.")
    ] = None,
    reserved: Annotated[
        int | None,
        typer.Option(metavar="N", help="Blocks promised to those that run, not handed out."),
    ] = None,
    running: Annotated[int | None, typer.Option(metavar="N", help="How many requests run.")] = None,
    running_request: Annotated[
        list[str] | None,
        typer.Option(
            metavar="IN[:DONE[:OUT]][xN]",
            help="One that runs: prompt tokens, generated so far, most output tokens.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences that may run at once.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of a request.")
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens one step may compute (max_num_batched_tokens)."),
    ] = None,
    watermark: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the pool an admission leaves available."),
    ] = None,
    new_token_ratio: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Expected share of the outstanding output (SGLang)."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME@VERSION", help="vllm@0.32, sglang@0.5, trtllm@1.2, tgi@3.3, llamacpp."
        ),
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Instead of the engine's: {', '.join(LAWS)}."),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help='JSON {"state": {...}, "queue": [...]} instead of the flags above; - is stdin.',
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say who of a queue would be admitted, and at which gate the others wait, with arithmetic.

    The law is that of the engine and version; without one it is kvcatch's full_prompt. A limit
    that is not given has no gate, and is named as not checked.

    Example: kvcatch admit --num-blocks 1000 --used 260 --request 512:4096x30 --law worst_case
    """
    with one_line_errors():
        parsed = None if engine is None else Engine.parse(engine)
        chosen = find_law(parsed, law)
        counts: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "cached": cached,
            "pinned": pinned,
            "reserved": reserved,
            "num_running": running,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "token_budget": token_budget,
            "watermark": watermark,
            "new_token_ratio": new_token_ratio,
        }
        given = {name: value for name, value in counts.items() if value is not None}
        if read is not None:
            if given or request or running_request or used is not None or free is not None:
                raise InvalidArgument("--from excludes the flags that describe state and queue")
            try:
                question = read_question(read_text(read, MAX_JSON_BYTES), parsed, law)
            except InvalidArgument as error:
                raise InvalidArgument(f"--from {read}: {error}") from None
        else:
            nulls = 0 if parsed is None else null_blocks(parsed)
            given["free"] = _free(num_blocks, nulls, used, free, cached or 0)
            given.setdefault("block_size", 16)
            state = State(**given, null_blocks=nulls, running=parse_running(running_request or ()))
            question = Question(chosen, parsed, state, parse_requests(request or ()))
        decisions = question.answer()
        if as_json:
            print(json.dumps(question.to_dict(decisions), indent=2, allow_nan=False))  # noqa: T201
        else:
            _show(question, decisions)


def _free(
    num_blocks: int | None, nulls: int, used: int | None, free: int | None, cached: int
) -> int:
    """Clean blocks: as given, or what is neither used nor cached; without a word all of them."""
    if num_blocks is None:
        raise InvalidArgument("give --num-blocks, or --from")
    if num_blocks < 1:
        raise InvalidArgument(f"num_blocks = {num_blocks}: must be 1 or more")
    if used is not None and free is not None:
        raise InvalidArgument("--used and --free exclude each other")
    if free is not None:
        return free
    if used is None:
        used = nulls
    if used < 0:
        raise InvalidArgument(f"--used {used}: must be 0 or more")
    if used + cached > num_blocks:
        raise InvalidArgument(
            f"--used {used} + --cached {cached} = {used + cached}: more than --num-blocks "
            f"{num_blocks}"
        )
    return num_blocks - max(used, nulls) - cached


def _show(question: Question, decisions: Sequence[Decision]) -> None:
    console, state, law = make_console(), question.state, question.law
    owner = str(question.engine) if question.engine else law.engine
    console.print(f"law {law.name} ({owner}, {law.source})")
    console.print(f"  enters iff {law.text}")
    reserved = question.reserved
    console.print(
        f"{state.unclaimed - reserved:,} of {state.num_blocks:,} blocks of {state.block_size} "
        f"tokens available = free {state.free:,} + cached {state.cached:,} - pinned "
        f"{state.pinned:,} - reserved {reserved:,}"
    )
    limit = "" if state.max_num_seqs is None else f" of {state.max_num_seqs:,}"
    console.print(f"{state.count_running:,}{limit} running")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("request", no_wrap=True)
    table.add_column("in:out", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("gate", no_wrap=True)
    table.add_column("arithmetic", overflow="fold")
    rows = _groups(decisions)
    for first, last, decision in rows[:MAX_GROUPS]:
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            _lengths(decision),
            decision.status,
            decision.refusal.gate if decision.refusal else "",
            decision.refusal.detail if decision.refusal else _entered(decision),
        )
    console.print(table)
    if len(rows) > MAX_GROUPS:
        console.print(f"{len(rows) - MAX_GROUPS:,} more rows: --json has all of them")
    entered = sum(decision.enters for decision in decisions)
    console.print(f"{entered:,} of {len(decisions):,} enter")
    for index, decision in enumerate(decisions, start=1):
        if decision.refusal is not None:
            console.print(f"first refusal: request {index} at {decision.refusal}")
            break
    if missing := question.not_checked():
        console.print(f"not checked, for it was not given: {', '.join(missing)}")


def _lengths(decision: Decision) -> str:
    request = decision.request
    output = "?" if request.max_tokens is None else str(request.max_tokens)
    name = f"{request.name} " if request.name else ""
    return f"{name}{request.prompt_tokens}:{output}"


def _entered(decision: Decision) -> str:
    return f"{decision.arithmetic}; {decision.warning}" if decision.warning else decision.arithmetic


def _groups(decisions: Sequence[Decision]) -> list[tuple[int, int, Decision]]:
    """Neighbours that ask the same and get the same answer, as (first, last, the first's)."""
    rows: list[tuple[int, int, Decision]] = []
    position = 1
    for _, same in groupby(
        decisions,
        key=lambda item: (item.request, item.status, item.refusal and item.refusal.gate),
    ):
        members = list(same)
        rows.append((position, position + len(members) - 1, members[0]))
        position += len(members)
    return rows
