"""Mooncake traces: JSON lines with ``hash_ids``.

The fields are ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``.
Every hash id stands for 512 prompt tokens in their place (the last one for what is left): equal ids
are equal tokens, different ids different ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import TraceError
from kvcatch.workload.readers import Line, lines, truncated
from kvcatch.workload.request import TOKEN_LIMIT, Request, Workload

if TYPE_CHECKING:
    from pathlib import Path

TOKENS_PER_HASH = 512


def read(path: Path, requests: int | None = None) -> Workload:
    """Read the first ``requests`` requests (all by default)."""
    notes: list[str] = []
    records: list[tuple[float, int, int, list[int]]] = []
    number_of_id: dict[int, int] = {}
    for line in lines(path):
        if requests is not None and len(records) >= requests:
            break
        record = _parse(line)
        if record is None:
            notes.append(truncated(line))
            break
        arrival, prompt, output, ids = record
        records.append(
            (arrival, prompt, output, [number_of_id.setdefault(i, len(number_of_id)) for i in ids])
        )
    next_output = len(number_of_id) * TOKENS_PER_HASH
    if next_output + sum(record[2] for record in records) > TOKEN_LIMIT:
        raise TraceError(f"{path}: more than {TOKEN_LIMIT} distinct tokens; read fewer requests")
    begin = min((record[0] for record in records), default=0.0)
    made: list[Request] = []
    for index, (arrival, prompt, output, ids) in enumerate(records):
        lengths = np.full(len(ids), TOKENS_PER_HASH, dtype=np.int64)
        lengths[-1] = prompt - TOKENS_PER_HASH * (len(ids) - 1)
        starts = np.array(ids, dtype=np.int64) * TOKENS_PER_HASH
        made.append(
            Request(
                index, arrival - begin, starts, lengths, prompt, output, next_output, f"req-{index}"
            )
        )
        next_output += output
    return Workload(path.name, "mooncake", tuple(made), tuple(notes))


def _parse(line: Line) -> tuple[float, int, int, list[int]] | None:
    """Arrival (s), prompt tokens, output tokens, hash ids; None when the line was cut short."""
    try:
        record: Any = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        if line.is_cut:
            return None
        line.fail("line", line.text, f"not JSON ({error})")
    if not isinstance(record, dict):
        line.fail("line", line.text, "not a JSON object")
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        if field not in record:
            line.fail(field, None, "missing")
    arrival = line.number_of("timestamp", record["timestamp"]) / 1000
    prompt = line.count("input_length", record["input_length"])
    output = line.count("output_length", record["output_length"])
    ids = record["hash_ids"]
    if not isinstance(ids, list):
        line.fail("hash_ids", ids, "not a list")
    for position, value in enumerate(ids):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            line.fail(f"hash_ids[{position}]", value, "not a whole number, 0 or more")
    expected = -(-prompt // TOKENS_PER_HASH)
    if len(ids) != expected:
        line.fail(
            "hash_ids",
            ids,
            f"{len(ids)} ids for input_length {prompt}: {expected} are needed, one for each "
            f"{TOKENS_PER_HASH} tokens",
        )
    return arrival, prompt, output, ids
