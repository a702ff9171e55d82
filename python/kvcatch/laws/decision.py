"""What a law answers about one request, and what the admissions of one step have used up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.laws.refusal import Refusal
    from kvcatch.laws.state import QueuedRequest


@dataclass(frozen=True, slots=True)
class Decision:
    """One law's answer about one request.

    Attributes:
        request: Who asked.
        required: Blocks that the law compared (tokens where the arithmetic says so).
        available: What it compared them with.
        arithmetic: The comparison, in one line.
        refusal: Why it does not enter; None when it enters.
        takes: Blocks handed out to it in this step when it enters.
        promises: Blocks reserved for it beyond those.
        step_tokens: Tokens it takes from this step's budget.
        claimed_tokens: Tokens set aside for it by a law that counts tokens.
        is_final: It is turned away for good: it can never fit and this engine says so at once.
        warning: What will go wrong although it enters; empty when nothing is known.
    """

    request: QueuedRequest
    required: int
    available: int
    arithmetic: str
    refusal: Refusal | None = None
    takes: int = 0
    promises: int = 0
    step_tokens: int = 0
    claimed_tokens: int = 0
    is_final: bool = False
    warning: str = ""

    @property
    def enters(self) -> bool:
        """Whether the request is admitted."""
        return self.refusal is None

    @property
    def status(self) -> str:
        """``enters``, ``waits`` or ``rejected``."""
        if self.refusal is None:
            return "enters"
        return "rejected" if self.is_final else "waits"

    def to_dict(self) -> dict[str, Any]:
        """The decision with units in the names, for JSON."""
        request = self.request
        data: dict[str, Any] = {
            "status": self.status,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "arithmetic": self.arithmetic,
        }
        if request.name:
            data["name"] = request.name
        if self.refusal is None:
            data["takes_blocks"] = self.takes
            data["promised_blocks"] = self.promises
            data["step_tokens"] = self.step_tokens
        else:
            data.update(self.refusal.to_dict())
        if self.warning:
            data["warning"] = self.warning
        return data


@dataclass(frozen=True, slots=True)
class Step:
    """What the requests admitted so far in this step have used up.

    Attributes:
        admitted: Requests.
        taken: Blocks handed out.
        promised: Blocks reserved.
        tokens: Tokens of the step's budget.
        claimed_tokens: Tokens set aside by a law that counts tokens.
    """

    admitted: int = 0
    taken: int = 0
    promised: int = 0
    tokens: int = 0
    claimed_tokens: int = 0

    def after(self, decision: Decision) -> Step:
        """The step once this request has entered."""
        return replace(
            self,
            admitted=self.admitted + 1,
            taken=self.taken + decision.takes,
            promised=self.promised + decision.promises,
            tokens=self.tokens + decision.step_tokens,
            claimed_tokens=self.claimed_tokens + decision.claimed_tokens,
        )


NO_STEP = Step()
"""A step in which nobody was admitted yet."""
