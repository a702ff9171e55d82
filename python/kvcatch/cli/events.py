"""``kvcatch events``: what an engine's KV events say of its prefix cache."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import Ticker, app, make_console, one_line, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.observe.events import BlockIndex, Subscriber

_TOP = 8


@app.command()
def events(
    endpoints: Annotated[
        list[str],
        typer.Argument(metavar="ENDPOINT", help="tcp://HOST:PORT, one per data-parallel rank."),
    ],
    replay: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="Repeats what was missed; one per ENDPOINT."),
    ] = None,
    topic: Annotated[str, typer.Option(help="Only messages whose topic begins so.")] = "",
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long; Ctrl-C ends it earlier.", min=0.1)
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Follow an engine's KV events (vLLM --kv-events-config, SGLang) and say what lies in its cache.

    Resident blocks by medium, shared prefixes, lifetimes, blocks stored again after they were evicted.
    What was lost on the way is counted and said. Exit code 0: events came; 1: none did; 2: bad input.

    Example: kvcatch events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --seconds 60
    """
    with one_line_errors():
        from kvcatch.observe.events import Subscriber

        replays = replay or []
        if replays and len(replays) != len(endpoints):
            raise InvalidArgument(
                f"{len(endpoints)} endpoints with {len(replays)} --replay: one for each, in the same order"
            )
        subscribers: list[Subscriber] = []
        try:
            for number, endpoint in enumerate(endpoints):
                again = replays[number] if replays else None
                subscribers.append(Subscriber(endpoint, replay=again, topic=topic))
            _follow(subscribers, seconds)
        finally:
            for subscriber in subscribers:
                subscriber.close()
        if as_json:
            facts = [subscriber.to_dict() for subscriber in subscribers]
            print(json.dumps(facts, indent=2, allow_nan=False))  # noqa: T201
        else:
            for subscriber in subscribers:
                _show(subscriber, seconds)
        heard = all(subscriber.counts["batches"] for subscriber in subscribers)
        raise typer.Exit(0 if heard else 1)


def _follow(subscribers: list[Subscriber], seconds: float) -> None:
    end = time.monotonic() + seconds
    with Ticker() as ticker:
        try:
            for subscriber in subscribers:
                subscriber.catch_up()
            while (left := end - time.monotonic()) > 0:
                # The first waits, the others are read as they are: a tenth of a second is soon enough.
                wait = min(left, 0.1)
                for subscriber in subscribers:
                    subscriber.poll(wait)
                    wait = 0.0
                batches = sum(subscriber.counts["batches"] for subscriber in subscribers)
                blocks = sum(
                    len(index)
                    for subscriber in subscribers
                    for index in subscriber.indices.values()
                )
                ticker.say(f"{batches:,} batches, {blocks:,} blocks resident")
            for subscriber in subscribers:
                subscriber.catch_up()
        except KeyboardInterrupt:
            make_console(stderr=True).print("stopped")


def _show(subscriber: Subscriber, seconds: float) -> None:
    console, counts = make_console(), subscriber.counts
    console.print(f"{subscriber.endpoint}: {counts['batches']:,} batches")
    for text in notes(subscriber, seconds):
        console.print(f"note: {text}")
    for rank, index in subscriber.indices.items():
        name = "" if rank is None else f"rank {rank}: "
        console.print(f"{name}{len(index):,} blocks can be found")
        console.print(_facts(index))
        prefixes = index.shared_prefixes(_TOP)
        if prefixes:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("shared prefix, tokens", justify="right")
            table.add_column("continuations", justify="right")
            table.add_column("of those resident", justify="right")
            table.add_column("adapter", overflow="fold", max_width=40)
            for item in prefixes:
                tokens = f"{item.tokens:,}" if item.is_rooted else f">= {item.tokens:,}"
                lora = one_line(item.lora) if item.lora else ""
                table.add_row(tokens, f"{item.branches:,}", f"{item.resident_branches:,}", lora)
            console.print(table)


def _facts(index: BlockIndex) -> Table:
    facts = index.to_dict(0)
    counts, shape = index.counts, facts["structure"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for medium, blocks in index.resident_blocks.items():
        tokens = index.resident_tokens[medium]
        table.add_row(f"  on {one_line(medium)}", f"{blocks:,} blocks, {tokens:,} tokens")
    table.add_row(
        "  tree",
        f"{shape['roots']:,} roots, {shape['leaves']:,} ends, {shape['branch_points']:,} branch points, "
        f"{shape['shared_blocks']:,} shared blocks, deepest {shape['deepest_blocks']:,} blocks",
    )
    table.add_row(
        "  chains",
        f"{counts['new_chains']:,} new, {counts['extended_chains']:,} extended, "
        f"{counts['branched_chains']:,} branched off, {counts['orphaned_chains']:,} under an unknown block",
    )
    table.add_row(
        "  blocks",
        f"{counts['stored_blocks']:,} stored, {counts['reused_blocks']:,} reported again, "
        f"{counts['removed_blocks']:,} removed, {counts['restored_blocks']:,} stored again after that",
    )
    table.add_row("  kept for", _spread(facts["lifetime_seconds"]))
    table.add_row("  stored again after", _spread(facts["restored_after_seconds"]))
    requests = facts["requests"]
    if requests is not None:
        runs = requests["runs_per_request"]
        table.add_row(
            "  requests",
            f"{requests['requests']:,} named, {requests['blocks_per_request']:.1f} blocks each, runs each: "
            + ("unknown, the events name no block ids" if runs is None else f"{runs:.1f}"),
        )
    return table


def _spread(value: dict[str, Any] | None) -> str:
    if value is None:
        return "unknown: none was seen"
    return f"median {value['p50']:,.1f} s, 90 % within {value['p90']:,.1f} s"


def notes(subscriber: Subscriber, seconds: float) -> list[str]:
    """What is doubtful, one line each."""
    counts, found = subscriber.counts, []
    if not counts["batches"]:
        found.append(
            f"nothing came in {seconds:g} s: is it the address in --kv-events-config, with "
            "enable_kv_cache_events on, and has a request run?"
        )
    elif subscriber.joined_at:
        found.append(
            f"joined at batch {subscriber.joined_at:,}: what was stored before is not known; "
            "--replay gives it, as far back as buffer_steps goes"
        )
    if counts["missed_batches"]:
        found.append(
            f"{counts['missed_batches']:,} batches were lost in {counts['gaps']:,} gaps: what is resident is "
            "doubtful"
        )
    elif counts["gaps"]:
        found.append(f"{counts['gaps']:,} gaps, all filled by replay")
    if counts["restarts"]:
        found.append(f"the publisher was restarted {counts['restarts']:,} times")
    if counts["malformed"]:
        found.append(
            f"{counts['malformed']:,} messages were malformed, the last: {subscriber.last_error}"
        )
    elif counts["replay_failures"]:
        found.append(f"replay failed {counts['replay_failures']:,} times: {subscriber.last_error}")
    if subscriber.unknown:
        names = ", ".join(f"{name} ({n:,})" for name, n in subscriber.unknown.most_common(5))
        found.append(f"unknown events left out: {names}")
    return [one_line(text) for text in found]
