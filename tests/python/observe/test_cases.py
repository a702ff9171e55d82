"""Public cases: what users saw, and the gate that held. The number and the source stand at each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from observe_make import steady, v0_line, v1_line

from kvcatch.observe.diagnose import (
    conservation,
    diagnose,
    fill_share,
    leak_slope,
)
from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args
from kvcatch.observe.log import read_vllm_log
from kvcatch.observe.sample import EngineSample

if TYPE_CHECKING:
    from kvcatch.observe.diagnose.verdict import Verdict


def judge(
    samples: list[EngineSample], engine: str, args: str = "", limits: Limits | None = None
) -> Verdict:
    known = read_engine_args(args).joined(limits or Limits())
    return diagnose(samples, EngineVersion.parse(engine), known).worst


def judge_log(lines: list[str], engine: str | None = None, args: str = "") -> Verdict:
    log = read_vllm_log(lines)
    version = log.version if engine is None else EngineVersion.parse(engine)
    return diagnose(log.samples, version, read_engine_args(args).joined(log.limits)).worst


class TestWorstCase:
    """Engines that reserve the whole output."""

    def test_article_26_percent_and_nothing_enters(self) -> None:
        # 1000 blocks, 260 used, 512 in and 4096 out: 288 blocks each.
        samples = steady(
            "trtllm",
            num_blocks=1000.0,
            used_blocks=260.0,
            free_blocks=740.0,
            kv_usage_share=0.26,
            block_size_tokens=16.0,
            running_requests=4.0,
            waiting_requests=6.0,
        )
        verdict = judge(samples, "trtllm@1.2", "--max_batch_size 64")
        assert verdict.gate == "worst_case"
        assert "740 of 1,000 blocks free" in verdict.arithmetic
        assert any("max_tokens" in text for text in verdict.advice)

    @pytest.mark.parametrize("policy", ["", "--capacity_scheduler_policy GUARANTEED_NO_EVICT"])
    def test_trtllm_2866_9412_1012(self, policy: str) -> None:
        # One request with a huge (or omitted) max_tokens runs, the others queue up behind it.
        samples = steady(
            "trtllm",
            num_blocks=2000.0,
            used_blocks=100.0,
            free_blocks=1900.0,
            kv_usage_share=0.05,
            running_requests=1.0,
            waiting_requests=8.0,
        )
        assert judge(samples, "trtllm@1.2", f"{policy} --max_batch_size 16").gate == "worst_case"

    def test_it_is_no_gate_of_max_utilization(self) -> None:
        samples = steady(
            "trtllm",
            num_blocks=2000.0,
            used_blocks=100.0,
            free_blocks=1900.0,
            kv_usage_share=0.05,
            running_requests=16.0,
            waiting_requests=8.0,
        )
        args = "--capacity_scheduler_policy MAX_UTILIZATION --max_batch_size 16"
        assert judge(samples, "trtllm@1.2", args).gate == "max_num_seqs"

    def test_tgi(self) -> None:
        samples = steady(
            "tgi",
            running_requests=3.0,
            waiting_requests=20.0,
            rates={"started_total": 0.1, "prompt_tokens_total": 51.2, "generated_tokens_total": 90},
            asked_output_tokens_sum=81920.0,
            asked_output_count=10.0,
        )
        verdict = judge(samples, "tgi@3.3")
        assert verdict.gate == "worst_case"
        assert "8,192 output tokens" in verdict.arithmetic

    def test_unsloth_10070_the_front_end_reserves_the_window(self) -> None:
        samples = steady(
            "llamacpp",
            pool_tokens=262144.0,
            used_tokens=900.0,
            running_requests=1.0,
            waiting_requests=3.0,
        )
        assert judge(samples, "llamacpp", "--parallel 4").gate == "worst_case"

    @pytest.mark.parametrize("engine", ["vllm@0.6.3", "vllm@0.10.2", "vllm@0.33"])
    def test_vllm_27017_never_reserves_the_output(self, engine: str) -> None:
        samples = steady(
            num_blocks=1001.0,
            free_blocks=740.0,
            kv_usage_share=0.26,
            running_requests=64.0,
            waiting_requests=9.0,
            block_size_tokens=16.0,
            max_model_len_tokens=8192.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 900.0},
        )
        verdict = judge(samples, engine, "--max-num-seqs 64")
        assert verdict.gate == "max_num_seqs"
        assert "worst_case" not in verdict.also


class TestLowUsage:
    def test_llmd_autoscaling_662_prefill_bound(self) -> None:
        samples = steady(
            kv_usage_share=0.32,
            running_requests=20.0,
            waiting_requests=10.0,
            ramps={"waiting_requests": 2.0},
            rates={
                "prompt_tokens_total": 36000.0,
                "generated_tokens_total": 12.0,
                "started_total": 6.0,
                "finished_total": 6.0,
            },
        )
        assert judge(samples, "vllm@0.14", "--max-num-batched-tokens 65000").gate == "token_budget"
        assert judge(samples, "vllm@0.14").gate == "token_budget"

    def test_vllm_37307_prompt_throughput_is_pinned(self) -> None:
        lines = [
            v1_line(10, 90, 19.3, 23998.2, 18.1, second=0),
            v1_line(22, 78, 42.5, 23999.8, 40.0, second=10),
            v1_line(34, 66, 65.4, 24000.7, 60.0, second=20),
        ]
        for part in (lines, lines[:1]):
            verdict = judge_log(part)
            assert verdict.gate == "token_budget"
            assert "capacity" not in verdict.also

    def test_vllm_11517_lora_slots(self) -> None:
        lines = [
            "INFO 12-26 03:00:00 distributed_gpu_executor.py:57] # GPU blocks: 50231, # CPU blocks: 8192",
            "INFO 12-26 03:00:01 distributed_gpu_executor.py:61] Maximum concurrency for 32768 tokens per "
            "request: 24.53x",
            *(v0_line(1, 3, 3.1, 0.0, 30.0, second) for second in range(10, 70, 10)),
        ]
        verdict = judge_log(lines, args="--enable-lora")
        assert verdict.gate == "deferred"
        assert "max_loras 1" in verdict.arithmetic
        assert any("--max-loras" in text for text in verdict.advice)

    def test_vllm_13508_max_num_seqs(self) -> None:
        lines = [v0_line(64, 40, 21.0, 300.0, 900.0, second) for second in range(0, 60, 10)]
        verdict = judge_log(lines, "vllm@0.6.3", "--max-num-seqs 64 --max-num-batched-tokens 4096")
        assert verdict.gate == "max_num_seqs"
        assert verdict.arithmetic == "64 running >= max_num_seqs 64"

    def test_deferred_requests_count_against_max_num_seqs(self) -> None:
        samples = steady(
            kv_usage_share=0.1,
            running_requests=3.0,
            waiting_requests=9.0,
            waiting_capacity_requests=4.0,
            waiting_deferred_requests=5.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 60.0},
        )
        verdict = judge(samples, "vllm@0.32", "--max-num-seqs 8")
        assert verdict.gate == "deferred"
        assert verdict.also == ["max_num_seqs"]
        assert verdict.waiting_request_seconds == {"deferred": 300.0, "max_num_seqs": 240.0}


class TestDeadlock:
    def test_vllm_39734_never_fits(self) -> None:
        lines = [
            "INFO 04-20 10:00:00 [kv_cache_utils.py:1316] GPU KV cache size: 37,392 tokens",
            "INFO 04-20 10:00:00 [kv_cache_utils.py:1321] Maximum concurrency for 262,144 tokens per "
            "request: 1.53x",
            *(v1_line(0, 1, 0.0, second=second) for second in range(10, 70, 10)),
        ]
        verdict = judge_log(lines)
        assert verdict.gate == "never_fits"
        assert "0.143 requests of the 262,144 tokens" in verdict.arithmetic

    @pytest.mark.parametrize(("tokens", "concurrency"), [(262144.0, 1.0), (265072.0, 1.01)])
    def test_vllm_52520_no_headroom(self, tokens: float, concurrency: float) -> None:
        samples = steady(
            pool_tokens=tokens,
            max_concurrency=concurrency,
            max_model_len_tokens=262144.0,
            kv_usage_share=0.0,
            running_requests=0.0,
            waiting_requests=1.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0},
        )
        assert judge(samples, "vllm@0.26").gate == "never_fits"

    def test_vllm_52530_preempts_itself_for_ever(self) -> None:
        # 69 blocks of 16, prompt 1000, output wall at token 9: it runs, is preempted, runs again.
        samples = steady(
            num_blocks=69.0,
            block_size_tokens=16.0,
            kv_usage_share=0.95,
            free_blocks=3.0,
            max_model_len_tokens=1024.0,
            waiting_requests=1.0,
            running_requests=0.0,
            rates={
                "prompt_tokens_total": 0.0,
                "generated_tokens_total": 0.0,
                "preemptions_total": 2.0,
                "finished_total": 0.0,
                "steps_total": 20.0,
            },
        )
        assert judge(samples, "vllm@0.26").gate == "never_fits"

    def test_freetoken_111_more_than_all_pages(self) -> None:
        samples = steady(
            num_blocks=8209.0,
            block_size_tokens=1.0,
            pool_tokens=8209.0,
            free_blocks=8209.0,
            kv_usage_share=0.0,
            running_requests=0.0,
            waiting_requests=4.0,
            max_model_len_tokens=32768.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0},
        )
        verdict = judge(samples, "sglang@0.5")
        assert verdict.gate == "never_fits"
        assert "8,209 tokens" in verdict.arithmetic

    def test_vllm_ascend_17074_hangs_with_an_empty_pool(self) -> None:
        # The groups' demand is not in the metrics: what shows is a standstill with nothing in use.
        samples = steady(
            kv_usage_share=0.0,
            running_requests=0.0,
            waiting_requests=1.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0},
        )
        assert {"stall", "never_fits"} & {judge(samples, "vllm@0.27").gate}

    def test_vllm_45414_stall(self) -> None:
        lines = [
            v1_line(0, 6 - second % 20 // 10, 0.0, second=second) for second in range(0, 550, 10)
        ]
        verdict = judge_log(lines)
        assert verdict.gate == "stall"
        assert "550 s" in verdict.arithmetic

    @pytest.mark.parametrize(
        ("blocks", "free", "waiting"),
        [(271, 20, 3), (2049, 799, 2)],
        ids=["vllm-57841", "vllm-45388"],
    )
    def test_head_of_line(self, blocks: int, free: int, waiting: int) -> None:
        samples = steady(
            num_blocks=float(blocks),
            free_blocks=float(free),
            kv_usage_share=1 - free / (blocks - 1),
            block_size_tokens=16.0,
            running_requests=0.0,
            waiting_requests=float(waiting),
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0, "steps_total": 0.0},
        )
        verdict = judge(samples, "vllm@0.32")
        assert verdict.gate == "head_of_line"
        assert "stall" in verdict.also
        assert f"{free} of" in verdict.arithmetic

    def test_vllm_57104_nothing_free_and_all_need_more(self) -> None:
        samples = steady(
            num_blocks=8.0,
            free_blocks=0.0,
            kv_usage_share=1.0,
            running_requests=0.0,
            waiting_requests=2.0,
            rates={"prompt_tokens_total": 0.0, "generated_tokens_total": 0.0},
        )
        verdict = judge(samples, "vllm@0.32")
        assert verdict.gate == "capacity"
        assert verdict.also == ["stall"]

    def test_vllm_31731_a_large_head_keeps_small_ones_out(self) -> None:
        samples = steady(
            num_blocks=1001.0,
            free_blocks=300.0,
            kv_usage_share=0.7,
            block_size_tokens=16.0,
            max_model_len_tokens=32768.0,
            running_requests=12.0,
            waiting_requests=30.0,
            waiting_deferred_requests=0.0,
            counters={"prompt_tokens_total": 100_000.0, "started_total": 1000.0},
            rates={
                "prompt_tokens_total": 0.0,
                "started_total": 0.0,
                "generated_tokens_total": 240.0,
                "finished_total": 0.0,
                "steps_total": 20.0,
            },
        )
        verdict = judge(samples, "vllm@0.33")
        assert verdict.gate == "head_of_line"
        assert "300 of 1,001 blocks free >= 7" in verdict.arithmetic


class TestPreemption:
    @pytest.mark.parametrize(
        ("watermark", "preempted", "is_storm"),
        [(0.0, 1065, True), (0.02, 400, True), (0.05, 187, False), (0.1, 168, False)],
    )
    def test_vllm_44594(self, watermark: float, preempted: int, is_storm: bool) -> None:
        seconds = 200
        samples = steady(
            seconds=seconds,
            num_blocks=18724.0,
            free_blocks=100.0,
            kv_usage_share=0.99,
            block_size_tokens=16.0,
            running_requests=100.0,
            waiting_requests=28.0,
            rates={
                "preemptions_total": preempted / seconds,
                "finished_total": 450 / seconds,
                "started_total": 450 / seconds,
                "prompt_tokens_total": 450_000 / seconds,
                "generated_tokens_total": 11_582.0,
            },
        )
        verdict = judge(samples, "vllm@0.24", f"--watermark {watermark}")
        assert (verdict.gate == "preemption_storm") == is_storm
        if is_storm:
            assert any("--watermark 0.02 to 0.05" in text for text in verdict.advice)
            older = judge(samples, "vllm@0.23")
            assert not any("--watermark" in text for text in older.advice)

    def test_tandemn_11_capacity(self) -> None:
        seconds = 600
        samples = steady(
            seconds=seconds,
            num_blocks=4819.0,
            free_blocks=40.0,
            kv_usage_share=0.99,
            block_size_tokens=16.0,
            running_requests=72.0,
            waiting_requests=184.0,
            rates={
                "preemptions_total": 480 / seconds,
                "finished_total": 5000 / seconds,
                "started_total": 5000 / seconds,
                "prompt_tokens_total": 5000 * 700 / seconds,
                "generated_tokens_total": 3000.0,
            },
        )
        verdict = judge(samples, "vllm@0.12")
        assert verdict.gate == "capacity"
        assert "preemption_storm" not in verdict.also

    def test_inference_sim_963_is_healthy(self) -> None:
        seconds = 3600
        samples = steady(
            seconds=seconds,
            kv_usage_share=0.85,
            running_requests=40.0,
            waiting_requests=0.0,
            rates={
                "preemptions_total": 1538 / seconds,
                "finished_total": 19801 / seconds,
                "started_total": 19801 / seconds,
                "prompt_tokens_total": 5000.0,
                "generated_tokens_total": 3000.0,
            },
        )
        assert judge(samples, "vllm@0.19.1").gate == "healthy"

    @pytest.mark.parametrize(
        ("tax", "gate"),
        [(0.0, "healthy"), (0.579, "preemption_storm"), (0.788, "preemption_storm")],
    )
    def test_vllm_54644_recompute_tax(self, tax: float, gate: str) -> None:
        # A tax of t means that t of all computed tokens were computed again: t / (1 - t) passes more.
        samples = steady(
            seconds=300,
            kv_usage_share=0.6 if not tax else 0.99,
            running_requests=20.0,
            waiting_requests=0.0 if not tax else 12.0,
            rates={
                "finished_total": 2.0,
                "started_total": 2.0,
                "preemptions_total": 2.0 * tax / (1 - tax),
                "prompt_tokens_total": 1000.0,
                "generated_tokens_total": 500.0,
            },
        )
        assert judge(samples, "vllm@0.31").gate == gate

    @pytest.mark.parametrize(
        ("after", "storm"),
        [(0.92, True), (0.71, True), (0.69, False), (0.1, False)],
    )
    def test_sglang_26248_decode_collapses_after_retraction(
        self, after: float, storm: bool
    ) -> None:
        # Slow over a pool with room left is slow for another reason.
        fast = steady(
            "sglang",
            30,
            kv_usage_share=0.92,
            running_requests=12.0,
            waiting_requests=0.0,
            rates={"generated_tokens_total": 420.0, "prompt_tokens_total": 0.0},
            preemptions_total=0.0,
        )
        slow = steady(
            "sglang",
            60,
            start=31,
            kv_usage_share=after,
            running_requests=6.0,
            waiting_requests=0.0,
            counters={"generated_tokens_total": 12_700.0},
            rates={"generated_tokens_total": 30.0, "prompt_tokens_total": 0.0},
            preemptions_total=6.0,
        )
        verdict = judge(fast + slow, "sglang@0.5")
        assert (verdict.gate == "preemption_storm") is storm
        assert any("--schedule-conservativeness" in text for text in verdict.advice) is storm

    def test_preemptions_that_no_counter_shows_are_seen(self) -> None:
        # running falls one by one, nothing ends: all that wait were preempted.
        samples = [
            EngineSample(
                float(at),
                "vllm",
                num_blocks=121.0,
                free_blocks=12.0,
                kv_usage_share=0.9,
                block_size_tokens=32.0,
                max_model_len_tokens=2048.0,
                running_requests=10.0 - at // 5,
                waiting_requests=float(at // 5),
                finished_total=0.0,
                started_total=10.0,
                prompt_tokens_total=2820.0,
                generated_tokens_total=200.0 * at,
                steps_total=20.0 * at,
                preemptions_total=0.0,
            )
            for at in range(20)
        ]
        verdict = judge(samples, "vllm@0.32")
        assert verdict.gate == "capacity"
        assert "were preempted" in verdict.arithmetic


def test_unsloth_9392_slots_are_not_capacity() -> None:
    samples = steady(
        "llamacpp",
        pool_tokens=2048.0,
        used_tokens=565.0 + 1485.0,
        running_requests=2.0,
        waiting_requests=1.0,
    )
    verdict = judge(samples, "llamacpp", "--parallel 4 --ctx-size 2048")
    assert verdict.gate == "capacity"
    assert "2 over" in verdict.arithmetic


class TestLeaks:
    @pytest.mark.parametrize(
        ("total", "available", "evictable", "leak"),
        [
            (270331, 644, 269628, 59),
            (3185200, 2864304, 325120, -4224),
            (396701, 6016, 390685, 0),
            (454, 315, 138, 1),
            (42308, 35244, 0, 7064),
        ],
        ids=[
            "sglang-11970",
            "sglang-6888",
            "sglang-16067-full",
            "sglang-16067-mamba",
            "sglang-105",
        ],
    )
    def test_conservation(self, total: int, available: int, evictable: int, leak: int) -> None:
        assert conservation(total, available, evictable) == leak
        samples = steady(
            "sglang",
            pool_tokens=float(total),
            available_tokens=float(available),
            evictable_tokens=float(evictable),
            block_size_tokens=16.0,
            running_requests=0.0,
            waiting_requests=0.0,
        )
        verdict = judge(samples, "sglang@0.5")
        assert verdict.gate == ("leak" if leak else "healthy")
        if leak:
            assert f"= {leak:,} tokens" in verdict.arithmetic
        if leak < 0:
            assert "264 pages of 16" in verdict.arithmetic
            assert "double free" in verdict.arithmetic

    def test_sglang_6778_cached_is_not_leaked(self) -> None:
        samples = steady(
            "sglang",
            pool_tokens=100_000.0,
            available_tokens=3_000.0,
            evictable_tokens=97_000.0,
            running_requests=0.0,
            waiting_requests=0.0,
        )
        assert judge(samples, "sglang@0.5").gate == "healthy"

    def test_imp_1115_one_block_per_request(self) -> None:
        assert leak_slope([120, 144, 168], [212, 236, 260]) == 1.0
        samples = []
        for number, (requests, used) in enumerate([(0, 0), (120, 212), (144, 236), (168, 260)]):
            samples += steady(
                seconds=20,
                start=30.0 * number,
                num_blocks=11528.0,
                used_blocks=float(used),
                kv_usage_share=used / 11527,
                finished_total=float(requests),
                running_requests=0.0,
                waiting_requests=0.0,
            )
        verdict = judge(samples, "vllm@0.20")
        assert verdict.gate == "leak"
        assert "1.00 blocks per request" in verdict.arithmetic
        assert "11,436 requests" in verdict.arithmetic

    def test_vllm_27073_is_a_backlog(self) -> None:
        lines = [
            v1_line(34, 18, 99.2, 10.0, 500.0, second=0),
            v1_line(33, 40, 97.5, 10.0, 500.0, second=10),
            v1_line(33, 47, 97.5, 10.0, 500.0, second=20),
        ]
        verdict = judge_log(lines, "vllm@0.10.2")
        assert verdict.gate == "capacity"
        assert "leak" not in verdict.also
        assert any("a backlog, not a leak" in item.text for item in verdict.evidence)

    @pytest.mark.parametrize(("held_s", "gate"), [(300, "healthy"), (900, "leak")])
    def test_vllm_29906_and_46283_leases(self, held_s: int, gate: str) -> None:
        # Blocks of aborted transfers stay until their lease ends; those of 46283 for ever.
        samples = steady(
            seconds=900,
            step=5,
            num_blocks=1001.0,
            transfer_descriptors_sum=4000.0,
            running_requests=0.0,
            waiting_requests=0.0,
        )
        for sample in samples:
            held = 200.0 if sample.t_seconds <= held_s else 0.0
            sample.used_blocks, sample.free_blocks = held, 1000 - held
            sample.kv_usage_share = held / 1000
        assert judge(samples, "vllm@0.12").gate == gate

    def test_lmcache_3187_pins(self) -> None:
        samples = steady(
            "lmcache",
            seconds=600,
            step=10,
            pinned_objects=100.0,
            ramps={"pinned_objects": 1.0},
            rates={"failed_allocations_total": 4.0},
        )
        verdict = judge(samples, "lmcache")
        assert verdict.gate == "leak"
        assert "pins are not given back" in verdict.arithmetic


class TestUsageMeaning:
    def test_vllm_5176_12077_usage_excludes_cached_blocks(self) -> None:
        samples = steady(kv_usage_share=0.0, running_requests=0.0, waiting_requests=0.0)
        verdict = judge(samples, "vllm@0.6.6")
        assert verdict.gate == "healthy"
        assert "cached blocks nobody references count as free" in verdict.usage_of

    def test_vllm_57336_blocks_are_not_tokens(self) -> None:
        assert fill_share(17, 16) == 0.53125

    def test_knee_llmd_312_high_usage_alone_is_no_fault(self) -> None:
        samples = steady(
            kv_usage_share=0.9,
            running_requests=30.0,
            waiting_requests=0.0,
            rates={"generated_tokens_total": 900.0, "prompt_tokens_total": 100.0},
        )
        assert judge(samples, "vllm@0.32").gate == "healthy"

    def test_llamacpp_11707_scatter_is_never_a_gate_of_a_paged_engine(self) -> None:
        samples = steady(
            kv_usage_share=0.99,
            running_requests=4.0,
            waiting_requests=4.0,
            rates={"generated_tokens_total": 100.0, "prompt_tokens_total": 0.0},
        )
        verdict = judge(samples, "vllm@0.32")
        assert "contiguity" not in {verdict.gate, *verdict.also}

    def test_watermark(self) -> None:
        samples = steady(
            num_blocks=1001.0,
            free_blocks=60.0,
            kv_usage_share=0.94,
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
        # A prompt of 320 tokens needs 20 blocks; 60 - 50 of the watermark are fewer.
        verdict = judge(samples, "vllm@0.24", "--watermark 0.05")
        assert verdict.gate == "watermark"
        assert verdict.arithmetic.startswith("60 of 1,001 blocks free < 20")
        assert judge(samples, "vllm@0.24").gate == "head_of_line"


class TestPrefix:
    def frozen(self, **gauges: Any) -> list[EngineSample]:
        rates = {"started_total": 0.2, "finished_total": 0.2, "prompt_tokens_total": 400.0}
        live = steady(
            seconds=1800,
            step=5,
            rates={
                **rates,
                "generated_tokens_total": 40.0,
                "prefix_query_tokens_total": 400.0,
                "prefix_hit_tokens_total": 240.0,
            },
            **gauges,
        )
        dead = steady(
            seconds=1800,
            step=5,
            start=1805,
            rates={**rates, "generated_tokens_total": 40.0, "prefix_query_tokens_total": 400.0},
            counters={
                name: value * 1805
                for name, value in {
                    **rates,
                    "generated_tokens_total": 40.0,
                    "prefix_query_tokens_total": 400.0,
                }.items()
            },
            prefix_hit_tokens_total=240.0 * 1800,
            **gauges,
        )
        return live + dead

    def test_glm_recipe_106_hits_freeze(self) -> None:
        samples = self.frozen(kv_usage_share=0.2, running_requests=1.0, waiting_requests=0.0)
        verdict = judge(samples, "vllm@0.31")
        assert verdict.gate == "prefix_cache_broken"
        assert verdict.arithmetic.startswith("60% of looked-up tokens hit before, none of")

    def test_ten_minutes_are_needed(self) -> None:
        samples = self.frozen(kv_usage_share=0.2, running_requests=1.0, waiting_requests=0.0)
        short = [sample for sample in samples if sample.t_seconds < 2300]
        assert judge(short, "vllm@0.31").gate == "healthy"

    @pytest.mark.parametrize(
        ("block_size", "hits", "noted"), [(1536, 0, 1), (1536, 9, 0), (16, 0, 0)]
    )
    def test_vllm_ascend_16639_prefixes_that_never_hit(
        self, block_size: int, hits: int, noted: int
    ) -> None:
        samples = steady(
            seconds=60,
            rates={
                "prompt_tokens_total": 400.0,
                "generated_tokens_total": 40.0,
                "prefix_query_tokens_total": 400.0,
                "prefix_hit_tokens_total": float(hits),
                "finished_total": 0.2,
            },
            block_size_tokens=float(block_size),
            running_requests=1.0,
            waiting_requests=0.0,
            kv_usage_share=0.1,
        )
        verdict = judge(samples, "vllm@0.31")
        assert verdict.gate == "healthy"
        texts = [item.text for item in verdict.evidence if "3,072 with EAGLE or MTP" in item.text]
        assert len(texts) == noted
        assert all(text.startswith("none of 24,000 looked-up tokens hit") for text in texts)

    @pytest.mark.parametrize(("engine", "noted"), [("vllm@0.10.2", True), ("vllm@0.27.1", False)])
    def test_vllm_25780_43736_the_rate_is_too_high(self, engine: str, noted: bool) -> None:
        lines = [
            v1_line(259, 535, 82.3, 4000.0, 9000.0, second=second, hits=32.2)
            for second in range(0, 60, 10)
        ]
        verdict = judge_log(lines, engine)
        assert any("hit rate is too high" in item.text for item in verdict.evidence) == noted
