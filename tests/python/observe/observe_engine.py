"""A small engine that schedules as vLLM V1 does and knows why each request waits.

Steps take ``base_s + token_s * tokens``. Running requests are served first, then waiting ones in order of
arrival; the loop stops at the first that does not fit. Metrics are exported as vLLM exports them: gauges
and counters change at the end of a step, a prompt's tokens count when its last one is computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvcatch.observe.sample import EngineSample


@dataclass(slots=True)
class Request:
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    was_preempted: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


@dataclass(slots=True)
class SimulatedEngine:
    """Runs a load and keeps samples, and the waiting request-seconds of each true gate."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    token_budget: int = 8192
    max_model_len: int = 8192
    base_s: float = 0.01
    token_s: float = 2e-5
    samples: list[EngineSample] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    preempted: int = 0

    def run(self, load: list[tuple[float, int, int]], seconds: float) -> None:
        arrivals = [Request(*item) for item in sorted(load)]
        running: list[Request] = []
        waiting: list[Request] = []
        free = self.num_blocks - 1
        now, due, at = 0.0, 0.0, 0
        count: dict[str, float] = dict.fromkeys(
            ("prompt", "generated", "finished", "started", "steps", "step_tokens"), 0.0
        )
        gauges = (0, 0, free)
        while now < seconds:
            while at < len(arrivals) and arrivals[at].arrival_s <= now:
                waiting.append(arrivals[at])
                at += 1
            budget, scheduled, reason = self.token_budget, [], ""
            preempted_now = False
            for request in running:
                if request not in running or budget <= 0:
                    continue
                step = min(budget, max(1, request.tokens - request.computed))
                need = -(-(request.computed + step) // self.block_size) - request.blocks
                while need > free and running:
                    victim = running.pop()
                    free += victim.blocks
                    victim.blocks = victim.computed = 0
                    victim.was_preempted = preempted_now = True
                    waiting.insert(0, victim)
                    self.preempted += 1
                    scheduled = [item for item in scheduled if item[0] is not victim]
                    if victim is request:
                        break
                if request not in running:
                    continue
                free -= need
                request.blocks += need
                budget -= step
                scheduled.append((request, step))
            while waiting and not preempted_now:
                if len(running) >= self.max_num_seqs:
                    reason = "max_num_seqs"
                    break
                if budget <= 0:
                    reason = "token_budget"
                    break
                head = waiting[0]
                if -(-head.tokens // self.block_size) > free:
                    behind = waiting[1:]
                    fits = sum(-(-r.tokens // self.block_size) <= free for r in behind)
                    reason = "head_of_line" if behind and 2 * fits >= len(behind) else "capacity"
                    break
                waiting.pop(0)
                step = min(budget, head.tokens)
                head.blocks = -(-step // self.block_size)
                free -= head.blocks
                budget -= step
                running.append(head)
                scheduled.append((head, step))
            if preempted_now:
                reason = "capacity"
            tokens = sum(step for _, step in scheduled)
            if not tokens and not waiting:
                upcoming = arrivals[at].arrival_s if at < len(arrivals) else seconds
                length = max(1e-3, upcoming - now)
            else:
                length = self.base_s + self.token_s * tokens
            end = now + length
            # Those who arrive during a step wait for its end: that is the step's doing, not a gate's.
            if waiting:
                self.truth[reason] += len(waiting) * length
            while due < min(end, seconds):
                self._sample(due, gauges, count)
                due += 1.0
            for request, step in scheduled:
                was_prefill = request.computed < request.prompt
                request.computed += step
                if request.computed < request.tokens:
                    continue
                if was_prefill and request.generated == 0:
                    count["prompt"] += request.prompt
                    count["started"] += 1
                    count["step_tokens"] += request.prompt
                request.generated += 1
                count["generated"] += 1
                count["step_tokens"] += 1
                if request.generated >= request.output:
                    count["finished"] += 1
                    free += request.blocks
                    running.remove(request)
            if tokens:
                count["steps"] += 1
            arrived = sum(1 for r in arrivals[at:] if r.arrival_s <= end)
            gauges = (len(running), len(waiting) + arrived, free)
            now = end

    def _sample(self, at: float, gauges: tuple[int, int, int], count: dict[str, float]) -> None:
        running, waiting, free = gauges
        usable = self.num_blocks - 1
        longest = -(-self.max_model_len // self.block_size)
        self.samples.append(
            EngineSample(
                at,
                "vllm",
                running_requests=float(running),
                waiting_requests=float(waiting),
                waiting_capacity_requests=float(waiting),
                waiting_deferred_requests=0.0,
                kv_usage_share=1 - free / usable,
                num_blocks=float(self.num_blocks),
                free_blocks=float(free),
                used_blocks=float(usable - free),
                block_size_tokens=float(self.block_size),
                max_model_len_tokens=float(self.max_model_len),
                max_concurrency=self.num_blocks / longest,
                preemptions_total=float(self.preempted),
                prompt_tokens_total=count["prompt"],
                generated_tokens_total=count["generated"],
                finished_total=count["finished"],
                started_total=count["started"],
                steps_total=count["steps"],
                step_tokens_total=count["step_tokens"],
            )
        )

    @property
    def gate(self) -> str:
        """What truly kept requests out for most request-seconds; healthy when hardly any waited."""
        if not self.truth or max(self.truth.values()) < 5:
            return "healthy"
        return max(self.truth, key=lambda name: self.truth[name])
