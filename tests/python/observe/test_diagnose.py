"""Diagnosis beyond single cases: no false alarm, restarts, several ranks, advice that exists."""

from __future__ import annotations

import random
import re
from typing import Any, ClassVar

import pytest
from observe_make import steady

from kvcatch.laws import GATES
from kvcatch.observe.diagnose import DIAGNOSES, diagnose
from kvcatch.observe.diagnose.advice import ROWS, advise
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.sample import EngineSample
from kvcatch.observe.window import intervals


def healthy_hour(seed: int, arrivals_per_s: float = 3.0) -> list[EngineSample]:
    """An hour of a server that keeps up: bursts wait a second or two, a preemption now and then."""
    rng = random.Random(seed)
    samples = []
    totals = dict.fromkeys(
        ("prompt", "generated", "finished", "started", "steps", "hits", "queries", "preempted"), 0.0
    )
    for at in range(3601):
        load = 1 + 0.5 * rng.random() + (1.5 if rng.random() < 0.02 else 0)
        running = max(0, round(20 * load + rng.gauss(0, 3)))
        waiting = rng.choice([0] * 30 + [1, 1, 2, 5]) if load > 1.2 else 0
        new = arrivals_per_s * load * rng.random() * 2
        totals["started"] += round(new)
        totals["finished"] += round(new)
        totals["prompt"] += round(new) * 600
        totals["generated"] += running * 25
        totals["steps"] += 25
        totals["queries"] += round(new) * 600
        totals["hits"] += round(new) * rng.choice([0, 0, 320])
        totals["preempted"] += rng.random() < 0.05
        usage = min(0.97, running * 0.018)
        samples.append(
            EngineSample(
                float(at),
                "vllm",
                running_requests=float(running),
                waiting_requests=float(waiting),
                waiting_capacity_requests=float(waiting),
                waiting_deferred_requests=0.0,
                kv_usage_share=usage,
                num_blocks=5001.0,
                free_blocks=float(round(5000 * (1 - usage))),
                used_blocks=float(round(5000 * usage)),
                block_size_tokens=16.0,
                max_model_len_tokens=8192.0,
                prompt_tokens_total=totals["prompt"],
                generated_tokens_total=totals["generated"],
                finished_total=totals["finished"],
                started_total=totals["started"],
                steps_total=totals["steps"],
                prefix_query_tokens_total=totals["queries"],
                prefix_hit_tokens_total=totals["hits"],
                preemptions_total=totals["preempted"],
            )
        )
    return samples


@pytest.mark.parametrize("seed", range(4))
def test_an_hour_of_healthy_load_raises_no_alarm(seed: int) -> None:
    verdict = diagnose(healthy_hour(seed), EngineVersion.parse("vllm@0.32")).worst
    assert verdict.gate == "healthy"
    assert verdict.also == []


def test_quick_turnover_in_the_queue_is_healthy() -> None:
    # Two wait at any moment, each for a fiftieth of a second: the queue is never empty and nobody waits.
    samples = steady(
        seconds=300,
        kv_usage_share=0.5,
        running_requests=100.0,
        waiting_requests=2.0,
        rates={
            "started_total": 100.0,
            "finished_total": 100.0,
            "prompt_tokens_total": 50_000.0,
            "generated_tokens_total": 9_000.0,
        },
    )
    assert diagnose(samples).worst.gate == "healthy"


def test_an_incident_within_the_hour_is_found_at_its_time() -> None:
    samples = healthy_hour(9)
    for sample in samples[1800:1860]:
        sample.waiting_requests, sample.free_blocks, sample.kv_usage_share = 20.0, 10.0, 0.998
        sample.waiting_capacity_requests = 20.0
    for name in ("started_total", "finished_total", "prompt_tokens_total"):
        stopped = getattr(samples[1800], name)
        missing = getattr(samples[1859], name) - stopped
        for sample in samples[1801:1860]:
            setattr(sample, name, stopped)
        for sample in samples[1860:]:
            setattr(sample, name, getattr(sample, name) - missing)
    verdict = diagnose(samples, EngineVersion.parse("vllm@0.32")).worst
    assert verdict.gate == "capacity"
    assert (verdict.evidence[0].start_s, verdict.evidence[0].end_s) == (1800, 1860)


class TestEvidence:
    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few_samples(self, count: int) -> None:
        samples = steady(running_requests=1.0, waiting_requests=50.0)[:count]
        assert diagnose(samples).worst.gate == "not_enough_evidence"

    def test_a_queue_that_is_not_exported(self) -> None:
        assert diagnose(steady(running_requests=1.0)).worst.gate == "not_enough_evidence"

    def test_a_queue_that_nothing_explains(self) -> None:
        samples = steady(running_requests=3.0, waiting_requests=9.0, waiting_deferred_requests=0.0)
        verdict = diagnose(samples).worst
        assert verdict.gate == "not_enough_evidence"
        assert "540 of 540" in verdict.arithmetic

    def test_the_reason_capacity_is_not_kv_capacity(self) -> None:
        samples = steady(
            num_blocks=301.0,
            free_blocks=290.0,
            kv_usage_share=0.03,
            block_size_tokens=16.0,
            max_model_len_tokens=2048.0,
            running_requests=4.0,
            waiting_requests=12.0,
            waiting_capacity_requests=12.0,
            waiting_deferred_requests=0.0,
            rates={
                "generated_tokens_total": 120.0,
                "prompt_tokens_total": 100.0,
                "finished_total": 1.0,
                "started_total": 1.0,
            },
        )
        verdict = diagnose(samples).worst
        assert verdict.gate == "max_num_seqs"
        assert "capacity" not in verdict.also


