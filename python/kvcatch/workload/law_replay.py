"""The closed-loop replay under another admission law, or with prompts computed in chunks.

As ``workload.replay`` with these differences, each as in vLLM's scheduler:

1. A step computes at most ``token_budget`` tokens: those that run take theirs first, in order, then
   requests are admitted with what is left. A sequence generates from the step on in which its
   prompt is complete. Blocks of a chunk are findable when it is computed.
2. Who is admitted decides the law: ``full_prompt`` compares the whole prompt and hands out the
   first chunk, ``first_chunk`` compares that alone, ``worst_case`` reserves prompt and output until
   they are used, ``estimate`` adds what it and those that run are expected to generate.
3. A step that preempted admits nobody. A sequence that cannot grow although it is alone never fits.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from kvcatch.errors import InvalidArgument, OutOfBlocks
from kvcatch.laws import ESTIMATE_CLIP
from kvcatch.workload.replay import FAR, Replay, Running, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvcatch._core import BlockPool, Prefix, Sequence
    from kvcatch.workload.replay import ReplaySettings
    from kvcatch.workload.request import Workload

UNBOUNDED = 1 << 40
"""Token budget of a step that has none (tokens)."""

NEW_TOKEN_RATIO = (0.7, 0.098, 600)
"""First and least share of the outstanding output that is expected, and the steps from one to the
other: SGLang's defaults."""

RETRACT_STEPS = 20
"""After a preemption SGLang expects what was generated so far and this many steps more."""


