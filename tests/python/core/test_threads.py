"""Threads on one pool: no deadlock, no lost block, and nobody waits with the GIL held."""

from __future__ import annotations

import faulthandler
import random
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcatch import BlockPool, FreeBlocks, KvcatchError, placements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 8
DEADLOCK = 120


@pytest.fixture(autouse=True)
def _deadlocks_end_the_run() -> Iterator[None]:
    faulthandler.dump_traceback_later(DEADLOCK, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def hammer(work: Callable[[random.Random], Any], seconds: float) -> None:
    """Call ``work`` in every thread until the time is over; the first error is raised here."""
    end = time.monotonic() + seconds
    start = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def loop(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        try:
            while time.monotonic() < end and not errors:
                work(rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Hammer:
    """One thread's turn: something on a sequence that any thread may have made or freed meanwhile."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.seqs: list[Any] = []
        self.pins: list[Any] = []
        self.calls = 0
        self.out = threading.local()

    def some(self, rng: random.Random) -> list[Any]:
        seqs = list(self.seqs)
        return rng.sample(seqs, min(len(seqs), rng.randrange(1, 4)))

    def __call__(self, rng: random.Random) -> None:
        pool = self.pool
        self.calls += 1
        try:
            match rng.randrange(16):
                case 0 | 1 | 2:
                    tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 60))])
                    seq = pool.create(
                        tokens, owner=str(rng.randrange(3)), reserve_tokens=rng.randrange(9)
                    )
                    self.seqs.append(seq)
                case 3 | 4:
                    pool.append(self.some(rng), rng.randrange(9))
                case 5 | 6:
                    pool.commit(self.some(rng), deduplicate=rng.random() < 0.2)
                case 7:
                    self.seqs += [pool.fork(seq) for seq in self.some(rng)[:1]]
                case 8 | 9 | 10:
                    batch = self.some(rng)
                    pool.free(batch)
                    for seq in batch:
                        self.seqs.remove(seq)
                case 11:
                    pool.lookup_many([pool.prefix([0, 1] * 20), pool.prefix([1] * 30)])
                    pool.explain_miss([0] * 24)
                case 12:
                    pool.stats()
                    pool.holdings()
                    pool.audit(["1"])
                case 13:
                    pool.snapshot()
                    pool.validate()
                case 14:
                    pool.plan_compaction(rng.choice(["runs", "pages"]), max_moves=20).apply()
                case 15:
                    for seq in self.some(rng)[:1]:
                        self.pins.append(pool.pin(seq))
                    if self.pins and rng.random() < 0.7:
                        pool.unpin(self.pins.pop())
                    out = np.zeros((4, 64), np.int32)
                    pool.block_tables(self.some(rng), out)
                    pool.truncate(self.some(rng)[0], rng.randrange(9))
        except (KvcatchError, ValueError, IndexError):
            pass  # refused, freed by another thread meanwhile, or the lists are empty


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["bitmap", "queue"])
def test_hammering_one_pool(placement: str) -> None:
    pool = BlockPool(
        300, 4, placement=placement, eviction="slru", blocks_per_page=8, null_block=True
    )
    turn = Hammer(pool)
    hammer(turn, 1.5)
    assert turn.calls > THREADS
    pool.validate()
    assert pool.num_active > 0 or not pool.sequences()
    pool.free(pool.sequences())
    for pin in turn.pins:
        pool.unpin(pin)
    pool.validate()
    assert (pool.num_active, pool.num_reserved, pool.num_pinned, pool.num_sequences) == (0, 0, 0, 0)
    assert pool.num_free + pool.num_cached == 299
    pool.reset_prefix_cache()
    assert pool.num_free == 299
    counters = pool.stats()["counters"]
    assert counters["created"] + counters["forked"] == counters["freed"]


@pytest.mark.slow
@pytest.mark.parametrize("placement", placements())
def test_hammering_free_blocks(placement: str) -> None:
    """Every block is handed out to one thread at a time."""
    size = 128
    free = FreeBlocks(size, placement=placement)
    holders = np.zeros(size, np.int64)

    def turn(rng: random.Random) -> None:
        me = threading.get_ident()
        n = rng.randrange(1, 12)
        out = np.zeros(n, np.int32)
        try:
            free.take(n, out=out)
        except KvcatchError:
            return
        assert (holders[out] == 0).all()
        holders[out] = me
        assert (holders[out] == me).all()
        assert not any(block in free for block in out.tolist())
        time.sleep(0)
        assert (holders[out] == me).all()
        holders[out] = 0
        if rng.random() < 0.5:
            free.give_clean(out)
        else:
            free.give_cached(out)

    hammer(turn, 0.5)
    free.validate()
    assert len(free) == size
    assert sorted(free) == list(range(size))


def big_pool() -> BlockPool:
    """A pool whose compaction plan takes a while: many sequences scattered block by block."""
    pool = BlockPool(1 << 18, 1, placement="queue", blocks_per_page=16)
    seqs = [pool.create([1]) for _ in range(512)]
    for _ in range(400):
        pool.append(seqs, 1)
    return pool


@pytest.mark.slow
def test_other_threads_run_while_one_plans_and_one_waits() -> None:
    pool = big_pool()
    counted = 0
    done = threading.Event()
    marks: list[tuple[str, int]] = []

    def plan() -> None:
        marks.append(("plan starts", counted))
        pool.plan_compaction("runs")
        pool.validate()
        marks.append(("plan ends", counted))
        done.set()

    def wait() -> None:
        # Blocks on the pool that the planner holds.
        while not done.is_set():
            _ = pool.num_free
            time.sleep(0)

    threads = [threading.Thread(target=target) for target in (plan, wait, wait)]
    # A switch takes place only where the GIL is given up: not on a timer.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        for thread in threads:
            thread.start()
        while not done.is_set():
            counted += 1
            if counted % 64 == 0:
                time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()
    (_, before), (_, after) = marks
    assert after - before > 0


GARBAGE = """
    import faulthandler, gc, sys
    faulthandler.dump_traceback_later(4, exit=True)
    import kvcatch
    pool, free = kvcatch.BlockPool(16, 4), kvcatch.FreeBlocks(16)
    seq = pool.create([1, 2, 3], tags={{"a": "b"}})
    pin = pool.pin(seq)
    prefixes = [pool.prefix([1] * 4)]
    ran = []

    class Cycle:
        def __init__(self):
            self.me = self
        def __del__(self):
            ran.append((pool.num_free, len(free)))

    def call(f=pool, seq=seq):
        try:
            {call}
        except kvcatch.KvcatchError:
            pass

    for _ in range(200):
        gc.disable()
        Cycle(), Cycle()
        gc.set_threshold(1)
        gc.enable()
        call()
    gc.collect()
    assert ran
    print("done")
"""


@pytest.mark.parametrize(
    "call",
    [
        "pool.describe(seq)",
        "pool.describe(99)",
        "pool.block_ids(99)",
        "pool.append(seq, 10**6)",
        "pool.lookup_many(prefixes)",
        "pool.sequences()",
        "pool.holdings()",
        "pool.stats()",
        "free.take(0)",
        "free.take(99)",
        "free.give_clean([3])",
        "list(free)",
    ],
)
def test_a_finalizer_may_use_the_pool(call: str) -> None:
    """The garbage collector may run a ``__del__`` at any allocation, also inside a call of the pool."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GARBAGE.format(call=call))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
