"""JSON as a person wrote it: what ``json`` would let pass or say in its own words is one clear phrase."""

from __future__ import annotations

import json
from typing import NoReturn

__all__ = ["parse_json"]

MAX_DIGITS = 40
"""A longer number is damage; Python would also take quadratic time over it."""


def parse_json(data: str | bytes) -> object:
    """The value that a JSON text holds.

    Args:
        data: The text, or its bytes in UTF-8.

    Raises:
        ValueError: no UTF-8, no JSON, a key twice in one object, NaN or an infinity, a number of more than
            40 digits, or brackets nested too deeply. The message says which.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: byte {error.start + 1}: {error.reason}") from None
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: brackets are nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:60]!r} is there twice in one object")
            seen.add(name)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits: {digits[:12]}...")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a number of JSON")
