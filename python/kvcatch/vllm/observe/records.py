"""What the plugin keeps of refusals: one record per stretch in which one gate held one request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.laws.refusal import GATES, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.laws.refusal import Unit

__all__ = ["ALL_BEHIND", "NEXT_STEP", "UNEXPLAINED", "Ledger", "Refused"]

NEXT_STEP = "next_step"
"""Not refused: it arrived after the step began, and the next one looks at it."""

ALL_BEHIND = ("token_budget", "max_num_seqs", "deferred")
"""Gates that keep all out alike; the others hold the head, and those behind wait for it."""

UNEXPLAINED = "unexplained"
"""It was passed by and no known rule says why."""


@dataclass(slots=True)
class Refused:
    """One request at the head of vLLM's queue that was not admitted, for one reason, for a while.

    Attributes:
        request_id: vLLM's id of it.
        gate: Gate of ``kvcatch.laws``, or ``unexplained``.
        required: What the rule asked for, in ``unit``.
        available: What there was.
        detail: The arithmetic, in one line.
        unit: What both count.
        first_s: Monotonic time of the first step that refused it.
        last_s: Monotonic time of the last one.
        steps: Steps that refused it.
        free: Blocks that may be handed out, cached ones counted.
        watermark: Blocks of the watermark, where it was applied.
        reserved: Blocks promised to loads in flight.
        budget_left: Tokens of the step that nobody took.
        running: Requests that ran.
        deferred: Requests set aside.
        behind: Requests that wait behind it.
        warning: What will go wrong even when it enters.
    """

    request_id: str
    gate: str
    required: int
    available: int
    detail: str
    unit: Unit = "blocks"
    first_s: float = 0.0
    last_s: float = 0.0
    steps: int = 1
    free: int = 0
    watermark: int = 0
    reserved: int = 0
    budget_left: int = 0
    running: int = 0
    deferred: int = 0
    behind: int = 0
    warning: str = ""

    def refusal(self) -> Refusal | None:
        """The same as a Refusal; None when no gate is known."""
        if self.gate not in GATES:
            return None
        return Refusal(self.gate, self.required, self.available, self.detail, self.unit)

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """For JSON, with units in the names; times are seconds before ``now_s``."""
        data: dict[str, Any] = {
            "request": self.request_id,
            "gate": self.gate,
            f"required_{self.unit}": self.required,
            f"available_{self.unit}": self.available,
            "detail": self.detail,
            "first_seconds_ago": round(now_s - self.first_s, 3),
            "last_seconds_ago": round(now_s - self.last_s, 3),
            "steps": self.steps,
            "free_blocks": self.free,
            "watermark_blocks": self.watermark,
            "reserved_blocks": self.reserved,
            "token_budget_left": self.budget_left,
            "running_requests": self.running,
            "deferred_requests": self.deferred,
            "behind_requests": self.behind,
        }
        if self.warning:
            data["warning"] = self.warning
        return data


class Ledger:
    """Refusals of the last while, and how many request-seconds each gate has cost.

    Bounded: ``keep`` records; the sums are one number per gate. The engine's thread writes, a
    reader copies under the observer's lock.
    """

    def __init__(self, keep: int) -> None:
        self.recent: deque[Refused] = deque(maxlen=keep)
        self.current: Refused | None = None
        self.seconds: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self._assigned: tuple[tuple[str, int], ...] = ()
        self._since = 0.0

    @property
    def assigned(self) -> int:
        """Requests that the last step found waiting."""
        return sum(count for _, count in self._assigned)

    @property
    def shares(self) -> tuple[tuple[str, int], ...]:
        """Gate and number of requests that it kept out, as the last step found them."""
        return self._assigned

    def settle(self, now_s: float, shares: Iterable[tuple[str, int]]) -> None:
        """Charge the time since the last step to the gates of then, and note those of now."""
        for gate, count in self._assigned:
            waited = (now_s - self._since) * count
            self.seconds[gate] = self.seconds.get(gate, 0.0) + waited
        self._since = now_s
        self._assigned = tuple(shares)

    def seconds_until(self, now_s: float) -> dict[str, float]:
        """Request-seconds by gate, the time since the last step counted."""
        seconds = dict(self.seconds)
        for gate, count in self._assigned:
            seconds[gate] = seconds.get(gate, 0.0) + (now_s - self._since) * count
        return seconds

    def note(self, refused: Refused, now_s: float) -> None:
        """Take in what one step said of the head; the same request and gate stay one record."""
        self.steps[refused.gate] = self.steps.get(refused.gate, 0) + 1
        known = self.current
        refused.last_s = now_s
        if (
            known is not None
            and known.request_id == refused.request_id
            and known.gate == refused.gate
        ):
            refused.first_s, refused.steps = known.first_s, known.steps + 1
            self.recent[-1] = refused
        else:
            refused.first_s = now_s
            self.recent.append(refused)
        self.current = refused

    def clear(self) -> None:
        """Nobody is refused any more."""
        self.current = None
