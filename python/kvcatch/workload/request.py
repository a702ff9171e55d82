"""Requests whose prompts are described by spans and turned into token ids only when asked for.

Every prompt is a concatenation of spans of one imaginary stream of tokens ``0, 1, 2, ...``: two
prompts share a prefix exactly when their first spans are the same. A whole trace of 145 million
prompt tokens is thus a few megabytes until it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

TOKEN_LIMIT = 2**31
"""Distinct token ids that fit an int32; a workload that needs more is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a workload.

    Attributes:
        index: Position in the workload, by arrival.
        arrival: Seconds since the first request.
        starts: First token id of every span of the prompt.
        lengths: Tokens of every span of the prompt.
        num_tokens: Tokens of the prompt.
        output_tokens: Tokens to generate.
        output_start: First token id of the generated span.
        owner: Who asked: a conversation, a task, a line of the trace.
        tags: Free-form names (tenant, route, model).
    """

    index: int
    arrival: float
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    num_tokens: int
    output_tokens: int
    output_start: int
    owner: str
    tags: Mapping[str, str] = field(default_factory=dict)

    def tokens(self, generated: int = 0) -> npt.NDArray[np.int32]:
        """Token ids of the prompt, followed by the first ``generated`` tokens of the output."""
        starts, lengths = self.starts, self.lengths
        if generated:
            starts = np.append(starts, self.output_start)
            lengths = np.append(lengths, generated)
        offsets = (starts - (np.cumsum(lengths) - lengths)).astype(np.int32)
        ids = np.arange(self.num_tokens + generated, dtype=np.int32)
        ids += np.repeat(offsets, lengths)
        return ids


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        name: ``chat``, ``agent``, ``documents``, or the file's name.
        kind: Which generator or trace format it came from.
        requests: The requests.
        notes: What a reader of the results must know, in sentences (a truncated file, skipped
            lines).
    """

    name: str
    kind: str
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return (
            f"<Workload {self.name} ({self.kind}): {len(self)} requests, "
            f"{self.prompt_tokens:,} prompt tokens, "
            f"{self.output_tokens:,} output tokens>"
        )

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)

    def to_dict(self) -> dict[str, object]:
        """The workload in numbers, for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "requests": len(self),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "notes": list(self.notes),
        }
