"""``kvcatch serve``: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer

from kvcatch.cli.common import app, fail, make_console, one_line_errors
from kvcatch.cli.engine_options import (
    BlockSize,
    Compaction,
    Device,
    HostBlocks,
    KVType,
    Law,
    MaxBatchedTokens,
    MaxModelLen,
    MaxNumSeqs,
    Model,
    NumBlocks,
    Order,
    Precision,
    PreemptBy,
    Threads,
    Watermark,
    make_engine,
)
from kvcatch.cli.knee import measure_knee
from kvcatch.errors import InvalidArgument


@app.command("serve")
def serve_command(
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="0 takes a free one.",
        ),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVCATCH_API_KEY",
            show_envvar=True,
            help="Bearer token that calls need.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model.",
        ),
    ] = None,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Longest body of a call.",
        ),
    ] = 4 << 20,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="For accepted requests to finish at the end.",
        ),
    ] = 120.0,
    water_level: Annotated[
        float | None,
        typer.Option(
            help="Utilisation from which short requests go first.",
        ),
    ] = None,
    short_tokens: Annotated[
        int,
        typer.Option(
            help="A request of so many tokens is short.",
        ),
    ] = 1024,
    long_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the pool for long requests together.",
        ),
    ] = None,
    max_input: Annotated[
        int | None,
        typer.Option(
            help="Most prompt tokens.",
        ),
    ] = None,
    max_queued: Annotated[
        int | None,
        typer.Option(
            help="Requests that may wait.",
        ),
    ] = 1024,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of all that wait.",
        ),
    ] = None,
    model: Model = None,
    device: Device = "cpu",
    precision: Precision = "auto",
    kv_dtype: KVType = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_num_seqs: MaxNumSeqs = 32,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = 512,
    law: Law = "full_prompt",
    watermark: Watermark = 0.0,
    order: Order = "fcfs",
    preemption: PreemptBy = "recompute",
    host_blocks: HostBlocks = 0,
    compaction: Compaction = "off",
    num_threads: Threads = None,
    find_knee: Annotated[
        bool,
        typer.Option(
            "--find-knee",
            help="Do not serve: measure TTFT by utilisation here and propose a --water-level.",
        ),
    ] = False,
    knee_seconds: Annotated[
        float,
        typer.Option(
            help="About how long --find-knee measures.",
        ),
    ] = 120.0,
    knee_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of its requests; else what fills the pool.",
        ),
    ] = None,
    knee_output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of its requests, on average.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="What --find-knee found as JSON.",
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API. Ctrl-C or SIGTERM: no new request, accepted ones are answered.

    Example: kvcatch serve --port 8000 --num-blocks 4096 --law worst_case
    """
    with one_line_errors():
        if as_json and not find_knee:
            raise InvalidArgument("--json: prints what --find-knee found, which is not asked for")
        from kvcatch.engine.governor import GovernorConfig

        governor = GovernorConfig(
            water_level=water_level,
            short_tokens=short_tokens,
            long_share=long_share,
            max_input=max_input,
            max_queued=max_queued,
            max_queued_tokens=max_queued_tokens,
        )
        try:
            from kvcatch.serve.app import ServeSettings
            from kvcatch.serve.server import bind, serve
        except ModuleNotFoundError as error:
            from kvcatch.errors import MissingExtra

            raise MissingExtra(
                f"{error.name} is not installed: pip install 'kvcatch[serve]'"
            ) from error
        settings = ServeSettings(served_model_name or "", api_key, max_body_bytes)
        # Before the model loads: a taken port is said at once.
        bound = None if find_knee else bind(host, port)
        built = make_engine(
            model,
            quiet=find_knee and as_json,
            device=device,
            precision=precision,
            kv_dtype=kv_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            law=law,
            watermark=watermark,
            order=order,
            preemption=preemption,
            host_blocks=host_blocks,
            compaction=compaction,
            num_threads=num_threads,
            # The level is looked for in the traffic that no governor has changed.
            governor=None if find_knee else governor,
        )
        if bound is None:
            measure_knee(
                built.engine,
                seconds=knee_seconds,
                prompt_tokens=knee_prompt_tokens,
                output_tokens=knee_output_tokens,
                as_json=as_json,
            )
            return
        name = served_model_name or built.loaded.name
        settings = replace(settings, model_name=name)
        notes = make_console(stderr=True)

        shown = f"[{host}]" if ":" in host else host

        def ready() -> None:
            notes.print(f"model {name} at http://{shown}:{bound.getsockname()[1]}/v1")

        cut_off = asyncio.run(
            serve(
                built.engine,
                built.loaded.tokenizer,
                settings,
                bound,
                drain_seconds=drain_seconds,
                ready=ready,
            )
        )
        if cut_off:
            fail(f"stopped: {cut_off} requests were not finished within {drain_seconds:g} s", 1)
        notes.print("stopped: every accepted request was answered")
