"""Azure LLM inference traces (2023, 2024): CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvcatch.workload.readers import truncated
from kvcatch.workload.table import build, rows

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.workload.request import Workload

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, requests: int | None = None) -> Workload:
    """Read the first ``requests`` requests (all by default)."""
    notes: list[str] = []
    records: list[tuple[float, int, int, dict[str, str]]] = []
    for line, row in rows(path, COLUMNS):
        if requests is not None and len(records) >= requests:
            break
        if row is None:
            notes.append(truncated(line))
            break
        stamp = row["TIMESTAMP"]
        try:
            when = datetime.fromisoformat(stamp.strip())
        except ValueError:
            line.fail("TIMESTAMP", stamp, "not a time such as 2023-11-16 18:15:46.6805900")
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        prompt = line.count("ContextTokens", row["ContextTokens"])
        output = line.count("GeneratedTokens", row["GeneratedTokens"])
        records.append((when.timestamp(), prompt, output, {}))
    return build(path, "azure", records, notes)
