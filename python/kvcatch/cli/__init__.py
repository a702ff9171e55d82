"""The ``kvcatch`` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.

One file per command; each registers itself on ``app`` when it is imported here.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from kvcatch.cli import (
    admit,
    advise,
    bench,
    chat,
    compare,
    diagnose,
    events,
    generate,
    inspect,
    knee,
    leaks,
    loadtest,
    model,
    monitoring,
    plan,
    record,
    serve,
    sweep,
    watch,
)
from kvcatch.cli.common import app, make_console

__all__ = [
    "admit",
    "advise",
    "app",
    "bench",
    "chat",
    "compare",
    "diagnose",
    "events",
    "generate",
    "inspect",
    "knee",
    "leaks",
    "loadtest",
    "main",
    "model",
    "monitoring",
    "plan",
    "record",
    "serve",
    "sweep",
    "watch",
]


def _print_version(value: bool) -> None:
    if value:
        from kvcatch._core import __version__, build_profile

        suffix = "" if build_profile == "release" else f" ({build_profile} build)"
        make_console().print(f"kvcatch {__version__}{suffix}")
        raise typer.Exit


@app.callback()
def _kvcatch(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look after the KV cache of an LLM server: compare block allocators, read pool snapshots.

    Example: kvcatch bench --workload chat
    """


def main() -> None:
    """Run the command line; the entry point of ``kvcatch``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign gets another one, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
