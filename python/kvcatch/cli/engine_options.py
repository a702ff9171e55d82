"""Options that ``generate``, ``chat`` and ``serve`` share, and the engine they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcatch.cli.common import make_console

if TYPE_CHECKING:
    from kvcatch.engine.build import BuiltEngine

__all__ = [
    "BlockSize",
    "Compaction",
    "Device",
    "HostBlocks",
    "KVType",
    "Law",
    "MaxBatchedTokens",
    "MaxModelLen",
    "MaxNumSeqs",
    "MaxTokens",
    "Model",
    "NumBlocks",
    "Order",
    "Precision",
    "PreemptBy",
    "Seed",
    "Stop",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "Watermark",
    "make_engine",
]

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="A GGUF file or a folder with safetensors; else SmolLM2-135M-Instruct.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or cuda:N.",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="auto, float32 or bfloat16; auto takes what the processor is fast at.",
    ),
]
KVType = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="float32, float16, bfloat16 or float8_e4m3; else that of the weights.",
    ),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks of the pool; else up to 1 GiB.",
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(
        help="Tokens per block.",
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(
        help="Sequences that run at once.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a request; else the model's.",
    ),
]
MaxBatchedTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens",
        help="Tokens one step computes.",
    ),
]
Law = Annotated[
    str,
    typer.Option(
        help="Admission law: full_prompt, first_chunk, worst_case or estimate.",
    ),
]
Watermark = Annotated[
    float,
    typer.Option(
        help="Share of the pool an admission leaves while something runs.",
    ),
]
Order = Annotated[
    str,
    typer.Option(
        help="Waiting queue: fcfs, priority or cache_aware.",
    ),
]
PreemptBy = Annotated[
    str,
    typer.Option(
        "--preemption",
        help="recompute or swap.",
    ),
]
HostBlocks = Annotated[
    int,
    typer.Option(
        help="Blocks of the host pool that swap uses.",
    ),
]
Compaction = Annotated[
    str,
    typer.Option(
        help="off, runs or pages: between steps, when it pays.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--num-threads",
        help="Threads of one torch operation; else all.",
    ),
]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens to generate at most.",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token.",
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Sample among tokens that sum to this.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        help="Sample among so many tokens; 0 for all.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of the random choices.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Text that ends the output; repeatable.",
    ),
]


def make_engine(model: Path | None, quiet: bool = False, **options: Any) -> BuiltEngine:
    """Get the default model if none is named, load it, and say on stderr what was made."""
    from kvcatch.cli.model import pull_with_progress
    from kvcatch.engine.build import build_engine

    path = pull_with_progress() if model is None else model
    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        built = build_engine(path, **options)
    else:
        with console.status(f"loading {path.name}"):
            built = build_engine(path, **options)
    if not quiet:
        console.print(str(built), soft_wrap=False)
    return built
