"""A request on its way through the engine, and its branches: the continuations that are scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcatch import Prefix, Sequence
    from kvcatch.engine.sampling import SamplingParams, TokenLogprobs
    from kvcatch.laws import Refusal

__all__ = ["Branch", "FinishReason", "Request", "Status", "Swapped"]


class Status(Enum):
    """Where a branch is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REJECTED = "rejected"


@dataclass(slots=True, eq=False)
class Swapped:
    """A preempted branch's blocks in the host pool.

    Attributes:
        host_blocks: ids in the host pool, one per block of the branch, in order.
        computed: tokens they hold.
    """

    host_blocks: NDArray[np.int32]
    computed: int


@dataclass(slots=True, eq=False)
class Branch:
    """One continuation of a request: what the scheduler runs, preempts and finishes.

    Attributes:
        request: whose it is.
        index: which of its ``n`` continuations.
        tokens: prompt and generated token ids.
        computed: leading tokens whose keys and values are in the cache.
        sequence: its handle in the pool while it holds blocks.
        swapped: its blocks in the host pool while it is swapped out.
        generator: torch generator of its random choices.
        logprobs: of its generated tokens, where asked for.
        known: leading tokens that the pool knows from the sequence's creation; later ones are told
            when they are committed.
        preemptions: how often it lost its blocks.
        refusal: why it did not enter when it was last looked at.
        passed_over: admissions of requests behind it since it reached the window of the queue.
        last_token: when it gained its last token, in seconds on the engine's clock.
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    computed: int = 0
    known: int = 0
    sequence: Sequence | None = None
    swapped: Swapped | None = None
    generator: Any = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    preemptions: int = 0
    refusal: Refusal | None = None
    passed_over: int = 0
    last_token: float | None = None
    finish: FinishReason | None = None
    prefix: Prefix | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_generated(self) -> int:
        """How many tokens it has generated."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def uncomputed(self) -> int:
        """Tokens whose keys and values are still to be written; 1 in a decode step."""
        return len(self.tokens) - self.computed

    def __repr__(self) -> str:
        return (
            f"<Branch {self.request.id}/{self.index} {self.status.value}: "
            f"{self.num_prompt} + {self.num_generated} tokens, {self.computed} computed>"
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what is asked of its continuations.

    Attributes:
        id: name of the request; the owner of its blocks.
        prompt: token ids.
        params: what is asked of the output.
        max_tokens: tokens each branch may generate, the model's length considered.
        priority: lower runs first under the ``priority`` order.
        arrival: how many requests came before.
        tags: free-form, carried by its sequences (tenant, route).
        arrived: seconds on the engine's clock; so are ``scheduled``, ``first_token`` and
            ``finished``, ``None`` until then.
        hit_tokens: prompt tokens found in the prefix cache at the first admission.
        branches: its continuations; one until the prompt is computed.
        rejection: why it can never run, if so.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    tags: dict[str, str] = field(default_factory=dict)
    salt: str | None = None
    arrived: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    hit_tokens: int | None = None
    branches: list[Branch] = field(default_factory=list)
    rejection: Refusal | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all its branches have ended."""
        return all(branch.status is Status.FINISHED for branch in self.branches)

    @property
    def num_slots(self) -> int:
        """Sequences it counts for against ``max_num_seqs``: all branches, forked yet or not."""
        return self.params.n
