"""Windows cut out of recordings, and what a window can and cannot tell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from observe_make import steady, v1_line

from kvcatch.observe.diagnose import Verdict, diagnose
from kvcatch.observe.diagnose.advice import advise
from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args
from kvcatch.observe.log import read_vllm_log
from kvcatch.observe.record import Recorder, bodies, read_recording

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("headofline", "kvfull", "prefill_bound", "prefix_good", "seqcap")
UNSURE = "not_enough_evidence"


def judge(samples: list[Any], args: str = "") -> Verdict:
    return diagnose(samples, EngineVersion.parse("vllm@0.32"), read_engine_args(args)).worst


def queue_at_end(samples: list[Any]) -> bool:
    """At the last two looks somebody waits and nobody got a first token between them."""
    if len(samples) < 2:
        return False
    before, last = samples[-2:]
    return bool(before.waiting_requests and last.waiting_requests) and (
        before.started_total == last.started_total
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_ends_in_a_queue_is_never_healthy(recordings: Path, name: str) -> None:
    samples = read_recording(recordings / f"{name}.jsonl.gz").samples
    seen = 0
    for end in range(1, len(samples) + 1):
        for start in (0, max(0, end - 3)):
            if queue_at_end(part := samples[start:end]):
                seen += 1
                assert judge(part).gate != "healthy", (start, end)
    assert bool(seen) is (name != "prefix_good")


@pytest.mark.parametrize("name", NAMES)
def test_degraded_windows_are_right_or_unsure(recordings: Path, name: str) -> None:
    right = json.loads((recordings / f"{name}.json").read_text())["right"]["gate"]
    samples = read_recording(recordings / f"{name}.jsonl.gz").samples
    missing = [sample for at, sample in enumerate(samples) if at not in (5, 9)]
    for part in (samples[::2], samples[1::2], samples[::3], missing):
        assert judge(part).gate in {right, UNSURE}
    assert judge(missing).gate == right


@pytest.mark.parametrize("is_process", [True, False])
@pytest.mark.parametrize("name", ["headofline", "kvfull", "prefill_bound"])
def test_a_restart_in_the_middle(recordings: Path, name: str, is_process: bool) -> None:
    right = json.loads((recordings / f"{name}.json").read_text())["right"]["gate"]
    samples = read_recording(recordings / f"{name}.jsonl.gz").samples
    at = len(samples) // 2
    if is_process:
        for sample in samples[at:]:
            sample.process_start_seconds = (sample.process_start_seconds or 0.0) + 100.0
    for field in (
        "prompt_tokens_total",
        "generated_tokens_total",
        "finished_total",
        "started_total",
        "steps_total",
    ):
        base = getattr(samples[at], field)
        for sample in samples[at:]:
            setattr(sample, field, getattr(sample, field) - base)
    verdict = judge(samples)
    assert [span.gate for span in verdict.timeline].count("restart") == int(is_process)
    assert verdict.gate == right


@pytest.mark.parametrize("name", NAMES)
def test_the_command(recordings: Path, tmp_path: Path, run_kvcatch: Any, name: str) -> None:
    right = json.loads((recordings / f"{name}.json").read_text())["right"]["gate"]
    raw, compact = recordings / f"{name}.jsonl.gz", tmp_path / "compact.jsonl.gz"
    with Recorder(compact, "http://engine/metrics", 0.0) as recorder:
        for at, body in bodies(raw):
            assert body is not None
            recorder.add(at, body)
    answers = []
    for path in (raw, compact):
        done = run_kvcatch("diagnose", path, "--engine", "vllm@0.32", "--timeline", "--json")
        assert done.returncode == (0 if right == "healthy" else 1), done.stderr
        answers.append(json.loads(done.stdout))
    assert {answer["gate"] for answer in answers} == {right}
    assert answers[0]["timeline"] == answers[1]["timeline"]
    assert answers[0]["runbook"] == f"docs/runbook.md#{right}"


class TestOpenQueue:
    def late(self, seconds: int, served: float = 0.0) -> list[Any]:
        calm = steady(
            seconds=60, running_requests=4.0, waiting_requests=0.0, kv_usage_share=0.3,
            rates={"started_total": 0.0, "generated_tokens_total": 80.0},
        )  # fmt: skip
        queued = steady(
            seconds=seconds, start=61, running_requests=4.0, waiting_requests=6.0, kv_usage_share=0.3,
            counters={"generated_tokens_total": 4880.0},
            rates={"started_total": served, "generated_tokens_total": 80.0},
        )  # fmt: skip
        return calm + queued

    @pytest.mark.parametrize(
        ("seconds", "gate"), [(0, "healthy"), (1, UNSURE), (4, UNSURE), (5, "max_num_seqs")]
    )
    def test_how_long_it_stands(self, seconds: int, gate: str) -> None:
        verdict = judge(self.late(seconds), "--max-num-seqs 4")
        assert verdict.gate == gate
        if gate == UNSURE:
            said = f"6 wait at the end of the window, the first of them for {seconds}.0 s"
            assert verdict.arithmetic.startswith(said)
            assert any("so far it looks like max_num_seqs" in e.text for e in verdict.evidence)

    def test_one_that_moves_is_healthy(self) -> None:
        assert judge(self.late(3, served=20.0), "--max-num-seqs 4").gate == "healthy"

    def test_a_few_looks_and_a_queue_in_the_last(self) -> None:
        samples = self.late(0)
        assert judge(samples[-3:]).gate == UNSURE
        assert judge(samples[-20:]).gate == "healthy"

    def test_the_last_line_of_a_log(self) -> None:
        lines = [v1_line(2, 0, 5.0, 10.0, 50.0, second=s) for s in range(0, 50, 10)]
        still = read_vllm_log([*lines, v1_line(2, 9, 5.0, 0.0, 50.0, second=50)]).samples
        moves = read_vllm_log([*lines, v1_line(2, 9, 5.0, 900.0, 50.0, second=50)]).samples
        assert judge(still).gate == UNSURE
        assert judge(moves).gate == "healthy"


class TestOrder:
    def test_a_hang_is_no_full_batch(self) -> None:
        samples = steady(
            seconds=120, kv_usage_share=0.3, running_requests=8.0, waiting_requests=9.0,
            rates={"generated_tokens_total": 0.0, "prompt_tokens_total": 0.0, "steps_total": 0.0},
        )  # fmt: skip
        verdict = judge(samples, "--max-num-seqs 8")
        assert verdict.gate == "stall"
        assert verdict.arithmetic == "9 wait, 8 run, no token for 120 s"

    def test_an_inferred_cap_counts_deferred_requests(self) -> None:
        samples = steady(
            num_blocks=1001.0, free_blocks=900.0, kv_usage_share=0.1, block_size_tokens=16.0,
            max_model_len_tokens=4096.0, running_requests=3.0, waiting_requests=14.0,
            waiting_deferred_requests=5.0,
            rates={"generated_tokens_total": 60.0, "prompt_tokens_total": 30.0,
                   "finished_total": 1.0, "started_total": 1.0, "steps_total": 20.0},
        )  # fmt: skip
        for sample in samples[::2]:
            sample.running_requests, sample.waiting_deferred_requests = 4.0, 4.0
            sample.waiting_requests = 13.0
        verdict = judge(samples)
        assert verdict.gate == "max_num_seqs"
        assert "running + deferred stay at 8" in verdict.arithmetic

    def test_few_tokens_a_step_are_no_token_budget(self) -> None:
        samples = steady(
            kv_usage_share=0.3, running_requests=3.0, waiting_requests=9.0,
            waiting_deferred_requests=0.0, step=3.0,
            rates={"generated_tokens_total": 56.0, "prompt_tokens_total": 90.0, "steps_total": 19.0},
        )  # fmt: skip
        assert judge(samples[:3]).gate == UNSURE
        for sample in samples:
            sample.steps_total = (sample.steps_total or 0.0) / 19.0
        assert judge(samples[:3]).gate == "token_budget"

    def test_only_reasons_are_exported(self) -> None:
        samples = steady(
            kv_usage_share=0.3, running_requests=4.0, waiting_capacity_requests=7.0,
            rates={"generated_tokens_total": 80.0},
        )  # fmt: skip
        assert judge(samples, "--max-num-seqs 4").gate == "max_num_seqs"


def test_the_real_log_is_a_pool_that_thrashes(recordings: Path) -> None:
    """Running falls 19, 12, 7, 5 while the queue grows 1, 8, 13, 15: nobody ended, all were preempted."""
    log = read_vllm_log((recordings / "server_log_excerpt.txt").read_text().splitlines())
    verdict = diagnose(log.samples, log.version, log.limits).worst
    assert verdict.gate == "capacity"
    assert verdict.also == []


class TestAdvice:
    ENGINES = (
        "vllm@0.6.3",
        "vllm@0.10",
        "vllm@0.33",
        "sglang@0.5",
        "trtllm@1.2",
        "tgi@3.3",
        "kvcatch",
    )

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize(
        "gate",
        ["capacity", "max_num_seqs", "token_budget", "head_of_line", "deferred", "never_fits", "stall",
         "preemption_storm", "leak", "prefix_cache_broken", UNSURE],
    )  # fmt: skip
    def test_every_fault_has_advice(self, engine: str, gate: str) -> None:
        assert advise(gate, EngineVersion.parse(engine), Limits())

    @pytest.mark.parametrize(("version", "said"), [("0.6.3", False), ("0.10.2", True), ("0.19.1", False)])  # fmt: skip
    def test_v0_looks_at_the_whole_prompt(self, version: str, said: bool) -> None:
        text = " ".join(
            advise("preemption_storm", EngineVersion.parse(f"vllm@{version}"), Limits())
        )
        assert ("first chunk alone" in text) is said

    def test_a_version_that_contradicts_the_metrics_is_noted(self, recordings: Path) -> None:
        recording = read_recording(recordings / "prefix_good.jsonl.gz")
        old, new = (
            diagnose(recording.samples, EngineVersion.parse(f"vllm@{v}"), names=recording.names)
            for v in ("0.10.2", "0.32")
        )
        assert any("vLLM 0.10.2 was given" in note for note in old.notes)
        assert new.notes == []


@pytest.mark.parametrize(
    ("free", "gate"), [(19, "capacity"), (69, "watermark"), (70, "head_of_line")]
)
def test_the_watermark_holds_exactly_its_blocks_back(free: int, gate: str) -> None:
    """A prompt of 320 tokens needs 20 blocks of 16; int(0.05 * 1001) = 50 are held back."""
    samples = steady(
        num_blocks=1001.0,
        free_blocks=float(free),
        kv_usage_share=0.9,
        block_size_tokens=16.0,
        max_model_len_tokens=8192.0,
        running_requests=8.0,
        waiting_requests=5.0,
        counters={"prompt_tokens_total": 32_000.0, "started_total": 100.0},
        rates={
            "prompt_tokens_total": 0.0,
            "started_total": 0.0,
            "generated_tokens_total": 160.0,
        },
    )
    assert judge(samples, "--watermark 0.05").gate == gate
