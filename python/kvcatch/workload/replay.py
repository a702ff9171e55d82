"""Closed-loop replay of a workload over a pool, by its public calls alone.

One ``append`` and one ``commit`` serve the whole batch. Each step, as vLLM's scheduler does with
one decode token per sequence:

1. Every running sequence grows by the token it generated last. When the batch does not fit, the
   last running sequence is preempted: freed and put back at the head of the queue, its prompt now
   including what it generated.
2. While fewer than ``max_num_seqs`` run, the next waiting request is admitted with its whole
   prompt, whose full blocks are committed at once, or admission stops. A request that does not fit
   an otherwise idle pool never fits: it is counted and dropped. A refused head is tried again once
   blocks have come back.
3. Every running sequence generates a token; one that has all of them is freed. Its last token is
   never computed.

All requests wait from the first step on: arrival gives their order, not their time.

That is law ``full_prompt`` with whole prompts; other laws and a token budget per step are
``workload.law_replay``'s.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcatch.errors import InvalidArgument, OutOfBlocks
from kvcatch.workload.foresight import next_uses
from kvcatch.workload.measure import MAX_SAMPLES, LeastRuns, Samples, histogram, mean, quantile
from kvcatch.workload.settings import (
    BANDWIDTH_GB_S,
    BYTES_PER_TOKEN,
    DESCRIPTOR_US,
    MAX_PASSED_OVER,
    Order,
    ReplayResult,
    ReplaySettings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvcatch._core import BlockPool, Prefix
    from kvcatch.workload.request import Request, Workload

__all__ = [
    "BANDWIDTH_GB_S",
    "BYTES_PER_TOKEN",
    "DESCRIPTOR_US",
    "FAR",
    "MAX_PASSED_OVER",
    "Order",
    "Replay",
    "ReplayResult",
    "ReplaySettings",
    "Running",
    "Waiting",
    "replay",
    "start_replay",
]

FAR = np.iinfo(np.int64).max
"""A step that never comes."""


def replay(
    workload: Workload,
    pool: BlockPool,
    settings: ReplaySettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Run every request of ``workload`` through ``pool``.

    Args:
        workload: The requests; their tokens are made when they come near the head of the queue, and
            dropped when they are admitted.
        pool: An empty pool.
        settings: Order, watermark and the transfer model.
        progress: Called with (requests done, requests in all) now and then.

    Raises:
        InvalidArgument: The pool is not empty.
    """
    return start_replay(workload, pool, settings, progress).run()


