from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.geometry import BUILT_IN, Kind, Model, Parallel, read_config, read_model
from kvcatch.ledger import (
    GIB,
    Engine,
    Gpu,
    Ledger,
    LengthDistribution,
    Pool,
    Run,
    figures,
    parse_bytes,
    plan,
    prefill_steps,
    to_dict,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GQA = Model.uniform(32, 8, 128, attention_heads=32, max_model_len=131_072)
H200 = Gpu.named("h200")


def pool(num_blocks: int, model: Model = GQA, **more: Any) -> Ledger:
    return plan(model, Pool(num_blocks=num_blocks), **more)


class TestEngines:
    @pytest.mark.parametrize(
        ("text", "name", "version"),
        [
            ("vllm@0.32", "vllm", (0, 32)),
            ("vLLM@v0.20.2", "vllm", (0, 20, 2)),
            ("vllm", "vllm", (0, 33)),
            ("vllm@0.33.1", "vllm", (0, 33, 1)),
            ("tensorrt-llm@1.0", "trtllm", (1, 0)),
            ("kvcatch", "kvcatch", (0,)),
        ],
    )
    def test_parse(self, text: str, name: str, version: tuple[int, ...]) -> None:
        engine = Engine.parse(text)
        assert (engine.name, engine.version) == (name, version)
        assert Engine.parse(str(engine)) == engine

    @pytest.mark.parametrize(
        "text",
        ["", "vlm", "vllm@", "vllm@x", "vllm@0.34", "vllm@1.0", "vllm@0.2", "vllm@0.3.2.1.5", "vllm@99999999999",
         "kvcatch@1", "tgi@2", "vllm@-1", "@0.3"],
    )  # fmt: skip
    def test_unknown(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="engine = "):
            Engine.parse(text)

    def test_what_versions_changed(self) -> None:
        """Null block from 0.8, groups from 0.9.1, 0.92 of the GPU from 0.20.2, in-flight steps from 0.28."""
        versions = ["0.6", "0.8", "0.9.1", "0.16", "0.20.2", "0.28", "0.32"]
        engines = [Engine.parse(f"vllm@{version}") for version in versions]
        assert [engine.null_blocks for engine in engines] == [0, 1, 1, 1, 1, 1, 1]
        assert [engine.memory_utilization for engine in engines] == [0.9] * 4 + [0.92] * 3
        model = read_model("gpt-oss-20b")
        run = Run(max_num_batched_tokens=2048)
        per_request = [
            pool(20_000, model, engine=engine, run=run).blocks_per_request for engine in engines
        ]
        one_step = 8192 + (127 + 2048 + 15) // 16 + 1
        two_steps = 8192 + (127 + 4096 + 15) // 16 + 1
        assert per_request == [8192, 8192, one_step, one_step, one_step, two_steps, two_steps]

    def test_states_of_hybrids(self) -> None:
        """One state block before prefix caching became the default of hybrids in 0.28, two after."""
        model = read_model("qwen3-next-80b-a3b")

        def extra(engine: str, **run: Any) -> int:
            ledger = pool(5000, model, engine=engine, run=Run(2048, **run))
            full = next(group for group in ledger.geometry.groups if group.kind is Kind.FULL)
            return ledger.blocks_per_request - full.printed_blocks(
                ledger.max_model_len, ledger.geometry.demand
            )

        assert extra("vllm@0.24") == 3
        assert extra("vllm@0.32") == 6
        assert extra("vllm@0.32", prefix_caching=False) == 3
        assert extra("vllm@0.32", speculative_tokens=2) == 12

    def test_the_printed_size(self) -> None:
        model = read_model("gemma-3-4b")
        old, new = (pool(20_000, model, engine=f"vllm@{version}") for version in ("0.16", "0.32"))
        assert old.printed_tokens == 20_000 // len(old.geometry.groups) * 16
        assert new.printed_tokens == int(new.max_concurrency * 131_072)
        assert pool(2000, engine="trtllm").printed_tokens is None

    def test_other_engines_are_not_guessed(self) -> None:
        for engine in ("sglang", "trtllm", "tgi"):
            with pytest.raises(InvalidArgument, match="sliding_window layers is not known"):
                pool(2000, read_model("gpt-oss-20b"), engine=engine)


class TestPool:
    def test_from_a_gpu(self) -> None:
        model = read_model("llama-3.1-8b")
        ledger = plan(
            model, Pool(gpus=(H200,), utilization=0.9, weights_bytes=15 * GIB, non_kv_bytes=2 * GIB)
        )
        left = int(H200.num_bytes * 0.9) - 17 * GIB
        assert ledger.ranks[0].kv_bytes == left
        assert ledger.num_blocks == left // 2_097_152
        assert ledger.usable_blocks == ledger.num_blocks - 1
        assert ledger.max_tokens == ledger.usable_blocks * 16

    def test_given_and_estimated_are_told_apart(self) -> None:
        model = read_model("llama-3.1-8b")
        estimated = plan(model, Pool(gpus=(H200,))).ranks[0].memory
        assert estimated is not None
        assert (estimated.weights_from, estimated.non_kv_from) == ("estimated", "estimated")
        given_ = plan(model, Pool(gpus=(H200,), weights_bytes=1, non_kv_bytes=0)).ranks[0].memory
        assert given_ is not None
        assert (given_.weights_from, given_.non_kv_from) == ("given", "given")

    def test_the_smallest_rank_decides(self) -> None:
        sizes = (8 * GIB, 4 * GIB, 6 * GIB, 6 * GIB)
        ledger = plan(GQA, Pool(kv_bytes=sizes), parallel=Parallel(tp=2, pp=2))
        assert [rank.num_blocks for rank in ledger.ranks] == [16_384, 8192, 12_288, 12_288]
        assert ledger.num_blocks == 8192
        assert (ledger.binds.rank.stage, ledger.binds.rank.tp_rank) == (0, 1)

    def test_a_stage_without_a_cache_does_not_decide(self) -> None:
        config = {**BUILT_IN["nemotron-h-8b"], "hybrid_override_pattern": "M-*-" * 13}
        model = read_config(config, "x")
        ledger = plan(model, Pool(kv_bytes=(GIB,)), parallel=Parallel(pp=3, pp_layers=(3, 1, 48)))
        assert ledger.ranks[1].num_blocks is None
        assert ledger.binds.rank.stage == 2

    @given(num_blocks=st.integers(2, 10**7), length=st.integers(1, 131_072))
    def test_what_is_said_to_fit_fits(self, num_blocks: int, length: int) -> None:
        ledger = pool(num_blocks, max_model_len=length)
        servable = ledger.max_servable_length
        assert 1 <= servable <= length
        assert ledger.blocks_for(servable) <= ledger.usable_blocks
        assert servable == length or ledger.blocks_for(servable + 1) > ledger.usable_blocks
        assert ledger.max_running * ledger.blocks_for(length) <= ledger.usable_blocks
        assert ledger.max_running <= ledger.max_concurrency
        assert ledger.starts is (servable == length)

    @given(name=st.sampled_from(sorted(BUILT_IN)), more=st.integers(1, 10**6))
    def test_more_blocks_never_hold_less(self, name: str, more: int) -> None:
        model = read_model(name)
        few, many = pool(1000, model), pool(1000 + more, model)
        assert many.max_tokens >= few.max_tokens
        assert many.max_servable_length >= few.max_servable_length
        assert many.max_concurrency > few.max_concurrency


class TestLengths:
    def test_one_length(self) -> None:
        ledger = pool(1001, lengths=LengthDistribution.one(320))
        assert ledger.length_figures is not None
        assert ledger.length_figures["concurrency"] == 50
        assert ledger.running_at(320) == 50

    def test_a_histogram(self) -> None:
        lengths = LengthDistribution.of([(16, 3), (160, 1), (200_000, 1)])
        ledger = pool(1001, lengths=lengths)
        assert ledger.length_figures is not None
        assert ledger.length_figures["mean_blocks_per_request"] == (3 * 1 + 10) / 4
        assert ledger.length_figures["concurrency"] == pytest.approx(1000 / 3.25)
        assert ledger.length_figures["share_over_max_model_len"] == 0.2
        assert (lengths.percentile(50), lengths.percentile(61), lengths.percentile(100)) == (
            16,
            160,
            200_000,
        )

    def test_nobody_fits(self) -> None:
        ledger = pool(1001, lengths=LengthDistribution.one(200_000))
        assert ledger.length_figures == {
            "share_over_max_model_len": 1.0,
            "share_over_max_servable_length": 1.0,
        }

    def test_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.csv"
        path.write_text("length,count\n100,2\n300,1\n\n100,1\n")
        lengths = LengthDistribution.read(path)
        assert (lengths.lengths, lengths.weights) == ((100, 300), (3.0, 1.0))
        assert lengths.mean() == 150
        path.write_text("5\n7\n")
        assert LengthDistribution.read(path).lengths == (5, 7)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "no lengths"),
            ("length\n", "no lengths"),
            ("5\nx\n", ":2: 'x'"),
            ("5\n0\n", ":2: '0': out of range"),
            ("5,-1\n", "out of range"),
            ("5,nan\n", "out of range"),
            ("5,inf\n", "out of range"),
            ("5,0\n", "no lengths"),
            ("1,2,3\n", "3 columns"),
            ("99999999999999999999\n", "out of range"),
        ],
    )
    def test_bad_csv(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "lengths.csv"
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=words):
            LengthDistribution.read(path)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("8GiB", 8 * GIB),
            ("0.5 GiB", GIB // 2),
            ("16303MiB", 16_303 * 2**20),
            ("1024", 1024),
            ("1GB", 10**9),
        ],
    )
    def test_bytes(self, text: str, size: int) -> None:
        assert parse_bytes("x", text) == size

    @pytest.mark.parametrize(
        "text", ["", "GiB", "x", "-1GiB", "0", "nanGiB", "infGiB", "1e999GiB", "1 PiB", "2TiBB"]
    )
    def test_no_bytes(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="x = "):
            parse_bytes("x", text)

    def test_gpus(self) -> None:
        assert Gpu.parse("H100-80GB").name == "h100"
        assert Gpu.parse("48GiB").num_bytes == 48 * GIB
        with pytest.raises(InvalidArgument, match="several sizes: a100-40, a100-80"):
            Gpu.parse("a100")
        with pytest.raises(InvalidArgument, match="unknown; known are"):
            Gpu.parse("abacus")


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: plan(GQA, Pool()), "missing: give one of"),
            (lambda: plan(GQA, Pool(num_blocks=5, kv_bytes=(GIB,))), "given twice"),
            (lambda: plan(GQA, Pool(num_blocks=5, utilization=0.5)), "utilization = 0.5: only a plan from --gpu"),
            (lambda: pool(0), "num_blocks = 0"),
            (lambda: pool(-1), "num_blocks = -1"),
            (lambda: pool(1), "no block is left for requests beside the null block"),
            (lambda: pool(10**30), "num_blocks = 1000"),
            (lambda: plan(GQA, Pool(kv_bytes=(10,))), "less than one block of 2097152 bytes"),
            (lambda: plan(GQA, Pool(kv_bytes=(-1,))), "kv_bytes = -1"),
            (lambda: plan(GQA, Pool(kv_bytes=(GIB, GIB))), "2 values for 1 stages of 1 ranks"),
            (lambda: pool(9, max_model_len=0), "max_model_len = 0"),
            (lambda: pool(9, max_model_len=131_073), "made for at most 131072"),
            (lambda: pool(9, Model.uniform(1, 1, 1)), "states no longest length"),
            (lambda: pool(9, block_size=24), "block_size = 24: vLLM 0.32 takes multiples of 16"),
            (lambda: pool(9, block_size=-16), "block_size = -16"),
            (lambda: pool(9, kv_dtype="fp2"), "kv_dtype = 'fp2'"),
            (lambda: pool(9, engine="vllm@0.99"), "unknown version"),
            (lambda: pool(9, run=Run(max_num_batched_tokens=0)), "max_num_batched_tokens = 0"),
            (lambda: pool(9, run=Run(speculative_tokens=-1)), "speculative_tokens = -1"),
            (lambda: plan(GQA, Pool(gpus=(H200,))), "weights cannot be counted"),
            (lambda: plan(GQA, Pool(gpus=(H200,), weights_bytes=1)), "activations cannot be estimated"),
            (lambda: plan(read_model("llama-3.3-70b"), Pool(gpus=(H200,))), "no memory left"),
            (lambda: plan(read_model("qwen3-8b"), Pool(gpus=(H200,), utilization=0.0)), "utilization = 0.0"),
            (lambda: plan(read_model("qwen3-8b"), Pool(gpus=(H200,), utilization=float("nan"))), "utilization = nan"),
            (lambda: plan(read_model("qwen3-8b"), Pool(gpus=(H200,)), engine="tgi"), "is not known; give its pool"),
            (lambda: plan(read_model("qwen3-8b"), Pool(gpus=(H200,)), engine="sglang"), "give --memory-utilization"),
            (lambda: prefill_steps(0, 1), "prompt_tokens = 0"),
        ],
    )  # fmt: skip
    def test_one_clear_line(self, make: Callable[[], object], words: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            make()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


class TestReport:
    @pytest.mark.parametrize(
        "name", ["llama-3.1-8b", "gemma-3-27b", "nemotron-h-8b", "deepseek-v3.2"]
    )
    def test_every_number_is_explained(self, name: str) -> None:
        ledger = pool(
            5000, read_model(name), parallel=Parallel(pp=2), lengths=LengthDistribution.one(100)
        )
        data = to_dict(ledger)
        explained = {figure.name: figure for figure in figures(ledger)}
        for key in (
            "kv_bytes_per_token", "kv_bytes_per_block", "num_blocks", "usable_blocks", "max_tokens",
            "blocks_per_request", "max_concurrency", "max_servable_length", "max_running",
        ):  # fmt: skip
            assert key in data
            figure = explained[key]
            assert figure.formula
            assert figure.numbers
            if not figure.where:
                assert figure.value == data[key]

    def test_the_numbers_work_out(self) -> None:
        """The terms of a formula, evaluated, are the value."""
        for name in BUILT_IN:
            ledger = pool(5000, read_model(name))
            terms = next(f for f in figures(ledger) if f.name == "kv_bytes_per_token")
            text = terms.numbers
            for kind in Kind:
                text = text.replace(f" {kind} layers", "")
            assert eval(text, {"__builtins__": {}}) == terms.value
