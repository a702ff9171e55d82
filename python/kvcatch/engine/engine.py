"""The engine loop: schedule, execute, sample, commit."""

from __future__ import annotations

import itertools
import operator
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcatch import BlockPool
from kvcatch.engine.governor import Governor, QueueFull
from kvcatch.engine.output import Delta, OutputText, ending
from kvcatch.engine.request import FinishReason, Request, Status
from kvcatch.engine.sampling import SamplingParams, sample
from kvcatch.engine.scheduler import Scheduler
from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.observe.exporter.histogram import RequestHistograms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcatch.engine.config import EngineConfig
    from kvcatch.engine.governor import GovernorConfig
    from kvcatch.engine.output import TextSource
    from kvcatch.engine.request import Branch
    from kvcatch.engine.schedule import Schedule, Scheduled
    from kvcatch.laws import Refusal

__all__ = ["Engine", "EngineCounters", "Rejected", "Runner"]


class Rejected(InvalidArgument):
    """A request that can never run; ``refusal`` has the arithmetic."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Runner(Protocol):
    """Carries out a schedule on the model and the KV cache."""

    vocab_size: int

    def move(self, schedule: Schedule) -> None:
        """Swaps out, copies on write, swaps in: ordered before what :meth:`forward` reads and writes."""

    def forward(self, items: Sequence[Scheduled], pool: BlockPool) -> Any:
        """Write the items' keys and values; logits [n, vocab] of those that sample, in order."""

    def compact(self, pool: BlockPool, objective: str) -> int:
        """Apply a compaction plan if it pays; returns how many blocks moved."""


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made; counts never fall.

    Attributes:
        steps: steps that computed something.
        prompt_tokens: prompt tokens computed (recomputed ones count again).
        generated_tokens: tokens sampled.
        step_tokens: tokens computed, over all steps.
        looked_up_tokens: prompt tokens looked up in the prefix cache at first admissions.
        hit_tokens: of those, found.
        host_hit_tokens: tokens copied back from the host pool instead of computed again.
        finished: branches ended, by reason.
        rejected: requests refused at the door, by gate; ``queue_full`` where the governor took no more.
        refused_steps: steps in which the head of the queue was refused, by gate.
        compactions: plans applied.
        blocks_moved: by them.
        seconds: spent, by part of a step.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_tokens: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    refused_steps: dict[str, int] = field(default_factory=dict)
    compactions: int = 0
    blocks_moved: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "execute", "sample", "compact"), 0.0)
    )


