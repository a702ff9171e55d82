"""Public cases read from their file: their own numbers go through the diagnosis, their values come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from observe_make import steady, v1_line, vllm_body

from kvcatch.observe import Reader
from kvcatch.observe.diagnose import Verdict, diagnose, fill_share
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args
from kvcatch.observe.log import read_vllm_log

if TYPE_CHECKING:
    from kvcatch.observe.sample import EngineSample

CASES = Path(__file__).resolve().parents[3].parent / "shared" / "cases" / "cases.jsonl"
KINDS = (
    "admission_", "deadlock_", "hol_blocking", "victim_policy", "preemption", "overcommit", "leak",
    "not_a_leak", "usage_semantics", "metric_", "prefix_", "watermark", "defrag_false_trigger",
    "torch_fragmentation", "knee",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, int], dict[str, Any]]:
    if not CASES.is_file():
        pytest.skip(f"no cases in {CASES}")
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    return {(row["repo"].split("/")[-1], row["number"]): row for row in rows}


def judge(samples: list[EngineSample], engine: str, args: str = "") -> Verdict:
    return diagnose(samples, EngineVersion.parse(engine), read_engine_args(args)).worst


def test_every_case_of_a_kind_that_is_diagnosed_has_a_test(cases: Any) -> None:
    here = Path(__file__).parent
    text = "\n".join(path.read_text() for path in here.glob("test_*.py"))
    wanted = [case for case in cases.values() if case["kind"].startswith(KINDS)]
    assert len(wanted) >= 49
    missing = [
        f"{case['repo']}#{case['number']}"
        for case in wanted
        if not any(
            form in text
            for number in [case["number"]]
            for form in (f"_{number}_", f"_{number}(", f"-{number}", f"#{number}", f", {number})")
        )
    ]
    assert missing == []


@pytest.mark.parametrize("number", [0, 1])
def test_article_worst_case(cases: Any, number: int) -> None:
    case = cases["article-000", number]
    told, values = case["inputs"], case["expected"]["values"]
    free = float(told["total_blocks"] - told["used_blocks"])
    samples = steady(
        "tgi",
        num_blocks=float(told["total_blocks"]),
        free_blocks=free,
        used_blocks=float(told["used_blocks"]),
        kv_usage_share=told["used_blocks"] / told["total_blocks"],
        block_size_tokens=float(told["block_size"]),
        running_requests=float(values["admit_worst"]),
        waiting_requests=6.0,
        asked_output_count=10.0,
        asked_output_tokens_sum=10.0 * told["max_output"],
        counters={"prompt_tokens_total": 100.0 * told["input_len"], "started_total": 100.0},
        rates={"prompt_tokens_total": 0.0, "started_total": 0.0, "generated_tokens_total": 50.0},
    )
    verdict = judge(samples, "tgi@3.3")
    assert verdict.gate == "worst_case"
    assert f"so one reserves {values['worst_blocks']} blocks" in verdict.arithmetic
    assert f"{free:,.0f} of 1,000 blocks free" in verdict.arithmetic
    assert free // values["worst_blocks"] == values["admit_worst"]


@pytest.mark.parametrize(
    ("longest", "value", "running"), [(8192, "max_concurrency", 12), (4096, "at_4096_x", 20)]
)
def test_article_000_2_the_concurrency_line_is_no_limit(
    cases: Any, longest: int, value: str, running: int
) -> None:
    case = cases["article-000", 2]
    told, values = case["inputs"], case["expected"]["values"]
    concurrency = values[value]
    samples = steady(
        num_blocks=float(told["total_blocks"]),
        free_blocks=1200.0,
        kv_usage_share=0.4,
        block_size_tokens=float(told["block_size"]),
        max_model_len_tokens=float(longest),
        max_concurrency=concurrency,
        running_requests=float(running),
        waiting_requests=0.0,
        rates={"generated_tokens_total": 300.0, "prompt_tokens_total": 100.0},
    )
    assert running > concurrency
    assert judge(samples, "vllm@0.32").gate == "healthy"
    for sample in samples:
        sample.waiting_requests = 5.0
    verdict = judge(samples, "vllm@0.32", f"--max-num-seqs {running}")
    assert verdict.gate == "max_num_seqs"
    assert not {"worst_case", "never_fits"} & set(verdict.also)


class TestTensorRt:
    def samples(self, total: int, running: int) -> list[EngineSample]:
        return steady(
            "trtllm",
            num_blocks=float(total),
            free_blocks=total - 20.0,
            used_blocks=20.0,
            kv_usage_share=20 / total,
            block_size_tokens=32.0,
            running_requests=float(running),
            waiting_requests=8.0,
            rates={"generated_tokens_total": 20.0, "prompt_tokens_total": 0.0},
        )

    def test_trtllm_2866_one_request_may_be_the_whole_pool(self, cases: Any) -> None:
        told = cases["TensorRT-LLM", 2866]["inputs"]
        length, batch = told["max_seq_len"], told["max_batch_size"]
        args = f"--max_seq_len {length} --max_batch_size {batch}"
        verdict = judge(self.samples(length // 32 + 100, 1), "trtllm@0.17", args)
        assert verdict.gate == "worst_case"
        assert "max_tokens left out counts as the longest length, 12,288 tokens = 384 blocks" in (
            verdict.arithmetic
        )
        assert "KV keeps nobody out" not in verdict.arithmetic

    def test_it_is_ruled_out_where_all_may_be_longest(self, cases: Any) -> None:
        told = cases["TensorRT-LLM", 2866]["inputs"]
        args = f"--max_seq_len {told['max_seq_len']} --max_batch_size {told['max_batch_size']}"
        # 384 blocks for the longest: two of them fit, so the second is not kept out by a promise.
        for total, gate in ((767, True), (768, False)):
            verdict = judge(self.samples(total, 1), "trtllm@0.17", args)
            assert ("worst_case" in {verdict.gate, *verdict.also}) is gate

    def test_trtllm_9412_the_batch_is_not_the_limit(self, cases: Any) -> None:
        batch = cases["TensorRT-LLM", 9412]["inputs"]["max_batch_size"]
        args = f"--max_batch_size {batch}"
        assert judge(self.samples(500, 1), "trtllm@1.2.0", args).gate == "worst_case"
        assert judge(self.samples(500, batch), "trtllm@1.2.0", args).gate == "max_num_seqs"


def test_vllm_ascend_17074_stands_still_with_an_empty_pool() -> None:
    samples = steady(
        kv_usage_share=0.0,
        running_requests=0.0,
        waiting_requests=1.0,
        rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0},
    )
    verdict = judge(samples, "vllm@0.27")
    assert verdict.gate == "stall"
    assert "1 wait, 0 run, no token for 60 s; 0.0% of the pool in use" in verdict.arithmetic
    assert any("needs more than the pool" in text for text in verdict.advice)


@pytest.mark.parametrize(
    ("number", "waiting", "deferred"), [(57841, 3, 1), (45388, 2, 2)], ids=["57841", "45388"]
)
def test_loads_that_wait_for_each_other(
    cases: Any, number: int, waiting: int, deferred: int
) -> None:
    """From 0.22.1 on the half-loaded ones are counted as deferred: the standstill is named all the same."""
    told = cases["vllm", number]["inputs"]
    total, free = told["pool"] + 1.0, float(told.get("free_blocks", told.get("free")))
    samples = steady(
        num_blocks=total,
        free_blocks=free,
        kv_usage_share=1 - free / (total - 1),
        block_size_tokens=float(told["block_size"]),
        running_requests=0.0,
        waiting_requests=float(waiting),
        waiting_deferred_requests=float(deferred),
        rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0, "steps_total": 0.0},
    )
    verdict = judge(samples, "vllm@0.32")
    named = {verdict.gate, *verdict.also}
    assert {"stall", "deferred"} <= named
    assert ("head_of_line" in named) is (deferred < waiting)


def test_tandemn_11_what_the_pool_holds(cases: Any) -> None:
    case = cases["tandemn-system", 11]
    told, values = case["inputs"], case["expected"]["values"]
    assert told["kv_tokens"] // 16 == values["blocks"]
    samples = steady(
        pool_tokens=float(told["kv_tokens"]),
        kv_usage_share=1.0,
        running_requests=float(told["running"]),
        waiting_requests=float(told["waiting"]),
        rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 3000.0},
    )
    verdict = judge(samples, "vllm@0.12")
    assert verdict.gate == "capacity"
    text = f"72 running hold 77,088 tokens, {values['tokens_per_running']:,.1f} each"
    assert any(text in item.text and "about 72 such" in item.text for item in verdict.evidence)


@pytest.mark.parametrize(
    ("preempted", "ended", "gate"), [(1538, 19801, "healthy"), (173622, 0, "never_fits")]
)
def test_inference_sim_963(cases: Any, preempted: int, ended: int, gate: str) -> None:
    told = cases["inference-sim", 963]["inputs"]
    assert (told["total_preemptions"], told["requests"]) == (1538, 19801)
    samples = steady(
        seconds=600,
        kv_usage_share=0.9,
        running_requests=1.0,
        waiting_requests=0.0,
        rates={
            "preemptions_total": preempted / 600,
            "finished_total": ended / 600,
            "generated_tokens_total": 100.0,
            "prompt_tokens_total": 10.0,
        },
    )
    assert judge(samples, "vllm@0.19.1").gate == gate


def test_vllm_54644_every_row(cases: Any) -> None:
    gates = {}
    for row in cases["vllm", 54644]["inputs"]["rows"]:
        tax = row["tax"]
        samples = steady(
            seconds=300,
            kv_usage_share=0.99 if tax else 0.6,
            running_requests=20.0,
            waiting_requests=12.0 if tax else 0.0,
            rates={
                "finished_total": 2.0,
                "started_total": 2.0,
                "preemptions_total": 2.0 * tax / (1 - tax),
                "prompt_tokens_total": 1000.0,
                "generated_tokens_total": 500.0,
            },
        )
        gates[row["kv_blocks"]] = judge(samples, "vllm@0.31").gate
    assert gates == {
        2800: "healthy", 1600: "capacity", 800: "preemption_storm", 400: "preemption_storm",
    }  # fmt: skip


def test_vllm_25780_a_queue_at_82_percent(cases: Any) -> None:
    told = cases["vllm", 25780]["inputs"]
    lines = [
        v1_line(
            told["running"],
            told["waiting"],
            told["kv"],
            4000.0,
            9000.0,
            second=second,
            hits=told["hit"],
        )
        for second in range(0, 60, 10)
    ]
    log = read_vllm_log(lines)
    assert {sample.hit_share for sample in log.samples} == {0.322}
    verdict = diagnose(log.samples, EngineVersion.parse("vllm@0.10.2"), Limits()).worst
    assert verdict.gate != "healthy"
    assert "prefix_cache_broken" not in verdict.also


def test_vllm_29330_both_sides_of_the_rename(cases: Any) -> None:
    values = cases["vllm", 29330]["expected"]["values"]
    ranges = []
    for name in ("time_per_output_token_seconds", "inter_token_latency_seconds"):
        reader = Reader("x")
        reader.read(vllm_body({f"{name}_sum": 1.0, f"{name}_count": 2.0}), 0.0)
        ranges.append(FAMILIES["vllm"].version_range(reader.names["vllm"]))
    last, first = (tuple(map(int, values[name].split("."))) for name in ("old_last", "new_first"))
    assert ranges == [(None, last), (first, None)]


def test_vllm_28792_28792_series(cases: Any) -> None:
    case = cases["vllm", 28792]
    series = case["inputs"]["series"]
    body = vllm_body({f'kv_cache_usage_perc|pid="{at}"': value for at, value in enumerate(series)})
    (sample,) = Reader("x").read(body, 0.0)
    assert sample.kv_usage_share == case["expected"]["values"]["value"]


def test_vllm_57336_fill(cases: Any) -> None:
    case = cases["vllm", 57336]
    told = case["inputs"]
    assert (
        fill_share(told["prompt_tokens"], told["block_size"])
        == (case["expected"]["values"]["fill_at_17"])
    )


@pytest.mark.parametrize("usage", [0.6, 0.8, 0.9, 0.92, 0.98])
def test_knee_312_no_level_alone_is_a_fault(usage: float) -> None:
    samples = steady(
        kv_usage_share=usage,
        running_requests=30.0,
        waiting_requests=0.0,
        rates={"generated_tokens_total": 900.0, "prompt_tokens_total": 100.0},
    )
    assert judge(samples, "vllm@0.32").gate == "healthy"
