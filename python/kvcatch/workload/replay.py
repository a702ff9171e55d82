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
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import InvalidArgument, OutOfBlocks
from kvcatch.workload.foresight import next_uses
from kvcatch.workload.measure import MAX_SAMPLES, LeastRuns, Samples, histogram, mean, quantile

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvcatch._core import BlockPool, Prefix
    from kvcatch.workload.request import Request, Workload

MAX_PASSED_OVER = 512
"""Under ``cache_aware`` no request is passed over more often than this."""

DESCRIPTOR_US = 3.4
"""Cost of one transfer descriptor: 79.6 ms to post 23,252 of them (vLLM pull request 55841)."""

BANDWIDTH_GB_S = 40.0
"""Copy bandwidth with merged runs: 40 to 43 GB/s (vLLM pull request 35990)."""

BYTES_PER_TOKEN = 131_072
"""K and V of one token of Llama-3.1-8B in bf16: 32 layers x 8 KV heads x 128 x 2 x 2 bytes."""

_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Order:
    """In which order waiting requests are admitted.

    Attributes:
        name: ``fcfs``, or ``cache_aware``: the longest cached prefix among the first ``window``
            waiting (ties: the earliest), nobody passed over more than ``MAX_PASSED_OVER`` times, a
            preempted one at the head first.
        window: Waiting requests looked at.
    """

    name: str = "fcfs"
    window: int = 1

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read ``fcfs``, ``cache_aware`` (a window of 64) or ``cache_aware:WINDOW``."""
        if text == "fcfs":
            return cls()
        match = re.fullmatch(r"cache_aware(?::(\d{1,6}))?", text)
        if match is None:
            raise InvalidArgument(
                f"order = {text!r}: must be fcfs, cache_aware or cache_aware:WINDOW"
            )
        window = int(match[1] or 64)
        if window < 1:
            raise InvalidArgument(f"order = {text!r}: the window must be 1 request or more")
        return cls("cache_aware", window)

    def __str__(self) -> str:
        return self.name if self.name == "fcfs" else f"{self.name}:{self.window}"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is the same for every policy of a run.

    Attributes:
        max_num_seqs: Sequences that run at once.
        order: Order of admission.
        watermark: Share of the pool that must stay available after an admission while something
            runs.
        descriptor_us: Cost of one transfer descriptor (µs); one run is one descriptor.
        bandwidth_gb_s: Transfer bandwidth (GB/s).
        bytes_per_token: K and V of one token, all layers (bytes).
    """

    max_num_seqs: int = 64
    order: Order = field(default_factory=Order)
    watermark: float = 0.0
    descriptor_us: float = DESCRIPTOR_US
    bandwidth_gb_s: float = BANDWIDTH_GB_S
    bytes_per_token: int = BYTES_PER_TOKEN

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= 1_000_000:
            limits = "must be between 1 and 1000000"
            raise InvalidArgument(f"max_num_seqs = {self.max_num_seqs}: {limits}")
        if not 0 <= self.watermark < 1:
            raise InvalidArgument(f"watermark = {self.watermark}: must be at least 0 and below 1")
        if not 0 <= self.descriptor_us <= 1e9:
            limits = "must be between 0 and 1e9"
            raise InvalidArgument(f"descriptor_us = {self.descriptor_us}: {limits}")
        if not 1e-6 <= self.bandwidth_gb_s <= 1e9:
            limits = "must be between 1e-6 and 1e9"
            raise InvalidArgument(f"bandwidth_gb_s = {self.bandwidth_gb_s}: {limits}")
        if self.bytes_per_token < 1:
            raise InvalidArgument(f"bytes_per_token = {self.bytes_per_token}: must be 1 or more")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one policy did with a workload. Means are over finished sequences unless said otherwise.

    Attributes:
        finished: Sequences that generated all their tokens.
        never_fits: Requests dropped because they do not fit the empty pool.
        steps: Engine steps.
        decode_tokens: Tokens appended one by one.
        runs_per_sequence: Mean runs of a sequence's blocks when it was freed.
        runs_per_sequence_p50: Half of the sequences had no more runs.
        runs_per_sequence_p90: 90 % of the sequences had no more runs.
        runs_per_sequence_p99: 99 % of the sequences had no more runs.
        least_runs: Mean of the fewest runs possible given the shared prefixes
            (``measure.LeastRuns``).
        prompt_runs: Mean runs at admission, over all admissions.
        blocks_per_sequence: Mean blocks of a sequence when it was freed.
        hit_tokens: Prompt tokens found cached, over all admissions.
        first_admission_hit_tokens: The same without readmissions after a preemption.
        prefill_tokens: Prompt tokens computed, over all admissions.
        preemptions: Sequences preempted.
        us_per_decode_token: CPU time of the loop per decode token (µs; a busy machine does not
            count): every pool call (create with hashing, append, commit, free, lookup) and the
            loop's own Python. Not in it: making token ids, counting runs, samples, foresight for
            ``clairvoyant``, table export.
        export_us_per_decode_token: ``block_tables`` (rows as wide as the longest of the batch) and
            ``slot_mapping`` per decode token (µs), measured on the sampled steps.
        largest_free_run: Mean over samples of the longest run of clean blocks (blocks).
        pages_pinned: Mean over samples of the pages that cannot be given back because a block in
            them is active or cached (pages).
        waiting_steps_median: Steps from the start of the replay to a request's first admission.
        waiting_steps_p99: The same, 99 % waited no longer.
        waiting_steps_max: The same, the longest.
        passed_over_max: Most times one request was passed over by a later one.
        transfer_ms: Mean time to send one admitted prompt (ms):
            prompt_runs * descriptor_us + prompt bytes / bandwidth.
        seconds: Wall time of the whole replay, everything in it (s).
        runs_histogram: Finished sequences by runs, in power-of-two buckets.
        samples: State of the pool over time, at most 200 rows.
    """

    finished: int
    never_fits: int
    steps: int
    decode_tokens: int
    runs_per_sequence: float
    runs_per_sequence_p50: int
    runs_per_sequence_p90: int
    runs_per_sequence_p99: int
    least_runs: float
    prompt_runs: float
    blocks_per_sequence: float
    hit_tokens: int
    first_admission_hit_tokens: int
    prefill_tokens: int
    preemptions: int
    us_per_decode_token: float
    export_us_per_decode_token: float
    largest_free_run: float
    pages_pinned: float
    waiting_steps_median: int
    waiting_steps_p99: int
    waiting_steps_max: int
    passed_over_max: int
    transfer_ms: float
    seconds: float
    runs_histogram: dict[str, int]
    samples: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The columns as snake_case keys, for JSON."""
        return asdict(self)


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
    if pool.num_active or pool.num_cached:
        raise InvalidArgument(
            f"the pool has {pool.num_active} active and {pool.num_cached} cached blocks: a replay "
            "starts with an empty one"
        )
    return _Replay(workload, pool, settings or ReplaySettings(), progress).run()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in the queue. ``prefix`` is made when it comes into the window."""

    request: Request
    generated: int = 0
    is_preempted: bool = False
    passed_over: int = 0
    prefix: Prefix | None = None


@dataclass(slots=True, eq=False)
class _Running:
    """A running sequence's facts that no step changes."""

    request: Request
    blocks_known: int
    passed_over: int