class TestRestart:
    def test_nothing_is_subtracted_across_it(self) -> None:
        before = steady(
            seconds=20,
            running_requests=5.0,
            waiting_requests=0.0,
            rates={"prompt_tokens_total": 500.0},
        )
        after = steady(
            seconds=20,
            start=21,
            running_requests=5.0,
            waiting_requests=0.0,
            rates={"prompt_tokens_total": 500.0},
        )
        found = intervals(before + after)
        assert [item.is_restart for item in found].count(True) == 1
        assert {item.prompt_tokens_per_s for item in found} == {500.0, None}

    def test_by_process_start_when_counters_have_caught_up(self) -> None:
        samples = steady(seconds=2, running_requests=1.0, rates={"prompt_tokens_total": 5.0})
        samples[2].process_start_seconds = 2.0
        samples[0].process_start_seconds = samples[1].process_start_seconds = -500.0
        assert [item.is_restart for item in intervals(samples)] == [False, True]

    def test_a_long_gap_counts_little(self) -> None:
        samples = steady(seconds=10, waiting_requests=5.0, running_requests=1.0)
        samples += steady(seconds=10, start=4000, waiting_requests=5.0, running_requests=1.0)
        assert sum(item.seconds for item in intervals(samples)) == 25


def test_ranks_are_judged_apart_and_the_worst_speaks() -> None:
    calm = steady(replica="engine=0", running_requests=2.0, waiting_requests=0.0)
    full = steady(
        replica="engine=1",
        kv_usage_share=0.999,
        running_requests=2.0,
        waiting_requests=30.0,
        rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 40.0},
    )
    result = diagnose(calm + full)
    assert [(v.replica, v.gate) for v in result.verdicts] == [
        ("engine=1", "capacity"),
        ("engine=0", "healthy"),
    ]
    assert [item["gate"] for item in result.to_dict()["replicas"]] == ["capacity", "healthy"]


def test_kvcatch_is_taken_at_its_word() -> None:
    for gate in GATES:
        samples = steady("kvcatch", running_requests=1.0, waiting_requests=3.0, head_gate=gate)
        assert diagnose(samples).worst.gate == gate


def test_the_heads_numbers_are_shown_where_the_engine_has_them() -> None:
    head = {"head_gate": "worst_case", "head_required_blocks": 65.0, "head_available_blocks": 12.0}
    samples = steady("kvcatch", running_requests=3.0, waiting_requests=4.0, **head)
    assert diagnose(samples).worst.arithmetic == (
        "the engine says so: its head is refused at worst_case, which asks 65 blocks; 12 are available"
    )


class TestAdvice:
    FLAGS: ClassVar[dict[str, tuple[Any, Any]]] = {
        # flag -> versions of vLLM that have it: first, first without it
        "--watermark": ((0, 24), None),
        "--enable-chunked-prefill": (None, (0, 99)),
        "--swap-space": (None, (0, 17, 2)),
        "--max-num-partial-prefills": (None, (0, 27, 1)),
        "--max-num-tokens": ((9,), None),
        "--log-level": ((0, 31), None),
    }

    @pytest.mark.parametrize(
        "version", ["0.6.3", "0.8.5", "0.19", "0.23.1", "0.24", "0.27.1", "0.33"]
    )
    def test_no_flag_that_the_version_lacks(self, version: str) -> None:
        engine = EngineVersion.parse(f"vllm@{version}")
        text = " ".join(line for gate in DIAGNOSES for line in advise(gate, engine, Limits()))
        for flag, (first, gone) in self.FLAGS.items():
            if re.search(rf"{flag}\b", text):
                assert first is None or engine.since(*first), flag
                assert gone is None or engine.since(*gone) is False, flag

    def test_an_unknown_version_gets_only_what_all_have(self) -> None:
        text = " ".join(
            line for gate in DIAGNOSES for line in advise(gate, EngineVersion("vllm"), Limits())
        )
        assert "--watermark" not in text
        assert "--max-num-seqs" in text

    def test_every_row_is_of_a_known_gate_and_can_hold(self) -> None:
        for row in ROWS:
            assert row.gate in DIAGNOSES
            name = row.engine or "vllm"
            versions = (
                [f"{name}@{v}" for v in ("0.6", "0.10", "0.20", "0.33")]
                if row.first or row.before
                else [name]
            )
            assert any(row.holds(EngineVersion.parse(v)) for v in versions), row

    def test_known_limits_are_named(self) -> None:
        text = advise("max_num_seqs", EngineVersion.parse("vllm@0.32"), Limits(max_num_seqs=64))[0]
        assert text == "raise --max-num-seqs (now 64): KV has room for more"
