"""Recordings of an engine's metrics: kvcatch's compact format, and raw bodies.

Compact, one JSON value a line, gzip where the name ends in ``.gz``:

* ``{"kvcatch_recording": 1, "endpoint": ..., "start_unix_s": ..., "version": ...}`` first;
* ``{"types": {name: kind}}`` and ``{"series": [...]}``: metric kinds, and series numbered from 0 on, as met;
* ``[t, [i, value, ...], [gone, ...]]``: what changed at ``t`` seconds, and which series are gone;
* ``{"t": ..., "error": ...}``: a scrape that failed;
* ``{"t": ..., "inside": {...}}``: what kvcatch's plugin inside the engine said.

Raw, one JSON object a line: ``{"t": seconds, "text": body}`` or ``{"t": seconds, "error": ...}``.
"""

from __future__ import annotations

import gzip
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

from kvcatch.errors import InvalidArgument
from kvcatch.observe.engines import family_of
from kvcatch.observe.errors import MetricsError, RecordingError
from kvcatch.observe.inside import check_inside
from kvcatch.observe.limits import EngineVersion
from kvcatch.observe.lines import FORMAT, is_recording, rows
from kvcatch.observe.prometheus import Reader, parse_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcatch.observe.prometheus import Slot
    from kvcatch.observe.sample import EngineSample

__all__ = [
    "Recorder",
    "Recording",
    "bodies",
    "is_recording",
    "moments",
    "read_recording",
    "series_rows",
]

_FLUSH_ROWS = 30
_EXTRA = ("process_start_time_seconds",)
_MOST_VALUE = 1e300


@dataclass(slots=True)
class Recording:
    """What a recording holds.

    Attributes:
        samples: Of all engines and ranks in it, in order of time.
        names: Metric names met, by engine.
        version: As the recorder was told; None when it was not.
        errors: Scrapes that failed, one line each.
        notes: What is doubtful about the file.
        inside: What a plugin inside the engine said last; None without one.
    """

    samples: list[EngineSample] = field(default_factory=list)
    names: dict[str, set[str]] = field(default_factory=dict)
    version: EngineVersion | None = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inside: dict[str, Any] | None = None


