"""A window of samples of one replica: what happened between two of them, per second.

A smaller counter, or another process start, is a restart: nothing is subtracted across it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from kvcatch.observe.sample import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcatch.observe.sample import EngineSample

__all__ = ["Interval", "by_replica", "delta", "intervals", "queue"]

LONGEST_STEP_S = 30.0
"""A step that takes longer is taken for a standstill."""

_MANY_STEPS = 5
_SLOW_STEPS_PER_S = 2.0

_MAX_GAP = 5.0
"""A gap counts for at most so many usual intervals: what was not seen is not claimed."""


def by_replica(samples: Iterable[EngineSample]) -> dict[tuple[str, str, str], list[EngineSample]]:
    """Samples of each (endpoint, engine, replica), in order of time; never averaged into one."""
    groups: dict[tuple[str, str, str], list[EngineSample]] = {}
    for sample in samples:
        groups.setdefault((sample.endpoint, sample.engine, sample.replica), []).append(sample)
    for group in groups.values():
        group.sort(key=lambda sample: sample.t_seconds)
    return groups


def delta(before: EngineSample, after: EngineSample, name: str) -> float | None:
    """How far a counter went up; None when it is unknown or went back."""
    old, new = getattr(before, name), getattr(after, name)
    return None if old is None or new is None or new < old else new - old


def queue(state: EngineSample) -> float | None:
    """Requests that wait, for whatever reason; the sum by reason where only that is exported."""
    if state.waiting_requests is not None:
        return state.waiting_requests
    parts = (state.waiting_capacity_requests, state.waiting_deferred_requests)
    if all(part is None for part in parts):
        return None
    return sum(part or 0.0 for part in parts)


def is_restart(before: EngineSample, after: EngineSample) -> bool:
    """Whether the engine was restarted between the two."""
    old, new = before.process_start_seconds, after.process_start_seconds
    if old is not None and new is not None:
        return abs(new - old) > 1
    for name in COUNTERS:
        first, second = getattr(before, name), getattr(after, name)
        if first is not None and second is not None and second < first:
            return True
    return False


@dataclass(slots=True)
class Interval:
    """From one sample to the next.

    A gauge holds from the end of an engine step to the end of the next, so the interval's state is that of
    the sample at its start; of a periodic log line, that of the line which closes it. Rates of an interval
    in which no step ended are those of the whole step around it.

    Attributes:
        start_s: Time of its start.
        seconds: How long it is, gaps cut short.
        state: The gauges that hold in it.
        prompt_tokens_per_s: Prompt tokens; None when unknown.
        generated_tokens_per_s: Generated tokens; None when unknown.
        finished: Requests that ended.
        started: Requests that got their first token.
        steps: Engine steps.
        generated_tokens: Tokens generated in it; None when unknown.
        preempted: By the counter.
        left: Requests that stopped running without having ended.
        entered: Requests that began to run.
        preempted_waiting: Requests preempted so far and not running again.
        hit_tokens: Prefix hits.
        query_tokens: Prefix look-ups.
        queue_after: Requests that wait at its end; None when unknown.
        is_frozen: No step ended in it and nothing was generated.
        is_slow: Hardly a step ended in it and no prompt: a long step is under way.
        is_restart: The engine was restarted in it.
    """

    start_s: float
    seconds: float
    state: EngineSample
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    finished: float | None
    started: float | None
    steps: float | None
    generated_tokens: float | None
    preempted: float
    left: float
    entered: float
    hit_tokens: float | None
    query_tokens: float | None
    preempted_waiting: float = 0.0
    queue_after: float | None = None
    is_frozen: bool = False
    is_slow: bool = False
    is_restart: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Running requests generate less than a token a step: some of them compute their prompt.

        vLLM counts a prompt's tokens when the last of them is computed, so a long prompt is not seen
        in the prompt throughput until then.
        """
        running = self.state.running_requests
        if not running or not self.steps or self.steps < _MANY_STEPS:
            return False
        if self.generated_tokens is None:
            return False
        return self.generated_tokens < 0.85 * self.steps * running

    @property
    def end_s(self) -> float:
        """Time of its end."""
        return self.start_s + self.seconds


