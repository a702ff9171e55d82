"""Recordings of a made-up vLLM under a made-up load, written as ``kvcatch record`` would."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.observe.record import Recorder

if TYPE_CHECKING:
    from pathlib import Path

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class Load:
    """What the made-up engine did; one request's TTFT is drawn around ``ttft`` (exponential)."""

    seconds: int = 240
    per_second: float = 4.0
    prompt_tokens: int = 500
    output_tokens: int = 100
    running: float = 8.0
    waiting: float = 1.0
    usage: float = 0.6
    ttft: float = 0.4
    itl: float = 0.03
    preempted: float = 0.02
    hit_share: float = 0.3
    seed: int = 0
    num_gpu_blocks: int = 1000
    restart_at: int = -1
    engines: tuple[str, ...] = ("0",)
    idle_after: int = 3


class _Engine:
    def __init__(self, load: Load, name: str) -> None:
        self.load, self.name = load, name
        self.rng = random.Random(f"{load.seed}-{name}")
        self.reset()

    def reset(self) -> None:
        self.counters = dict.fromkeys(
            ("requests", "prompt", "output", "preempted", "queries", "hits", "ttft", "itl"), 0.0
        )
        self.ttft = [0] * (len(BOUNDS) + 1)
        self.itl = [0] * (len(BOUNDS) + 1)

    def step(self) -> None:
        load, rng, counters = self.load, self.rng, self.counters
        count = int(rng.expovariate(1 / load.per_second) + rng.random())
        for _ in range(count):
            ttft = rng.expovariate(1 / load.ttft)
            itl = rng.expovariate(1 / load.itl)
            counters["requests"] += 1
            counters["prompt"] += load.prompt_tokens
            counters["output"] += load.output_tokens
            counters["queries"] += load.prompt_tokens
            counters["hits"] += load.prompt_tokens * (rng.random() < load.hit_share)
            counters["preempted"] += rng.random() < load.preempted
            counters["ttft"] += ttft
            counters["itl"] += itl
            self.ttft[sum(ttft > bound for bound in BOUNDS)] += 1
            self.itl[sum(itl > bound for bound in BOUNDS)] += 1

    def lines(self, *, busy: bool) -> list[str]:
        load, rng, counters = self.load, self.rng, self.counters
        labels = f'engine="{self.name}",model_name="m"'
        noise = rng.uniform(0.9, 1.1) * busy
        values = {
            "num_requests_running": round(load.running * noise),
            "num_requests_waiting": round(load.waiting * noise),
            "kv_cache_usage_perc": load.usage * noise,
            "num_preemptions_total": counters["preempted"],
            "prompt_tokens_total": counters["prompt"],
            "generation_tokens_total": counters["output"],
            "prefix_cache_queries_total": counters["queries"],
            "prefix_cache_hits_total": counters["hits"],
            "time_to_first_token_seconds_sum": counters["ttft"],
            "time_to_first_token_seconds_count": counters["requests"],
            "inter_token_latency_seconds_sum": counters["itl"],
            "inter_token_latency_seconds_count": counters["requests"],
        }
        lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()]
        lines.append(
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {counters["requests"]}'
        )
        for name, counts in (
            ("time_to_first_token_seconds", self.ttft),
            ("inter_token_latency_seconds", self.itl),
        ):
            total = 0
            for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
                total += count
                lines.append(f'vllm:{name}_bucket{{{labels},le="{bound}"}} {total}')
        config = f'engine="{self.name}",block_size="16",num_gpu_blocks="{load.num_gpu_blocks}"'
        lines.append(f"vllm:cache_config_info{{{config}}} 1.0")
        return lines


def write_load(path: Path, load: Load) -> Path:
    """Write the recording; one look a second, then ``idle_after`` idle ones."""
    engines = [_Engine(load, name) for name in load.engines]
    with Recorder(path, "http://engine/metrics", 0.0, None) as recorder:
        for second in range(load.seconds + load.idle_after):
            busy = second < load.seconds
            lines = []
            for engine in engines:
                if second == load.restart_at:
                    engine.reset()
                if busy and second:
                    engine.step()
                lines += engine.lines(busy=busy)
            recorder.add(float(second), "\n".join(lines) + "\n")
    return path
