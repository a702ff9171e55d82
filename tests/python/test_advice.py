from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcatch.advice import (
    SETTINGS,
    Advice,
    Counsel,
    Deployment,
    NotAdvised,
    Traffic,
    advise,
    from_metrics,
    read_traffic,
)
from kvcatch.cli import app
from kvcatch.errors import InvalidArgument, KvcatchError, TraceError
from kvcatch.ledger.engines import Engine
from kvcatch.workload import Request, Workload, generate, replay

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch


def workload(lengths: list[tuple[int, int]]) -> Workload:
    start, made = 0, []
    for index, (prompt, output) in enumerate(lengths):
        made.append(
            Request(
                index, 0.0, np.array([start]), np.array([prompt]), prompt, output,
                start + prompt, f"r{index}",
            )
        )  # fmt: skip
        start += prompt + output
    return Workload("made", "made", tuple(made))


def on(engine: str, num_blocks: int, **fields: Any) -> Deployment:
    return Deployment.on(Engine.parse(engine), num_blocks, **fields)


def found(counsel: Counsel, setting: str) -> Advice | NotAdvised:
    answers: list[Advice | NotAdvised] = [*counsel.advice, *counsel.not_advised]
    (answer,) = (item for item in answers if item.setting == setting)
    return answer


MIXED = [(400, 200)] * 5 + [(2000, 900)] + [(300, 250)] * 5
"""A tenth of the requests is long."""


@pytest.fixture(scope="module")
def busy() -> Counsel:
    """vLLM 0.32 with a pool that is too small for its sequences."""
    return advise(on("vllm@0.32", 500, max_num_seqs=128), Traffic.of(workload(MIXED * 15)))


class TestLengths:
    def test_percentiles_of_a_trace(self) -> None:
        traffic = Traffic.of(workload([(prompt, 10) for prompt in range(1, 1001)]))
        data = traffic.to_dict()
        assert data["prompt"] == {
            "p50_tokens": 500,
            "p90_tokens": 900,
            "p99_tokens": 990,
            "p99.9_tokens": 999,
        }
        assert data["total"]["p99_tokens"] == 1000
        assert data["output"]["p50_tokens"] == 10

    def test_a_csv_of_lengths(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.csv"
        path.write_text("prompt_tokens,output_tokens,note\n100,20,a\n300,5,b\n")
        traffic = read_traffic(path)
        assert [(r.num_tokens, r.output_tokens) for r in traffic.workload.requests] == [
            (100, 20),
            (300, 5),
        ]
        assert any("no prompt shares a prefix" in note for note in traffic.workload.notes)

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("prompt_tokens,output_tokens\n100,x\n", "lengths.csv:2: output_tokens = 'x'"),
            ("prompt_tokens,output_tokens\n-1,5\n", "lengths.csv:2: prompt_tokens = "),
            ("prompt_tokens,output_tokens\n1,0\n", "lengths.csv:2: output_tokens = "),
            ("prompt_tokens,outputs\n1,5\n", "lengths.csv:1: header"),
            ("prompt_tokens,output_tokens\n", "no complete request"),
            ("", "no lines"),
            ("<html>\n<body>\n", "lengths.csv:1"),
        ],
    )
    def test_a_malformed_csv_is_refused(self, tmp_path: Path, text: str, word: str) -> None:
        path = tmp_path / "lengths.csv"
        path.write_text(text)
        with pytest.raises(TraceError, match=word):
            read_traffic(path)


def histogram(name: str, counts: dict[str, float], labels: str = 'model_name="m"') -> str:
    return "".join(
        f'{name}_bucket{{{labels},le="{bound}"}} {count}\n' for bound, count in counts.items()
    )


PROMPTS = {"100.0": 10, "200.0": 50, "1000.0": 99, "2000.0": 100, "+Inf": 100}
OUTPUTS = {"100.0": 10, "1000.0": 90, "2000.0": 99, "+Inf": 100}


