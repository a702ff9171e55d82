"""Reading a pool's snapshot: checking that its numbers can be true together, and who holds what.

A snapshot is what ``json.dump(pool.snapshot(), file)`` writes, version 1. Nothing impossible is
explained: it is refused with the arithmetic.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcatch.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT = "kvcatch.snapshot"
VERSION = 1

_COUNTS = {
    "config": ("num_blocks", "block_size", "blocks_per_page"),
    "blocks": (
        "total",
        "free",
        "cached",
        "active",
        "pinned",
        "reserved",
        "available",
        "null",
    ),
    "runs": ("largest_run", "free_runs"),
    "pages": ("total", "empty", "pinned"),
    "tokens": ("slots", "used"),
}
_SEQUENCE_COUNTS = (
    "num_tokens",
    "num_committed",
    "blocks",
    "shared_blocks",
    "runs",
    "hit_tokens",
    "reserved",
)
_NAMES = ("placement", "eviction", "contiguity")


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner, or one value of a tag, holds.

    Attributes:
        name: The owner or the tag's value; None where sequences have none.
        sequences: Sequences.
        blocks: Blocks in their tables; a block shared by two sequences counts for each.
        own_blocks: Blocks that nobody else holds.
        num_tokens: Tokens.
        runs: Runs of their blocks.
        reserved: Blocks promised and not yet handed out.
    """

    name: str | None
    sequences: int
    blocks: int
    own_blocks: int
    num_tokens: int
    runs: int
    reserved: int

    def to_dict(self) -> dict[str, Any]:
        """The holding with units in the names, for JSON."""
        return {
            "name": self.name,
            "sequences": self.sequences,
            "blocks": self.blocks,
            "own_blocks": self.own_blocks,
            "num_tokens": self.num_tokens,
            "runs": self.runs,
            "reserved_blocks": self.reserved,
        }


