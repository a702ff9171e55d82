"""The lines of a recording, checked: of a known kind and well formed, times never going back."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from typing import TYPE_CHECKING, Any, cast

from kvcatch.observe.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FORMAT", "is_recording", "rows"]

FORMAT = 1
"""Of the compact format."""

_MAX_LINE = 256 * 2**20
_VALUES = {int, float, type(None)}


def is_recording(path: Path) -> bool:
    """Whether a file's first line is that of a recording, compact or raw."""
    for _, value in _lines(path, []):
        return _is_head(value)
    return False


def _is_head(value: object) -> bool:
    return isinstance(value, dict) and ("kvcatch_recording" in value or "t" in value)


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else path.open("rb")


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """Numbered JSON values; a file that breaks off is read up to there, and noted.

    Raises:
        RecordingError: A line before the last is not JSON.
    """
    number, broken = 0, ""
    with _open(path) as file:
        while True:
            try:
                line = file.readline(_MAX_LINE)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if not number:
                    raise RecordingError(f"{path}: {error}") from None
                notes.append(f"{path} breaks off after line {number}: {error}")
                return
            if not line:
                break
            if broken:
                raise RecordingError(f"{path}, line {number}: {broken}")
            number += 1
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                broken = f"not JSON: {error}"
                continue
            yield number, value
    if broken:
        if number == 1:
            raise RecordingError(f"{path}, line 1: {broken}")
        notes.append(f"{path} breaks off in line {number}")


def rows(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """Numbered lines of a recording, the head first, each of a known kind, times never going back.

    A clock that was set back, or a recording appended to another, is taken to go on one interval after the
    row before, and noted.

    Raises:
        RecordingError: It is not a recording, is of another format, or a line is malformed.
    """
    back, offset, last, gap = 0, 0.0, -math.inf, 1.0
    first_line = count = 0
    is_first, is_compact = True, False
    for number, row in _lines(path, notes):
        if is_first:
            is_first = False
            is_compact = _read_head(path, row)
            if is_compact:
                yield number, row
                continue
        count += _check(path, number, row, count, is_compact=is_compact)
        key: Any = 0 if isinstance(row, list) else "t"
        if key == 0 or "t" in row:
            t_seconds = _time(path, number, row[key]) + offset
            if t_seconds < last:
                first_line = first_line or number
                back += 1
                offset += last + gap - t_seconds
                t_seconds = last + gap
            elif last > -math.inf and t_seconds > last:
                gap = t_seconds - last
            last = row[key] = round(t_seconds, 3) if offset else t_seconds
        yield number, row
    if back:
        notes.append(
            f"{path}: time goes back {back:,} times, first in line {first_line:,}: the rows after it are taken "
            "to follow those before"
        )


def _read_head(path: Path, row: Any) -> bool:
    """Whether the first line is that of a compact recording; refuses what is none."""
    if not _is_head(row):
        raise RecordingError(
            f"{path}: not a recording: its first line has no kvcatch_recording and no t"
        )
    if "kvcatch_recording" not in row:
        return False
    if row["kvcatch_recording"] != FORMAT:
        raise RecordingError(
            f"{path}: format {row['kvcatch_recording']!r:.20}; this kvcatch reads {FORMAT}"
        )
    return True


def _check(path: Path, number: int, row: Any, known: int, *, is_compact: bool) -> int:
    """Refuse what is no line of a recording; returns how many series it adds to the ``known`` ones."""
    error = "unknown kind of line"
    if isinstance(row, dict):
        if "kvcatch_recording" in row:
            error = "another recording begins here"
        elif not is_compact:
            if "t" in row:
                return 0
            error = "no t"
        elif "series" in row:
            series = row["series"]
            if isinstance(series, list) and set(map(type, series)) <= {str}:
                return len(series)
            error = "malformed series"
        elif "types" in row:
            types = row["types"]
            if isinstance(types, dict) and set(map(type, types.values())) <= {str}:
                return 0
            error = "malformed types"
        elif "t" in row and ("inside" in row or "error" in row):
            return 0
    elif isinstance(row, list) and is_compact:
        error = "malformed row"
        changed, gone = row[1] if len(row) > 1 else None, row[2] if len(row) > 2 else []
        if isinstance(changed, list) and isinstance(gone, list) and len(changed) % 2 == 0:
            numbers, values = changed[::2], changed[1::2]
            is_whole = set(map(type, numbers)) | set(map(type, gone)) <= {int}
            if is_whole and set(map(type, values)) <= _VALUES:
                named = (*numbers, *gone)
                if min(named, default=0) >= 0 and max(named, default=-1) < known:
                    return 0
                error = "malformed row (a series that was not named before)"
    raise RecordingError(f"{path}, line {number}: {error}")


def _time(path: Path, number: int, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(cast("float", value)) < 1e15:
        raise RecordingError(f"{path}, line {number}: t = {value!r:.40} is not a time")
    return float(cast("float", value))
