"""The waiting queue: who is looked at next."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcatch import BlockPool, Prefix
    from kvcatch.engine.config import EngineConfig
    from kvcatch.engine.governor import Governor
    from kvcatch.engine.request import Branch, Request
    from kvcatch.laws import Refusal

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Branches that wait, by arrival; a preempted one goes back to its place.

    ``fcfs`` takes the first. ``priority`` takes the lowest (priority, arrival). ``cache_aware`` takes
    the longest cached prefix among the first ``window``, the first of equals; one that was passed
    over ``max_passed_over`` times goes before all.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._waiting: deque[Branch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._waiting)

    def add(self, branch: Branch) -> None:
        """Put a branch behind all that arrived before it."""
        waiting = self._waiting
        if waiting and self._key(branch) < self._key(waiting[-1]):
            at = next(i for i, other in enumerate(waiting) if self._key(branch) < self._key(other))
            waiting.insert(at, branch)
        else:
            waiting.append(branch)

    def remove(self, branch: Branch) -> None:
        """Take a branch out."""
        self._waiting.remove(branch)

    def pick(self, governor: Governor | None = None, long_blocks: int = 0) -> Branch | None:
        """The branch to look at next; it stays in the queue.

        Args:
            governor: bars long requests beyond their share, and above its water level looks at short
                ones first.
            long_blocks: worst-case blocks of the long requests that run.

        Returns:
            ``None`` when the governor bars all; each then carries its refusal.
        """
        cache_aware = self._config.order == "cache_aware" and self._config.prefix_cache
        if governor is None and not cache_aware:
            return self._waiting[0]
        if governor is None:
            window = list(islice(self._waiting, self._config.window))
        else:
            window = self._let_through(governor, long_blocks)
        for branch in window:
            if branch.passed_over >= self._config.max_passed_over:
                return branch
        used = self._pool.num_active + self._pool.num_reserved
        if governor is not None and governor.short_first(used):
            short = [branch for branch in window if not governor.is_long(branch.request)]
            window = short or window
        if not cache_aware or len(window) < 2:
            return window[0] if window else None
        prefixes = [prefix_of(branch, self._pool) for branch in window]
        hits = self._pool.lookup_many(prefixes)
        return window[int(hits.argmax())]

    def _let_through(self, governor: Governor, long_blocks: int) -> list[Branch]:
        """The first ``window`` that the governor does not bar; the barred ones stand aside for them.

        One that stood aside ``max_passed_over`` times has every long one behind it barred too, until the
        share has room for it.
        """
        through: list[Branch] = []
        first: Refusal | None = None
        for branch in self._waiting:
            refusal = governor.bars(branch.request, long_blocks)
            if first is not None and refusal is None and governor.is_long(branch.request):
                refusal = replace(first, gate="head_of_line")
            if refusal is None:
                through.append(branch)
                if len(through) == self._config.window:
                    break
                continue
            branch.refusal = refusal
            if branch.passed_over >= self._config.max_passed_over:
                first = first or refusal
        return through

    def admitted(self, branch: Branch) -> None:
        """Take out a branch that enters; those before it were passed over once more."""
        for other in self._waiting:
            if other is branch:
                break
            other.passed_over += 1
        self._waiting.remove(branch)
        branch.passed_over = 0

    def _key(self, branch: Branch) -> tuple[int, int, int]:
        request: Request = branch.request
        first = request.priority if self._config.order == "priority" else 0
        return (first, request.arrival, branch.index)


def prefix_of(branch: Branch, pool: BlockPool) -> Prefix:
    """The hashed tokens of a branch; hashed once for as long as its tokens stay the same."""
    prefix = branch.prefix
    if prefix is None or prefix.num_tokens != len(branch.tokens):
        salt = branch.request.salt
        prefix = branch.prefix = pool.prefix(branch.tokens, salt=salt)
    return prefix