def start_replay(
    workload: Workload,
    pool: BlockPool,
    settings: ReplaySettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """The replay, ready to run: who wants more than its result keeps it (arguments as ``replay``).

    Raises:
        InvalidArgument: The pool is not empty.
    """
    if pool.num_active or pool.num_cached:
        raise InvalidArgument(
            f"the pool has {pool.num_active} active and {pool.num_cached} cached blocks: a replay "
            "starts with an empty one"
        )
    settings = settings or ReplaySettings()
    if settings.law != "full_prompt" or settings.token_budget is not None:
        from kvcatch.workload.law_replay import LawReplay

        return LawReplay(workload, pool, settings, progress)
    return Replay(workload, pool, settings, progress)


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue. ``prefix`` is made when it comes into the window."""

    request: Request
    generated: int = 0
    is_preempted: bool = False
    passed_over: int = 0
    prefix: Prefix | None = None


@dataclass(slots=True, eq=False)
class Running:
    """A running sequence's facts that no step changes."""

    request: Request
    blocks_known: int
    passed_over: int


class Replay:
    """State of one replay; the running batch is the first ``self.n`` entries of its arrays.

    Attributes:
        waits: Steps until each first admission, in the order of the admissions.
        first_admitted: Index of the request of each of them.
    """

    def __init__(
        self,
        workload: Workload,
        pool: BlockPool,
        settings: ReplaySettings,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.progress = progress
        self.total = len(workload)
        self.pending = deque(workload.requests)
        self.window: deque[Waiting] = deque()
        self.refused = False

        self.n = 0
        self.running: list[Running] = []
        self.handles = np.zeros(settings.max_num_seqs, dtype=np.int64)
        # At step s a sequence computes token id `token_base + s`; it leaves at the end of step `ends`.
        self.token_base = np.zeros(settings.max_num_seqs, dtype=np.int32)
        self.ends = np.zeros(settings.max_num_seqs, dtype=np.int64)
        self.next_end = 0
        self.watermark_tokens = int(settings.watermark * pool.num_blocks) * pool.block_size

        self.untimed = 0.0
        self.begin = time.perf_counter()
        clairvoyant = pool.eviction == "clairvoyant"
        self.next_uses = (
            dict(zip(workload.requests, next_uses(workload, pool.block_size), strict=True))
            if clairvoyant
            else None
        )

        self.steps = self.decode_tokens = self.preemptions = self.never_fits = 0
        self.hit_tokens = self.first_hit_tokens = self.prefill_tokens = 0
        self.runs: list[int] = []
        self.least: list[int] = []
        self.blocks: list[int] = []
        self.prompt_runs: list[int] = []
        self.prompt_tokens = 0
        self.waits: list[int] = []
        self.first_admitted: list[int] = []
        self.passed_over_max = 0
        self.least_runs = LeastRuns(pool.num_blocks)
        decode_tokens = sum(request.output_tokens for request in workload.requests)
        self.samples = Samples(1 + decode_tokens // settings.max_num_seqs // (MAX_SAMPLES // 2))
        self.table_buffer = np.empty(0, dtype=np.int32)
        self.export_seconds = 0.0
        self.export_tokens = 0

    def run(self) -> ReplayResult:
        """Every request to its end, and what was measured."""
        begin = time.thread_time()
        while self.pending or self.window or self.n:
            self.steps += 1
            self._grow()
            self._admit()
            self._generate()
        busy = time.thread_time() - begin - self.untimed
        self._report()
        return self._result(busy)

    # one step

    def _grow(self) -> None:
        """Room for one more token in every running sequence, and the token itself."""
        pool = self.pool
        while self.n:
            batch = self.handles[: self.n]
            try:
                pool.append(batch, 1)
            except OutOfBlocks:
                self._preempt_last()
                continue
            if self.samples.is_due(self.steps):
                self._sample(batch)
            pool.commit(batch, self.token_base[: self.n] + self.steps)
            self.decode_tokens += self.n
            return

    def _preempt_last(self) -> None:
        self.n -= 1
        last = self.running.pop()
        handle = int(self.handles[self.n])
        generated = last.request.output_tokens - (int(self.ends[self.n]) - self.steps + 1)
        if self.next_uses is not None:
            blocks = len(self.pool.block_ids(handle))
            self.pool.set_next_use(handle, np.zeros(blocks, dtype=np.int64))
        self.pool.free(self.handles[self.n : self.n + 1])
        self.window.appendleft(Waiting(last.request, generated, True, last.passed_over))
        self.preemptions += 1
        self.refused = False
        self.next_end = int(self.ends[: self.n].min(initial=FAR))

    def _admit(self) -> None:
        while self.n < self.settings.max_num_seqs and not self.refused and self._admit_one():
            pass

    def _admit_one(self) -> bool:
        """Try the next request; False when none waits."""
        self._fill_window()
        if not self.window:
            return False
        chosen = self._choose()
        waiting = self.window[chosen]
        if self._start(waiting):
            del self.window[chosen]
            for position in range(chosen):
                passed = self.window[position]
                passed.passed_over += 1
                self.passed_over_max = max(self.passed_over_max, passed.passed_over)
        elif self.n == 0:
            self.never_fits += 1
            del self.window[chosen]
        else:
            self.refused = True
        return True

    def _fill_window(self) -> None:
        size = self.settings.order.window
        while len(self.window) < size and self.pending:
            self.window.append(Waiting(self.pending.popleft()))

    def _prefix(self, waiting: Waiting) -> Prefix:
        """The request's hashed prompt, made once."""
        if waiting.prefix is None:
            begin = time.thread_time()
            tokens = waiting.request.tokens(waiting.generated)
            self.untimed += time.thread_time() - begin
            waiting.prefix = self.pool.prefix(tokens)
        return waiting.prefix

    def _choose(self) -> int:
        """Position in the window of the request to admit next."""
        if self.settings.order.name == "fcfs" or self.window[0].is_preempted:
            return 0
        candidates: list[Prefix] = []
        for position in range(min(self.settings.order.window, len(self.window))):
            waiting = self.window[position]
            candidates.append(self._prefix(waiting))
            if waiting.passed_over >= MAX_PASSED_OVER:
                break
        return int(np.argmax(self.pool.lookup_many(candidates)))

    def _start(self, waiting: Waiting) -> bool:
        """Admit the request, or change nothing and return False."""
        pool, request = self.pool, waiting.request
        ahead = self.watermark_tokens if self.n else 0
        try:
            seq = pool.create(
                self._prefix(waiting), owner=request.owner, reserve_tokens=ahead, commit=True
            )
        except OutOfBlocks:
            return False
        if ahead:
            pool.reserve(seq, 0)
        hit = seq.hit_tokens
        num_tokens = request.num_tokens + waiting.generated
        self.hit_tokens += hit
        self.prefill_tokens += num_tokens - hit
        if not waiting.is_preempted:
            self.first_hit_tokens += hit
            self.waits.append(self.steps)
            self.first_admitted.append(request.index)

        begin = time.thread_time()
        if self.next_uses is not None:
            pool.set_next_use(seq, self.next_uses[request])
        blocks = pool.block_ids(seq)
        self.least_runs.admit(blocks, hit // pool.block_size)
        self.prompt_runs.append(pool.num_runs(seq))
        self.prompt_tokens += num_tokens
        self.untimed += time.thread_time() - begin

        n = self.n
        self.handles[n] = seq.id
        end = self.steps + request.output_tokens - waiting.generated - 1
        self.token_base[n] = request.output_start + waiting.generated - self.steps - 1
        self.ends[n] = end
        self.next_end = min(self.next_end, end) if n else end
        self.running.append(Running(request, len(blocks), waiting.passed_over))
        self.n = n + 1
        return True

    def _generate(self) -> None:
        """Every running sequence generates a token; those that are done leave."""
        if not self.n or self.steps < self.next_end:
            return
        done = self.ends[: self.n] <= self.steps
        leaving = self.handles[: self.n][done]
        begin = time.thread_time()
        for position in np.flatnonzero(done):
            self._measure(int(self.handles[position]), self.running[position].blocks_known)
        self.untimed += time.thread_time() - begin
        self.pool.free(leaving)
        stay = np.flatnonzero(~done)
        for column in (self.handles, self.token_base, self.ends):
            column[: len(stay)] = column[stay]
        self.running = [self.running[position] for position in stay]
        self.n = len(stay)
        self.next_end = int(self.ends[: self.n].min(initial=FAR))
        self.refused = False
        if self.progress is not None:
            self._report()

    # measuring

    def _measure(self, handle: int, blocks_known: int) -> None:
        blocks = self.pool.block_ids(handle)
        runs = self.pool.num_runs([handle])
        self.blocks.append(len(blocks))
        self.runs.append(runs)
        self.least.append(min(runs, self.least_runs.finish(blocks, blocks_known)))

    def _sample(self, batch: npt.NDArray[np.int64]) -> None:
        """The pool's state, and what exporting this batch's tables costs."""
        begin = time.thread_time()
        pool = self.pool
        longest = max(pool.num_tokens(int(handle)) for handle in batch)
        width = -(-longest // pool.block_size)
        cells = len(batch) * width
        if cells > len(self.table_buffer):
            self.table_buffer = np.zeros(2 * cells, dtype=np.int32) + 1
        tables = self.table_buffer[:cells].reshape(len(batch), width)
        slots = np.zeros(len(batch), dtype=np.int64)
        start = time.thread_time()
        pool.block_tables(batch, tables)
        pool.slot_mapping(batch, 1, out=slots)
        self.export_seconds += time.thread_time() - start
        self.export_tokens += len(batch)
        self.samples.take(self.steps, pool)
        self.untimed += time.thread_time() - begin

    def _report(self) -> None:
        if self.progress is not None:
            begin = time.thread_time()
            self.progress(len(self.runs) + self.never_fits, self.total)
            self.untimed += time.thread_time() - begin

    def _result(self, busy: float) -> ReplayResult:
        settings, runs = self.settings, self.runs
        admissions = max(1, len(self.prompt_runs))
        prompt_runs = mean(self.prompt_runs)
        bytes_sent = self.prompt_tokens / admissions * settings.bytes_per_token
        return ReplayResult(
            finished=len(runs),
            never_fits=self.never_fits,
            steps=self.steps,
            decode_tokens=self.decode_tokens,
            runs_per_sequence=mean(runs),
            runs_per_sequence_p50=quantile(runs, 0.5),
            runs_per_sequence_p90=quantile(runs, 0.9),
            runs_per_sequence_p99=quantile(runs, 0.99),
            least_runs=mean(self.least),
            prompt_runs=prompt_runs,
            blocks_per_sequence=mean(self.blocks),
            hit_tokens=self.hit_tokens,
            first_admission_hit_tokens=self.first_hit_tokens,
            prefill_tokens=self.prefill_tokens,
            preemptions=self.preemptions,
            us_per_decode_token=busy / max(1, self.decode_tokens) * 1e6,
            export_us_per_decode_token=self.export_seconds / max(1, self.export_tokens) * 1e6,
            largest_free_run=self.samples.mean("largest_free_run"),
            pages_pinned=self.samples.mean("pages_pinned"),
            waiting_steps_median=quantile(self.waits, 0.5),
            waiting_steps_p99=quantile(self.waits, 0.99),
            waiting_steps_max=max(self.waits, default=0),
            passed_over_max=self.passed_over_max,
            transfer_ms=prompt_runs * settings.descriptor_us / 1e3
            + bytes_sent / (settings.bandwidth_gb_s * 1e9) * 1e3,
            seconds=time.perf_counter() - self.begin,
            runs_histogram=histogram(runs),
            samples=self.samples.rows,
        )
