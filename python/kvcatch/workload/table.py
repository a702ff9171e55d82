"""What the CSV traces have in common: lengths, no contents, so no prompt shares a prefix."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np

from kvcatch.errors import TraceError
from kvcatch.workload.readers import Line, lines
from kvcatch.workload.request import TOKEN_LIMIT, Request, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

NO_SHARING = "the trace has lengths only: no prompt shares a prefix with another"


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[Line, dict[str, str] | None]]:
    """Every row by column name; None for a last row the file was cut in."""
    header: list[str] | None = None
    for line in lines(path):
        try:
            (cells,) = csv.reader([line.text], strict=True)
        except (csv.Error, ValueError) as error:
            if line.is_cut and header is not None:
                yield line, None
                return
            line.fail("line", line.text, f"not CSV ({error})")
        if header is None:
            header = [cell.strip() for cell in cells]
            for column in columns:
                if column not in header:
                    line.fail("header", line.text, f"column {column!r} is missing")
                if header.count(column) > 1:
                    line.fail("header", line.text, f"column {column!r} stands there twice")
            continue
        if len(cells) != len(header) or (line.is_cut and not cells[-1].strip()):
            if line.is_cut and len(cells) <= len(header):
                yield line, None
                return
            line.fail("line", line.text, f"{len(cells)} fields where the header has {len(header)}")
        yield line, dict(zip(header, cells, strict=True))


def build(
    path: Path,
    kind: str,
    records: Sequence[tuple[float, int, int, Mapping[str, str]]],
    notes: Sequence[str],
) -> Workload:
    """A workload from (arrival in seconds, prompt tokens, output tokens, tags)."""
    if sum(prompt + output for _, prompt, output, _ in records) > TOKEN_LIMIT:
        raise TraceError(f"{path}: more than {TOKEN_LIMIT} distinct tokens; read fewer requests")
    begin = min((record[0] for record in records), default=0.0)
    next_token = 0
    made: list[Request] = []
    for index, (arrival, prompt, output, tags) in enumerate(records):
        made.append(
            Request(
                index,
                arrival - begin,
                np.array([next_token], dtype=np.int64),
                np.array([prompt], dtype=np.int64),
                prompt,
                output,
                next_token + prompt,
                f"req-{index}",
                tags,
            )
        )
        next_token += prompt + output
    return Workload(path.name, kind, tuple(made), (*notes, f"{path}: {NO_SHARING}"))
