"""One batch of KV events, as vLLM 0.10 to 0.33 and SGLang write it with msgpack.

A batch is an array ``[ts, events, data_parallel_rank]``, the rank missing in old versions. An event is an
array whose first item is its type (old versions) or a map with ``type`` (new ones). Fields were only ever
added at the end, so one order reads every array; what a version does not have stays None.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batch", "BlockHash", "Cleared", "Event", "EventError", "Removed", "Stored", "decode"]

BlockHash = int | bytes
"""vLLM publishes the low 64 bits of its hashes, or whole ones (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``)."""

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")

_LONGEST_NAME = 256


class EventError(InvalidArgument):
    """A batch of KV events that cannot be read. The message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became findable by hash, in the order of one chain; or were found again.

    Attributes:
        hashes: Of the blocks.
        parent: Hash of the block before the first; None where the chain begins.
        block_size: Tokens per block.
        num_tokens: Tokens the event lists; 0 where it lists none.
        medium: ``GPU``, ``CPU`` or another tier; None where the version does not say.
        group: KV cache group; None where the version does not say.
        lora: Name or number of the adapter.
        request: Session or request that caused it, where the version says.
        block_ids: Ids of the blocks, where the publisher gives them (vLLM does not).
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    block_size: int
    num_tokens: int = 0
    medium: str | None = None
    group: int | None = None
    lora: str | None = None
    request: str | None = None
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer findable.

    Attributes:
        hashes: Of the blocks.
        medium: Where from; None where the version does not say.
        group: KV cache group; None where the version does not say.
    """

    hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is findable any more."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class Batch:
    """What one engine step published.

    Attributes:
        t_seconds: Unix time of the publisher.
        rank: Data-parallel rank; None where the version does not say.
        events: In order; those of an unknown type are left out.
        unknown: Types that are not known here, with how many of each.
    """

    t_seconds: float
    rank: int | None = None
    events: list[Event] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


def decode(payload: bytes) -> Batch:
    """Read one batch.

    Raises:
        EventError: It is not msgpack, not a batch, or an event of a known type is malformed.
        MissingExtra: msgspec is not installed.
    """
    try:
        import msgspec
    except ModuleNotFoundError as error:
        raise MissingExtra("msgspec is not installed: pip install 'kvcatch[observe]'") from error
    try:
        value = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"a payload of {len(payload):,} bytes is not msgpack: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:  # a map with unhashable keys
        raise EventError(f"a payload of {len(payload):,} bytes is malformed: {error}") from None
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[1], list):
        raise EventError(f"not a batch [ts, events, ...] but {_short(value)}")
    at = value[0]
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not math.isfinite(at):
        raise EventError(f"the batch's time is {_short(at)}")
    rank = value[2] if len(value) > 2 else None
    batch = Batch(float(at), _whole(rank, "data_parallel_rank", least=0))
    for item in value[1]:
        event = _event(item, batch.unknown)
        if event is not None:
            batch.events.append(event)
    return batch


def _event(item: Any, unknown: Counter[str]) -> Event | None:
    if isinstance(item, dict):
        kind, fields = item.get("type"), item
    elif isinstance(item, list) and item:
        kind = item[0]
        names: Sequence[str] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(
            kind if isinstance(kind, str) else "", ()
        )
        fields = dict(zip(names, item[1:], strict=False))
    else:
        raise EventError(f"an event is {_short(item)}, neither an array nor a map")
    if not isinstance(kind, str):
        raise EventError(f"an event's type is {_short(kind)}")
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return Removed(_hashes(fields), _name(fields, "medium"), _group(fields))
    if kind == "AllBlocksCleared":
        return Cleared()
    unknown[kind[:_LONGEST_NAME]] += 1
    return None


def _stored(fields: dict[str, Any]) -> Stored:
    hashes = _hashes(fields)
    size = _whole(fields.get("block_size"), "block_size", least=1)
    if size is None:
        raise EventError("BlockStored without block_size")
    tokens = fields.get("token_ids")
    if tokens is not None and not isinstance(tokens, list):
        raise EventError(f"token_ids is {_short(tokens)}")
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_hash(parent):
        raise EventError(f"parent_block_hash is {_short(parent)}")
    ids = fields.get("block_ids") or ()
    if not isinstance(ids, (list, tuple)) or (ids and len(ids) != len(hashes)):
        raise EventError(f"{len(hashes)} block_hashes with block_ids {_short(ids)}")
    lora = _name(fields, "lora_name")
    if lora is None and fields.get("lora_id") is not None:
        lora = str(_whole(fields["lora_id"], "lora_id", least=0))
    return Stored(
        hashes,
        parent,
        size,
        len(tokens or ()),
        _name(fields, "medium"),
        _group(fields),
        lora,
        _name(fields, "session_id") or _name(fields, "request_id"),
        tuple(_whole(block, "block_ids", least=0) or 0 for block in ids),
    )


def _hashes(fields: dict[str, Any]) -> tuple[BlockHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise EventError(f"block_hashes is {_short(hashes)}")
    for value in hashes:
        if not _is_hash(value):
            raise EventError(f"a block hash is {_short(value)}")
    return tuple(hashes)


def _is_hash(value: Any) -> bool:
    return isinstance(value, (int, bytes)) and not isinstance(value, bool)


def _group(fields: dict[str, Any]) -> int | None:
    return _whole(fields.get("group_idx"), "group_idx", least=0)


def _name(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise EventError(f"{name} is {_short(value)}")
    return value[:_LONGEST_NAME] if value else None


def _whole(value: Any, name: str, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EventError(f"{name} is {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
