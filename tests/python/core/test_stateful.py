"""The pool as an engine uses it, with the KV cache simulated: every written token stays where the tables say.

One array holds what was last written to every slot. A rule that would change it on a GPU (commit, copy-on-write,
compaction) changes it here by the numbers the pool gave out, and after every rule each committed token of each live
sequence must lie in its slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_support import slots, state
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcatch import BlockPool, KvcatchError, OutOfBlocks, Pin, Sequence, StaleHandle, StalePlan

BLOCK_SIZE = 3
NOTHING = -1
SALTS = [None, "a", 1]
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=14)
positions = st.integers(0, 30)


class Engine(RuleBasedStateMachine):
    """A model of what every sequence has written, beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockPool
        self.kv: np.ndarray
        self.live: dict[Sequence, list[int]] = {}  # tokens known, from position 0
        self.salts: dict[Sequence, object] = {}
        self.dead: list[Sequence] = []
        self.pins: list[Pin] = []
        self.dead_pins: list[Pin] = []
        self.plans: list[Any] = []

    @initialize(
        num_blocks=st.integers(2, 24),
        placement=st.sampled_from(["queue", "sorted", "bitmap", "buddy"]),
        eviction=st.sampled_from(["lru", "slru", "clairvoyant"]),
        contiguity=st.sampled_from(["preferred", "preferred", "required"]),
        null_block=st.booleans(),
    )
    def make(self, num_blocks: int, **options: Any) -> None:
        self.pool = BlockPool(
            num_blocks, BLOCK_SIZE, blocks_per_page=4, manual_clock=True, **options
        )
        self.kv = np.full(num_blocks * BLOCK_SIZE, NOTHING)

    # helpers

    def pick(self, position: int) -> Sequence:
        return list(self.live)[position % len(self.live)]

    def batch(self, chosen: list[int]) -> list[Sequence]:
        return list(dict.fromkeys(self.pick(position) for position in chosen))

    def marks(self, seq: Sequence, start: int, end: int) -> list[int]:
        """What is written for tokens [start, end): it depends on all tokens before and on the salt."""
        known = self.live[seq]
        salt = SALTS.index(self.salts[seq])
        return [hash((salt, *known[: at + 1])) >> 1 for at in range(start, end)]

    def attempt(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """The call's result, or the error it raised; an error has changed nothing."""
        before = state(self.pool, refusals=False)
        try:
            return call(*args, **kwargs)
        except KvcatchError as error:
            assert state(self.pool, refusals=False) == before
            return error

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        cells = self.kv.reshape(-1, BLOCK_SIZE)
        for source, destination in pairs:
            cells[destination] = cells[source]

    def write(self, seq: Sequence, end: int) -> None:
        """Write the KV of the tokens not committed up to ``end``, then commit them."""
        start = self.pool.num_committed(seq)
        if end > start:
            self.kv[slots(self.pool, seq, end - start)] = self.marks(seq, start, end)

    # rules

    @rule(
        tokens=tokens_of,
        salt=st.sampled_from(SALTS),
        chunk=st.none() | st.integers(1, 14),
        reserve=st.integers(0, 7),
        commit=st.booleans(),
        use_cache=st.booleans(),
    )
    def create(self, tokens: list[int], chunk: int | None, commit: bool, **options: Any) -> None:
        options["reserve_tokens"] = options.pop("reserve")
        chunk = None if commit or chunk is None else min(chunk, len(tokens))
        created = self.attempt(self.pool.create, tokens, num_tokens=chunk, **options)
        if isinstance(created, OutOfBlocks):
            return
        self.live[created] = list(tokens)
        self.salts[created] = options["salt"]
        assert created.hit_tokens < len(tokens)
        assert options["use_cache"] or created.hit_tokens == 0
        if commit:
            self.write(created, len(tokens))
            self.pool.commit(created)

    @precondition(lambda self: self.live)
    @rule(
        chosen=st.lists(positions, min_size=1, max_size=4),
        counts=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    )
    def append(self, chosen: list[int], counts: list[int]) -> None:
        batch = self.batch(chosen)
        pairs = self.attempt(self.pool.append, batch, counts[: len(batch)])
        if isinstance(pairs, OutOfBlocks):
            return
        self.copy(pairs)

    @precondition(lambda self: self.live)
    @rule(
        chosen=st.lists(positions, min_size=1, max_size=4),
        deduplicate=st.booleans(),
        part=st.integers(0, 5),
    )
    def commit_known(self, chosen: list[int], deduplicate: bool, part: int) -> None:
        batch = self.batch(chosen)
        ends = []
        for seq in batch:
            known = min(len(self.live[seq]), self.pool.num_tokens(seq))
            done = self.pool.num_committed(seq)
            ends.append(min(known, done + part) if part else known)
            self.write(seq, ends[-1])
        counts = [end - self.pool.num_committed(seq) for seq, end in zip(batch, ends, strict=True)]
        self.pool.commit(batch, counts=counts, deduplicate=deduplicate)

    @precondition(lambda self: self.live)
    @rule(
        chosen=st.lists(positions, min_size=1, max_size=4),
        new=st.lists(st.integers(0, 1), min_size=28, max_size=28),
    )
    def commit_generated(self, chosen: list[int], new: list[int]) -> None:
        batch = [
            seq for seq in self.batch(chosen) if self.pool.num_committed(seq) == len(self.live[seq])
        ]
        tokens, counts = [], []
        for seq in batch:
            n = min(7, self.pool.num_tokens(seq) - self.pool.num_committed(seq))
            fresh, new = new[:n], new[n:]
            self.live[seq] += fresh
            self.write(seq, len(self.live[seq]))
            tokens += fresh
            counts.append(n)
        self.pool.commit(batch, tokens, counts)

    @precondition(lambda self: self.live)
    @rule(position=positions)
    def fork(self, position: int) -> None:
        seq = self.pick(position)
        child = self.attempt(self.pool.fork, seq)
        if isinstance(child, KvcatchError):
            # Both would write the room that no token is known for.
            assert self.pool.num_tokens(seq) > len(self.live[seq])
            return
        self.live[child] = list(self.live[seq])
        self.salts[child] = self.salts[seq]

    @precondition(lambda self: self.live)
    @rule(position=positions, left=st.integers(0, 20))
    def truncate(self, position: int, left: int) -> None:
        seq = self.pick(position)
        if isinstance(self.attempt(self.pool.truncate, seq, left), KvcatchError):
            assert left > self.pool.num_tokens(seq)
            return
        del self.live[seq][max(left, self.pool.num_committed(seq)) :]

    @precondition(lambda self: self.live)
    @rule(position=positions, tokens=st.integers(0, 12))
    def reserve(self, position: int, tokens: int) -> None:
        self.attempt(self.pool.reserve, self.pick(position), tokens)

    @precondition(lambda self: self.live)
    @rule(chosen=st.lists(positions, min_size=1, max_size=3))
    def free(self, chosen: list[int]) -> None:
        batch = self.batch(chosen)
        self.pool.free(batch)
        for seq in batch:
            del self.live[seq], self.salts[seq]
        self.dead += batch

    @precondition(lambda self: self.dead)
    @rule(position=positions)
    def use_a_stale_handle(self, position: int) -> None:
        stale = self.dead[position % len(self.dead)]
        batch = [*list(self.live)[:2], stale]
        for call in (self.pool.free, self.pool.append, self.pool.commit):
            assert isinstance(self.attempt(call, batch), StaleHandle)
        assert isinstance(self.attempt(self.pool.fork, stale), StaleHandle)

    @precondition(lambda self: self.live)
    @rule(position=positions)
    def give_one_twice(self, position: int) -> None:
        seq = self.pick(position)
        for call in (self.pool.free, self.pool.append, self.pool.commit):
            assert isinstance(self.attempt(call, [seq, seq]), KvcatchError)

    @rule(
        tokens=tokens_of,
        salt=st.sampled_from(SALTS),
        priority=st.integers(0, 3),
        ttl=st.none() | st.integers(0, 5),
    )
    def retain(self, tokens: list[int], **options: Any) -> None:
        hits = self.pool.lookup(tokens, salt=options["salt"])
        assert self.pool.retain(tokens, **options) == hits // BLOCK_SIZE

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.pool.now += seconds

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        cached = self.pool.stats()["blocks"]["cached"]
        assert self.pool.evict(n) <= min(n, cached)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.pool.lookup([0] * BLOCK_SIZE) == 0

    @precondition(lambda self: self.live)
    @rule(position=positions)
    def pin(self, position: int) -> None:
        pin = self.attempt(self.pool.pin, self.pick(position))
        if isinstance(pin, Pin):
            self.pins.append(pin)

    @rule(block=st.integers(0, 23))
    def pin_a_block(self, block: int) -> None:
        pin = self.attempt(self.pool.pin, [block])
        if isinstance(pin, Pin):
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(position=positions)
    def unpin(self, position: int) -> None:
        pin = self.pins.pop(position % len(self.pins))
        self.pool.unpin(pin)
        self.dead_pins.append(pin)
        assert isinstance(self.attempt(self.pool.unpin, pin), StaleHandle)

    @rule(
        objective=st.sampled_from(["runs", "pages", "largest_run"]),
        n=st.integers(1, 12),
        max_moves=st.none() | st.integers(0, 6),
    )
    def plan(self, objective: str, n: int, max_moves: int | None) -> None:
        n_blocks = n if objective == "largest_run" else None
        plan = self.attempt(self.pool.plan_compaction, objective, n=n_blocks, max_moves=max_moves)
        if not isinstance(plan, KvcatchError):
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(position=positions)
    def apply(self, position: int) -> None:
        plan = self.plans.pop(position % len(self.plans))
        if isinstance(self.attempt(plan.apply), StalePlan):
            return
        start = 0
        for end in plan.rounds:
            self.copy(list(zip(plan.src[start:end], plan.dst[start:end], strict=True)))
            start = end
        assert isinstance(self.attempt(plan.apply), StalePlan)

    @precondition(lambda self: self.live)
    @rule(position=positions, more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def what_is_found_is_right(self, position: int, more: list[int]) -> None:
        """A hit serves blocks whose every token was written for this very prefix and salt."""
        like = self.pick(position)
        tokens, salt = [*self.live[like], *more], self.salts[like]
        probe = self.attempt(self.pool.create, tokens, salt=salt)
        if isinstance(probe, OutOfBlocks):
            return
        self.live[probe], self.salts[probe] = tokens, salt
        found = slots(self.pool, probe, probe.hit_tokens, starts=0)
        assert self.kv[found].tolist() == self.marks(probe, 0, probe.hit_tokens)

    # what always holds

    @invariant()
    def everything_written_is_where_the_tables_say(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        for seq in self.live:
            committed = self.pool.num_committed(seq)
            written = slots(self.pool, seq, committed, starts=0)
            assert self.kv[written].tolist() == self.marks(seq, 0, committed)

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        blocks = self.pool.snapshot()["blocks"]
        assert (
            blocks["free"] + blocks["cached"] + blocks["active"] + blocks["null"] == blocks["total"]
        )
        assert self.pool.num_sequences == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.free(list(self.live))
        for pin in self.pins:
            self.pool.unpin(pin)
        self.pool.validate()
        assert (self.pool.num_active, self.pool.num_reserved, self.pool.num_pinned) == (0, 0, 0)


@pytest.mark.slow
class TestEngine(Engine.TestCase):
    settings = settings(
        max_examples=150,
        stateful_step_count=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