class _Replay:
    """State of one replay; the running batch is the first ``self.n`` entries of its arrays."""

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
        self.window: deque[_Waiting] = deque()
        self.refused = False

        self.n = 0
        self.running: list[_Running] = []
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
        self.passed_over_max = 0
        self.least_runs = LeastRuns(pool.num_blocks)
        decode_tokens = sum(request.output_tokens for request in workload.requests)
        self.samples = Samples(1 + decode_tokens // settings.max_num_seqs // (MAX_SAMPLES // 2))
        self.table_buffer = np.empty(0, dtype=np.int32)
        self.export_seconds = 0.0
        self.export_tokens = 0

    def run(self) -> ReplayResult:
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
        self.window.appendleft(_Waiting(last.request, generated, True, last.passed_over))
        self.preemptions += 1
        self.refused = False
        self.next_end = int(self.ends[: self.n].min(initial=_FAR))

    def _admit(self) -> None:
        while self.n < self.settings.max_num_seqs and not self.refused:
            self._fill_window()
            if not self.window:
                return
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

    def _fill_window(self) -> None:
        size = self.settings.order.window
        while len(self.window) < size and self.pending:
            self.window.append(_Waiting(self.pending.popleft()))

    def _prefix(self, waiting: _Waiting) -> Prefix:
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

    def _start(self, waiting: _Waiting) -> bool:
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
        self.running.append(_Running(request, len(blocks), waiting.passed_over))
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
        self.next_end = int(self.ends[: self.n].min(initial=_FAR))
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