class Engine:
    """Continuous batching over one pool.

    ``add`` queues a request, ``step`` runs all that run one token (or one chunk of prompt) further
    and returns what each branch gained. One thread calls it; see ``AsyncEngine`` for many.

    Args:
        config: limits and policies.
        runner: the model and its KV cache.
        text: the tokenizer; without one there is no text and no stop text.
        clock: seconds; for tests.
        governor: limits under load; ``None`` for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        text: TextSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        governor: GovernorConfig | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.text = text
        self.clock = clock
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            placement=config.placement,
            eviction=config.eviction,
            seed=config.seed,
        )
        governed = None
        if governor is not None:
            governed = Governor(governor, config.num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.pool, governed)
        self.counters = EngineCounters()
        self.times = RequestHistograms()
        self.requests: dict[str, Request] = {}
        self._texts: dict[Branch, OutputText] = {}
        self._arrivals = itertools.count()

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tags: dict[str, str] | None = None,
        salt: str | None = None,
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: token ids.
            params: what is asked of the output.
            request_id: its name, unique among those under way; made up when not given.
            priority: lower runs first under the ``priority`` order.
            tags: carried by its sequences (tenant, route).
            salt: only requests of the same salt share its blocks.

        Raises:
            InvalidArgument: an empty prompt, a token outside the vocabulary, an id under way; ``min_tokens``
                with every token of the vocabulary as one that ends the output.
            InvalidType: a prompt, name, priority, tag or salt of the wrong type.
            Rejected: it can never run.
            QueueFull: the governor takes no more work now.
        """
        params = params or SamplingParams()
        arrival = next(self._arrivals)
        name = request_id if request_id is not None else f"req-{arrival}"
        _check_labels(name, priority, tags, salt)
        if name in self.requests:
            raise InvalidArgument(f"request_id {name!r}: a request of that name is under way")
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise InvalidType(f"prompt must be token ids: {error}") from None
        if not tokens:
            raise InvalidArgument("prompt has no token")
        bad = next((t for t in tokens if not 0 <= t < self.runner.vocab_size), None)
        if bad is not None:
            raise InvalidArgument(
                f"prompt has token {bad}: must be within 0..{self.runner.vocab_size - 1}"
            )
        if params.stop and self.text is None:
            raise InvalidArgument(f"stop = {params.stop!r}: needs a tokenizer")
        self._check_stop_tokens(params)
        left = max(1, self.config.max_model_len - len(tokens))
        request = Request(
            name,
            tokens,
            params,
            max_tokens=left if params.max_tokens is None else params.max_tokens,
            priority=priority,
            arrival=arrival,
            tags=dict(tags or {}),
            salt=salt,
            arrived=self.clock(),
        )
        if (refusal := self.scheduler.refusal_at_the_door(request)) is not None:
            self._count_rejected(refusal.gate)
            raise Rejected(refusal)
        try:
            self.scheduler.check_queue(request)
        except QueueFull:
            self._count_rejected("queue_full")
            raise
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def _check_stop_tokens(self, params: SamplingParams) -> None:
        """What may not be chosen before ``min_tokens`` has to exist, and to leave something."""
        size = self.runner.vocab_size
        bad = next((token for token in params.stop_token_ids if token >= size), None)
        if bad is not None:
            raise InvalidArgument(f"stop_token_ids has {bad}: must be within 0..{size - 1}")
        if not params.min_tokens:
            return
        eos_ids = () if self.text is None or params.ignore_eos else self.text.eos_ids
        if len({*eos_ids, *params.stop_token_ids}) >= size:
            raise InvalidArgument(
                f"min_tokens = {params.min_tokens}: all {size} tokens of the vocabulary end the output"
            )

    def _count_rejected(self, gate: str) -> None:
        counts = self.counters.rejected
        counts[gate] = counts.get(gate, 0) + 1

    def abort(self, request_id: str) -> list[Delta]:
        """End a request, wherever it is; its blocks are free when this returns."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        ended = self.scheduler.abort(request)
        return [self._ended(branch, FinishReason.ABORT) for branch in ended]

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.requests

    # --- a step ---------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Run all that run one step further; what each branch gained, in no promised order."""
        clock, seconds = time.perf_counter, self.counters.seconds
        start = clock()
        schedule = self.scheduler.schedule()
        self._note(schedule)
        deltas = [self._ended(branch, FinishReason.REJECTED) for branch in schedule.rejected]
        seconds["schedule"] += clock() - start

        start = clock()
        self.runner.move(schedule)
        for copy in schedule.swap_in:
            self.counters.host_hit_tokens += copy.committed
            self.pool.commit(copy.branch.sequence, counts=copy.committed)  # type: ignore[arg-type]
        logits = self.runner.forward(schedule.items, self.pool) if schedule.items else None
        seconds["execute"] += clock() - start

        start = clock()
        if schedule.items:
            self._commit(schedule)
            deltas += self._sample(schedule, logits)
        seconds["sample"] += clock() - start

        if self.config.compaction != "off":
            start = clock()
            moved = self.runner.compact(self.pool, self.config.compaction)
            self.counters.compactions += moved > 0
            self.counters.blocks_moved += moved
            seconds["compact"] += clock() - start
        return deltas

    def _note(self, schedule: Schedule) -> None:
        counters, now = self.counters, self.clock()
        for branch in schedule.admitted:
            if branch.request.scheduled is None:
                branch.request.scheduled = now
                self.times.queue.add(now - branch.request.arrived)
                counters.looked_up_tokens += branch.num_prompt * self.config.prefix_cache
                counters.hit_tokens += branch.computed
        if (refusal := self.scheduler.refusal) is not None:
            counters.refused_steps[refusal.gate] = counters.refused_steps.get(refusal.gate, 0) + 1
        if schedule.items:
            counters.steps += 1
            counters.step_tokens += schedule.num_tokens
            counters.prompt_tokens += sum(
                item.count for item in schedule.items if item.start < item.branch.known
            )

    def _commit(self, schedule: Schedule) -> None:
        """What this step wrote may be found by others; the pool learns the generated tokens."""
        known = [item for item in schedule.items if item.start < item.branch.known]
        new = [item for item in schedule.items if item.start >= item.branch.known]
        if known:
            self.pool.commit(_sequences(known), counts=[item.count for item in known])
        if new:
            tokens = [item.branch.tokens[item.start] for item in new]
            self.pool.commit(_sequences(new), tokens=tokens, counts=1)
        self.scheduler.computed(schedule)

    def _sample(self, schedule: Schedule, logits: Any) -> list[Delta]:
        rows = [item.branch for item in schedule.items if item.samples]
        if not rows:
            return []
        # A prompt that is complete has all its branches choose their first token from one row.
        row_of: list[int] = []
        branches: list[Branch] = []
        for row, branch in enumerate(rows):
            forks = self.scheduler.fork(branch) if branch.num_generated == 0 else [branch]
            branches += forks
            row_of += [row] * len(forks)
        if len(branches) > len(rows):
            logits = logits[np.asarray(row_of)]
        params = [branch.request.params for branch in branches]
        generators = [self._generator(branch) for branch in branches]
        forbidden = [self._forbidden(branch) for branch in branches]
        tokens, logprobs = sample(logits, params, generators, forbidden)
        now, times = self.clock(), self.times
        deltas = []
        for branch, token, found in zip(branches, tokens, logprobs, strict=True):
            branch.tokens.append(token)
            if found is not None:
                branch.logprobs.append(found)
            if branch.request.first_token is None:
                branch.request.first_token = now
                times.ttft.add(now - branch.request.arrived)
            if branch.last_token is not None:
                times.itl.add(now - branch.last_token)
            branch.last_token = now
            self.counters.generated_tokens += 1
            deltas.append(self._gained(branch, token))
        return deltas

    def _gained(self, branch: Branch, token: int) -> Delta:
        eos_ids = self.text.eos_ids if self.text is not None else ()
        output = self._texts.get(branch)
        if output is None:
            source = self.text.detokeniser() if self.text is not None else None
            output = self._texts[branch] = OutputText(source, branch.request.params.stop)
        is_end = ending(branch, token, eos_ids, stopped=False) is FinishReason.STOP
        text, stopped = ("", False) if is_end else output.add(token)
        finish = ending(branch, token, eos_ids, stopped=stopped)
        logprobs = (branch.logprobs[-1],) if branch.request.params.logprobs is not None else ()
        if finish is not None:
            if not stopped:
                text += output.end()
            self.scheduler.finish(branch, finish)
        delta = Delta(branch.request.id, branch.index, (token,), text, logprobs, finish)
        if finish is not None:
            self._forget(branch, finish)
        return delta

    def _ended(self, branch: Branch, reason: FinishReason) -> Delta:
        output = self._texts.get(branch)
        text = output.end() if output is not None else ""
        self._forget(branch, reason)
        return Delta(branch.request.id, branch.index, (), text, (), reason)

    def _forget(self, branch: Branch, reason: FinishReason) -> None:
        counts = self.counters.finished
        counts[reason.value] = counts.get(reason.value, 0) + 1
        self._texts.pop(branch, None)
        request = branch.request
        if request.is_finished:
            request.finished = self.clock()
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._note_finished(request)
            self.requests.pop(request.id, None)

    def _note_finished(self, request: Request) -> None:
        """How long a request took and was; of one that was cut off that says nothing."""
        if request.finished is None or request.first_token is None:
            return
        times, longest = self.times, max(branch.num_generated for branch in request.branches)
        times.e2e.add(request.finished - request.arrived)
        if longest > 1:
            times.tpot.add((request.finished - request.first_token) / (longest - 1))
        times.prompt_tokens.add(len(request.prompt))
        times.output_tokens.add(sum(branch.num_generated for branch in request.branches))
        times.asked_tokens.add(request.max_tokens * request.params.n)

    def _generator(self, branch: Branch) -> Any:
        params = branch.request.params
        if params.temperature == 0:
            return None
        if branch.generator is None:
            import torch

            generator = torch.Generator()
            if params.seed is None:
                generator.seed()
            else:
                # Each continuation its own stream, the first that of the seed itself.
                generator.manual_seed((params.seed + branch.index * 0x9E3779B97F4A7C15) % (1 << 64))
            branch.generator = generator
        return branch.generator

    def _forbidden(self, branch: Branch) -> tuple[int, ...]:
        params = branch.request.params
        if branch.num_generated >= params.min_tokens:
            return ()
        eos_ids = () if self.text is None or params.ignore_eos else tuple(self.text.eos_ids)
        return (*eos_ids, *params.stop_token_ids)

    # --- seeing ---------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """The conservation law at idle: no branch, no owner, no block that is not free or cached.

        Raises:
            CorruptPool: something is left.
        """
        self.pool.validate()
        from kvcatch.errors import CorruptPool

        scheduler = self.scheduler
        left = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
        active, host = self.pool.num_active, self.config.host_blocks - scheduler.host_free
        if left or active or host or self.pool.num_reserved or self.pool.num_sequences:
            raise CorruptPool(
                f"not idle: {len(left)} branches, {active} active blocks, {self.pool.num_reserved} "
                f"reserved, {host} host blocks, owners {[h['owner'] for h in self.pool.holdings()]}"
            )

    def __repr__(self) -> str:
        pool, scheduler = self.pool, self.scheduler
        return (
            f"<Engine {len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{len(scheduler.swapped)} swapped; blocks {pool.num_active} active, {pool.num_cached} "
            f"cached, {pool.num_free} free of {pool.num_blocks}>"
        )


def _check_labels(name: Any, priority: Any, tags: Any, salt: Any) -> None:
    """What the pool would refuse at admission is refused at the door: a step has other requests to run."""
    for what, text in (("request_id", name), ("salt", salt)):
        if not _is_text(text) and not (what == "salt" and text is None):
            raise InvalidType(f"{what} = {text!r}: must be text that UTF-8 can encode")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidType(f"priority = {priority!r}: must be a whole number")
    for key, value in dict(tags or {}).items():
        if not _is_text(key) or not _is_text(value):
            raise InvalidType(
                f"tags has {key!r}: {value!r}: both must be text that UTF-8 can encode"
            )
        if key == "owner":
            raise InvalidArgument('tags has the key "owner": the owner is the request_id')


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _sequences(items: Sequence[Scheduled]) -> Any:
    return [item.branch.sequence for item in items]


def status_counts(engine: Engine) -> dict[str, int]:
    """Branches by status."""
    counts = {status.value: 0 for status in Status}
    for request in engine.requests.values():
        for branch in request.branches:
            counts[branch.status.value] += 1
    return counts
