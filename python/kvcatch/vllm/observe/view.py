"""A consistent copy of one engine's blocks, and what follows from it: holdings, runs, conservation.

``take`` copies under the observer's lock (lists of references, no work per block); all that costs
time per block is done afterwards, in the reader's thread, on the copy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.vllm.observe.reasons import deferral, is_deferred, queues, slots
from kvcatch.vllm.observe.records import NEXT_STEP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.vllm.observe.observer import Observer
    from kvcatch.vllm.observe.records import Refused

__all__ = ["Copy", "Held", "Layout", "Waiting", "counts", "layout", "take"]

MOST_WAITING = 64
"""Waiting requests that are told one by one."""

_MOST_BLOCKS_NAMED = 32


@dataclass(slots=True)
class Held:
    """One request and the blocks in its table.

    Attributes:
        request_id: vLLM's id.
        status: vLLM's status; ``GONE`` where the scheduler no longer knows it.
        blocks: Blocks in its table, null blocks not counted.
        shared_blocks: Of those, blocks that another table has, too.
        runs: Runs of consecutive block ids, in order, over all groups.
        tokens: Prompt and generated tokens.
        computed_tokens: Tokens whose K and V are there.
        prompt_tokens: Tokens of its prompt.
        max_tokens: Tokens it may generate.
        age_s: Seconds since it got its first blocks; None where that was not seen.
        growth_s: Seconds since it last got one.
        tags: Where it comes from.
    """

    request_id: str
    status: str = "GONE"
    blocks: int = 0
    shared_blocks: int = 0
    runs: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    age_s: float | None = None
    growth_s: float | None = None
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def is_zombie(self) -> bool:
        """Whether it holds blocks though the scheduler has ended or forgotten it."""
        return self.blocks > 0 and (self.status == "GONE" or self.status.startswith("FINISHED"))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "request": self.request_id,
            "status": self.status,
            "blocks": self.blocks,
            "shared_blocks": self.shared_blocks,
            "runs": self.runs,
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "age_seconds": None if self.age_s is None else round(self.age_s, 3),
            "last_growth_seconds_ago": None if self.growth_s is None else round(self.growth_s, 3),
            "tags": self.tags,
            "is_zombie": self.is_zombie,
        }


@dataclass(slots=True)
class Waiting:
    """One waiting request.

    Attributes:
        request_id: vLLM's id.
        tokens: Prompt and generated tokens.
        deferred: Why it was set aside; empty when it was not.
        held_blocks: Blocks it holds while it waits.
    """

    request_id: str
    tokens: int
    deferred: str = ""
    held_blocks: int = 0


@dataclass(slots=True)
class Copy:
    """What ``take`` copied.

    Attributes:
        at_s: Monotonic time.
        num_blocks: Blocks of the pool, null block counted.
        free: Blocks that may be handed out, cached ones counted.
        null_id: Id of the null block.
        tables: Group, request id and the blocks of its table.
        retired: Blocks whose return vLLM has put off until a step has ended.
        requests: Facts of each request the scheduler knows, by id.
        running: Requests that run.
        sessions: Paused streaming sessions that keep a slot.
        slots: Sequences that may run at once.
        waiting: Requests that wait.
        deferred: Of those, the ones set aside.
        queue: The first of those that wait.
        shares: Gate and number of those that the last step found waiting.
        head: The refusal of the head, as the last step found it.
        recent: The last refusals, oldest first; none of them changes any more.
        seconds: Request-seconds by gate.
        steps: Steps that refused the head, by gate.
        reported: Gates of those that vLLM counted itself.
        last_step_s: When the last step was scheduled.
    """

    at_s: float
    num_blocks: int
    free: int
    null_id: int
    tables: list[tuple[int, str, list[Any]]]
    retired: list[list[Any]]
    requests: dict[str, tuple[str, int, int, int, int, str | None, int]]
    running: int
    sessions: int
    slots: int
    waiting: int
    deferred: int
    queue: list[Waiting]
    shares: tuple[tuple[str, int], ...]
    head: Refused | None
    recent: list[Refused]
    seconds: dict[str, float]
    steps: dict[str, int]
    reported: dict[str, int]
    last_step_s: float

    @property
    def usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1


def _facts(request: Any) -> tuple[str, int, int, int, int, str | None, int]:
    lora = getattr(request, "lora_request", None)
    return (
        request.status.name,
        request.num_tokens,
        request.num_computed_tokens,
        request.num_prompt_tokens,
        getattr(request, "max_tokens", 0) or 0,
        None if lora is None else str(lora.lora_name),
        getattr(request, "priority", 0) or 0,
    )


def take(observer: Observer, *, with_tables: bool = True) -> Copy:
    """Copy the scheduler's state; the engine waits for no more than that.

    Args:
        observer: Whose.
        with_tables: The block tables as well; without, only what is counted anyway.
    """
    scheduler, pool = observer.scheduler, observer.pool
    with observer.lock:
        tables: list[tuple[int, str, list[Any]]] = []
        retired: list[list[Any]] = []
        requests = {}
        queue: list[Waiting] = []
        if with_tables:
            for group, part in enumerate(observer.coordinator.single_type_managers):
                if getattr(part, "block_pool", pool) is pool:
                    tables += [
                        (group, name, list(blocks)) for name, blocks in part.req_to_blocks.items()
                    ]
            retired = [list(blocks) for _, blocks in getattr(scheduler, "deferred_frees", ())]
            requests = {name: _facts(request) for name, request in scheduler.requests.items()}
            held: dict[str, int] = {}
            for _, name, blocks in tables:
                held[name] = held.get(name, 0) + len(blocks)
            for waiting in queues(scheduler):
                for request in itertools.islice(iter(waiting), MOST_WAITING - len(queue)):
                    aside = is_deferred(scheduler, request)
                    why = deferral(scheduler, request) if aside else ""
                    name = request.request_id
                    queue.append(Waiting(name, request.num_tokens, why, held.get(name, 0)))
        running, sessions, most = slots(scheduler, counts_sessions=True)
        ledger, now = observer.ledger, observer.clock()
        return Copy(
            now,
            pool.num_gpu_blocks,
            pool.get_num_free_blocks(),
            pool.null_block.block_id,
            tables,
            retired,
            requests,
            running,
            sessions,
            most,
            sum(map(len, queues(scheduler))),
            observer.count_deferred(),
            queue,
            ledger.shares,
            ledger.current,
            list(ledger.recent),
            ledger.seconds_until(now),
            dict(ledger.steps),
            dict(observer.reported),
            observer.last_step_s,
        )


@dataclass(slots=True)
class Layout:
    """What a copy of the tables shows.

    Attributes:
        held: Requests that hold blocks, most blocks first.
        held_blocks: Blocks in at least one table.
        retired_blocks: Blocks whose return is put off.
        unaccounted: ``usable - free - held - retired``: blocks that nobody's table has and that are
            not free. More than 0 with nothing running: a leak, or a connector that still reads them.
            Less than 0: a block that is free and held.
        free_runs: Number of free runs by length: ``1``, ``2-3``, ``4-7``, ...
        largest_run: Blocks of the longest free run.
        blocks_per_page: Blocks of one page; 0 where it is not known.
        pages: Pages of the pool.
        pinned_pages: Pages of which a block is not free.
    """

    held: list[Held]
    held_blocks: int
    retired_blocks: int
    unaccounted: int
    free_runs: dict[str, int]
    largest_run: int
    blocks_per_page: int
    pages: int
    pinned_pages: int

    @property
    def zombies(self) -> list[Held]:
        """Requests that have ended and still hold blocks."""
        return [held for held in self.held if held.is_zombie]


def layout(observer: Observer, copy: Copy, blocks_per_page: int = 0) -> Layout:
    """Holdings, runs, pages and conservation of a copy."""
    ids = [
        (name, np.fromiter((block.block_id for block in blocks), np.int64, len(blocks)))
        for _, name, blocks in copy.tables
    ]
    ids = [(name, row[row != copy.null_id]) for name, row in ids]
    everything = np.concatenate([row for _, row in ids]) if ids else np.zeros(0, np.int64)
    tables_with = np.bincount(everything, minlength=copy.num_blocks)
    held: dict[str, Held] = {}
    for name, row in ids:
        item = held.get(name)
        if item is None:
            item = held[name] = _held(observer, copy, name)
        item.blocks += len(row)
        item.shared_blocks += int(np.count_nonzero(tables_with[row] > 1))
        item.runs += int(np.count_nonzero(np.diff(row) != 1)) + 1 if len(row) else 0
    used = tables_with > 0
    held_blocks = int(np.count_nonzero(used))
    retired = [block.block_id for blocks in copy.retired for block in blocks]
    retired_blocks = int(np.count_nonzero(~used[retired])) if retired else 0
    used[retired] = True
    used[copy.null_id] = True
    lengths = _runs_of(~used)
    pages = -(-copy.num_blocks // blocks_per_page) if blocks_per_page else 0
    pinned = 0
    if pages:
        padded = np.zeros(pages * blocks_per_page, bool)
        padded[: copy.num_blocks] = used
        pinned = int(np.count_nonzero(padded.reshape(pages, blocks_per_page).any(axis=1)))
    return Layout(
        sorted(
            (item for item in held.values() if item.blocks),
            key=lambda item: (-item.blocks, item.request_id),
        ),
        held_blocks,
        retired_blocks,
        copy.usable - copy.free - held_blocks - retired_blocks,
        _histogram(lengths),
        int(lengths.max(initial=0)),
        blocks_per_page,
        pages,
        pinned,
    )


def _held(observer: Observer, copy: Copy, name: str) -> Held:
    facts = copy.requests.get(name)
    admitted, grown = observer.admitted_s.get(name), observer.grown_s.get(name)
    item = Held(
        name,
        age_s=None if admitted is None else copy.at_s - admitted,
        growth_s=None if grown is None else copy.at_s - grown,
    )
    lora, priority = None, 0
    if facts is not None:
        item.status, item.tokens, item.computed_tokens = facts[0], facts[1], facts[2]
        item.prompt_tokens, item.max_tokens, lora, priority = facts[3:]
    item.tags = observer.tagger.tags(name, lora, priority)
    return item


def _runs_of(free: NDArray[np.bool_]) -> NDArray[np.int64]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    lengths: NDArray[np.int64] = edges[1::2] - edges[::2]
    return lengths


def _histogram(lengths: NDArray[np.int64]) -> dict[str, int]:
    if not len(lengths):
        return {}
    order = np.floor(np.log2(lengths)).astype(int)
    return {
        "1" if exponent == 0 else f"{2**exponent}-{2 ** (exponent + 1) - 1}": int(number)
        for exponent, number in enumerate(np.bincount(order))
        if number
    }


def unowned_blocks(observer: Observer, copy: Copy) -> list[int]:
    """Ids of blocks that are referenced and in nobody's table; the first few. Walks the whole pool."""
    owned = {block.block_id for _, _, blocks in copy.tables for block in blocks}
    owned.update(block.block_id for blocks in copy.retired for block in blocks)
    found = (
        block.block_id
        for block in observer.pool.blocks
        if block.ref_cnt > 0 and not block.is_null and block.block_id not in owned
    )
    return list(itertools.islice(found, _MOST_BLOCKS_NAMED))


def counts(copy: Copy) -> dict[str, int]:
    """How many wait at each gate; those that came since the last step are ``next_step``.

    Who left since then is taken from those behind: their gates are the last.
    """
    found: dict[str, int] = {}
    left = copy.waiting
    for gate, number in copy.shares:
        if number := min(number, left):
            found[gate] = found.get(gate, 0) + number
        left -= number
    if left:
        found[NEXT_STEP] = found.get(NEXT_STEP, 0) + left
    return found
