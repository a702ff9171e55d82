"""``kvcatch generate``: continue one prompt."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

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
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    make_engine,
)

if TYPE_CHECKING:
    from kvcatch.engine.engine import Engine
    from kvcatch.engine.request import Request


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    n: Annotated[int, typer.Option("--n", help="Continuations; they share the prompt.")] = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = None,
    device: Device = "cpu",
    precision: Precision = "auto",
    kv_dtype: KVType = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    num_threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Continue a prompt; the text comes as it is generated.

    Example: kvcatch generate "The KV cache is" --max-tokens 32
    """
    with one_line_errors():
        from kvcatch.engine.sampling import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            n=n,
            stop=tuple(stop or ()),
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        built = make_engine(
            model,
            quiet=as_json,
            device=device,
            precision=precision,
            kv_dtype=kv_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            num_threads=num_threads,
            # A pool for no more than these: zeroing 1 GiB takes longer than loading the model.
            max_num_seqs=n,
        )
        tokenizer = built.loaded.tokenizer
        tokens = (
            tokenizer.encode_chat([{"role": "user", "content": text}])
            if chat
            else tokenizer.encode(text)
        )
        request = built.engine.add(tokens, params)
        texts = run(built.engine, request, show=not as_json and n == 1)
        if as_json:
            print(json.dumps(facts(request, texts), indent=2, ensure_ascii=False))  # noqa: T201
            return
        for index, one in enumerate(texts):
            if n > 1:
                print(f"[{index}] {one}")  # noqa: T201
        make_console(stderr=True).print(summary(request))


def run(engine: Engine, request: Request, *, show: bool) -> list[str]:
    """Step until the request has ended; the texts of its branches. Ctrl-C ends the request."""
    texts = [""] * request.params.n
    try:
        while not request.is_finished:
            for delta in engine.step():
                texts[delta.index] += delta.text
                if show:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
    finally:
        engine.abort(request.id)
        if show:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return texts


def facts(request: Request, texts: list[str]) -> dict[str, Any]:
    """What happened, with units in the names."""
    return {
        "choices": [
            {
                "index": branch.index,
                "text": text,
                "tokens": branch.generated,
                "finish_reason": branch.finish.value if branch.finish else None,
            }
            for branch, text in zip(request.branches, texts, strict=False)
        ],
        "prompt_tokens": len(request.prompt),
        "hit_tokens": request.hit_tokens or 0,
        "generated_tokens": generated(request),
        "ttft_seconds": ttft(request),
        "tokens_per_second": speed(request),
    }


def generated(request: Request) -> int:
    """Tokens that all branches generated."""
    return sum(branch.num_generated for branch in request.branches)


def ttft(request: Request) -> float | None:
    """Seconds from arrival to the first token."""
    return None if request.first_token is None else request.first_token - request.arrived


def speed(request: Request) -> float | None:
    """Tokens per second after the first; ``None`` where there was one alone."""
    rest = generated(request) - len(request.branches)
    if request.first_token is None or request.finished is None or rest < 1:
        return None
    seconds = request.finished - request.first_token
    return rest / seconds if seconds > 0 else None


def summary(request: Request) -> str:
    """One line for a person."""
    first, rate = ttft(request), speed(request)
    parts = [f"{len(request.prompt)} prompt tokens", f"{generated(request)} generated"]
    if request.hit_tokens:
        parts[0] += f" ({request.hit_tokens} from the prefix cache)"
    if first is not None:
        parts.append(f"first after {first * 1e3:.0f} ms")
    if rate is not None:
        parts.append(f"then {rate:.1f} tokens/s")
    return ", ".join(parts)
