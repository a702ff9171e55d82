"""``kvcatch plan``: what fits into the KV cache of a model on an engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvcatch.cli.common import app, make_console, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.ledger import Figure, Ledger, LengthDistribution, Pool

_MAX_LIST = 65_536


@app.command()
def plan(
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A config.json, its folder, or a built-in name such as llama-3.1-8b.",
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|SIZE",
            help="GPU such as h200, or its memory such as 48GiB; repeat it per stage or rank where they differ.",
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Blocks of the pool, one of them the null block; no GPU needed."
        ),
    ] = None,
    kv_bytes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="KV cache of a rank such as 16GiB; repeat it per stage or rank; no GPU needed.",
        ),
    ] = None,
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Share of the GPU the engine takes.  [default: the engine's]"
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Weights on a rank.  [default: counted from the config]"),
    ] = None,
    non_kv: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Activations, graphs, context on a rank.  [default: estimated]"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Longest request.  [default: the model's]")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens per block.  [default: the engine's]")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME@VERSION", help="vllm, sglang, trtllm, tgi or kvcatch.")
    ] = "vllm@0.32",
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE", help="auto, bf16, fp16, fp32, fp8, int8, fp8_per_token_head, ..."
        ),
    ] = "auto",
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    pp_layers: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Layers of each stage.  [default: even]")
    ] = None,
    dp: Annotated[int, typer.Option(metavar="N", help="Replicas, each with its own pool.")] = 1,
    dcp: Annotated[int, typer.Option(metavar="N", help="Decode context parallel ranks.")] = 1,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of the largest step.  [default: by GPU]")
    ] = None,
    speculative_tokens: Annotated[int, typer.Option(metavar="N", help="Draft tokens a step.")] = 0,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="For models with states.  [default: the version's]",
        ),
    ] = None,
    async_scheduling: Annotated[
        bool, typer.Option("--async-scheduling/--no-async-scheduling", help="Steps overlap.")
    ] = True,
    mean_length: Annotated[
        int | None, typer.Option(metavar="N", help="Length of requests, prompt and output.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Lengths of requests: one a row, or length,count."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the formula of every number and its inputs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Work out what fits: bytes per token, blocks, requests at once, the longest request, who binds.

    The pool comes from a GPU, from --kv-bytes or from --num-blocks. Figures hold for one replica.

    Example: kvcatch plan --model llama-3.1-8b --gpu h200 --max-model-len 32768 --explain
    """
    with one_line_errors():
        from kvcatch.geometry import Parallel, read_model
        from kvcatch.ledger import Run, to_dict
        from kvcatch.ledger import plan as work_out

        parallel = Parallel(tp, pp, dp, dcp, None if pp_layers is None else _counts(pp_layers))
        ledger = work_out(
            read_model(model),
            _pool(num_blocks, kv_bytes, gpu, memory_utilization, weights, non_kv),
            engine=engine,
            parallel=parallel,
            kv_dtype=kv_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            run=Run(max_num_batched_tokens, async_scheduling, prefix_caching, speculative_tokens),
            lengths=_lengths(mean_length, lengths),
        )
        if as_json:
            text = json.dumps(to_dict(ledger, explain=explain), indent=2, allow_nan=False)
            print(text)  # noqa: T201
            return
        _show(ledger, explain=explain)


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    try:
        if len(parts) > _MAX_LIST:
            raise ValueError
        return tuple(int(part) for part in parts)
    except ValueError:
        raise InvalidArgument(f"pp_layers = {text[:60]!r}: not numbers such as 16,32") from None


def _pool(
    num_blocks: int | None,
    kv_bytes: list[str] | None,
    gpu: list[str] | None,
    utilization: float | None,
    weights: str | None,
    non_kv: str | None,
) -> Pool:
    from kvcatch.ledger import Gpu, Pool, parse_bytes

    return Pool(
        num_blocks=num_blocks,
        kv_bytes=tuple(parse_bytes("kv_bytes", text) for text in kv_bytes or ()),
        gpus=tuple(Gpu.parse(text) for text in gpu or ()),
        utilization=utilization,
        weights_bytes=None if weights is None else parse_bytes("weights", weights, 0),
        non_kv_bytes=None if non_kv is None else parse_bytes("non_kv", non_kv, 0),
    )


def _lengths(mean: int | None, path: Path | None) -> LengthDistribution | None:
    from kvcatch.ledger import LengthDistribution

    if mean is not None and path is not None:
        raise InvalidArgument("--mean-length and --lengths exclude each other")
    if mean is not None:
        return LengthDistribution.one(mean)
    return None if path is None else LengthDistribution.read(path)


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes:,} B"


