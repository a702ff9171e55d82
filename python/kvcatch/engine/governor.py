"""What keeps a loaded engine responsive: a water level, a bounded share for long requests, limits at the door.

The admission law says whether a request fits. The governor says whose turn it is when the pool is nearly
full, and what is not queued at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument, KvcatchError
from kvcatch.laws import Refusal, blocks_for

if TYPE_CHECKING:
    from kvcatch.engine.request import Request

__all__ = ["Governor", "GovernorConfig", "QueueFull"]


class QueueFull(KvcatchError):
    """The queue takes no more work now; the message has the numbers. Try again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """Limits of the governor; each is off where it is ``None``.

    Attributes:
        water_level: utilisation (active and reserved blocks over all) from which short requests go
            first. Measure it (``kvcatch serve --find-knee``): it depends on the traffic.
        short_tokens: a request of at most so many tokens (prompt and output) is short.
        long_share: share of the pool that long requests may need together, in the worst case. One long
            request always may run.
        max_input: most prompt tokens; more are refused at the door.
        max_queued_tokens: tokens (prompt and output) of all that wait; a request that would pass it is
            turned away, unless nothing waits.
        max_queued: requests that may wait.

    Raises:
        InvalidArgument: a value that cannot be.
    """

    water_level: float | None = None
    short_tokens: int = 1024
    long_share: float | None = None
    max_input: int | None = None
    max_queued_tokens: int | None = None
    max_queued: int | None = None

    def __post_init__(self) -> None:
        for name in ("water_level", "long_share"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise InvalidArgument(f"{name} = {share}: must be above 0 and at most 1")
        for name in ("short_tokens", "max_input", "max_queued_tokens", "max_queued"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise InvalidArgument(f"{name} = {count!r}: must be a positive whole number")


class Governor:
    """Applies the limits of a :class:`GovernorConfig` to one engine's pool.

    Args:
        config: the limits.
        num_blocks: blocks of the pool.
        block_size: tokens per block.
    """

    def __init__(self, config: GovernorConfig, num_blocks: int, block_size: int) -> None:
        self.config = config
        self._num_blocks, self._block_size = num_blocks, block_size

    def is_long(self, request: Request) -> bool:
        """Whether a request is longer than a short one may be."""
        return total_tokens(request) > self.config.short_tokens

    def short_first(self, used_blocks: int) -> bool:
        """Whether ``used_blocks`` (active and reserved) reach the water level."""
        level = self.config.water_level
        return level is not None and used_blocks >= level * self._num_blocks

    def worst_case_blocks(self, request: Request) -> int:
        """Blocks that a request needs if it generates all it may."""
        prompt, output = len(request.prompt), request.max_tokens * request.params.n
        return blocks_for(prompt + output, self._block_size)

    def bars(self, request: Request, long_blocks: int) -> Refusal | None:
        """Why a long request has to wait although it may fit.

        Args:
            request: who asks.
            long_blocks: worst-case blocks of the long requests that run.
        """
        share = self.config.long_share
        if share is None or long_blocks == 0 or not self.is_long(request):
            return None
        limit = int(share * self._num_blocks)
        required = self.worst_case_blocks(request)
        if long_blocks + required <= limit:
            return None
        detail = (
            f"long requests: {long_blocks} blocks run + {required} = {long_blocks + required} > "
            f"long_share {share:g} x {self._num_blocks} = {limit}"
        )
        return Refusal("watermark", required, limit - long_blocks, detail)

    def at_the_door(self, request: Request) -> Refusal | None:
        """Why a request is refused whatever the load."""
        longest = self.config.max_input
        if longest is None or len(request.prompt) <= longest:
            return None
        detail = f"prompt {len(request.prompt)} > max_input {longest}"
        return Refusal("never_fits", len(request.prompt), longest, detail, "tokens")

    def check_queue(self, request: Request, waiting: int, waiting_tokens: int) -> None:
        """Turn a request away while too much waits.

        Raises:
            QueueFull: with the limit and what waits.
        """
        config, tokens = self.config, total_tokens(request)
        if config.max_queued is not None and waiting >= config.max_queued:
            raise QueueFull(f"{waiting} requests wait: max_queued is {config.max_queued}")
        limit = config.max_queued_tokens
        if limit is not None and waiting and waiting_tokens + tokens > limit:
            raise QueueFull(
                f"{waiting} requests of {waiting_tokens} tokens wait, this one has {tokens}: "
                f"max_queued_tokens is {limit}"
            )


def total_tokens(request: Request) -> int:
    """Tokens a request may come to: prompt and all outputs."""
    return len(request.prompt) + request.max_tokens * request.params.n