class TestHistograms:
    @pytest.mark.parametrize(
        ("prompts", "outputs"),
        [
            ("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
            ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram"),
            ("tgi_request_input_length", "tgi_request_generated_tokens"),
        ],
    )
    def test_percentiles_are_known_to_a_bucket(self, prompts: str, outputs: str) -> None:
        text = "# HELP x y\n" + histogram(prompts, PROMPTS) + histogram(outputs, OUTPUTS)
        traffic = from_metrics(text, "m", 500)
        assert traffic.prompt.percentile(50) == (101, 200)
        assert traffic.prompt.percentile(90) == (201, 1000)
        assert traffic.prompt.percentile(99) == (201, 1000)
        assert traffic.prompt.percentile(99.9) == (1001, 2000)
        assert traffic.output.percentile(99) == (1001, 2000)
        assert traffic.output.percentile(99.9) == (2000, None)
        assert traffic.is_exact is False
        assert any("by how much is not known" in note for note in traffic.workload.notes)

    def test_what_is_drawn_has_the_histogram_again(self) -> None:
        names = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
        text = histogram(names[0], PROMPTS) + histogram(names[1], OUTPUTS)
        requests = from_metrics(text, "m", 1000, seed=3).workload.requests
        prompts = np.array([item.num_tokens for item in requests])
        for bound, count in PROMPTS.items():
            assert np.mean(prompts <= float(bound)) == pytest.approx(count / 100, abs=0.002)
        again = from_metrics(text, "m", 1000, seed=3).workload.requests
        assert [r.num_tokens for r in again] == prompts.tolist()

    def test_series_of_several_engines_are_added_up_and_that_is_said(self) -> None:
        text = "".join(
            histogram(name, counts, f'engine="{engine}"')
            for name, counts in (
                ("vllm:request_prompt_tokens", PROMPTS),
                ("vllm:request_generation_tokens", OUTPUTS),
            )
            for engine in (0, 1)
        )
        traffic = from_metrics(text, "m", 100)
        assert traffic.prompt.percentile(50) == (101, 200)
        assert any("2 series were added up" in note for note in traffic.workload.notes)

    @pytest.mark.parametrize(
        ("prompts", "word"),
        [
            ({"100.0": 5, "+Inf": 0}, "no request was counted"),
            ({"100.0": 5, "200.0": 3, "+Inf": 9}, "a lower one 5"),
            ({"100.0": 5, "200.0": 9}, r"\+Inf is missing"),
            ({"100.0": float("nan"), "+Inf": 9}, "not a bound and a count"),
            ({"100.0": -1, "+Inf": 9}, "not a bound and a count"),
            ({"x": 1, "+Inf": 9}, "not a number"),
            ({"+Inf": 9}, "alone"),
            ({"1e300": 5, "+Inf": 9}, "beyond any request"),
        ],
    )
    def test_an_impossible_histogram_is_refused(self, prompts: dict[str, float], word: str) -> None:
        text = histogram("vllm:request_prompt_tokens", prompts) + histogram(
            "vllm:request_generation_tokens", OUTPUTS
        )
        with pytest.raises(TraceError, match=word):
            from_metrics(text, "m")

    def test_other_metrics_are_refused(self) -> None:
        with pytest.raises(TraceError, match="vllm:request_prompt_tokens"):
            from_metrics("# HELP up x\nup 1\n", "m")
        one = histogram("vllm:request_prompt_tokens", PROMPTS)
        with pytest.raises(TraceError, match="no vllm:request_generation_tokens_bucket"):
            from_metrics(one, "m")
        twice = one + histogram("vllm:request_generation_tokens", OUTPUTS) + one
        with pytest.raises(TraceError, match="twice"):
            from_metrics(twice, "m")

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("latin-1")))
    def test_any_text_is_refused_in_one_line(self, text: str) -> None:
        noise = text + "\nvllm:request_prompt_tokens_bucket{" + text
        with pytest.raises(KvcatchError):
            from_metrics(noise, "m", 10)