class LawReplay(Replay):
    """State of one replay under a law; the running batch is the first ``self.n`` entries."""

    def __init__(
        self,
        workload: Workload,
        pool: BlockPool,
        settings: ReplaySettings,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        if pool.eviction == "clairvoyant":
            raise InvalidArgument(
                "eviction clairvoyant: only under law full_prompt without a token budget"
            )
        super().__init__(workload, pool, settings, progress)
        size = settings.max_num_seqs
        self.uncomputed = np.zeros(size, dtype=np.int64)
        self.generated = np.zeros(size, dtype=np.int64)
        self.wanted = np.zeros(size, dtype=np.int64)
        self.limit = np.zeros(size, dtype=np.int64)
        self.last_token = np.zeros(size, dtype=np.int32)
        self.is_computed = np.zeros(size, dtype=bool)
        self.budget = settings.token_budget or UNBOUNDED
        self.left = 0
        self.in_prompt = 0
        self.is_plain = False
        self.admitted_from = 0
        self.preempted = False
        self.ratio = NEW_TOKEN_RATIO[0]

    # one step

    def _grow(self) -> None:
        """Blocks for what those that run compute in this step, and the tokens themselves."""
        first, least, steps = NEW_TOKEN_RATIO
        self.ratio = max(least, self.ratio - (first - least) / steps)
        self.preempted = False
        self.left = self.budget
        if self.settings.law in ("first_chunk", "estimate"):
            self.refused = False
        while self.n:
            n = self.n
            batch = self.handles[:n]
            self.is_plain = self.in_prompt == 0 and n <= self.budget
            grant: npt.NDArray[np.int64] | int = 1
            if not self.is_plain:
                need = np.maximum(self.uncomputed[:n], 1)
                grant = np.clip(self.budget - (np.cumsum(need) - need), 0, need)
            try:
                self.pool.append(batch, grant)
            except OutOfBlocks:
                self._preempt_last()
                continue
            if self.samples.is_due(self.steps):
                self._sample(batch)
            if isinstance(grant, int):
                self.pool.commit(batch, self.last_token[:n])
                self.decode_tokens += n
                self.left = self.budget - n
            else:
                self._compute(batch, grant)
                self.left = self.budget - int(grant.sum())
            break
        self.admitted_from = self.n

    def _sample(self, batch: npt.NDArray[np.int64]) -> None:
        begin = time.thread_time()
        self.samples.take(self.steps, self.pool)
        self.untimed += time.thread_time() - begin

    def _compute(self, batch: npt.NDArray[np.int64], grant: npt.NDArray[np.int64]) -> None:
        """Commit what was computed: the next tokens of prompts, one generated token of others."""
        n = self.n
        in_prompt = self.uncomputed[:n] > 0
        decodes = ~in_prompt & (grant > 0)
        tokens = self.last_token[:n][decodes]
        if len(tokens):
            self.pool.commit(batch[decodes], tokens)
            self.decode_tokens += len(tokens)
        chunks = in_prompt & (grant > 0)
        if chunks.any():
            self.pool.commit(batch[chunks], None, grant[chunks])
            self.uncomputed[:n][chunks] -= grant[chunks]
            self.prefill_tokens += int(grant[chunks].sum())
        whole = chunks & (self.uncomputed[:n] == 0)
        self.in_prompt -= int(whole.sum())
        self.is_computed[:n] = decodes | whole

    def _preempt_last(self) -> None:
        self.n -= 1
        n = self.n
        last = self.running.pop()
        self.pool.free(self.handles[n : n + 1])
        self.in_prompt -= int(self.uncomputed[n] > 0)
        self.preemptions += 1
        self.preempted = True
        self.refused = False
        if n == 0:
            self.never_fits += 1
            return
        self.window.appendleft(
            Waiting(last.request, int(self.generated[n]), True, last.passed_over)
        )
        outstanding = int(self.limit[:n].sum()) + 1
        expected = int(self.generated[:n].sum()) + RETRACT_STEPS * n
        self.ratio = min(1.0, expected / outstanding)

    def _admit(self) -> None:
        if self.preempted:
            return
        seats = self.settings.max_num_seqs
        while self.n < seats and self.left > 0 and not self.refused and self._admit_one():
            pass

    def _start(self, waiting: Waiting) -> bool:
        """Admit the request, or change nothing and return False."""
        pool, request, settings = self.pool, waiting.request, self.settings
        prefix = self._prefix(waiting)
        num_tokens = request.num_tokens + waiting.generated
        found = pool.lookup(prefix)
        hit = min(found, (num_tokens - 1) // pool.block_size * pool.block_size)
        now = hit + min(num_tokens - hit, self.left)
        limit = max(request.output_tokens, self._asks_for(request.num_tokens))
        ahead = self._ahead(num_tokens, num_tokens - now, limit - waiting.generated)
        try:
            if ahead is None:
                seq = self._create_beside(prefix, request.owner, hit, now, num_tokens)
            else:
                seq = pool.create(
                    prefix,
                    owner=request.owner,
                    num_tokens=now,
                    reserve_tokens=ahead,
                    commit=now == num_tokens,
                )
        except OutOfBlocks:
            return False
        if ahead != 0 and settings.law != "worst_case":
            pool.reserve(seq, 0)
        hit = seq.hit_tokens
        if now < num_tokens:
            pool.commit([seq.id], None, now - hit)
        self.left -= now - hit
        self.hit_tokens += hit
        self.prefill_tokens += now - hit
        if not waiting.is_preempted:
            self.first_hit_tokens += hit
            self.waits.append(self.steps)
            self.first_admitted.append(request.index)

        begin = time.thread_time()
        blocks = pool.block_ids(seq)
        self.least_runs.admit(blocks, hit // pool.block_size)
        self.prompt_tokens += num_tokens
        self.untimed += time.thread_time() - begin

        n = self.n
        self.handles[n] = seq.id
        self.uncomputed[n] = num_tokens - now
        self.generated[n] = waiting.generated
        self.wanted[n] = request.output_tokens
        self.limit[n] = limit
        self.last_token[n] = request.output_start + waiting.generated - 1
        self.is_computed[n] = now == num_tokens
        self.in_prompt += now < num_tokens
        self.next_end = self.steps
        self.running.append(Running(request, len(blocks), waiting.passed_over))
        self.n = n + 1
        return True

    def _asks_for(self, prompt_tokens: int) -> int:
        """Output tokens that a client asks for beside what is generated."""
        settings = self.settings
        if settings.max_tokens is not None:
            return settings.max_tokens
        return 0 if settings.max_model_len is None else settings.max_model_len - prompt_tokens

    def _ahead(self, num_tokens: int, prompt_left: int, output_left: int) -> int | None:
        """Tokens beyond its whole prompt that must fit, too, for the law to let the request in.

        0 asks for no more than the first chunk. None: the pool has no one call for what the law
        compares.
        """
        settings, n = self.settings, self.n
        if settings.law == "worst_case":
            return output_left
        if settings.law == "estimate":
            outstanding = np.minimum(self.limit[:n] - self.generated[:n], ESTIMATE_CLIP)
            before, now = outstanding[: self.admitted_from], outstanding[self.admitted_from :]
            grows = math.ceil(self.ratio * float(before.sum())) + int(now.sum())
            grows += int(self.uncomputed[:n].sum())
            return min(output_left, ESTIMATE_CLIP) + grows
        watermark = self.watermark_tokens if n else 0
        if not prompt_left:
            return watermark
        if settings.law == "first_chunk":
            return None if watermark else 0
        if watermark:
            return watermark
        # One token more is in the same block, unless the prompt ends with one.
        return 1 if num_tokens % self.pool.block_size else None

    def _create_beside(
        self, prefix: Prefix, owner: str, hit: int, now: int, num_tokens: int
    ) -> Sequence:
        """Create the sequence with its first chunk, if what the law compares fits beside it.

        Raises:
            OutOfBlocks: It does not. Where hits are evictable their order of use may have changed.
        """
        pool = self.pool
        whole = num_tokens if self.settings.law == "full_prompt" else now
        ahead = whole - now + (self.watermark_tokens if self.n else 0)
        least = -(-(now + ahead) // pool.block_size) - hit // pool.block_size
        if least > pool.available:
            raise OutOfBlocks("refused by the law", least, pool.num_free, pool.num_cached)
        seq = pool.create(prefix, owner=owner, num_tokens=now)
        try:
            pool.reserve(seq, ahead)
        except OutOfBlocks:
            pool.free([seq])
            raise
        return seq

    def _generate(self) -> None:
        """Who computed its last known token generates one; those that are done leave."""
        n = self.n
        if not n:
            return
        if self.is_plain and n == self.admitted_from:
            self.generated[:n] += 1
            self.last_token[:n] += 1
            if self.steps < self.next_end:
                return
        else:
            computed = self.is_computed[:n]
            computed[: self.admitted_from] |= self.is_plain
            begin = time.thread_time()
            for position in np.flatnonzero(computed & (self.generated[:n] == 0)):
                self.prompt_runs.append(self.pool.num_runs(self.handles[position : position + 1]))
            self.untimed += time.thread_time() - begin
            self.generated[:n] += computed
            self.last_token[:n] += computed
        done = self.generated[:n] >= self.wanted[:n]
        self.next_end = self.steps + int(
            (self.wanted[:n] - self.generated[:n])[~done].min(initial=FAR)
        )
        if not done.any():
            return
        begin = time.thread_time()
        for position in np.flatnonzero(done):
            self._measure(int(self.handles[position]), self.running[position].blocks_known)
        self.untimed += time.thread_time() - begin
        self.pool.free(self.handles[:n][done])
        stay = np.flatnonzero(~done)
        for column in (
            self.handles,
            self.uncomputed,
            self.generated,
            self.wanted,
            self.limit,
            self.last_token,
        ):
            column[: len(stay)] = column[stay]
        self.running = [self.running[position] for position in stay]
        self.n = len(stay)
        self.refused = False
        if self.progress is not None:
            self._report()
