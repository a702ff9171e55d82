"""``kvcatch loadtest``: add requests one at a time until one waits, and compare with the law."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvcatch.cli.common import app, make_console, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.loadtest.predict import Limits, Prediction
    from kvcatch.loadtest.ramp import Probe, Ramp, RampSettings
    from kvcatch.loadtest.result import Verdict

FAULTY = ("off", "configuration_fault")


@app.command("loadtest")
def loadtest_command(
    url: Annotated[str, typer.Argument(help="Of an OpenAI-compatible server.")],
    prompt_tokens: Annotated[int, typer.Option(help="Of every request.")] = 512,
    output_tokens: Annotated[
        int, typer.Option(help="Of every request; enough that the first outlives the ramp.")
    ] = 1024,
    max_concurrency: Annotated[int, typer.Option(help="Requests under way at most.")] = 64,
    model: Annotated[str | None, typer.Option(help="Name; else the first one listed.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVCATCH_API_KEY", help="Bearer token.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Whose admission law to expect, for example vllm@0.32.")
    ] = "kvcatch",
    law: Annotated[str | None, typer.Option(help="Another law, by name.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the pool; else what /metrics says.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block; else what /metrics says, or 16.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that may run.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a request.")] = None,
    watermark: Annotated[float, typer.Option(help="Share an admission leaves.")] = 0.0,
    id_range: Annotated[str, typer.Option(help="Ids that prompts are made of.")] = "1000:9000",
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of TTFT by concurrency (PNG, SVG or PDF).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find where a server begins to make requests wait, and compare that with its admission law.

    Requests of fixed lengths are added one at a time, each once the one before has started, never more than
    --max-concurrency. Exit code 1 when the difference is beyond 20 %. Ctrl-C stops and says what was measured.

    Example: kvcatch loadtest http://127.0.0.1:8000 --prompt-tokens 200 --output-tokens 800 --engine vllm@0.32
    """
    with one_line_errors():
        from kvcatch.loadtest.client import ServerClient
        from kvcatch.loadtest.ramp import RampSettings
        from kvcatch.loadtest.result import judge, to_dict

        settings = RampSettings(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_concurrency=max_concurrency,
        )
        client = ServerClient(url, model, api_key, _range(id_range))
        chosen = _law(engine, law)
        if plot is not None:
            from kvcatch.loadtest.plot import check_plot

            check_plot(plot)
        notes = make_console(stderr=True)

        def progress(probe: Probe) -> None:
            if not as_json:
                notes.print(_line(probe))

        found, blocks, size = asyncio.run(_run(client, settings, progress))
        prediction = None
        if (num_blocks or blocks) is not None:
            prediction = _predict(
                found,
                settings,
                _limits(
                    chosen,
                    num_blocks or blocks or 0,
                    block_size or size or 16,
                    max_num_seqs,
                    max_model_len,
                    watermark,
                ),
            )
        verdict = judge(found, prediction, max_concurrency)
        if plot is not None:
            from kvcatch.loadtest.plot import write_plot

            write_plot(plot, found, prediction)
        if as_json:
            print(json.dumps(to_dict(found, prediction, verdict), indent=2))  # noqa: T201
        else:
            _print(found, prediction, verdict)
        if found.interrupted:
            raise typer.Exit(130)
        raise typer.Exit(1 if verdict.name in FAULTY else 0)


async def _run(
    client: Any, settings: RampSettings, progress: Any
) -> tuple[Ramp, int | None, int | None]:
    from kvcatch.loadtest.ramp import ramp

    async with client:
        gauges = await client.gauges()
        found = await ramp(client, settings, progress)
        return found, gauges.num_blocks, gauges.block_size


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise InvalidArgument(f"id range {text!r}: must be LOW:HIGH with LOW < HIGH")
    return int(low), int(high)


def _law(engine: str, law: str | None) -> Any:
    from kvcatch.laws import find_law, null_blocks
    from kvcatch.ledger.engines import Engine

    parsed = Engine.parse(engine)
    return find_law(parsed, law), null_blocks(parsed)


def _limits(
    chosen: Any,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int | None,
    max_model_len: int | None,
    watermark: float,
) -> Limits:
    from kvcatch.loadtest.predict import Limits

    law, null = chosen
    return Limits(law, num_blocks, block_size, null, max_num_seqs, max_model_len, watermark)


def _predict(found: Ramp, settings: RampSettings, limits: Limits) -> Prediction:
    from kvcatch.loadtest.predict import predict

    generated = [probe.generated for probe in found.probes]
    return predict(
        limits,
        found.prompt_tokens,
        settings.output_tokens,
        generated,
        settings.max_concurrency,
    )


def _line(probe: Probe) -> str:
    ttft = "" if probe.ttft is None else f", first token after {probe.ttft * 1e3:.0f} ms"
    detail = f": {probe.detail}" if probe.detail else ""
    return f"request {probe.number}: {probe.outcome}{ttft}{detail}"[:100]


def _print(found: Ramp, prediction: Prediction | None, verdict: Verdict) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("verdict", f"{verdict.name}: {verdict.text}")
    if verdict.gate:
        table.add_row("gate", verdict.gate)
    if prediction is not None:
        most, least = prediction.most, prediction.least
        table.add_row(
            "by the law", f"between {least} (outputs complete) and {most} (none generated)"
        )
        if prediction.refusal is not None:
            table.add_row("arithmetic", str(prediction.refusal))
    else:
        table.add_row("by the law", "not predicted: give --num-blocks (the server does not say)")
    if found.preemptions is not None:
        table.add_row("preemptions", str(found.preemptions))
    make_console().print(table)
