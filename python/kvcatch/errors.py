"""Every exception kvcatch raises on purpose, with the offending value in its message.

A call that raises one of these has changed nothing. The Rust core raises these very classes.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorruptPool",
    "DoubleFree",
    "InvalidArgument",
    "InvalidType",
    "KernelError",
    "KvcatchError",
    "MissingExtra",
    "OutOfBlocks",
    "OutOfMemory",
    "SnapshotError",
    "StaleHandle",
    "StalePlan",
    "TraceError",
]


class KvcatchError(Exception):
    """Base class of everything kvcatch raises on purpose."""


class OutOfBlocks(KvcatchError):
    """The pool cannot serve a request for blocks; nothing was changed.

    Attributes (all in blocks):
        required: blocks the refused call needs beyond what it already holds.
        free: clean blocks in the pool.
        cached: evictable prefix blocks in the pool (cached and not pinned).
        reserved: blocks promised to admitted sequences and not yet handed out.
        largest_run: longest run of consecutive blocks that may be handed out. It decides only under
            ``contiguity="required"``; a paged engine is never refused for scatter.
    """

    def __init__(
        self,
        message: str,
        required: int = 0,
        free: int = 0,
        cached: int = 0,
        reserved: int = 0,
        largest_run: int = 0,
    ) -> None:
        super().__init__(message)
        self.required = required
        self.free = free
        self.cached = cached
        self.reserved = reserved
        self.largest_run = largest_run

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.required, self.free, self.cached, self.reserved, self.largest_run)
        return (type(self), (str(self), *fields))


class InvalidArgument(KvcatchError, ValueError):
    """An argument has the right type and an impossible value (negative, zero, out of range, read-only...)."""


class ConfigError(InvalidArgument):
    """A model config that is malformed, lacks a field, contradicts itself or is of an unknown architecture."""


class InvalidType(KvcatchError, TypeError):
    """An argument has the wrong type or the buffer has the wrong dtype or shape."""


class KernelError(KvcatchError, RuntimeError):
    """A kernel could not be built or launched on this device, or found a bad block id while it ran."""


class OutOfMemory(KvcatchError, MemoryError):
    """An allocation of KV memory failed; the message states the bytes asked for."""


class StaleHandle(KvcatchError, LookupError):
    """A sequence or pin handle that was freed, or that this pool never gave out."""


class DoubleFree(KvcatchError):
    """A block was given back that is not handed out."""


class StalePlan(KvcatchError):
    """The pool changed since the compaction plan was made in a way that matters to it, or it was applied already."""


class CorruptPool(KvcatchError):
    """``validate()`` found a broken invariant. This is a bug in kvcatch: please report it."""


class SnapshotError(KvcatchError, ValueError):
    """A snapshot file is malformed, of an unknown version, or states numbers that cannot be true together."""


class TraceError(KvcatchError, ValueError):
    """A workload file has a malformed line. The message names file, line and field."""


class MissingExtra(KvcatchError, ImportError):
    """A feature needs an optional dependency. The message names the extra to install."""
