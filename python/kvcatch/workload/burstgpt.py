"""BurstGPT traces: CSV with request, response and total tokens, model and log type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.workload.readers import truncated
from kvcatch.workload.table import build, rows

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.workload.request import Workload

COLUMNS = (
    "Timestamp",
    "Model",
    "Request tokens",
    "Response tokens",
    "Total tokens",
    "Log Type",
)


def read(path: Path, requests: int | None = None) -> Workload:
    """Read the first ``requests`` requests (all by default).

    BurstGPT writes a failed request as ``Response tokens`` 0: those are left out and counted in the
    notes.
    """
    notes: list[str] = []
    records: list[tuple[float, int, int, dict[str, str]]] = []
    failed = 0
    for line, row in rows(path, COLUMNS):
        if requests is not None and len(records) >= requests:
            break
        if row is None:
            notes.append(truncated(line))
            break
        arrival = line.number_of("Timestamp", row["Timestamp"])
        prompt = line.count("Request tokens", row["Request tokens"])
        if row["Response tokens"].strip() == "0":
            failed += 1
            continue
        output = line.count("Response tokens", row["Response tokens"])
        total = line.count("Total tokens", row["Total tokens"])
        if total != prompt + output:
            line.fail("Total tokens", total, f"is not {prompt} + {output}")
        tags = {"model": row["Model"].strip(), "log_type": row["Log Type"].strip()}
        records.append((arrival, prompt, output, tags))
    if failed:
        notes.append(f"{path}: {failed} failed requests (Response tokens 0) were left out")
    return build(path, "burstgpt", records, notes)
