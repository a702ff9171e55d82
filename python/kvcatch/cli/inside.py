"""Prints what kvcatch's plugin inside vLLM says; shared by inspect and diagnose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from kvcatch.cli.common import MAX_ROWS, percent

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_inside", "print_refused", "print_who"]


def print_inside(console: Console, data: dict[str, Any]) -> None:
    """The whole page: limits, who is refused, who holds what, runs, conservation."""
    limits, queue, blocks = data["limits"], data["queue"], data["blocks"]
    sizes = "/".join(map(str, limits["block_size_tokens"]))
    console.print(
        f"vLLM {data['vllm']}, {data['model']}, engine {data['engine']}, process {data['pid']}: "
        f"{limits['num_blocks']:,} blocks of {sizes} tokens, one of them the null block"
    )
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    total = limits["usable_blocks"]
    parts = [
        f"{name} {blocks[name]:,} ({percent(blocks[name], total)})" for name in ("free", "held")
    ]
    facts.add_row("blocks", f"{', '.join(parts)} of {total:,} usable; cached blocks count as free")
    if blocks["retired"] or blocks["unaccounted"]:
        facts.add_row(
            "", f"retired {blocks['retired']:,}, in nobody's table {blocks['unaccounted']:,}"
        )
    facts.add_row(
        "requests",
        f"{queue['running']:,} run, {queue['waiting']:,} wait ({queue['deferred']:,} set aside)",
    )
    facts.add_row(
        "limits",
        f"max_num_seqs {limits['max_num_seqs']:,}, {limits['token_budget_tokens']:,} tokens per "
        f"step, max_model_len {limits['max_model_len_tokens']:,}, watermark "
        f"{limits['watermark_blocks']:,} blocks",
    )
    facts.add_row(
        "last step", f"{data['last_step_seconds_ago']:,.1f} s ago, {data['steps']:,} steps so far"
    )
    runs, pages = data["runs"], data["pages"]
    facts.add_row(
        "runs",
        f"{runs['held_runs']:,} held by {data['requests']:,} requests; longest free run "
        f"{runs['largest_free_run']:,} blocks",
    )
    lengths = ", ".join(
        f"{name}: {number:,}" for name, number in runs["free_run_histogram"].items()
    )
    facts.add_row("  free, by length", lengths or "none")
    if pages["total"]:
        facts.add_row(
            "pages",
            f"{pages['pinned']:,} pinned of {pages['total']:,} ({pages['blocks_per_page']} blocks "
            "of a layer each)",
        )
    console.print(facts)
    print_refused(console, data)
    print_who(console, data)
    for tag, values in data["by_tag"].items():
        console.print(_tags(tag, values, total))
    _print_law(console, data)


def print_refused(console: Console, data: dict[str, Any]) -> None:
    """Which request is refused by which gate, and who waits with it."""
    from kvcatch.observe.inside import refusal_line

    head, recent = data.get("head"), data["recent"]
    if head is not None:
        console.print(f"refused now: {refusal_line(head, is_now=True)}")
    elif recent:
        console.print(f"refused last: {refusal_line(recent[0])}")
    else:
        console.print("refused: nobody so far")
    if len(data["waiting"]) > 1:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("waiting", overflow="fold", max_width=32)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("gate", no_wrap=True)
        table.add_column("why", overflow="fold")
        for item in data["waiting"][:MAX_ROWS]:
            table.add_row(item["request"], f"{item['tokens']:,}", item["gate"], item["detail"])
        console.print(table)
        rest = data["queue"]["waiting"] - min(MAX_ROWS, len(data["waiting"]))
        if rest > 0:
            console.print(f"... {rest:,} more wait")
    if data["waiting_request_seconds"]:
        console.print("request-seconds waited, by gate, since the engine started")
        for gate, seconds in sorted(
            data["waiting_request_seconds"].items(), key=lambda row: -float(row[1])
        ):
            console.print(f"  {seconds:>12,.1f}  {gate}")


def print_who(console: Console, data: dict[str, Any]) -> None:
    """Who holds the blocks."""
    total = data["limits"]["usable_blocks"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("who holds blocks", overflow="fold", max_width=32)
    table.add_column("status", no_wrap=True)
    for name in ("blocks", "% of pool", "shared", "runs", "tokens", "age s", "grew s ago"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in data["holdings"][:MAX_ROWS]:
        table.add_row(
            item["request"],
            item["status"].lower().replace("waiting_for_", "for "),
            f"{item['blocks']:,}",
            percent(item["blocks"], total),
            f"{item['shared_blocks']:,}",
            f"{item['runs']:,}",
            f"{item['tokens']:,}",
            _seconds(item.get("age_seconds")),
            _seconds(item.get("last_growth_seconds_ago")),
        )
    hidden = data["holdings"][MAX_ROWS:]
    requests = data["others"]["requests"] + len(hidden)
    if requests:
        blocks = data["others"]["blocks"] + sum(item["blocks"] for item in hidden)
        table.add_row(f"... {requests:,} more", "", f"{blocks:,}", percent(blocks, total))
    console.print(table)


def _seconds(value: Any) -> str:
    return "-" if not isinstance(value, (int, float)) else f"{value:,.1f}"


def _tags(tag: str, values: list[dict[str, Any]], total: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"tag {tag}", overflow="fold", max_width=32)
    for name in ("requests", "blocks", "% of pool"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in values[:MAX_ROWS]:
        share = percent(item["blocks"], total)
        table.add_row(item["value"], f"{item['requests']:,}", f"{item['blocks']:,}", share)
    return table


def _print_law(console: Console, data: dict[str, Any]) -> None:
    law = data["conservation"]
    state = "idle" if law["is_idle"] else "busy"
    console.print(f"conservation ({state}): {law['law']}")
    zombies = law["zombies"]
    if zombies:
        held = sum(item["blocks"] for item in zombies)
        names = ", ".join(item["request"] for item in zombies[:5])
        console.print(f"zombies: {held:,} blocks of {len(zombies):,} ended requests: {names}")
    elif law["is_idle"]:
        console.print("zombies: none" if law["holds"] else "blocks are missing: see above")