class Snapshot:
    """A snapshot whose numbers were checked.

    Raises:
        SnapshotError: A field is missing or malformed, or the numbers cannot be true together.
    """

    def __init__(self, data: object) -> None:
        self.data = _shape(data)
        self.config: dict[str, Any] = self.data["config"]
        self.blocks: dict[str, int] = self.data["blocks"]
        self.runs: dict[str, Any] = self.data["runs"]
        self.pages: dict[str, int] = self.data["pages"]
        self.tokens: dict[str, Any] = self.data["tokens"]
        self.sequences: list[dict[str, Any]] = self.data["sequences"]
        self.pins: list[dict[str, Any]] = self.data["pins"]
        _check_blocks(self)
        _check_runs(self)
        _check_pages(self)
        _check_sequences(self)

    @classmethod
    def read(cls, path: str | Path) -> Snapshot:
        """Read and check a snapshot file; the error names the file."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: not a JSON file ({error})") from None
        try:
            return cls(data)
        except SnapshotError as error:
            raise SnapshotError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise SnapshotError(f"{path}: malformed ({error!r})") from None

    def holdings_by_owner(self) -> list[Holding]:
        """Holdings of every owner, most blocks first."""
        return self._holdings(lambda sequence: sequence["owner"])

    def tag_names(self) -> list[str]:
        """Names of the tags that any sequence has."""
        return sorted({name for sequence in self.sequences for name in sequence["tags"]})

    def holdings_by_tag(self, tag: str) -> list[Holding]:
        """Holdings of every value of a tag, most blocks first."""
        return self._holdings(lambda sequence: sequence["tags"].get(tag))

    def zombies(self, live: Iterable[str]) -> list[Holding]:
        """Holdings of named owners that are not among ``live``."""
        alive = set(live)
        return [
            holding
            for holding in self.holdings_by_owner()
            if holding.name is not None and holding.name not in alive
        ]

    def _holdings(self, key: Callable[[dict[str, Any]], str | None]) -> list[Holding]:
        groups: dict[str | None, list[dict[str, Any]]] = {}
        for sequence in self.sequences:
            groups.setdefault(key(sequence), []).append(sequence)
        holdings = [
            Holding(
                name,
                len(members),
                sum(member["blocks"] for member in members),
                sum(member["blocks"] - member["shared_blocks"] for member in members),
                sum(member["num_tokens"] for member in members),
                sum(member["runs"] for member in members),
                sum(member["reserved"] for member in members),
            )
            for name, members in groups.items()
        ]
        return sorted(holdings, key=lambda holding: (-holding.blocks, holding.name or ""))

    def to_dict(self, live: Iterable[str] | None = None) -> dict[str, Any]:
        """What ``kvcatch inspect --json`` prints."""
        facts: dict[str, Any] = {
            "kvcatch": self.data["kvcatch"],
            "config": self.config,
            "blocks": self.blocks,
            "runs": self.runs,
            "pages": self.pages,
            "tokens": self.tokens,
            "holdings": {
                "owner": [holding.to_dict() for holding in self.holdings_by_owner()],
                "tags": {
                    tag: [holding.to_dict() for holding in self.holdings_by_tag(tag)]
                    for tag in self.tag_names()
                },
            },
            "pins": self.pins,
        }
        if live is not None:
            zombies = self.zombies(live)
            facts["zombies"] = [holding.to_dict() for holding in zombies]
            facts["zombie_blocks"] = sum(holding.blocks for holding in zombies)
        return facts


def _shape(data: object) -> dict[str, Any]:
    """Fields and their types."""
    if not isinstance(data, dict):
        raise SnapshotError("not a JSON object")
    if data.get("format") != FORMAT:
        raise SnapshotError(f"format = {data.get('format')!r}: not a snapshot ({FORMAT!r})")
    if data.get("version") != VERSION:
        raise SnapshotError(
            f"version = {data.get('version')!r}: this kvcatch reads version {VERSION}"
        )
    for section, names in _COUNTS.items():
        part = data.get(section)
        if not isinstance(part, dict):
            raise SnapshotError(f"{section} is missing or not an object")
        for name in names:
            _count(part, name, f"{section}.{name}")
    config, runs, tokens = data["config"], data["runs"], data["tokens"]
    for name in ("num_blocks", "block_size", "blocks_per_page"):
        if config[name] < 1:
            raise SnapshotError(f"config.{name} = {config[name]}: must be 1 or more")
    for name in _NAMES:
        if not isinstance(config.get(name), str):
            raise SnapshotError(f"config.{name} = {config.get(name)!r}: not a name")
    _share(runs, "fragmentation", "runs.fragmentation")
    _share(tokens, "internal_fragmentation", "tokens.internal_fragmentation")
    buckets = runs.get("free_run_histogram")
    if not isinstance(buckets, dict):
        raise SnapshotError("runs.free_run_histogram is missing or not an object")
    for name in buckets:
        _bucket(name)
        _count(buckets, name, f"runs.free_run_histogram[{name!r}]")
    for section in ("sequences", "pins"):
        part = data.get(section)
        if not isinstance(part, list) or not all(isinstance(item, dict) for item in part):
            raise SnapshotError(f"{section} is missing or not a list of objects")
    for position, sequence in enumerate(data["sequences"]):
        _sequence_shape(sequence, f"sequences[{position}]")
    for position, pin in enumerate(data["pins"]):
        _count(pin, "blocks", f"pins[{position}].blocks")
    if not isinstance(data.get("kvcatch"), str):
        raise SnapshotError(f"kvcatch = {data.get('kvcatch')!r}: not a version")
    return data


def _sequence_shape(sequence: dict[str, Any], where: str) -> None:
    for name in _SEQUENCE_COUNTS:
        _count(sequence, name, f"{where}.{name}")
    owner, tags = sequence.get("owner"), sequence.get("tags")
    if owner is not None and not isinstance(owner, str):
        raise SnapshotError(f"{where}.owner = {owner!r}: not a name")
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise SnapshotError(f"{where}.tags = {tags!r}: not an object of names")


def _count(part: dict[str, Any], name: str, where: str) -> None:
    value = part.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SnapshotError(f"{where} = {value!r}: must be a whole number, 0 or more")


def _share(part: dict[str, Any], name: str, where: str) -> None:
    value = part.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise SnapshotError(f"{where} = {value!r}: must be between 0 and 1")


def _bucket(name: str) -> tuple[int, int]:
    """Shortest and longest run of a bucket such as ``1`` or ``4-7``."""
    low, _, high = name.partition("-")
    if low.isdecimal() and (high.isdecimal() or (not high and name == "1")):
        bounds = int(low), int(high or low)
        if bounds[0] >= 1 and bounds[0].bit_count() == 1 and bounds[1] == 2 * bounds[0] - 1:
            return bounds
    raise SnapshotError(f"runs.free_run_histogram has {name!r}: not a bucket such as '1' or '4-7'")


def _check_blocks(snapshot: Snapshot) -> None:
    blocks, num_blocks = snapshot.blocks, snapshot.config["num_blocks"]
    free, cached, active, null = (blocks[name] for name in ("free", "cached", "active", "null"))
    if null > 1 or (null == 1) != bool(snapshot.config.get("null_block")):
        raise SnapshotError(
            f"blocks.null = {null} with config.null_block = {snapshot.config.get('null_block')!r}"
        )
    if blocks["total"] != num_blocks:
        raise SnapshotError(
            f"blocks.total is {blocks['total']}, but config.num_blocks is {num_blocks}"
        )
    if free + cached + active + null != num_blocks:
        raise SnapshotError(
            f"free {free} + cached {cached} + active {active} + null {null} = "
            f"{free + cached + active + null}, but blocks.total is {num_blocks}"
        )
    pinned, reserved, available = (blocks[name] for name in ("pinned", "reserved", "available"))
    if pinned > cached + active:
        raise SnapshotError(
            f"blocks.pinned {pinned} is more than cached {cached} + active {active}"
        )
    most = free + cached - reserved
    if not max(0, most - min(pinned, cached)) <= available <= most:
        raise SnapshotError(
            f"blocks.available = {available}, but free {free} + cached {cached} - reserved "
            f"{reserved} = {most}, of which at most {min(pinned, cached)} cached blocks are pinned"
        )


def _check_runs(snapshot: Snapshot) -> None:
    free, runs = snapshot.blocks["free"], snapshot.runs
    num_blocks = snapshot.config["num_blocks"]
    largest, count = runs["largest_run"], runs["free_runs"]
    used = num_blocks - free
    if largest > free:
        raise SnapshotError(f"runs.largest_run {largest} is more than the {free} free blocks")
    least = -(-free // (used + 1))
    if largest < least:
        raise SnapshotError(
            f"{free:,} of {num_blocks:,} blocks are free, so {used:,} are used; they part the free "
            f"blocks into at most {used + 1:,} runs, so the largest has at least "
            f"{free:,} / {used + 1:,} = {least:,} blocks (rounded up), but runs.largest_run is "
            f"{largest:,}"
        )
    if count > min(free, used + 1):
        raise SnapshotError(
            f"runs.free_runs = {count}, but {free} free blocks among {used} used ones form at most "
            f"{min(free, used + 1)} runs"
        )
    buckets = {_bucket(name): n for name, n in runs["free_run_histogram"].items() if n}
    if sum(buckets.values()) != count:
        raise SnapshotError(
            f"runs.free_run_histogram counts {sum(buckets.values())} runs, but runs.free_runs is "
            f"{count}"
        )
    fewest = sum(low * n for (low, _), n in buckets.items())
    most = sum(high * n for (_, high), n in buckets.items())
    if not fewest <= free <= most:
        raise SnapshotError(
            f"the runs of runs.free_run_histogram have {fewest} to {most} blocks together, "
            f"but {free} are free"
        )
    low, high = max(buckets, default=(0, 0))
    if not low <= largest <= high:
        raise SnapshotError(
            f"runs.largest_run is {largest}, but the longest runs of runs.free_run_histogram have "
            f"{low} to {high} blocks"
        )


def _check_pages(snapshot: Snapshot) -> None:
    pages, blocks = snapshot.pages, snapshot.blocks
    size, num_blocks = snapshot.config["blocks_per_page"], snapshot.config["num_blocks"]
    total = -(-num_blocks // size)
    if pages["total"] != total:
        raise SnapshotError(
            f"pages.total = {pages['total']}, but {num_blocks} blocks in pages of {size} are "
            f"{total}"
        )
    if pages["empty"] + pages["pinned"] != total:
        raise SnapshotError(
            f"pages.empty {pages['empty']} + pinned {pages['pinned']} = "
            f"{pages['empty'] + pages['pinned']}, but pages.total is {total}"
        )
    room = (total - pages["empty"]) * size
    used = num_blocks - blocks["free"]
    if not pages["pinned"] <= used <= room:
        raise SnapshotError(
            f"{used} blocks are not clean: they lie in at least {-(-used // size)} and at most "
            f"{used} of the pages of {size} blocks, but pages.pinned is {pages['pinned']}"
        )


def _check_sequences(snapshot: Snapshot) -> None:
    size, active = snapshot.config["block_size"], snapshot.blocks["active"]
    own = held = reserved = most_shared = 0
    seen = set()
    for place, sequence in enumerate(snapshot.sequences):
        for field in ("id", "owner", "tags", *_SEQUENCE_COUNTS):
            if field not in sequence:
                raise SnapshotError(f"sequences[{place}]: {field} is missing")
        name = f"sequence {sequence['id']}"
        if sequence["id"] in seen:
            raise SnapshotError(f"{name}: is listed twice")
        seen.add(sequence["id"])
        tokens, blocks = sequence["num_tokens"], sequence["blocks"]
        if tokens > blocks * size:
            raise SnapshotError(
                f"{name}: {tokens} tokens do not fit {blocks} blocks of {size} ({blocks * size})"
            )
        if sequence["num_committed"] > tokens:
            raise SnapshotError(f"{name}: {sequence['num_committed']} tokens committed of {tokens}")
        if sequence["shared_blocks"] > blocks:
            raise SnapshotError(f"{name}: {sequence['shared_blocks']} of {blocks} blocks shared")
        if not min(1, blocks) <= sequence["runs"] <= blocks:
            raise SnapshotError(f"{name}: {blocks} blocks in {sequence['runs']} runs")
        own += blocks - sequence["shared_blocks"]
        held += blocks
        most_shared = max(most_shared, sequence["shared_blocks"])
        reserved += sequence["reserved"]
    if own + most_shared > active:
        raise SnapshotError(
            f"the sequences hold {own} blocks of their own and {most_shared} or more shared ones, "
            f"but only {active} blocks are active"
        )
    if active > held + sum(pin["blocks"] for pin in snapshot.pins):
        raise SnapshotError(
            f"{active} blocks are active, but sequences and pins hold only "
            f"{held + sum(pin['blocks'] for pin in snapshot.pins)}"
        )
    if reserved != snapshot.blocks["reserved"]:
        raise SnapshotError(
            f"the sequences' reservations are {reserved} blocks, but blocks.reserved is "
            f"{snapshot.blocks['reserved']}"
        )
    tokens = snapshot.tokens
    if tokens["used"] > tokens["slots"]:
        raise SnapshotError(f"tokens.used {tokens['used']} is more than slots {tokens['slots']}")
    if tokens["slots"] > active * size:
        raise SnapshotError(
            f"tokens.slots {tokens['slots']} is more than {active} active blocks of {size} have "
            f"({active * size})"
        )
    share = 1 - tokens["used"] / tokens["slots"] if tokens["slots"] else 0.0
    if not math.isclose(tokens["internal_fragmentation"], share, abs_tol=1e-6):
        raise SnapshotError(
            f"tokens.internal_fragmentation = {tokens['internal_fragmentation']}, but "
            f"1 - {tokens['used']} / {tokens['slots']} = {share:.6f}"
        )