class Recorder:
    """Writes the compact format.

    Args:
        path: Where to; an existing file is replaced.
        endpoint: Whose metrics.
        start_unix_s: Time of the first row's zero.
        version: ``vllm@0.32.0`` and the like, where known.

    Attributes:
        rows: Written so far, those of scrapes that failed counted.
        failed: Scrapes that failed.
    """

    def __init__(
        self, path: Path, endpoint: str, start_unix_s: float, version: str | None = None
    ) -> None:
        self.rows = self.failed = 0
        self._reader = Reader(endpoint)
        self._series: dict[str, int] = {}
        self._values: dict[int, float] = {}
        self._types: dict[str, str] = {}
        if path.suffix == ".gz":
            self._file: TextIO = cast(
                "TextIO",
                gzip.open(path, "wt", encoding="utf-8"),  # noqa: SIM115
            )
        else:
            self._file = path.open("w", encoding="utf-8")
        self._write(
            {
                "kvcatch_recording": FORMAT,
                "endpoint": endpoint,
                "start_unix_s": round(start_unix_s, 3),
                "version": version,
            }
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
        except OSError:
            if kind is None:
                raise
            # What went wrong before says more: the disk is still full.

    def add(self, t_seconds: float, body: bytes | str) -> None:
        """Add one body.

        Raises:
            MetricsError: It is not a metrics body of an engine; nothing was written.
        """
        self._reader.read(body, t_seconds)
        text = body.decode("utf-8", errors="replace") if isinstance(body, bytes) else body
        kinds: dict[str, str] = {}
        fresh: list[str] = []
        seen: dict[int, float] = {}
        for line in text.split("\n"):
            if line.startswith("# TYPE "):
                parts = line.split()
                if len(parts) == 4 and parts[2] not in self._types and _is_kept(parts[2]):
                    kinds[parts[2]] = parts[3]
                continue
            if not line or line[0] == "#" or not _is_kept(line.lstrip()):
                continue
            parsed = parse_line(line)
            if parsed is None or parsed[0].partition("{")[0].endswith("_created"):
                continue
            try:
                value = float(parsed[1])
            except ValueError:
                continue
            number = self._series.get(parsed[0])
            if number is None:
                number = self._series[parsed[0]] = len(self._series)
                fresh.append(parsed[0])
            seen[number] = value
        if kinds:
            self._types.update(kinds)
            self._write({"types": kinds})
        if fresh:
            self._write({"series": fresh})
        changed: list[float | int | None] = []
        for number, value in seen.items():
            if self._values.get(number) != value:
                short = int(value) if value.is_integer() and abs(value) < 2**53 else value
                changed += [number, short if math.isfinite(value) else None]
        gone = [number for number in self._values if number not in seen]
        self._values = seen
        self._write(
            [round(t_seconds, 3), changed, gone] if gone else [round(t_seconds, 3), changed]
        )
        self._row()

    def fail(self, t_seconds: float, error: str) -> None:
        """Add a scrape that failed."""
        self.failed += 1
        self._write({"t": round(t_seconds, 3), "error": error})
        self._row()

    def inside(self, t_seconds: float, data: dict[str, Any]) -> None:
        """Add what the plugin inside the engine said."""
        self._write({"t": round(t_seconds, 3), "inside": data})

    def _row(self) -> None:
        self.rows += 1
        if self.rows % _FLUSH_ROWS == 0:
            self._file.flush()

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def _is_kept(name: str) -> bool:
    return family_of(name) is not None or name.startswith(_EXTRA)


def _number(value: float | None) -> float:
    """A value as it was recorded; NaN for what is no finite number."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.nan


def read_recording(path: Path, progress: Callable[[int], None] | None = None) -> Recording:
    """Read a recording, compact or raw.

    Args:
        path: The file.
        progress: Called with the number of rows read, now and then.

    Raises:
        RecordingError: It is not a recording, or a line is malformed.
        OSError: It cannot be opened.
    """
    recording = Recording()
    reader = Reader(str(path))
    slots: list[Slot | None] = []
    is_empty = True
    for number, row in rows(path, recording.notes):
        is_empty = False
        if isinstance(row, list):
            _compact_row(row, slots)
            recording.samples += reader.assemble(row[0], 0)
        elif "kvcatch_recording" in row:
            if isinstance(row.get("version"), str):
                recording.version = _version(path, row["version"], recording.notes)
        elif "series" in row:
            for series in row["series"]:
                name = series.partition("{")[0]
                slots.append(reader.slot(series) if reader.wants(name) else None)
        elif "inside" in row:
            recording.inside = check_inside(row["inside"], f"{path}, line {number}")
        elif isinstance(row.get("text"), str):
            try:
                recording.samples += reader.read(row["text"], row["t"])
            except MetricsError as error:
                recording.errors.append(f"line {number}: {error}")
        elif "t" in row:
            recording.errors.append(f"line {number}: {row.get('error', 'no text')!s:.200}")
        if progress is not None and number % (500 if slots else 50) == 0:
            progress(number)
    if is_empty:
        raise RecordingError(f"{path}: empty")
    recording.names = reader.names
    if not recording.samples:
        first = f": {recording.errors[0]}" if recording.errors else ""
        raise RecordingError(f"{path}: no sample in it{first}")
    return recording


def _version(path: Path, text: str, notes: list[str]) -> EngineVersion | None:
    try:
        return EngineVersion.parse(text, "recording")
    except InvalidArgument as error:
        notes.append(f"{path}: its version is not read: {error}")
        return None


def _compact_row(row: list[Any], slots: list[Slot | None]) -> None:
    changed = row[1]
    for at in range(0, len(changed), 2):
        slot = slots[changed[at]]
        if slot is not None:
            value = changed[at + 1]
            # As in a body: what is no count is unknown.
            if value is None or not 0 <= value < _MOST_VALUE:
                slot.seen = -1
            else:
                slot.value = float(value)
                slot.seen = 0
    if len(row) > 2:
        for number in row[2]:
            slot = slots[number]
            if slot is not None:
                slot.seen = -1


def moments(path: Path) -> Iterator[tuple[float, Callable[[], str | None]]]:
    """Time of each row, and what makes its metrics body; None for a scrape that failed.

    The body is that of the row until the next one is taken.

    Raises:
        RecordingError: It is not a recording.
    """
    series: list[str] = []
    values: dict[int, float | None] = {}
    types: dict[str, str] = {}
    for _, row in rows(path, []):
        if isinstance(row, list):
            pairs = row[1]
            values.update(zip(pairs[::2], pairs[1::2], strict=True))
            for gone in row[2] if len(row) > 2 else ():
                values.pop(gone, None)
            yield row[0], partial(_render, series, values, types)
        elif "series" in row:
            series += row["series"]
        elif "types" in row:
            types.update(row["types"])
        elif "t" in row and "inside" not in row:
            text = row.get("text")
            yield row["t"], partial(_as_text, text)


def _as_text(text: object) -> str | None:
    return text if isinstance(text, str) else None


def bodies(path: Path) -> Iterator[tuple[float, str | None]]:
    """Time and metrics body of each row, as an endpoint would serve it; None for a scrape that failed.

    Raises:
        RecordingError: It is not a recording.
    """
    for t_seconds, make in moments(path):
        yield t_seconds, make()


def series_rows(
    path: Path, wants: Callable[[str], bool]
) -> Iterator[tuple[float, dict[str, float]]]:
    """Time and values of the wanted series of each row; the dict is the same one, brought up to date.

    Args:
        path: The recording.
        wants: Whether the series of this metric name are wanted.

    Raises:
        RecordingError: It is not a recording, or a line is malformed.
    """
    values: dict[str, float] = {}
    names: list[str | None] = []
    for _, row in rows(path, []):
        if isinstance(row, list):
            for at in range(0, len(row[1]), 2):
                name = names[row[1][at]]
                if name is not None:
                    values[name] = _number(row[1][at + 1])
            for gone in row[2] if len(row) > 2 else ():
                values.pop(names[gone] or "", None)
            yield row[0], values
        elif "series" in row:
            names += [
                series if wants(series.partition("{")[0]) else None for series in row["series"]
            ]
        elif isinstance(row.get("text"), str):
            values.clear()
            for line in row["text"].split("\n"):
                if not line or line[0] == "#" or not wants(line.split("{", 1)[0].split(" ", 1)[0]):
                    continue
                parsed = parse_line(line)
                if parsed is not None:
                    with suppress(ValueError):
                        values[parsed[0]] = float(parsed[1])
            yield row["t"], values


def _render(series: list[str], values: dict[int, float | None], types: dict[str, str]) -> str:
    lines, told = [], set()
    # Series of one metric stand together, as the format wants it.
    for number in sorted(values, key=lambda at: (_base(series[at], types), at)):
        base = _base(series[number], types)
        if base in types and base not in told:
            told.add(base)
            lines.append(f"# TYPE {base} {types[base]}")
        value = values[number]
        lines.append(f"{series[number]} {'NaN' if value is None else value}")
    return "\n".join(lines) + "\n"


def _base(series: str, types: dict[str, str]) -> str:
    name = series.partition("{")[0]
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and types.get(base) in ("histogram", "summary"):
            return base
    return name