def intervals(samples: Sequence[EngineSample]) -> list[Interval]:
    """The intervals of one replica's samples, in order; one less than samples (as many, of a log)."""
    found: list[Interval] = []
    gaps = [after.t_seconds - before.t_seconds for before, after in itertools.pairwise(samples)]
    usual = median(gaps) if gaps else 0.0
    outstanding = 0.0
    for index, after in enumerate(samples):
        before = samples[index - 1] if index else None
        if after.covers_seconds is not None:
            interval = _of_line(before, after)
        elif before is None:
            continue
        else:
            seconds = after.t_seconds - before.t_seconds
            if seconds <= 0:
                continue
            interval = _between(before, after, min(seconds, max(_MAX_GAP * usual, 5.0)))
        outstanding = 0.0 if interval.is_restart else outstanding
        # What was preempted before this interval waits in it; who enters resumes first.
        interval.preempted_waiting = outstanding
        if after.covers_seconds is not None:
            # A line tells of its end: who left in it waits there, unless nobody does.
            interval.preempted_waiting += interval.left
            outstanding = min(outstanding, queue(after) or 0.0)
            interval.preempted_waiting = min(interval.preempted_waiting, queue(after) or 0.0)
        outstanding = max(0.0, outstanding + interval.left - interval.entered)
        found.append(interval)
    _spread(found)
    return found


def _left_and_entered(
    before: EngineSample, after: EngineSample, finished: float | None
) -> tuple[float, float]:
    """Requests that stopped running and wait again, and those that began to run, net of each other.

    Who was preempted and runs not again waits: running that falls by more than waits afterwards was aborted.
    """
    old, new = before.running_requests, after.running_requests
    if old is None or new is None or finished is None:
        return 0.0, 0.0
    change = new - old + finished
    left, waiting = max(0.0, -change), queue(after)
    return left if waiting is None else min(left, waiting), max(0.0, change)


def _between(before: EngineSample, after: EngineSample, seconds: float) -> Interval:
    whole = after.t_seconds - before.t_seconds
    if is_restart(before, after):
        return Interval(
            before.t_seconds, seconds, before, None, None, None, None, None, None, 0, 0, 0,
            None, None, is_restart=True,
        )  # fmt: skip
    prompt, generated = (
        delta(before, after, name) for name in ("prompt_tokens_total", "generated_tokens_total")
    )
    finished = delta(before, after, "finished_total")
    left, entered = _left_and_entered(before, after, finished)
    steps = delta(before, after, "steps_total")
    frozen = steps == 0 if steps is not None else prompt == 0 and generated == 0
    if prompt is None and generated is None and steps is None:
        # Nothing tells of tokens: nothing runs at either end, that much is known.
        frozen = before.running_requests == 0 == after.running_requests
    slow = steps is not None and prompt == 0 and steps <= _SLOW_STEPS_PER_S * whole
    return Interval(
        before.t_seconds,
        seconds,
        before,
        None if prompt is None else prompt / whole,
        None if generated is None else generated / whole,
        finished,
        delta(before, after, "started_total"),
        steps,
        generated,
        delta(before, after, "preemptions_total") or 0.0,
        left,
        entered,
        delta(before, after, "prefix_hit_tokens_total"),
        delta(before, after, "prefix_query_tokens_total"),
        queue_after=queue(after),
        is_frozen=frozen,
        is_slow=slow,
    )


def _left_between_lines(before: EngineSample | None, line: EngineSample) -> float:
    """Requests that went back into the queue between two lines, which do not count completions.

    Running fell by as much as the queue grew, while no prompt was computed.
    """
    if before is None or line.prompt_tokens_per_second != 0:
        return 0.0
    old, new = before.running_requests, line.running_requests
    waited, waits = queue(before), queue(line)
    if old is None or new is None or waited is None or waits is None or new >= old:
        return 0.0
    return old - new if waits - waited == old - new else 0.0


def _of_line(before: EngineSample | None, line: EngineSample) -> Interval:
    covers = line.covers_seconds or 0.0
    prompt, generated = line.prompt_tokens_per_second, line.generated_tokens_per_second
    preempted = line.preemptions_total or 0.0
    if before is not None:
        preempted = max(0.0, preempted - (before.preemptions_total or 0.0))
    return Interval(
        line.t_seconds - covers, covers, line, prompt, generated, None, None, None, None,
        preempted, _left_between_lines(before, line), 0.0, None, None, queue_after=queue(line),
        is_frozen=not prompt and not generated,
    )  # fmt: skip


def _spread(found: list[Interval]) -> None:
    """Give the intervals of one long step the rates of that step; a longer standstill stays one."""
    group: list[Interval] = []
    for interval in found:
        if interval.is_restart or interval.state.covers_seconds is not None:
            group = []
            continue
        is_busy = bool(interval.state.running_requests or queue(interval.state))
        if interval.is_frozen or interval.is_slow:
            group = [*group, interval] if is_busy else []
            continue
        group.append(interval)
        seconds = sum(item.seconds for item in group)
        if len(group) > 1 and seconds <= LONGEST_STEP_S:
            for name in ("prompt_tokens_per_s", "generated_tokens_per_s"):
                rates = [(getattr(item, name), item.seconds) for item in group]
                if all(rate is not None for rate, _ in rates):
                    rate = sum(rate * length for rate, length in rates) / seconds
                    for item in group:
                        setattr(item, name, rate)
            for item in group:
                item.is_frozen = False
        group = []
