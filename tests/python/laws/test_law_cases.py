"""Public cases whose numbers an admission law has to give."""

from __future__ import annotations

import pytest

from kvcatch.laws import (
    LAWS,
    Decision,
    QueuedRequest,
    RunningRequest,
    State,
    admit,
    blocks_for,
    law_of,
    prefill_steps,
)
from kvcatch.ledger.engines import Engine


def entering(decisions: list[Decision]) -> int:
    return sum(decision.enters for decision in decisions)


def gates(decisions: list[Decision]) -> list[str]:
    return [decision.refusal.gate if decision.refusal else "" for decision in decisions]


def vllm(version: str) -> str:
    return law_of(Engine.parse(f"vllm@{version}")).name


class TestWorkedExamples:
    """1000 blocks of 16, 260 used: the dashboard says 26 % (issue text and a public article)."""

    state = State(num_blocks=1000, block_size=16, free=740)

    @pytest.mark.parametrize(
        "law", ["worst_case", "guaranteed_no_evict", "static_batch", "tgi_worst_case"]
    )
    @pytest.mark.parametrize(("output", "blocks", "enter"), [(4096, 288, 2), (8192, 544, 1)])
    def test_worst_case(self, law: str, output: int, blocks: int, enter: int) -> None:
        decisions = admit(LAWS[law], self.state, [QueuedRequest(512, output)] * 30)
        assert [item.required for item in decisions[: enter + 1]] == [blocks] * (enter + 1)
        assert entering(decisions) == enter
        refusal = decisions[enter].refusal
        assert refusal is not None
        assert refusal.gate == "worst_case"
        assert (refusal.required, refusal.available) == (blocks, 740 - enter * blocks)
        assert gates(decisions)[enter:] == ["worst_case"] * (30 - enter)

    @pytest.mark.parametrize("law", ["full_prompt", "vllm_full_prompt", "vllm_first_chunk"])
    @pytest.mark.parametrize("output", [4096, 8192, None])
    def test_vllm_looks_at_the_prompt_alone(self, law: str, output: int | None) -> None:
        decisions = admit(LAWS[law], self.state, [QueuedRequest(512, output)] * 30)
        assert decisions[0].required == 32
        assert entering(decisions) == 23
        assert gates(decisions)[23:] == ["capacity"] * 7

    def test_the_null_block_changes_nothing_here(self) -> None:
        state = State(num_blocks=1000, block_size=16, free=739, null_blocks=1)
        queue = [QueuedRequest(512, 4096)] * 30
        assert entering(admit(LAWS["vllm_full_prompt"], state, queue)) == 23

    def test_vllm_v0_keeps_one_percent(self) -> None:
        """The case says 23 for any version; V0's fixed watermark of 10 blocks makes it 22."""
        decisions = admit(LAWS["vllm_v0"], self.state, [QueuedRequest(512, 4096)] * 30)
        assert entering(decisions) == 22
        assert gates(decisions)[22] == "watermark"

    @pytest.mark.parametrize(
        ("length", "blocks", "ratio", "enter"), [(8192, 512, 3.90625, 3), (4096, 256, 7.8125, 7)]
    )
    def test_2000_blocks(self, length: int, blocks: int, ratio: float, enter: int) -> None:
        state = State(num_blocks=2000, block_size=16, free=2000, max_model_len=length)
        decisions = admit(LAWS["worst_case"], state, [QueuedRequest(1)] * 10)
        assert decisions[0].required == blocks
        assert state.num_blocks / blocks == ratio
        assert entering(decisions) == enter


