"""What kvcatch's plugin inside an engine says: which request is refused and why, and who holds the blocks.

The page is JSON of format ``kvcatch.vllm`` (``kvcatch.vllm.observe``). It is checked before anything is
shown of it: a field that is missing or of another kind is an error that names it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvcatch.observe.errors import MetricsError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMAT", "check_inside", "is_inside", "read_inside", "read_inside_file", "refusal_line"]

FORMAT = "kvcatch.vllm"
_VERSION = 1
_MOST_BYTES = 64 * 2**20

_NUMBER = (int, float)
_HEAD: dict[str, Any] = {
    "request": str,
    "gate": str,
    "detail": str,
    "steps": int,
    "first_seconds_ago": _NUMBER,
    "last_seconds_ago": _NUMBER,
    "free_blocks": int,
    "running_requests": int,
    "deferred_requests": int,
    "behind_requests": int,
}
_HELD: dict[str, Any] = {
    "request": str,
    "status": str,
    "blocks": int,
    "shared_blocks": int,
    "runs": int,
    "tokens": int,
    "tags": dict,
    "is_zombie": bool,
}
_SHAPE: dict[str, Any] = {
    "model": str,
    "vllm": str,
    "engine": int,
    "pid": int,
    "steps": int,
    "last_step_seconds_ago": _NUMBER,
    "limits": {
        "num_blocks": int,
        "usable_blocks": int,
        "block_size_tokens": list,
        "watermark_blocks": int,
        "max_num_seqs": int,
        "token_budget_tokens": int,
        "max_model_len_tokens": int,
    },
    "queue": {"running": int, "waiting": int, "deferred": int, "waiting_by_gate": dict},
    "waiting": [{"request": str, "tokens": int, "gate": str, "detail": str}],
    "recent": [_HEAD],
    "waiting_request_seconds": dict,
    "blocks": {"total": int, "free": int, "held": int, "retired": int, "unaccounted": int},
    "conservation": {"is_idle": bool, "law": str, "holds": bool, "zombies": [_HELD]},
    "requests": int,
    "holdings": [_HELD],
    "others": {"requests": int, "blocks": int},
    "by_tag": dict,
    "runs": {"held_runs": int, "free_run_histogram": dict, "largest_free_run": int},
    "pages": {"blocks_per_page": int, "total": int, "pinned": int},
}
_TAG = {"value": str, "requests": int, "blocks": int}


def is_inside(start: bytes) -> bool:
    """Whether the beginning of a file is that of a plugin's page."""
    return b'"format": "kvcatch.vllm"' in start[:400]


def read_inside(body: bytes | str, name: str) -> dict[str, Any]:
    """A snapshot of the plugin, checked.

    Args:
        body: The page ``/snapshot``.
        name: Endpoint or file, for errors.

    Raises:
        MetricsError: It is not such a page, or one of another version.
    """
    if len(body) > _MOST_BYTES:
        raise MetricsError(f"{name}: larger than {_MOST_BYTES:,} bytes")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MetricsError(f"{name}: not JSON: {error}") from None
    return check_inside(data, name)


def check_inside(data: Any, name: str) -> dict[str, Any]:
    """The same of a page that is parsed already.

    Raises:
        MetricsError: It is not such a page, or one of another version.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise MetricsError(f"{name}: not a page of kvcatch's plugin for vLLM")
    if data.get("version") != _VERSION:
        raise MetricsError(
            f"{name}: version {data.get('version')!r:.20} of the page; this kvcatch reads {_VERSION}"
        )
    _check(data, _SHAPE, "", name)
    head = data.get("head")
    if head is not None:
        _check(head, _HEAD, "head", name)
    for tag, values in data["by_tag"].items():
        _check(values, [_TAG], f"by_tag.{tag}", name)
    return data


def read_inside_file(path: Path) -> dict[str, Any]:
    """The same from a file.

    Raises:
        MetricsError: It is not such a page.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return read_inside(file.read(_MOST_BYTES + 1), str(path))


def _check(value: Any, shape: Any, where: str, name: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise MetricsError(f"{name}: {where or 'the page'} is not an object")
        for key, part in shape.items():
            _check(value.get(key), part, f"{where}.{key}" if where else key, name)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise MetricsError(f"{name}: {where} is not a list")
        for at, item in enumerate(value):
            _check(item, shape[0], f"{where}[{at}]", name)
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        raise MetricsError(f"{name}: {where} = {value!r:.40} is missing or of another kind")


def refusal_line(refused: dict[str, Any], *, is_now: bool = False) -> str:
    """One refusal in one line: the request, the gate, the arithmetic, for how long.

    Args:
        refused: As the page has it.
        is_now: It is the queue's head now, however long ago the last step began.
    """
    lasted = refused["first_seconds_ago"] - refused["last_seconds_ago"]
    when = f"for {refused['first_seconds_ago']:,.1f} s"
    if not is_now and refused["last_seconds_ago"] > 1.0:
        when = f"for {lasted:,.1f} s until {refused['last_seconds_ago']:,.1f} s ago"
    text = f"{refused['request']} is refused at {refused['gate']}: {refused['detail']}; {when}"
    text += f" ({refused['steps']:,} steps)"
    if refused["behind_requests"]:
        text += f", {refused['behind_requests']:,} wait behind it"
    if refused.get("warning"):
        text += f"; {refused['warning']}"
    return text
