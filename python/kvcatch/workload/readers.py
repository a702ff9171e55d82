"""Reading a trace line by line: where an error is, and what is kept of a truncated file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvcatch.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcatch.workload.request import Workload

MAX_TOKENS = 2**27
"""A longer prompt or output (tokens) is taken for a damaged line."""
MAX_LINE_BYTES = 2**26
"""A longer line is taken for a file that is no trace: a device without an end would fill the memory."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace file.

    Attributes:
        path: The file.
        number: Position in the file, from 1.
        text: The line without its end.
        is_cut: The file ends in this line without a line end, so it may be incomplete.
    """

    path: Path
    number: int
    text: str
    is_cut: bool

    def fail(self, field: str, value: object, problem: str) -> NoReturn:
        """Raise TraceError that names file, line, field and value."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        raise TraceError(f"{self.path}:{self.number}: {field} = {shown}: {problem}")

    def count(self, field: str, value: object) -> int:
        """``value`` as a number of tokens, 1 or more."""
        if isinstance(value, str):
            try:
                value = int(value.strip(), 10)
            except ValueError:
                self.fail(field, value, "not a whole number of tokens")
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(field, value, "not a whole number of tokens")
        if not 1 <= value <= MAX_TOKENS:
            self.fail(field, value, f"must lie between 1 and {MAX_TOKENS} tokens")
        return value

    def number_of(self, field: str, value: object) -> float:
        """``value`` as a finite number, 0 or more."""
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.fail(field, value, "not a number")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(field, value, "not a number")
        if not (0 <= value <= 1e15) or not math.isfinite(value):
            self.fail(field, value, "must be a finite number, 0 or more")
        return float(value)


def lines(path: Path) -> Iterator[Line]:
    """The file's lines that are not blank."""
    with path.open("rb") as file:
        for number in count(1):
            raw = file.readline(MAX_LINE_BYTES + 1)
            if not raw:
                return
            if len(raw) > MAX_LINE_BYTES:
                raise TraceError(
                    f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes: not a trace"
                )
            ended = raw.endswith(b"\n")
            try:
                text = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                if not ended:
                    text = raw.decode("utf-8", errors="replace")
                else:
                    bad = raw[error.start : error.start + 8]
                    raise TraceError(
                        f"{path}:{number}: byte {error.start + 1} = {bad!r}: not UTF-8 text"
                    ) from None
            if number == 1:
                text = text.removeprefix("\ufeff")
            if text.strip():
                yield Line(path, number, text, is_cut=not ended)


def truncated(line: Line) -> str:
    """The note for a file whose last line is incomplete."""
    return (
        f"{line.path}: truncated: line {line.number} is incomplete and was left out; "
        "the lines before it were kept"
    )


def read_trace(path: str | Path, requests: int | None = None) -> Workload:
    """Read a trace, its format recognised by its first line.

    Args:
        path: A Mooncake JSONL, Azure LLM CSV or BurstGPT CSV file, or a CSV with the columns
            prompt_tokens and output_tokens.
        requests: Read only the first so many requests.

    Raises:
        TraceError: A line is malformed (file, line and field are named) or the format is unknown.
        OSError: The file cannot be read.
    """
    from kvcatch.workload import azure, burstgpt, lengths, mooncake

    path = Path(path)
    first = next(lines(path), None)
    if first is None:
        raise TraceError(f"{path}: the file has no lines")
    if first.text.lstrip().startswith("{") or path.suffix in {".jsonl", ".ndjson"}:
        workload = mooncake.read(path, requests)
    else:
        names = [name.strip() for name in first.text.split(",")]
        for reader in (azure, burstgpt, lengths):
            if all(column in names for column in reader.COLUMNS):
                workload = reader.read(path, requests)
                break
        else:
            first.fail(
                "header",
                first.text,
                "neither Mooncake JSONL, nor the columns of Azure LLM or BurstGPT, nor "
                "prompt_tokens,output_tokens",
            )
    if not workload.requests:
        raise TraceError(f"{path}: no complete request in the file")
    return workload