class TestReservingEngines:
    def test_an_omitted_limit_makes_requests_run_one_by_one(self) -> None:
        """TensorRT-LLM issue 9412; unsloth pull request 10070: 262,144 tokens, four slots."""
        state = State(
            num_blocks=16_384, block_size=16, free=16_384, max_model_len=262_144, max_num_seqs=4
        )
        for law in ("guaranteed_no_evict", "worst_case"):
            decisions = admit(LAWS[law], state, [QueuedRequest(500)] * 4)
            assert entering(decisions) == 1
            assert decisions[1].refusal is not None
            assert decisions[1].refusal.gate == "worst_case"
        charged = [QueuedRequest(500, 1024)] * 4
        assert entering(admit(LAWS["guaranteed_no_evict"], state, charged)) == 4

    def test_one_huge_request_blocks_all_others(self) -> None:
        """TensorRT-LLM issue 2866: max_seq_len 12288, max_batch_size 16."""
        blocks = 12_288 // 32
        held = RunningRequest(300, 10, 11_900)
        state = State(
            num_blocks=blocks,
            block_size=32,
            free=blocks - 10,
            running=(held,),
            max_num_seqs=16,
            max_model_len=12_288,
        )
        decisions = admit(LAWS["guaranteed_no_evict"], state, [QueuedRequest(200, 100)] * 3)
        assert gates(decisions) == ["worst_case"] * 3
        # ceil(12200 / 32) = 382 blocks in all, 10 held: 372 of the 374 free ones are promised.
        assert decisions[0].refusal is not None
        assert (decisions[0].refusal.required, decisions[0].refusal.available) == (10, 2)
        assert entering(admit(LAWS["max_utilization"], state, [QueuedRequest(200, 100)] * 3)) == 3

    def test_kv_is_underused_to_completion(self) -> None:
        """TensorRT-LLM issue 1012: scheduled only if there are blocks for all of its output."""
        state = State(num_blocks=100, block_size=64, free=100)
        decision = admit(LAWS["guaranteed_no_evict"], state, [QueuedRequest(64, 64 * 100)])[0]
        assert decision.refusal is not None
        assert decision.refusal.gate == "never_fits"
        assert (decision.refusal.required, decision.refusal.available) == (101, 100)


class TestLowUsage:
    """KV usage is low and requests wait: what the laws say about the public cases."""

    def test_prefill_is_the_bound(self) -> None:
        """llm-d-autoscaling issue 662: 6000 in, 2 out, 8 a second (48,000 tokens/s); KV at 32 %."""
        blocks = 40_000
        state = State(
            num_blocks=blocks,
            block_size=16,
            free=int(blocks * 0.68),
            num_running=20,
            token_budget=65_000,
        )
        decisions = admit(LAWS[vllm("0.14")], state, [QueuedRequest(6_000, 2)] * 20)
        assert entering(decisions) == 11
        assert set(gates(decisions)[11:]) == {"token_budget"}
        assert decisions[10].step_tokens == 65_000 - 20 - 10 * 6_000

    def test_a_fifth_long_prompt_enters_on_its_first_chunk_alone(self) -> None:
        """vLLM pull request 37307: 4 x 100k tokens fill about 90 %; the fifth thrashes them."""
        held = blocks_for(100_000, 16)
        blocks = int(4 * held / 0.9)
        state = State(
            num_blocks=blocks,
            block_size=16,
            free=blocks - 4 * held - 1,
            null_blocks=1,
            running=tuple([RunningRequest(100_000)] * 4),
            token_budget=24_000,
        )
        queue = [QueuedRequest(100_000)]
        before, after = vllm("0.19.0"), vllm("0.19.1")
        assert admit(LAWS[before], state, queue)[0].enters
        refusal = admit(LAWS[after], state, queue)[0].refusal
        assert refusal is not None
        assert (refusal.gate, refusal.required, refusal.available) == ("capacity", 6_250, 2_776)

    def test_adapters_are_deferred(self) -> None:
        """vLLM issue 11517: 50,231 blocks at 3.1 %, 1 running, 3 pending, max_loras 1."""
        concurrency = 50_231 / blocks_for(32_768, 16)
        assert concurrency == pytest.approx(24.53, abs=0.005)
        state = State(num_blocks=50_231, block_size=16, free=int(50_231 * 0.969), num_running=1)
        queue = [QueuedRequest(1_000, deferred=f"adapter {i}: max_loras 1") for i in range(3)]
        assert gates(admit(LAWS["vllm_full_prompt"], state, queue)) == ["deferred"] * 3

    def test_sequences_are_the_bound(self) -> None:
        """vLLM issue 13508: max_num_seqs 64."""
        state = State(
            num_blocks=20_000, block_size=16, free=15_000, num_running=64, max_num_seqs=64
        )
        refusal = admit(LAWS[vllm("0.6.3")], state, [QueuedRequest(100)])[0].refusal
        assert refusal is not None
        assert (refusal.gate, refusal.unit) == ("max_num_seqs", "sequences")

    @pytest.mark.parametrize("version", ["0.6.6", "0.11.0", "0.32"])
    def test_max_tokens_plays_no_part_in_vllm(self, version: str) -> None:
        """vLLM issue 27017."""
        state = State(num_blocks=1000, block_size=16, free=600)
        short, long = (
            admit(LAWS[vllm(version)], state, [QueuedRequest(512, output)] * 40)
            for output in (1, 15_000)
        )
        assert entering(short) == entering(long)
        assert short[0].required == long[0].required


