"""Memory of common GPUs, as a program on them sees it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GIB", "GPUS", "Gpu"]

GIB = 2**30

GPUS: Mapping[str, float] = MappingProxyType({
    "t4": 14.6, "v100-16": 15.8, "v100-32": 31.7, "p100": 15.9,
    "a10": 22.0, "a10g": 22.0, "a30": 23.7, "a40": 44.4, "a100-40": 39.5, "a100-80": 79.2,
    "l4": 22.0, "l20": 44.4, "l40": 44.4, "l40s": 44.4,
    "h20": 95.0, "h100": 79.1, "h100-nvl": 93.0, "h200": 139.8, "gh200": 94.5, "b200": 178.3, "b300": 267.6,
    "rtx3090": 23.7, "rtx4090": 23.6, "rtx5090": 31.4, "a5000": 23.7, "a6000": 47.5, "rtx6000-ada": 47.5,
    "mi300x": 192.0, "mi325x": 256.0,
})  # fmt: skip
"""GiB that ``torch.cuda.mem_get_info`` calls the total; drivers and ECC move it by about one part in a hundred."""

_ALIASES = {
    "h100-80": "h100",
    "h200-141": "h200",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's memory.

    Attributes:
        name: Key of GPUS, or how the user gave the memory.
        num_bytes: Its total, in bytes.
    """

    name: str
    num_bytes: int

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A GPU of the table.

        Raises:
            InvalidArgument: an unknown name, or one that comes in several sizes.
        """
        key = name.strip().lower().replace("_", "-").replace(" ", "-").removesuffix("gb")
        key = _ALIASES.get(key, key)
        if key in GPUS:
            return cls(key, round(GPUS[key] * GIB))
        sizes = [known for known in GPUS if known.startswith(f"{key}-")] if key else []
        if sizes:
            raise InvalidArgument(f"gpu = {name!r}: comes in several sizes: {', '.join(sizes)}")
        raise InvalidArgument(
            f"gpu = {name!r}: unknown; known are {', '.join(GPUS)}; else give its memory, such as 48GiB"
        )

    @classmethod
    def parse(cls, text: str) -> Gpu:
        """A name of the table, or memory such as ``48GiB`` or ``16303MiB``.

        Raises:
            InvalidArgument: neither.
        """
        if parse_bytes_or_none(text) is not None:
            return cls(text.strip(), parse_bytes("gpu", text))
        return cls.named(text)


_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
    "mb": 10**6,
    "gb": 10**9,
}

MAX_BYTES = 2**50


def parse_bytes_or_none(text: str) -> int | None:
    """A number with a unit in bytes; None where the text is none."""
    stripped = text.strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(digits) :].strip()
    if unit not in _UNITS or not digits.strip():
        return None
    if not set(digits.strip()) <= set("0123456789._+-e"):
        return None
    try:
        if unit in ("", "b"):
            return int(digits)
        return round(float(digits) * _UNITS[unit])
    except (ValueError, OverflowError):
        return None


def parse_bytes(name: str, text: str, minimum: int = 1) -> int:
    """Bytes from ``8GiB``, ``3072 MiB`` or a plain number of bytes.

    Raises:
        InvalidArgument: not such a number, or not between ``minimum`` and 1 PiB.
    """
    size = parse_bytes_or_none(text)
    if size is None:
        raise InvalidArgument(f"{name} = {text!r}: not a size such as 8GiB, 512MiB or 8589934592")
    if not minimum <= size <= MAX_BYTES:
        raise InvalidArgument(f"{name} = {text!r}: must be between {minimum} bytes and 1024 TiB")
    return size
