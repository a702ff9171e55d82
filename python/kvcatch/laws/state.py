"""What an admission law looks at: the pool, the limits, who runs, and the request that asks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_COUNT = 2**48
"""A larger number of blocks or tokens is taken for a mistake."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens: ``ceil(tokens / block_size)``."""
    return -(-tokens // block_size)


def prefill_steps(prompt_tokens: int, token_budget: int) -> int:
    """Engine steps that a prompt takes when nothing else runs: ``ceil(prompt / token budget)``.

    Raises:
        InvalidArgument: A number is not a whole number of 1 or more.
    """
    check_count("prompt_tokens", prompt_tokens, least=1)
    check_count("token_budget", token_budget, least=1)
    return -(-prompt_tokens // token_budget)


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """``value`` as a whole number between ``least`` and ``MAX_COUNT``, or InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} = {value!r}: not a whole number")
    if not least <= value <= MAX_COUNT:
        raise InvalidArgument(f"{name} = {value}: must be between {least} and {MAX_COUNT}")
    return value


def check_share(name: str, value: object, *, below: bool) -> float:
    """``value`` as a finite share: 0 or more, and below 1 (or at most 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidArgument(f"{name} = {value!r}: not a finite number")
    if not 0 <= value <= 1 or (below and value == 1):
        limit = "below 1" if below else "at most 1"
        raise InvalidArgument(f"{name} = {value}: must be at least 0 and {limit}")
    return float(value)


class _FromDict:
    """Reads a frozen record from JSON, refusing names it does not have."""

    __slots__ = ()
    _title: ClassVar[str]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build one from a JSON object.

        Raises:
            InvalidArgument: A name is unknown or missing, or a value is impossible.
        """
        if not isinstance(data, dict):
            raise InvalidArgument(f"{cls._title}: {data!r:.60} is not a JSON object")
        known = {item.name for item in fields(cls) if item.init}  # type: ignore[arg-type]
        for name in data:
            if name not in known:
                raise InvalidArgument(
                    f"{cls._title}: unknown field {name!r}; there are {', '.join(sorted(known))}"
                )
        try:
            return cls(**data)
        except TypeError as error:
            missing = str(error).partition("argument")[2].partition(":")[2].strip()
            raise InvalidArgument(f"{cls._title}: missing {missing or error}") from None


@dataclass(frozen=True, slots=True)
class RunningRequest(_FromDict):
    """A request that runs.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        generated: Tokens it has generated.
        max_tokens: Tokens it may generate; None when it did not say.
        computed_tokens: Tokens whose K and V are computed; None for all it has so far.
        held_blocks: Blocks it holds; None for as many as its computed tokens need.
    """

    _title: ClassVar[str] = "running request"

    prompt_tokens: int
    generated: int = 0
    max_tokens: int | None = None
    computed_tokens: int | None = None
    held_blocks: int | None = None

    def __post_init__(self) -> None:
        check_count("running prompt_tokens", self.prompt_tokens, least=1)
        check_count("running generated", self.generated)
        for name in ("max_tokens", "computed_tokens", "held_blocks"):
            value = getattr(self, name)
            if value is not None:
                check_count(f"running {name}", value)
        if self.max_tokens is not None and self.generated > self.max_tokens:
            raise InvalidArgument(
                f"running generated = {self.generated}: more than its max_tokens = "
                f"{self.max_tokens}"
            )
        if self.computed_tokens is not None and self.computed_tokens > self.tokens:
            raise InvalidArgument(
                f"running computed_tokens = {self.computed_tokens}: more than its {self.tokens} "
                "tokens"
            )

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated

    def held(self, block_size: int) -> int:
        """Blocks it holds."""
        if self.held_blocks is not None:
            return self.held_blocks
        tokens = self.tokens if self.computed_tokens is None else self.computed_tokens
        return blocks_for(tokens, block_size)

    def step_tokens(self) -> int:
        """Tokens it takes from the next step's budget: what is left of its prompt, at least 1."""
        if self.computed_tokens is None:
            return 1
        return max(1, self.tokens - self.computed_tokens)


@dataclass(frozen=True, slots=True)
class QueuedRequest(_FromDict):
    """A request that waits.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        max_tokens: Tokens it may generate; None when it did not say.
        generated: Tokens it had generated before it was preempted.
        hit_tokens: Tokens of its prompt found in the prefix cache.
        active_hit_tokens: Of those, tokens in blocks that are active: they cost no block.
        held_blocks: Blocks it holds already (a KV transfer brought them).
        computed_tokens: Tokens whose K and V those blocks hold.
        loading: Its KV arrives by an asynchronous transfer.
        deferred: Why it cannot be looked at yet (an adapter slot, a grammar, a KV fetch); empty
            when it can.
        name: How to call it in what is printed.
    """

    _title: ClassVar[str] = "request of the queue"

    prompt_tokens: int
    max_tokens: int | None = None
    generated: int = 0
    hit_tokens: int = 0
    active_hit_tokens: int = 0
    held_blocks: int = 0
    computed_tokens: int = 0
    loading: bool = False
    deferred: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        check_count("prompt_tokens", self.prompt_tokens, least=1)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, least=1)
        for name in (
            "generated",
            "hit_tokens",
            "active_hit_tokens",
            "held_blocks",
            "computed_tokens",
        ):
            check_count(name, getattr(self, name))
        for name in ("deferred", "name"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(f"{name} = {getattr(self, name)!r}: not text")
        if not isinstance(self.loading, bool):
            raise InvalidArgument(f"loading = {self.loading!r}: must be true or false")
        if self.active_hit_tokens > self.hit_tokens:
            raise InvalidArgument(
                f"active_hit_tokens = {self.active_hit_tokens}: more than hit_tokens = "
                f"{self.hit_tokens}"
            )
        for name in ("hit_tokens", "computed_tokens"):
            if getattr(self, name) >= self.tokens:
                raise InvalidArgument(
                    f"{name} = {getattr(self, name)}: at least one of the {self.tokens} tokens "
                    "has to be computed"
                )
        if self.max_tokens is not None and self.generated >= self.max_tokens:
            raise InvalidArgument(
                f"generated = {self.generated}: a request with max_tokens = {self.max_tokens} "
                "is done"
            )

    @property
    def tokens(self) -> int:
        """Tokens that have to be in the cache before it can go on: prompt and generated."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class State(_FromDict):
    """The pool and the limits at the moment a queue is looked at.

    Attributes:
        num_blocks: Blocks of the pool, null blocks counted.
        block_size: Tokens per block.
        free: Clean blocks.
        cached: Evictable prefix blocks.
        pinned: Of the cached blocks, those that must not be evicted.
        reserved: Blocks promised to those that run and not yet handed out. None: it follows from
            ``running`` under a law that reserves, and is 0 under others.
        running: Those that run, as far as they are known one by one.
        num_running: How many run; None for as many as ``running`` lists.
        num_deferred: Requests set aside that count against ``max_num_seqs``.
        null_blocks: Blocks that nobody can ever hold (1 in vLLM and TGI).
        max_num_seqs: Sequences that may run at once; None when it is not known: then no gate.
        token_budget: Tokens one step may compute; None when it is not known: then no gate.
        chunked_prefill: A prompt may be computed over several steps.
        long_prefill_threshold: Most prompt tokens of one request per step; 0 for no such limit.
        watermark: Share of the pool that an admission must leave available.
        max_model_len: Most tokens of a request, prompt and output; None when it is not known.
        new_token_ratio: Under an estimating law: share of its outstanding output that a running
            request is expected to need.
        spec_tokens: Speculative tokens per step.
        largest_run: Longest run of blocks that may be handed out; given only where K and V of a
            request must be contiguous.
    """

    _title: ClassVar[str] = "state"

    num_blocks: int
    block_size: int
    free: int
    cached: int = 0
    pinned: int = 0
    reserved: int | None = None
    running: tuple[RunningRequest, ...] = ()
    num_running: int | None = None
    num_deferred: int = 0
    null_blocks: int = 0
    max_num_seqs: int | None = None
    token_budget: int | None = None
    chunked_prefill: bool = True
    long_prefill_threshold: int = 0
    watermark: float = 0.0
    max_model_len: int | None = None
    new_token_ratio: float = 0.7
    spec_tokens: int = 0
    largest_run: int | None = None
    _running_tokens: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        check_count("num_blocks", self.num_blocks, least=1)
        check_count("block_size", self.block_size, least=1)
        for name in (
            "free",
            "cached",
            "pinned",
            "num_deferred",
            "null_blocks",
            "long_prefill_threshold",
            "spec_tokens",
        ):
            check_count(name, getattr(self, name))
        for name in ("reserved", "num_running", "largest_run"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("max_num_seqs", "token_budget", "max_model_len"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)
        check_share("watermark", self.watermark, below=True)
        check_share("new_token_ratio", self.new_token_ratio, below=False)
        if not isinstance(self.chunked_prefill, bool):
            raise InvalidArgument(
                f"chunked_prefill = {self.chunked_prefill!r}: must be true or false"
            )
        object.__setattr__(self, "running", _running(self.running))
        self._check_sums()
        tokens = sum(item.step_tokens() for item in self.running)
        unknown = self.count_running - len(self.running)
        object.__setattr__(self, "_running_tokens", tokens + unknown)

    def _check_sums(self) -> None:
        if self.null_blocks >= self.num_blocks:
            raise InvalidArgument(
                f"null_blocks = {self.null_blocks}: a pool of {self.num_blocks} blocks has none "
                "left to hand out"
            )
        if self.free + self.cached > self.usable:
            raise InvalidArgument(
                f"free + cached = {self.free} + {self.cached} = {self.free + self.cached}: more "
                f"than the {self.usable} usable blocks "
                f"({self.num_blocks} - {self.null_blocks} null)"
            )
        if self.pinned > self.cached:
            raise InvalidArgument(
                f"pinned = {self.pinned}: more than the {self.cached} cached blocks"
            )
        if self.reserved is not None and self.reserved > self.unclaimed:
            raise InvalidArgument(
                f"reserved = {self.reserved}: more than free + cached - pinned = {self.unclaimed}"
            )
        if self.num_running is not None and self.num_running < len(self.running):
            raise InvalidArgument(
                f"num_running = {self.num_running}: running lists {len(self.running)}"
            )
        if self.largest_run is not None and self.largest_run > self.unclaimed:
            raise InvalidArgument(
                f"largest_run = {self.largest_run}: longer than the {self.unclaimed} blocks that "
                "may be handed out"
            )

    @property
    def usable(self) -> int:
        """Blocks that requests can hold: all but the null blocks."""
        return self.num_blocks - self.null_blocks

    @property
    def unclaimed(self) -> int:
        """Blocks that could be handed out, reserved ones counted: free + cached - pinned."""
        return self.free + self.cached - self.pinned

    @property
    def count_running(self) -> int:
        """How many run."""
        return len(self.running) if self.num_running is None else self.num_running

    @property
    def watermark_blocks(self) -> int:
        """Blocks of the watermark: ``int(watermark * num_blocks)``."""
        return int(self.watermark * self.num_blocks)

    @property
    def running_tokens(self) -> int:
        """Tokens that those that run take from the next step's budget."""
        return self._running_tokens


def _running(items: object) -> tuple[RunningRequest, ...]:
    if not isinstance(items, (list, tuple)):
        raise InvalidArgument(f"running = {items!r:.60}: not a list")
    return tuple(
        item if isinstance(item, RunningRequest) else RunningRequest.from_dict(item)
        for item in items
    )