class TestHeadOfLine:
    def test_two_that_fit_wait_behind_one_that_does_not(self) -> None:
        """vLLM pull request 57841: 20 free, the head needs 100, L needs 5, W needs 10."""
        state = State(num_blocks=270, block_size=16, free=20)
        queue = [
            QueuedRequest(1600, name="H"),
            QueuedRequest(4080, held_blocks=250, computed_tokens=4000, name="L"),
            QueuedRequest(160, name="W"),
        ]
        decisions = admit(LAWS["vllm_full_prompt"], state, queue)
        assert gates(decisions) == ["capacity", "head_of_line", "head_of_line"]
        assert [item.required for item in decisions] == [100, 5, 10]
        assert decisions[1].refusal is not None
        assert "waits behind H: capacity, 100 > 20 blocks" in decisions[1].refusal.detail

    def test_two_half_loaded_prompts_hold_each_other_up(self) -> None:
        """vLLM issue 45388: 799 free, A1 needs 1088 more, B1 464."""
        state = State(num_blocks=2048, block_size=16, free=799)
        queue = [
            QueuedRequest(25_596, held_blocks=512, computed_tokens=8_192),
            QueuedRequest(19_196, held_blocks=736, computed_tokens=11_776),
        ]
        decisions = admit(LAWS["vllm_full_prompt"], state, queue)
        assert [item.required for item in decisions] == [1_088, 464]
        assert gates(decisions) == ["capacity", "head_of_line"]


@pytest.mark.parametrize(
    ("prompt", "budget", "steps"),
    [(130_000, 512, 254), (100_000, 16_384, 7), (180_000, 16_384, 11)],
)
def test_steps_of_a_long_prompt(prompt: int, budget: int, steps: int) -> None:
    """vLLM issues 10774 and 57413."""
    assert prefill_steps(prompt, budget) == steps


@pytest.mark.parametrize(
    ("version", "law"),
    [
        ("0.3.3", "vllm_v0"),
        ("0.7.3", "vllm_v0"),
        ("0.8.0", "vllm_first_chunk"),
        ("0.19", "vllm_first_chunk"),
        ("0.19.0", "vllm_first_chunk"),
        ("0.19.1", "vllm_full_prompt"),
        ("0.33.0", "vllm_full_prompt"),
    ],
)
def test_the_law_depends_on_the_version(version: str, law: str) -> None:
    assert vllm(version) == law


@pytest.mark.parametrize(
    ("engine", "law"),
    [
        ("sglang@0.5.23", "sglang_estimate"),
        ("trtllm@1.2", "guaranteed_no_evict"),
        ("tgi@3.3", "tgi_worst_case"),
        ("llama.cpp", "slot"),
        ("kvcatch", "full_prompt"),
    ],
)
def test_the_law_of_other_engines(engine: str, law: str) -> None:
    assert law_of(Engine.parse(engine)).name == law


def test_slots_are_no_capacity() -> None:
    """unsloth pull request 9392: 565 + 1485 = 2050 tokens in a unified cache of 2048."""
    state = State(num_blocks=2048, block_size=1, free=2048, max_num_seqs=4)
    first, second = admit(LAWS["slot"], state, [QueuedRequest(565), QueuedRequest(1485)])
    assert first.enters
    assert not first.warning
    assert second.enters
    assert "565 + 1485 = 2050 > 2048 tokens" in second.warning
