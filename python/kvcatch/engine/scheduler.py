"""Who runs in the next step: growth of those that run, preemption, and admission by a law.

Knows tokens and blocks, no tensors. A step: those that run grow first, in order of admission; where
the pool cannot serve them all, victims lose their blocks. When nobody did, swapped branches come back,
and after them the waiting queue is asked, as long as the law lets its head in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvcatch import FreeBlocks
from kvcatch.engine.governor import total_tokens
from kvcatch.engine.queue import WaitingQueue, prefix_of
from kvcatch.engine.request import Branch, FinishReason, Request, Status, Swapped
from kvcatch.engine.schedule import Schedule, Scheduled, SwapCopy
from kvcatch.errors import OutOfBlocks
from kvcatch.laws import LAWS, QueuedRequest, Refusal, RunningRequest, State, admit, blocks_for
from kvcatch.laws import Step as Used

if TYPE_CHECKING:
    from kvcatch import BlockPool
    from kvcatch.engine.config import EngineConfig
    from kvcatch.engine.governor import Governor
    from kvcatch.laws import Decision, Gate

__all__ = ["Scheduler"]


class Scheduler:
    """Decides every step; holds the queues.

    Attributes:
        running: branches with blocks, by admission.
        waiting: branches without.
        swapped: branches whose blocks lie in the host pool, first to come back first.
        refusal: why the last step admitted no more; ``None`` when nobody was left waiting for a gate.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, governor: Governor | None = None
    ) -> None:
        self.config = config
        self.governor = governor
        self.pool = pool
        self.law = LAWS[config.law]
        self.running: list[Branch] = []
        self.waiting = WaitingQueue(config, pool)
        self.swapped: deque[Branch] = deque()
        self._host = (
            FreeBlocks(config.host_blocks, placement="bitmap") if config.host_blocks else None
        )
        self.host_free = config.host_blocks
        self.refusal: Refusal | None = None
        self.preemptions = {"recompute": 0, "swap": 0}

    # --- requests -------------------------------------------------------------------------------

    def refusal_at_the_door(self, request: Request) -> Refusal | None:
        """Why a request can never run, with the arithmetic; ``None`` when it can."""
        total = len(request.prompt) + request.max_tokens
        if total > self.config.max_model_len:
            return Refusal(
                "never_fits",
                total,
                self.config.max_model_len,
                f"prompt {len(request.prompt)} + output {request.max_tokens} = {total} > "
                f"max_model_len {self.config.max_model_len}",
                "tokens",
            )
        if request.num_slots > self.config.max_num_seqs:
            return Refusal(
                "never_fits",
                request.num_slots,
                self.config.max_num_seqs,
                f"n {request.num_slots} > max_num_seqs {self.config.max_num_seqs}",
                "sequences",
            )
        return None if self.governor is None else self.governor.at_the_door(request)

    def check_queue(self, request: Request) -> None:
        """Turn a request away while too much waits (QueueFull)."""
        if self.governor is not None:
            tokens = sum(total_tokens(branch.request) for branch in self.waiting)
            self.governor.check_queue(request, len(self.waiting), tokens)

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`refusal_at_the_door`."""
        branch = Branch(request, tokens=list(request.prompt))
        request.branches.append(branch)
        self.waiting.add(branch)

    def abort(self, request: Request) -> list[Branch]:
        """End all branches of a request that have not ended; their blocks are free at once."""
        ended = [b for b in request.branches if b.status is not Status.FINISHED]
        for branch in ended:
            self.finish(branch, FinishReason.ABORT)
        return ended

    def finish(self, branch: Branch, reason: FinishReason) -> None:
        """End a branch, wherever it is. Its committed blocks stay findable until evicted."""
        if branch.status is Status.RUNNING:
            self.running.remove(branch)
        elif branch.status is Status.SWAPPED:
            self.swapped.remove(branch)
        elif branch.status is Status.WAITING:
            self.waiting.remove(branch)
        self._release(branch)
        branch.status, branch.finish = Status.FINISHED, reason

    def fork(self, branch: Branch) -> list[Branch]:
        """All continuations of a request whose prompt is computed; the new ones share its blocks."""
        request = branch.request
        if len(request.branches) < request.params.n:
            assert branch.sequence is not None
            for index in range(len(request.branches), request.params.n):
                child = Branch(request, index, list(branch.tokens), Status.RUNNING)
                child.computed, child.known = branch.computed, branch.known
                child.sequence = self.pool.fork(branch.sequence)
                request.branches.append(child)
                self.running.append(child)
        return request.branches

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Decide the next step; the pool and the queues are as it leaves them."""
        step = Schedule()
        self.refusal = None
        self._grow(step)
        if not step.preempted:
            self._swap_in(step)
            if self.swapped:
                self.refusal = self.swapped[0].refusal
            else:
                self._admit(step)
        step.items.sort(key=lambda item: item.count > 1)
        return step

    def computed(self, step: Schedule) -> None:
        """Note that a step's keys and values are written (ordered before whatever comes next)."""
        for item in step.items:
            item.branch.computed = item.start + item.count

    def _grow(self, step: Schedule) -> None:
        budget = self.config.max_num_batched_tokens
        items: list[Scheduled] = []
        for branch in self.running:
            count = self._chunk(branch.uncomputed, budget)
            if count:
                items.append(Scheduled(branch, branch.computed, count))
                budget -= count
        while items:
            try:
                sequences = [item.branch.sequence for item in items]
                pairs = self.pool.append(sequences, [item.count for item in items])  # type: ignore[arg-type]
            except OutOfBlocks:
                victim = self._victim()
                self._preempt(victim, step)
                items = [item for item in items if item.branch is not victim]
            else:
                step.copies += pairs
                break
        step.items = items

    def _chunk(self, uncomputed: int, budget: int) -> int:
        threshold = self.config.long_prefill_threshold
        most = min(uncomputed, threshold) if threshold else uncomputed
        return min(most, budget)

    # --- preemption -----------------------------------------------------------------------------

    def _victim(self) -> Branch:
        """Who loses its blocks: never the oldest, unless nobody else runs."""
        oldest = min(self.running, key=_seniority)
        others = [branch for branch in self.running if branch is not oldest] or [oldest]
        match self.config.victim:
            case "lowest_priority":
                return max(others, key=_seniority)
            case "cheapest":
                return min(others, key=lambda b: (b.computed, -b.request.arrival, -b.index))
            case _:
                return others[-1]

    def _preempt(self, branch: Branch, step: Schedule) -> None:
        self.running.remove(branch)
        branch.preemptions += 1
        step.preempted.append(branch)
        assert branch.sequence is not None
        needed = blocks_for(branch.computed, self.config.block_size)
        if self.config.preemption == "swap" and 0 < needed <= self.host_free:
            assert self._host is not None
            host = np.asarray(self._host.take(needed), np.int32)
            self.host_free -= needed
            src = self.pool.block_ids(branch.sequence)[:needed]
            step.swap_out.append(SwapCopy(branch, src, host))
            branch.swapped = Swapped(host, branch.computed)
            self._free(branch)
            branch.status = Status.SWAPPED
            self.swapped.append(branch)
            self.swapped = deque(sorted(self.swapped, key=_seniority))
            self.preemptions["swap"] += 1
        else:
            self._free(branch)
            branch.computed = 0
            branch.status = Status.WAITING
            self.waiting.add(branch)
            self.preemptions["recompute"] += 1

    def _swap_in(self, step: Schedule) -> None:
        while self.swapped and len(self.running) < self.config.max_num_seqs:
            branch = self.swapped[0]
            assert branch.swapped is not None
            prefix = prefix_of(branch, self.pool)
            hit, _ = self._hits(branch)
            if self._short_of(branch, max(hit, branch.swapped.computed) + 1):
                return
            try:
                sequence = self.pool.create(
                    prefix,
                    owner=branch.request.id,
                    tags=branch.request.tags,
                    num_tokens=max(hit, branch.swapped.computed),
                    use_cache=self.config.prefix_cache,
                    reserve_tokens=self._promise(branch),
                )
            except OutOfBlocks as error:
                branch.refusal = _out_of_blocks(error)
                return
            self.swapped.popleft()
            hit = sequence.hit_tokens
            first = hit // self.config.block_size
            host = branch.swapped.host_blocks
            device = self.pool.block_ids(sequence)
            if first < len(host):
                committed = branch.swapped.computed - hit
                step.swap_in.append(
                    SwapCopy(branch, host[first:], device[first : len(host)], committed)
                )
            self._free_host(branch)
            branch.sequence, branch.known = sequence, len(branch.tokens)
            branch.computed = max(hit, branch.computed)
            branch.status, branch.refusal = Status.RUNNING, None
            self.running.append(branch)

    def _short_of(self, branch: Branch, tokens: int) -> bool:
        """Whether a swapped branch must wait; notes why."""
        hit, active = self._hits(branch)
        required = blocks_for(tokens, self.config.block_size) - active // self.config.block_size
        watermark = int(self.config.watermark * self.config.num_blocks) if self.running else 0
        if required + watermark <= self.pool.available:
            return False
        detail = f"swapped {tokens} tokens, {hit} hit ({active} active), + watermark {watermark}"
        gate: Gate = "capacity" if required > self.pool.available else "watermark"
        branch.refusal = Refusal(gate, required + watermark, self.pool.available, detail)
        return True

    # --- admission ------------------------------------------------------------------------------

    def _admit(self, step: Schedule) -> None:
        used = step.num_tokens
        while self.waiting:
            branch = self.waiting.pick(self.governor, self._long_blocks())
            if branch is None:
                self.refusal = next(iter(self.waiting)).refusal
                return
            decision = self._decide(branch, used)
            if decision.refusal is not None:
                branch.refusal = self.refusal = decision.refusal
                if not decision.is_final:
                    return
                self.refusal, branch.request.rejection = None, decision.refusal
                self.finish(branch, FinishReason.REJECTED)
                step.rejected.append(branch)
                continue
            hit, _ = self._hits(branch)
            count = self._chunk(len(branch.tokens) - hit, self.config.max_num_batched_tokens - used)
            try:
                branch.sequence = self.pool.create(
                    prefix_of(branch, self.pool),
                    owner=branch.request.id,
                    tags=branch.request.tags,
                    num_tokens=hit + count,
                    reserve_tokens=self._promise(branch),
                    use_cache=self.config.prefix_cache,
                )
            except OutOfBlocks as error:
                branch.refusal = self.refusal = _out_of_blocks(error)
                return
            self.waiting.admitted(branch)
            branch.computed, branch.known = branch.sequence.hit_tokens, len(branch.tokens)
            branch.status, branch.refusal = Status.RUNNING, None
            if branch.request.hit_tokens is None:
                branch.request.hit_tokens = branch.computed
            self.running.append(branch)
            step.admitted.append(branch)
            step.items.append(Scheduled(branch, branch.computed, count))
            used += count

    def explain(self) -> list[Decision]:
        """What the law says of every waiting request now, in order of the queue; changes nothing.

        Behind the first that waits, one that could enter waits at the gate ``head_of_line``.
        """
        queue = [self._queued(branch) for branch in self.waiting]
        return admit(self.law, self._state(), queue)

    def _decide(self, branch: Branch, used: int) -> Decision:
        decision = self.law.rule(self._state(), self._queued(branch), Used(tokens=used))
        slots = self._slots()
        wanted = branch.request.num_slots if len(branch.request.branches) == 1 else 1
        if decision.refusal is None and slots + wanted > self.config.max_num_seqs:
            free = self.config.max_num_seqs - slots
            detail = f"running {slots} of max_num_seqs {self.config.max_num_seqs}, n = {wanted}"
            refusal = Refusal("max_num_seqs", wanted, free, detail, "sequences")
            return replace(decision, refusal=refusal)
        return decision

    def _long_blocks(self) -> int:
        """Worst-case blocks of the long requests that run."""
        if self.governor is None:
            return 0
        requests = {id(b.request): b.request for b in (*self.running, *self.swapped)}
        return sum(
            self.governor.worst_case_blocks(request)
            for request in requests.values()
            if self.governor.is_long(request)
        )

    def _slots(self) -> int:
        """Sequences that run or will: forks still to come count."""
        return sum(
            b.request.num_slots if len(b.request.branches) == 1 else 1
            for b in (*self.running, *self.swapped)
        )

    def _state(self) -> State:
        pool, config = self.pool, self.config
        running: tuple[RunningRequest, ...] = ()
        if self.law.name in ("estimate", "worst_case"):
            running = tuple(self._running(branch) for branch in self.running)
        return State(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            free=pool.num_free,
            cached=pool.num_cached,
            pinned=pool.num_free + pool.num_cached - pool.num_reserved - pool.available,
            reserved=pool.num_reserved,
            running=running,
            num_running=self._slots(),
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
            long_prefill_threshold=config.long_prefill_threshold,
            watermark=config.watermark,
            max_model_len=config.max_model_len,
        )

    def _running(self, branch: Branch) -> RunningRequest:
        request = branch.request
        return RunningRequest(
            len(request.prompt), branch.num_generated, request.max_tokens, branch.computed
        )

    def _queued(self, branch: Branch) -> QueuedRequest:
        hit, active = self._hits(branch)
        request = branch.request
        return QueuedRequest(
            len(request.prompt),
            request.max_tokens,
            generated=branch.num_generated,
            hit_tokens=hit,
            active_hit_tokens=active,
            name=request.id,
        )

    def _hits(self, branch: Branch) -> tuple[int, int]:
        if not self.config.prefix_cache:
            return 0, 0
        return self.pool.hits(prefix_of(branch, self.pool))

    def _promise(self, branch: Branch) -> int:
        """Tokens beyond those it has that the law reserves room for."""
        if not self.law.reserves_output:
            return 0
        return branch.request.max_tokens - branch.num_generated

    # --- blocks ---------------------------------------------------------------------------------

    def _free(self, branch: Branch) -> None:
        if branch.sequence is not None:
            self.pool.free(branch.sequence)
            branch.sequence = None

    def _free_host(self, branch: Branch) -> None:
        if branch.swapped is not None:
            assert self._host is not None
            self._host.give_clean(branch.swapped.host_blocks)
            self.host_free += len(branch.swapped.host_blocks)
            branch.swapped = None

    def _release(self, branch: Branch) -> None:
        self._free(branch)
        self._free_host(branch)


def _seniority(branch: Branch) -> tuple[int, int, int]:
    return (branch.request.priority, branch.request.arrival, branch.index)


def _out_of_blocks(error: OutOfBlocks) -> Refusal:
    available = error.free + error.cached - error.reserved
    if error.required <= available:
        return Refusal("contiguity", error.required, error.largest_run, str(error))
    return Refusal("capacity", error.required, available, str(error))