def _show(ledger: Ledger, *, explain: bool) -> None:
    from kvcatch.ledger import figures

    console = make_console()
    geometry, binds = ledger.geometry, ledger.binds
    model = geometry.model
    spread = ", ".join(
        f"{name} {getattr(geometry.parallel, name)}"
        for name in ("tp", "pp", "dp", "dcp")
        if getattr(geometry.parallel, name) > 1
    )
    console.print(
        f"{model.name}: {model.num_layers} layers ({', '.join(model.kinds)}), KV in {geometry.kv_dtype.name}"
        f"{', ' + spread if spread else ''}; {ledger.engine.title}, blocks of {geometry.block_size} tokens"
    )
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _rows(ledger):
        facts.add_row(name, text)
    console.print(facts)
    group = geometry.groups[binds.group]
    if len(ledger.ranks) > 1 or len(geometry.groups) > 1:
        console.print(
            f"binds: {binds.rank.label} with {binds.rank.num_blocks:,} blocks; group {binds.group} "
            f"({group.kind}) takes {binds.blocks:,} of them at {ledger.max_model_len:,} tokens"
        )
    if ledger.starts is False:
        console.print(f"{ledger.engine.title} would refuse to start: {_why_not(ledger)}")
    elif ledger.max_servable_length < ledger.max_model_len:
        console.print(
            f"requests of more than {ledger.max_servable_length:,} tokens would be accepted and never finish"
        )
    for note in ledger.notes:
        console.print(f"note: {note}")
    if explain:
        console.print()
        for figure in figures(ledger):
            _explain(figure)
    sys.stdout.flush()


def _why_not(ledger: Ledger) -> str:
    one = f"one request of {ledger.max_model_len:,} tokens"
    if ledger.checks_whole_model:
        return (
            f"it sets {_size(ledger.needed_bytes_whole)}, the whole model's need for {one}, "
            f"against the {_size(ledger.smallest_bytes)} of one stage"
        )
    return f"{ledger.blocks_per_request:,} blocks for {one}"


def _rows(ledger: Ledger) -> list[tuple[str, str]]:
    rows = []
    geometry = ledger.geometry
    for rank in ledger.ranks:
        stage = geometry.ranks[rank.stage]
        label = f"{rank.label}: " if len(ledger.ranks) > 1 else ""
        if rank.memory is not None:
            memory = rank.memory
            rows.append(
                (
                    f"{label}memory",
                    f"{_size(memory.gpu.num_bytes)} * {memory.utilization:g} - weights {_size(memory.weights)} "
                    f"({memory.weights_from}) - other {_size(memory.non_kv)} ({memory.non_kv_from})",
                )
            )
        text = (
            f"{stage.kv_bytes_per_token:,} bytes per token, {_size(stage.kv_bytes_per_block)} per block"
            + (
                f", states {_size(stage.state_bytes_per_sequence)}"
                if stage.state_bytes_per_sequence
                else ""
            )
            + (f"; {stage.replicas} ranks hold the same" if stage.replicas > 1 else "")
        )
        rows.append((f"{label}KV", text))
        if rank.kv_bytes is not None:
            rows.append(
                (f"{label}KV cache", f"{_size(rank.kv_bytes)}, {rank.num_blocks or 0:,} blocks")
            )
    kept = ledger.num_blocks - ledger.usable_blocks
    rows += [
        (
            "blocks",
            f"{ledger.num_blocks:,}, usable {ledger.usable_blocks:,}"
            + (" (null block)" if kept else ""),
        ),
        ("tokens", f"{ledger.max_tokens:,}"),
        (
            "longest request",
            f"{ledger.max_model_len:,} tokens accepted, {ledger.max_servable_length:,} really fit",
        ),
        (
            "blocks per request",
            f"{ledger.blocks_per_request:,} at {ledger.max_model_len:,} tokens",
        ),
        (
            "at once, worst case",
            (
                f"{ledger.max_concurrency:,.2f}"
                if ledger.max_concurrency >= 0.01
                else f"{ledger.max_concurrency:.2g}"
            )
            + (" as the engine prints it" if ledger.engine.is_vllm else "")
            + f"; {ledger.max_running:,} sure to fit",
        ),
    ]
    lengths = ledger.length_figures
    if lengths is not None:
        over = lengths["share_over_max_model_len"]
        refused = f"; {over:.1%} over max_model_len are refused" if over else ""
        if "concurrency" in lengths:
            rows.append(
                (
                    "at once, by lengths",
                    f"{lengths['concurrency']:,.1f} at {lengths['mean_blocks_per_request']:,.1f} blocks each"
                    + refused,
                )
            )
        else:
            rows.append(("at once, by lengths", f"none{refused}"))
    return rows


def _explain(figure: Figure) -> None:
    value = f"{figure.value:,.4f}" if isinstance(figure.value, float) else f"{figure.value:,}"
    console = make_console()
    where = f" ({figure.where})" if figure.where else ""
    console.print(f"{figure.name}{where} = {value} {figure.unit}")
    console.print(f"  {figure.formula}")
    console.print(f"  {figure.numbers}")