class TestAdvice:
    def test_every_setting_has_one_answer(self, busy: Counsel) -> None:
        names = [item.setting for item in (*busy.advice, *busy.not_advised)]
        assert sorted(names) == sorted(SETTINGS)

    def test_today_is_the_replay(self, busy: Counsel) -> None:
        trial = busy.deployment.trial(busy.traffic.workload)
        result = replay(
            busy.traffic.workload, trial.point.pool(), trial.point.settings(trial.settings)
        )
        assert busy.today.steps == result.steps
        assert busy.today.preemptions == result.preemptions > 0
        assert busy.today.prefill_tokens == result.prefill_tokens

    def test_what_is_advised_is_better_in_the_replay(self, busy: Counsel) -> None:
        assert busy.advice
        for item in busy.advice:
            assert item.before == busy.today
            assert item.current != item.proposed
            if item.setting == "long_queue":
                continue
            assert item.after.steps <= item.before.steps * 1.01
            assert (
                item.after.steps < item.before.steps * 0.99
                or item.after.preemptions < item.before.preemptions
                or item.after.prefill_tokens < item.before.prefill_tokens
            )

    def test_a_watermark_is_advised_against_preemptions(self) -> None:
        """A tenth of vLLM pull request 44594: 1000 in, 5000 out, 128 at once, 18,724 blocks."""
        deployment = on("vllm@0.32", 1_872, max_num_seqs=128, token_budget=2_048)
        storm = advise(deployment, Traffic.of(workload([(100, 500)] * 300)))
        answer = found(storm, "watermark")
        assert isinstance(answer, Advice)
        assert answer.flag == "--watermark"
        assert answer.after.preemptions < 0.75 * storm.today.preemptions
        assert answer.after.steps <= 1.01 * storm.today.steps
        assert [float(item.value) for item in answer.tried] == [0.0, 0.01, 0.02, 0.05, 0.1]

    def test_a_smaller_max_model_len_is_never_advised_on_vllm(self, busy: Counsel) -> None:
        answer = found(busy, "max_model_len")
        assert isinstance(answer, NotAdvised)
        assert "does not raise concurrency on vllm@0.32" in answer.reason
        assert answer.facts is not None
        # A tenth of the requests has 2900 tokens: both rules keep them, in steps of 256.
        assert answer.facts["p99_max_model_len_tokens"] == 3072
        assert answer.facts["p99_share_cut_off"] == 0

    def test_block_sizes_are_those_the_engine_accepts(self, busy: Counsel) -> None:
        answer = found(busy, "block_size")
        assert {int(item.value) for item in answer.tried} <= {16, 32, 48, 64, 128, 256}
        facts: dict[str, float | int] = answer.facts or {}
        held = np.mean([16 * -(-(p + o) // 16) for p, o in MIXED])
        used = np.mean([p + o for p, o in MIXED])
        assert facts["unused_share_at_16"] == pytest.approx(1 - used / held)
        assert facts["table_bytes_at_16"] == 4 * 128 * -(-2900 // 16)

    def test_sequences_are_70_to_80_percent_of_what_fits(self, busy: Counsel) -> None:
        answer = found(busy, "max_num_seqs")
        mean = np.mean([-(-(p + o) // 16) for p, o in MIXED])
        bound = 499 / mean
        facts: dict[str, float | int] = answer.facts or {}
        assert facts["sequences_that_fit"] >= bound - 1e-9
        values = [int(item.value) for item in answer.tried if item.value != "128"]
        bound = facts["sequences_that_fit"]
        assert values == sorted({int(bound * share) for share in (0.7, 0.75, 0.8)})

    def test_long_requests_apart_shorten_the_wait_of_others(self, busy: Counsel) -> None:
        answer = found(busy, "long_queue")
        assert isinstance(answer, Advice)
        facts = answer.facts
        assert (
            facts["short_waiting_steps_p99_after"] < 0.9 * facts["short_waiting_steps_p99_before"]
        )
        assert facts["share_of_block_steps"] > 2 * facts["share_of_requests"]
        assert facts["steps_after"] <= 1.05 * busy.today.steps

    def test_a_roomy_pool_needs_nothing(self) -> None:
        roomy = advise(on("vllm@0.32", 20_000, max_num_seqs=64), Traffic.of(workload(MIXED * 6)))
        assert roomy.today.preemptions == 0
        assert "nothing to prevent" in found(roomy, "watermark").reason
        assert "is below 70 %" in found(roomy, "max_num_seqs").reason

    def test_old_vllm_has_no_watermark(self) -> None:
        old = advise(on("vllm@0.20", 500), Traffic.of(workload(MIXED * 4)))
        assert "no such setting (vLLM has one from 0.24.0 on)" in found(old, "watermark").reason


class TestReservingEngines:
    def test_a_smaller_max_model_len_is_advised_where_outputs_are_left_open(self) -> None:
        deployment = on("trtllm@1.2", 2_000, block_size=32, max_model_len=32_768)
        answer = found(advise(deployment, Traffic.of(workload(MIXED * 6))), "max_model_len")
        assert isinstance(answer, Advice)
        assert answer.flag == "max_seq_len"
        assert (answer.current, answer.proposed) == ("32768", "3072")
        # 1024 blocks a request against 96: 1 runs at a time, then 20.
        assert answer.after.steps < answer.before.steps / 5

    def test_not_where_clients_say_what_they_want(self) -> None:
        deployment = on("trtllm@1.2", 2_000, block_size=32, max_model_len=32_768, max_tokens=1000)
        answer = found(advise(deployment, Traffic.of(workload(MIXED * 4))), "max_model_len")
        assert isinstance(answer, NotAdvised)
        assert "clients ask for 1,000 tokens" in answer.reason

    def test_open_outputs_need_a_length(self) -> None:
        with pytest.raises(InvalidArgument, match=r"trtllm@1\.2 reserves the whole output"):
            on("trtllm@1.2", 2_000, block_size=32)


class TestMemory:
    def test_a_share_buys_blocks(self) -> None:
        deployment = on(
            "vllm@0.32", 300, max_num_seqs=32, memory_utilization=0.9, device_bytes=2**30,
            kv_bytes_per_token=10_000,
        )  # fmt: skip
        answer = found(advise(deployment, Traffic.of(workload(MIXED * 6))), "memory_utilization")
        assert isinstance(answer, Advice)
        assert answer.proposed == "0.95"
        assert answer.facts["blocks_per_0_01"] == pytest.approx(0.01 * 2**30 / 160_000)
        assert answer.after.steps < answer.before.steps

    def test_it_is_not_guessed(self, busy: Counsel) -> None:
        assert "--kv-bytes-per-token" in found(busy, "memory_utilization").reason


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"num_blocks": 1}, "num_blocks = 1"),
        ({"block_size": 24}, "block_size = 24: vllm@0.32 takes 16, 32"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"watermark": float("nan")}, "watermark = nan"),
        ({"token_budget": 0}, "token_budget = 0"),
        ({"memory_utilization": 1.5}, "memory_utilization = 1.5"),
    ],
)
def test_an_impossible_deployment_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(word)):
        on("vllm@0.32", **{"num_blocks": 500, **fields})


def test_llama_cpp_has_no_replay() -> None:
    with pytest.raises(InvalidArgument, match="slot"):
        on("llamacpp", 500, block_size=1)


def test_nothing_fits() -> None:
    with pytest.raises(InvalidArgument, match="no request fits"):
        advise(on("vllm@0.32", 5), Traffic.of(workload([(500, 5)] * 3)))


def test_the_order_of_the_same_lengths_hardly_matters() -> None:
    """Shuffled traffic of equal lengths gets advice on the same settings' bounds."""
    lengths = MIXED * 6
    shuffled = [lengths[i] for i in np.random.default_rng(0).permutation(len(lengths))]
    first, second = (
        advise(on("vllm@0.32", 500), Traffic.of(workload(item))) for item in (lengths, shuffled)
    )
    assert first.traffic.to_dict() == {**second.traffic.to_dict()}
    assert second.today.steps == pytest.approx(first.today.steps, rel=0.2)


class TestCommand:
    @pytest.fixture
    def lengths(self, tmp_path: Path) -> Path:
        path = tmp_path / "lengths.csv"
        rows = [f"{prompt},{output}" for prompt, output in MIXED * 4]
        path.write_text("\n".join(["prompt_tokens,output_tokens", *rows, ""]))
        return path

    def test_tables(self, run_kvcatch: RunKvcatch, lengths: Path) -> None:
        done = run_kvcatch(
            "advise", lengths, "--engine", "vllm@0.32", "--num-blocks", 500, "--max-num-seqs", 64
        )
        assert done.returncode == 0, done.stderr
        for words in ("P99.9", "leave max_model_len", "today", "preempted"):
            assert words in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert "Traceback" not in done.stderr

    def test_json(self, run_kvcatch: RunKvcatch, lengths: Path) -> None:
        done = run_kvcatch(
            "advise", lengths, "--engine", "tgi@3.3", "--num-blocks", 12000, "--max-tokens", 1000,
            "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        assert data["law"] == "tgi_worst_case"
        assert data["today"]["preemptions"] == 0
        settings = [item["setting"] for item in data["advice"] + data["not_advised"]]
        assert sorted(settings) == sorted(SETTINGS)

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (("--engine", "vllm@0.99"), "vllm@0.99"),
            (("--engine", "fastllm"), "fastllm"),
            (("--engine", "vllm@0.20", "--watermark", "0.1"), "has no such setting"),
            (("--engine", "vllm@0.32", "--watermark", "nan"), "watermark"),
            (("--engine", "vllm@0.32", "--block-size", "24"), "block_size = 24"),
            (("--engine", "vllm@0.32", "--law", "tgi_worst_case"), "is tgi's"),
            (("--engine", "vllm@0.32", "--requests", "0"), "--requests 0"),
            (("--engine", "vllm@0.32", "--seed", "-1"), "--seed -1"),
            (("--engine", "vllm@0.32", "--device-gib", "nan"), "--device-gib nan"),
            (("--engine", "trtllm@1.2"), "max_model_len"),
            (("--engine", "vllm@0.32", "--max-num-seqs", "many"), "--max-num-seqs = 'many'"),
            (
                ("--engine", "vllm@0.32", "--max-model-len", "100"),
                "max_model_len = 100: each of the 44",
            ),
            (
                (
                    "--engine",
                    "vllm@0.32",
                    "--memory-utilization",
                    "0.9",
                    "--device-gib",
                    "1",
                    "--kv-bytes-per-token",
                    "131072",
                ),
                "0.98 GiB of KV cache at 131072 bytes per token are more than 0.9 of 1.00 GiB",
            ),
        ],
    )
    def test_bad_input_is_one_line(
        self, lengths: Path, arguments: tuple[str, ...], word: str
    ) -> None:
        done = CliRunner().invoke(app, ["advise", str(lengths), "--num-blocks", "500", *arguments])
        assert done.exit_code == 2, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert word in done.stderr

    def test_what_the_engine_refuses_is_left_out(
        self, run_kvcatch: RunKvcatch, lengths: Path
    ) -> None:
        done = run_kvcatch(
            "advise", lengths, "--engine", "vllm@0.32", "--num-blocks", 500, "--max-model-len", 1000,
            "--json",
        )  # fmt: skip
        data = json.loads(done.stdout)
        assert data["traffic"]["requests"] == data["today"]["finished"] == 40
        assert data["traffic"]["total"]["p99.9_tokens"] == 600
        assert "4 of 44 requests are longer than max_model_len = 1000 tokens" in done.stderr

    def test_a_real_trace(self, run_kvcatch: RunKvcatch, azure_trace: Path) -> None:
        done = run_kvcatch(
            "advise", azure_trace, "--engine", "vllm@0.32", "--num-blocks", 3000, "--requests", 200,
            "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["traffic"]["requests"] == 200


def test_shared_prefixes_let_more_run_than_lengths_say() -> None:
    traffic = Traffic.of(generate("documents", 60))
    counsel = advise(on("vllm@0.32", 8_000, max_num_seqs=48), replace(traffic))
    answer = found(counsel, "max_num_seqs")
    assert counsel.today.hit_tokens > 0
    facts: dict[str, float | int] = answer.facts or {}
    assert facts["sequences_that_fit"] > 7_999 / facts["mean_blocks_per_request"]
