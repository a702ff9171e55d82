"""What an advice says, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.advice.trial import Effect

SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "block_size",
    "watermark",
    "memory_utilization",
    "long_queue",
)
"""What advice is given on, in this order."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One value and what the replay showed with it."""

    value: str
    effect: Effect

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, **self.effect.to_dict()}


@dataclass(frozen=True, slots=True)
class Advice:
    """A change to make.

    Attributes:
        setting: One of ``SETTINGS``.
        flag: What the engine calls it; None for a change outside of it.
        current: The value today.
        proposed: The value to set.
        reason: Why, in one sentence.
        before: The replay with the value of today.
        after: The replay with the proposed one.
        tried: Every value that was replayed.
        facts: Numbers that belong to it, with units in the names.
    """

    setting: str
    flag: str | None
    current: str
    proposed: str
    reason: str
    before: Effect
    after: Effect
    tried: tuple[Tried, ...]
    facts: dict[str, float | int]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": self.setting,
            "flag": self.flag,
            "current": self.current,
            "proposed": self.proposed,
            "reason": self.reason,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "tried": [item.to_dict() for item in self.tried],
            **self.facts,
        }


@dataclass(frozen=True, slots=True)
class NotAdvised:
    """A setting that is better left alone.

    Attributes:
        setting: One of ``SETTINGS``.
        reason: Why, in one sentence.
        tried: Every value that was replayed; empty when none had to be.
        facts: Numbers that belong to it, with units in the names.
    """

    setting: str
    reason: str
    tried: tuple[Tried, ...] = ()
    facts: dict[str, float | int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": self.setting,
            "reason": self.reason,
            "tried": [item.to_dict() for item in self.tried],
            **(self.facts or {}),
        }
