"""``kvcatch monitoring``: dashboards and alert rules as files."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003
from typing import Annotated

import typer

from kvcatch.cli.common import app, make_console, one_line_errors
from kvcatch.errors import InvalidArgument


@app.command()
def monitoring(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where to; made if it is missing.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that differ from what would be written.")
    ] = False,
) -> None:
    """Write Grafana dashboards (kvcatch, vLLM) and Prometheus alert rules into a folder.

    Import the .json files in Grafana; name alerts.yml under rule_files in prometheus.yml. Each alert
    names the paragraph of docs/runbook.md that says what to do.

    Example: kvcatch monitoring -o monitoring
    """
    with one_line_errors():
        from kvcatch.observe.monitoring import FILES, read_file

        output.mkdir(parents=True, exist_ok=True)
        texts = {output / name: read_file(name) for name in FILES}
        for path, text in texts.items():
            if force or not path.exists():
                continue
            if path.read_bytes() != text.encode():
                raise InvalidArgument(f"{path}: is there and differs; --force replaces it")
        console = make_console()
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            console.print(f"{path}: {FILES[path.name]}", soft_wrap=True)
