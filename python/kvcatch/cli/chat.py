"""``kvcatch chat``: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvcatch.cli.common import app, make_console, one_line_errors
from kvcatch.cli.engine_options import (
    BlockSize,
    Device,
    KVType,
    MaxModelLen,
    MaxTokens,
    Model,
    NumBlocks,
    Precision,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    make_engine,
)
from kvcatch.cli.generate import run, summary


@app.command("chat")
def chat_command(
    system: Annotated[
        str | None, typer.Option(help="What the assistant is told before the conversation.")
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = None,
    model: Model = None,
    device: Device = "cpu",
    precision: Precision = "auto",
    kv_dtype: KVType = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    num_threads: Threads = None,
) -> None:
    """Talk to the model. An empty line or Ctrl-D ends; Ctrl-C ends an answer.

    Every turn's prompt holds all turns before it: the line below an answer says how many of its tokens came from
    the prefix cache.

    Example: kvcatch chat --system "Answer in one sentence."
    """
    with one_line_errors():
        from kvcatch.engine.sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        built = make_engine(
            model,
            device=device,
            precision=precision,
            kv_dtype=kv_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            num_threads=num_threads,
            max_num_seqs=1,
        )
        notes = make_console(stderr=True)
        messages = [] if system is None else [{"role": "system", "content": system}]
        while True:
            try:
                line = input("> ")
            except EOFError:
                break
            if not line.strip():
                break
            messages.append({"role": "user", "content": line})
            tokens = built.loaded.tokenizer.encode_chat(messages)
            longest = built.engine.config.max_model_len
            room = longest - len(tokens)
            if room < 1:
                notes.print(f"the conversation is full: {len(tokens)} tokens of at most {longest}")
                messages.pop()
                continue
            # An answer takes what room there is, rather than none.
            limit = room if max_tokens is None else min(max_tokens, room)
            request = built.engine.add(tokens, replace(params, max_tokens=limit))
            try:
                text = run(built.engine, request, show=True)[0]
            except KeyboardInterrupt:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": text})
            notes.print(summary(request), style="dim")
