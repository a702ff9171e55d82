"""How a table of metric names is written down: one row per name, with the versions it was seen in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from zlib import crc32

from kvcatch.observe.sample import FIELDS

if TYPE_CHECKING:
    from kvcatch.observe.sample import EngineSample

__all__ = ["Combine", "Family", "Metric", "Version", "replica_name"]

Version = tuple[int, ...]

Combine = Literal["max", "sum", "bucket", "label"]
"""How several series of one replica become one number: the largest (a gauge that every API process
exports), the sum (a counter by reason), the bucket that holds the largest value, or a label's text."""

Labels = Mapping[str, str]

_SEPARATES = {",", "\\"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One name on the wire and the field it fills.

    Attributes:
        name: As exported; a counter without its ``_total``.
        field: Of EngineSample; where several names fill one, the first row that has a value wins.
        combine: See ``Combine``.
        first: Version in which it was first seen; None where unknown.
        last: Version in which it was last seen; None where it still exists.
        where: Labels that a series must have; an empty text stands for a missing label.
        scale: Factor to the field's unit (0.01 for a percentage).
        optional: NaN in it is unknown rather than an error (a ratio of nothing).
        label: Which label's text, for ``combine="label"``.
    """

    name: str
    field: str
    combine: Combine = "max"
    first: Version | None = None
    last: Version | None = None
    where: Labels = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    optional: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        assert self.field in FIELDS, self.field


_LONGEST_LABEL = 200


def replica_name(identity: Sequence[str], labels: Labels) -> str:
    """The labels that tell a replica from others, as ``name=value,...``; empty ones left out.

    Two replicas never share a name: signs that separate, or that a terminal would act on, are escaped.
    """
    return ",".join(f"{name}={_plain(labels[name])}" for name in identity if labels.get(name))


def _plain(value: str) -> str:
    if len(value) <= _LONGEST_LABEL and value.isprintable() and not _SEPARATES & set(value):
        return value
    text = "".join(
        f"\\x{ord(char):02x}"
        if char in _SEPARATES
        else char
        if char.isprintable()
        else char.encode("unicode_escape").decode()
        for char in value
    )
    if len(value) <= _LONGEST_LABEL:
        return text
    return f"{text[:_LONGEST_LABEL]}...{crc32(value.encode('utf-8', 'replace')):08x}"


def _no_info(labels: Labels) -> dict[str, float]:
    return {}


def _nothing(sample: EngineSample) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """One engine's metrics.

    Attributes:
        engine: Its key.
        prefixes: A series with one of these belongs to it.
        identity: Labels that tell one replica or rank from another.
        metrics: The table.
        usage_of: What its KV usage is a share of, in words.
        info: Name of a series whose labels are configuration, with ``read_info`` to read them.
        read_info: Fields from those labels.
        finish: Completes a sample from what was read.
    """

    engine: str
    prefixes: tuple[str, ...]
    identity: tuple[str, ...]
    metrics: tuple[Metric, ...]
    usage_of: str
    info: tuple[str, ...] = ()
    read_info: Callable[[Labels], dict[str, float]] = _no_info
    finish: Callable[[EngineSample], None] = _nothing

    def version_range(self, names: set[str]) -> tuple[Version | None, Version | None]:
        """Oldest and newest version in which all these names were seen together, as far as known."""
        firsts = [row.first for row in self.metrics if row.first and row.name in names]
        lasts = [row.last for row in self.metrics if row.last and row.name in names]
        return max(firsts, default=None), min(lasts, default=None)
