"""Why a request does not enter: the gate that holds it, with the two numbers it compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Gate = Literal[
    "worst_case",
    "capacity",
    "watermark",
    "max_num_seqs",
    "token_budget",
    "head_of_line",
    "deferred",
    "contiguity",
    "never_fits",
]
"""The rule that keeps a waiting request out."""

GATES: tuple[Gate, ...] = get_args(Gate)
"""Every gate an admission law can name."""

Unit = Literal["blocks", "tokens", "sequences", "requests"]
"""What the two numbers of a refusal count."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was not admitted.

    Attributes:
        gate: The rule that keeps it out.
        required: What the rule asked for.
        available: What there was.
        detail: The arithmetic, in one line.
        unit: What ``required`` and ``available`` count; blocks unless said.
    """

    gate: Gate
    required: int
    available: int
    detail: str = ""
    unit: Unit = "blocks"

    def __str__(self) -> str:
        """One line: the gate and its arithmetic."""
        line = (
            f"{self.gate}: {self.required:,} {self.unit} required, "
            f"{max(0, self.available):,} available"
        )
        return f"{line} ({self.detail})" if self.detail else line

    def to_dict(self) -> dict[str, Any]:
        """The refusal with units in the names, for JSON."""
        return {
            "gate": self.gate,
            f"required_{self.unit}": self.required,
            f"available_{self.unit}": self.available,
            "detail": self.detail,
        }
