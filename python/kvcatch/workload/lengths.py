"""A plain CSV of lengths: ``prompt_tokens,output_tokens``, one request a line, in queue order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.workload.readers import truncated
from kvcatch.workload.table import build, rows

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.workload.request import Workload

COLUMNS = ("prompt_tokens", "output_tokens")


def read(path: Path, requests: int | None = None) -> Workload:
    """Read the file, at most ``requests`` of it. Other columns are left out.

    Raises:
        TraceError: A line is malformed; file, line and field are named.
    """
    records: list[tuple[float, int, int, dict[str, str]]] = []
    notes: list[str] = []
    for line, row in rows(path, COLUMNS):
        if row is None:
            notes.append(truncated(line))
            break
        if requests is not None and len(records) >= requests:
            break
        prompt, output = (line.count(name, row[name]) for name in COLUMNS)
        records.append((float(len(records)), prompt, output, {}))
    return build(path, "lengths", records, notes)
