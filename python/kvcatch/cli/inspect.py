"""``kvcatch inspect``: print what a pool's snapshot holds, or what the plugin inside vLLM sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcatch.cli.common import MAX_ROWS, app, fail, make_console, one_line_errors, percent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvcatch.snapshot import Holding, Snapshot


@app.command()
def inspect(
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="FILE|unix:PATH|URL",
            help="JSON that pool.snapshot() gave, or the plugin inside vLLM: its socket, port or page.",
        ),
    ],
    live: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER,...", help="Owners that are alive; others that hold blocks are zombies."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="All requests of a running vLLM, not the largest.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For a running vLLM to answer.", min=0.1)
    ] = 5.0,
    token: Annotated[
        str | None,
        typer.Option(envvar="KVCATCH_TOKEN", help="Of the plugin's port.", show_envvar=True),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print what is in a pool's snapshot: who holds what, runs, pages, fragmentation, zombies.

    Of a vLLM with kvcatch's plugin it also prints which request is refused, by which gate, with what
    arithmetic. A snapshot whose numbers cannot be true together is refused with the arithmetic.

    Example: kvcatch inspect snapshot.json --live req-17,req-18
    """
    from kvcatch.snapshot import Snapshot

    with one_line_errors():
        if (inside := _inside(snapshot, timeout, token, is_whole=whole)) is not None:
            if as_json:
                print(json.dumps(inside, indent=2, allow_nan=False))  # noqa: T201
            else:
                from kvcatch.cli.inside import print_inside

                print_inside(make_console(), inside)
            return
        read = Snapshot.read(Path(snapshot))
        owners = (
            None if live is None else [name.strip() for name in live.split(",") if name.strip()]
        )
        if as_json:
            print(json.dumps(read.to_dict(owners), indent=2, allow_nan=False))  # noqa: T201
            return
        _print_snapshot(read, owners)


def _inside(
    source: str, timeout: float, token: str | None, *, is_whole: bool
) -> dict[str, Any] | None:
    """What the plugin says, from an address or from a file with its page; None for another file."""
    if "://" not in source and not source.startswith("unix:"):
        with Path(source).open("rb") as file:
            start = file.read(400)
        if b'"kvcatch.vllm"' not in start:
            return None
        from kvcatch.observe.inside import read_inside_file

        return read_inside_file(Path(source))
    from kvcatch.observe.inside import read_inside
    from kvcatch.observe.scrape import Scraper, metrics_url, page_url

    endpoint = metrics_url(source)

    async def fetch() -> dict[str, Any]:
        async with Scraper(timeout_s=timeout, token=token) as scraper:
            page = await scraper.fetch(
                page_url(endpoint, "/snapshot" + ("?all=1" if is_whole else ""))
            )
        if page.body is None:
            fail(page.error or f"{endpoint}: no answer", 2)
        return read_inside(page.body, endpoint)

    return asyncio.run(fetch())


def _print_snapshot(read: Snapshot, owners: list[str] | None) -> None:
    console = make_console()
    config, blocks, runs, pages, tokens = (
        read.config,
        read.blocks,
        read.runs,
        read.pages,
        read.tokens,
    )
    null = ", one of them the null block" if blocks["null"] else ""
    console.print(
        f"pool of {config['num_blocks']:,} blocks of {config['block_size']} tokens{null}; "
        f"{config['placement']}+{config['eviction']}, contiguity {config['contiguity']}"
    )
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    total = blocks["total"]
    facts.add_row(
        "blocks",
        ", ".join(
            f"{name} {blocks[name]:,} ({percent(blocks[name], total)})"
            for name in ("free", "cached", "active")
        )
        + f" of {total:,}",
    )
    facts.add_row(
        "available",
        f"{blocks['available']:,} = free + cached - pinned cached - reserved "
        f"(pinned {blocks['pinned']:,}, reserved {blocks['reserved']:,})",
    )
    facts.add_row(
        "free runs",
        f"{runs['free_runs']:,}, largest {runs['largest_run']:,} blocks, "
        f"fragmentation {runs['fragmentation']:.1%}",
    )
    buckets = sorted(
        runs["free_run_histogram"].items(), key=lambda item: int(item[0].split("-")[0])
    )
    histogram = ", ".join(f"{name}: {n:,}" for name, n in buckets if n)
    facts.add_row("  by length", histogram or "none")
    facts.add_row(
        "pages",
        f"{pages['empty']:,} empty, {pages['pinned']:,} pinned of {pages['total']:,} "
        f"({config['blocks_per_page']} blocks each)",
    )
    facts.add_row(
        "slots",
        f"{tokens['used']:,} used of {tokens['slots']:,}, "
        f"internal fragmentation {tokens['internal_fragmentation']:.1%}",
    )
    facts.add_row("sequences", f"{len(read.sequences):,}, pins {len(read.pins):,}")
    console.print(facts)
    console.print(_holdings("owner", read.holdings_by_owner(), total))
    for tag in read.tag_names():
        console.print(_holdings(f"tag {tag}", read.holdings_by_tag(tag), total))
    if owners is not None:
        zombies = read.zombies(owners)
        if zombies:
            held = sum(holding.blocks for holding in zombies)
            console.print(
                f"zombies: {held:,} blocks ({percent(held, total)} of {total:,}) held by "
                f"{len(zombies):,} owners that are not alive"
            )
            console.print(_holdings("zombie", zombies, total))
        else:
            console.print("zombies: none")


def _holdings(title: str, holdings: Sequence[Holding], total: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold", max_width=32)
    for name in ("sequences", "blocks", "% of pool", "own", "tokens", "runs", "reserved"):
        table.add_column(name, justify="right", no_wrap=True)
    for holding in holdings[:MAX_ROWS]:
        table.add_row(
            "(none)" if holding.name is None else holding.name,
            f"{holding.sequences:,}",
            f"{holding.blocks:,}",
            percent(holding.blocks, total),
            f"{holding.own_blocks:,}",
            f"{holding.num_tokens:,}",
            f"{holding.runs:,}",
            f"{holding.reserved:,}",
        )
    rest = holdings[MAX_ROWS:]
    if rest:
        table.add_row(
            f"... {len(rest):,} more",
            f"{sum(holding.sequences for holding in rest):,}",
            f"{sum(holding.blocks for holding in rest):,}",
            percent(sum(holding.blocks for holding in rest), total),
            f"{sum(holding.own_blocks for holding in rest):,}",
            f"{sum(holding.num_tokens for holding in rest):,}",
            f"{sum(holding.runs for holding in rest):,}",
            f"{sum(holding.reserved for holding in rest):,}",
        )
    return table
