"""Numbers from public reports of real servers; each test names the thread it comes from."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvcatch.errors import ConfigError
from kvcatch.geometry import (
    Attention,
    Kind,
    KvDtype,
    Model,
    Parallel,
    State,
    read_config,
    read_model,
)
from kvcatch.ledger import GIB, Gpu, Ledger, Pool, Run, plan, prefill_steps

MIB = 2**20
GQA_8B = Model.uniform(32, 8, 128, attention_heads=32)
MHA_7B = Model.uniform(32, 32, 128)


def bytes_per_token(model: Model, dtype: str = "auto") -> int:
    return model.bytes_per_token(KvDtype.parse(dtype, model.dtype))


def blocks(model: Model, num_blocks: int, max_model_len: int, **more: Any) -> Ledger:
    return plan(model, Pool(num_blocks=num_blocks), max_model_len=max_model_len, **more)


class TestCapacityFormula:
    def test_gqa_7b_fp16_at_8k(self) -> None:
        """A widely read article: 128 KiB per token, 1 GiB per 8192 tokens, 16 GiB for 16 of them."""
        ledger = blocks(GQA_8B, 10_000, 8192)
        assert bytes_per_token(GQA_8B) == 131_072
        assert ledger.geometry.bytes_for(8192) == GIB
        assert 16 * ledger.geometry.bytes_for(8192) == 16 * GIB

    def test_2000_blocks(self) -> None:
        """The same article: 3.906 requests of 8192 tokens, 7.8125 of 4096."""
        long, short = blocks(GQA_8B, 2000, 8192), blocks(GQA_8B, 2000, 4096)
        assert (long.blocks_per_request, long.max_concurrency, long.max_running) == (
            512,
            3.90625,
            3,
        )
        assert (short.max_concurrency, short.max_running) == (7.8125, 7)

    def test_budget_of_an_a100(self) -> None:
        """vLLM 12330: 0.9 * 39.5 - 14.96 - 0.10 - 9.37 = 11.12 GiB, 5691 blocks of 2 MiB, 11.12x."""
        model = read_model("llama-3-8b")
        pool = Pool(
            gpus=(Gpu("a100-40", round(39.5 * GIB)),),
            utilization=0.9,
            weights_bytes=round(14.96 * GIB),
            non_kv_bytes=round((0.10 + 9.37) * GIB),
        )
        ledger = plan(model, pool, engine="vllm@0.6.6")
        assert round(ledger.ranks[0].kv_bytes / GIB, 2) == 11.12
        assert ledger.num_blocks == pytest.approx(5691, abs=2)  # the log rounds its GiB to 0.01
        assert round(blocks(model, 5691, 8192).max_concurrency, 3) == 11.115
        # What the config counts agrees with the log's weights.
        assert model.weights is not None
        assert round(model.weights.total_bytes / GIB, 2) == 14.96

    def test_mha_pool_of_trtllm(self) -> None:
        """TensorRT-LLM 1400: 69,524,783,104 bytes hold 132,608 tokens of a 7B MHA model."""
        ledger = plan(
            MHA_7B,
            Pool(kv_bytes=(69_524_783_104,)),
            engine="trtllm",
            block_size=64,
            max_model_len=4096,
        )
        assert bytes_per_token(MHA_7B) == 524_288
        assert ledger.max_tokens == 132_608

    def test_fp8_pool_of_trtllm(self) -> None:
        """TensorRT-LLM 4275: 0.9 of 17.83 GiB is 16.05 GiB: 8219 blocks of 32, 263,008 tokens."""
        model = read_model("llama-3.1-8b")
        assert bytes_per_token(model, "fp8") == 65_536
        pool = Pool(
            gpus=(Gpu("free", round(17.83 * GIB)),),
            utilization=0.9,
            weights_bytes=0,
            non_kv_bytes=0,
        )
        ledger = plan(model, pool, engine="trtllm", kv_dtype="fp8", max_model_len=8192)
        assert ledger.ranks[0].kv_bytes == pytest.approx(16.05 * GIB, rel=5e-4)
        assert ledger.num_blocks == pytest.approx(8219, rel=5e-4)
        exact = plan(
            model, Pool(num_blocks=8219), engine="trtllm", kv_dtype="fp8", max_model_len=8192
        )
        assert exact.max_tokens == 263_008

    def test_fp8_pool_of_52_gib(self) -> None:
        """TensorRT-LLM 6294: 860,320 tokens are 26,885 blocks of 32 in 52.51 GiB."""
        ledger = plan(
            GQA_8B, Pool(num_blocks=26_885), engine="trtllm", kv_dtype="fp8", max_model_len=8192
        )
        assert ledger.max_tokens == 860_320
        assert ledger.ranks[0].kv_bytes == pytest.approx(52.51 * GIB, rel=1e-4)

    def test_blocks_of_64_mha_tokens(self) -> None:
        """TensorRT-LLM 2268: 32 MiB per block, 0.9 of 21.89 GiB are 630.4 of them."""
        size = round(0.9 * 21.89 * GIB)
        ledger = plan(
            read_model("qwen1.5-7b"),
            Pool(kv_bytes=(size,)),
            engine="trtllm",
            block_size=64,
            max_model_len=8192,
        )
        per_block = ledger.geometry.ranks[0].kv_bytes_per_block
        assert per_block == 32 * MIB
        assert round(size / per_block, 1) == 630.4
        assert ledger.num_blocks == 630

    def test_mla_keeps_one_row(self) -> None:
        """TensorRT-LLM 16707 and LMCache 694: 512 + 64 values once per layer, no factor 2: 70,272 bytes."""
        model = read_model("deepseek-v3")
        row = model.layers[0][0]
        assert isinstance(row, Attention)
        assert (row.head_dim, row.head_dim_v) == (576, 0)
        assert bytes_per_token(model) == 70_272

    def test_query_heads_do_not_count(self) -> None:
        """vllm-fit 2: heads * hidden over-counts; KV heads and head_dim alone decide."""
        few, many = (Model.uniform(32, 8, 128, attention_heads=heads) for heads in (8, 64))
        assert bytes_per_token(few) == bytes_per_token(many) == 2 * 32 * 8 * 128 * 2

    def test_head_dim_of_the_config(self) -> None:
        """LMCache 694: Qwen3-32B has 5120 / 64 = 80, but its heads have 128 values."""
        assert bytes_per_token(read_model("qwen3-32b")) == 64 * 8 * (128 + 128) * 2

    def test_deepseek_v4_is_refused(self) -> None:
        """sparkrun 247: 2 * 43 * 512 * 2 = 88,064 bytes per token would be wrong: its rows are compressed."""
        config = {
            "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 43,
            "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "torch_dtype": "bfloat16",
        }  # fmt: skip
        with pytest.raises(
            ConfigError, match=r"unknown architecture 'deepseek_v4' \(DeepseekV4ForCausalLM\)"
        ):
            read_config(config, "v4")
        with pytest.raises(ConfigError, match="compress_ratios"):
            read_config({**config, "model_type": "deepseek_v3", "compress_ratios": [4]}, "v4")

    def test_packed_rows_of_sparse_mla(self) -> None:
        """sparkrun 247: a row of fp8_ds_mla is 656 bytes; DeepSeek V3.2 has an indexer's 132 beside it."""
        model = read_model("deepseek-v3.2")
        assert bytes_per_token(model, "fp8_ds_mla") == 61 * (656 + 132)

    def test_a_larger_kernel_page(self) -> None:
        """tpu-inference 1285: 76,268 pages of 524,288 bytes are 19,067 of 2,097,152."""
        ledger = plan(GQA_8B, Pool(kv_bytes=(76_268 * 524_288,)), max_model_len=8192)
        assert ledger.geometry.ranks[0].kv_bytes_per_block == 2_097_152
        assert ledger.num_blocks == 19_067

    def test_16_gib_of_qwen(self) -> None:
        """vLLM 44594: Qwen2.5-7B, 16 GiB: 18,724 blocks, 299,584 tokens."""
        ledger = plan(read_model("qwen2.5-7b"), Pool(kv_bytes=(17_179_869_184,)))
        assert ledger.num_blocks == 18_724
        assert ledger.num_blocks * 16 == 299_584

    def test_concurrency_of_qwen_32b(self) -> None:
        """vLLM 11517: 50,231 blocks, 24.53x at 32,768."""
        assert round(blocks(read_model("qwen2.5-32b"), 50_231, 32_768).max_concurrency, 3) == 24.527


class TestStartupMemory:
    @pytest.mark.parametrize(
        ("num_blocks", "max_model_len", "tokens", "concurrency", "starts"),
        [
            pytest.param(1952, 20_000, 31_232, 1.5616, True, id="vllm-10517-20k"),
            pytest.param(1478, 29_000, 23_648, 0.815, False, id="vllm-10517-29k"),
            pytest.param(378, 8192, 6048, 0.738, False, id="openrlhf-336"),
            pytest.param(229, 4096, 3664, 0.894, False, id="vllm-2418"),
        ],
    )
    def test_v0(
        self, num_blocks: int, max_model_len: int, tokens: int, concurrency: float, starts: bool
    ) -> None:
        ledger = blocks(GQA_8B, num_blocks, max_model_len, engine="vllm@0.6")
        assert ledger.usable_blocks == num_blocks
        assert ledger.max_tokens == tokens
        assert ledger.max_concurrency == pytest.approx(concurrency, abs=1e-3)
        assert ledger.max_servable_length == min(tokens, max_model_len)
        assert ledger.starts is starts
        assert ledger.geometry.ranks[0].kv_bytes_per_block == 2_097_152

    def test_mha_of_qwen(self) -> None:
        """Qwen3 295: why only 7344 tokens? 512 KiB each: 3.586 GiB."""
        ledger = blocks(read_model("qwen1.5-7b"), 459, 32_768, engine="vllm@0.6")
        assert bytes_per_token(read_model("qwen1.5-7b")) == 524_288
        assert ledger.max_tokens == 7344
        assert ledger.ranks[0].kv_bytes == pytest.approx(3.586 * GIB, rel=1e-3)

    def test_a_real_server(self) -> None:
        """vLLM 0.32 on a CPU with 120 blocks of 32 logged 3,840 tokens and 1.88x at 2,048."""
        ledger = blocks(read_model("smollm2-135m"), 120, 2048, block_size=32)
        assert ledger.printed_tokens == 3840
        assert f"{ledger.max_concurrency:.2f}" == "1.88"
        assert ledger.max_tokens == 119 * 32


class TestHybridCapacity:
    def test_sliding_window(self) -> None:
        """vLLM 19029: 137,407 blocks of starcoder2: 134.19x printed, 178.68x once windows count."""
        more = {"run": Run(max_num_batched_tokens=8192)}
        model = read_model("starcoder2-3b")
        after = blocks(model, 137_407, 16_384, engine="vllm@0.9.1", **more)
        assert after.blocks_per_request == 769
        assert round(after.max_concurrency, 2) == 178.68
        assert after.printed_tokens == 2_198_512
        before = blocks(model, 137_407, 16_384, engine="vllm@0.8.5", **more)
        assert round(before.max_concurrency, 2) == 134.19

    def test_qwen_35_27b(self) -> None:
        """vLLM 40691 (0.19): one log said 290,864 tokens and 33.04x at 32,768, which is 1,082,655.

        Both follow from 1487 blocks of 784 tokens in 4 groups: 1487 // 4 * 784, and 1487 / (42 + 3).
        """
        model = read_config(
            {
                "model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_attention_heads": 24,
                "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 5120, "torch_dtype": "bfloat16",
                "max_position_embeddings": 262_144, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
                "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
            },
            "qwen3.5-27b",
        )  # fmt: skip
        old = blocks(model, 1487, 32_768, engine="vllm@0.19")
        assert old.geometry.block_size == 784
        assert len(old.geometry.groups) == 4
        assert old.blocks_per_request == 45
        assert round(old.max_concurrency, 2) == 33.04
        assert old.printed_tokens == 290_864
        new = blocks(model, 1487, 32_768, engine="vllm@0.20.2")
        assert new.printed_tokens == pytest.approx(1_082_655, rel=2e-4)

    def test_block_of_qwen_36_35b(self) -> None:
        """vLLM 42966: 528 tokens per block where the label says 16 (float32 states, four ranks)."""
        model = read_config(
            {
                "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_attention_heads": 16,
                "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048, "torch_dtype": "bfloat16",
                "max_position_embeddings": 262_144, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
                "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
            },
            "qwen3.6-35b-a3b",
        )  # fmt: skip
        ledger = blocks(model, 5000, 32_768, parallel=Parallel(tp=4))
        assert ledger.geometry.block_size == 528

    def test_segments_of_a_hybrid(self) -> None:
        """GLM-5.3-Flash recipe 94: 643 blocks, 38 for each 3584 tokens: 57,344 tokens, not 1,553,140."""
        full = Attention(Kind.FULL, 1, 64, 64)
        state = State("mamba1", 1, 2, 1, 1, 128 * 256 - 2, 2)
        model = Model("segments", "x", "bfloat16", 1, 10**6, ((full,), *[(state,)] * 5))
        ledger = blocks(model, 643, 10**6)
        assert ledger.usable_blocks == 642
        assert ledger.blocks_for(3584) == 38
        assert ledger.running_at(3584) * 3584 == 57_344

    def test_a_request_costs_a_fixed_part_and_a_part_per_token(self) -> None:
        """vLLM 51041: GiB per token of the log varied 20-fold; a request costs A + B * length."""
        geometry = blocks(read_model("nemotron-h-8b"), 1000, 8192).geometry
        size = geometry.block_size
        costs = [geometry.bytes_for(size * count) for count in (1, 2, 3, 4)]
        steps = {after - before for before, after in pairwise(costs)}
        assert steps == {geometry.ranks[0].kv_bytes_per_block}
        assert costs[0] - steps.pop() > 0

    def test_never_fits(self) -> None:
        """vLLM 39734: 37,392 tokens against requests of up to 262,144 are 0.143 of one."""
        ledger = plan(
            Model.uniform(60, 16, 128),
            Pool(num_blocks=2337),
            engine="trtllm",
            block_size=16,
            max_model_len=262_144,
        )
        assert ledger.max_tokens == 37_392
        assert round(ledger.max_concurrency, 4) == 0.1426
        assert ledger.max_servable_length == 37_392

    def test_the_null_block_and_states_take_the_last_of_it(self) -> None:
        """vLLM 52530: 69 blocks of 16, max_model_len 1024, 3 draft tokens: 1008 tokens can be served."""
        state = State("mamba1", 1, 2, 1, 1, 100, 2)
        model = Model(
            "spec", "x", "bfloat16", 1, 1024, ((Attention(Kind.FULL, 1, 64, 64),), (state,))
        )
        ledger = blocks(model, 69, 1024, run=Run(speculative_tokens=3))
        assert ledger.geometry.block_size == 16
        assert ledger.max_servable_length == 1008

    def test_one_request_exactly(self) -> None:
        """vLLM 52520: 262,144 tokens and 1.00x; it starts and never serves one. 0.32 refuses to start."""
        old, new = (
            blocks(GQA_8B, 16_384, 262_144, engine=engine) for engine in ("vllm@0.24", "vllm@0.32")
        )
        assert old.max_concurrency == 1.0
        assert (old.starts, new.starts) == (True, False)
        assert old.max_servable_length == 262_128

    def test_prompts_longer_than_the_pool(self) -> None:
        """FreeToken 111: 8209 pages of one token serve at most 8209."""
        ledger = blocks(GQA_8B, 8209, 32_768, engine="sglang")
        assert ledger.max_servable_length == 8209


class TestPipelineAndTensorParallel:
    def test_each_stage_by_its_own_layers(self) -> None:
        """vLLM 34076: 16 of 48 layers, 3.18 GiB: 104,202 tokens, not the 34,734 of the whole model."""
        model = read_model("qwen3-coder-30b-a3b")
        room = round(3.18 * GIB)
        ledger = plan(
            model,
            Pool(kv_bytes=(room, 20 * GIB)),
            engine="vllm@0.15",
            parallel=Parallel(pp=2, pp_layers=(16, 32)),
            max_model_len=262_144,
        )
        assert bytes_per_token(model) == 98_304
        assert ledger.needed_bytes_whole == 24 * GIB
        first = ledger.geometry.ranks[0]
        assert first.kv_bytes_per_token == 32_768
        assert room // first.kv_bytes_per_token == 104_202
        assert room // bytes_per_token(model) == 34_734
        assert ledger.max_servable_length == 104_176  # whole blocks, the null block left out
        assert ledger.binds.rank.stage == 0
        assert ledger.starts is False

    def test_glm_on_eight_stages(self) -> None:
        """vLLM 32105: 71.156 GiB is the whole model's need; a stage has about an eighth, 8.895 GiB."""
        model = read_model("glm-4.7")
        parallel = Parallel(pp=8)
        ledger = plan(
            model, Pool(kv_bytes=(round(28.57 * GIB),)), engine="vllm@0.16", parallel=parallel
        )
        assert bytes_per_token(model) == 376_832
        assert ledger.needed_bytes_whole == pytest.approx(71.156 * GIB, rel=1e-5)
        assert ledger.starts is False
        stages = ledger.geometry.ranks
        assert [len(stage.layers) for stage in stages] == [11, 11, 11, 12, 12, 12, 12, 11]
        needs = [ledger.geometry.bytes_for(202_752, stage.stage) for stage in stages]
        assert sum(needs) / 8 == pytest.approx(8.895 * GIB, rel=1e-4)
        fixed = plan(
            model, Pool(kv_bytes=(round(28.57 * GIB),)), engine="vllm@0.32", parallel=parallel
        )
        assert fixed.starts is True

    def test_latent_rows_are_replicated(self) -> None:
        """vLLM 51454: eight replicas hold 7.68 times what eight tensor-parallel ranks hold (memory aside, 8)."""
        model = read_model("deepseek-v3")
        size = (50 * GIB,)
        split = plan(model, Pool(kv_bytes=size), parallel=Parallel(tp=8))
        replicas = plan(model, Pool(kv_bytes=size), parallel=Parallel(dp=8))
        assert split.geometry.ranks[0].replicas == 8
        ratio = 8 * replicas.max_concurrency / split.max_concurrency
        assert ratio == 8
        assert ratio == pytest.approx(156.9 / 20.43, rel=0.05)

    def test_a_block_in_descriptors(self) -> None:
        """Dynamo 12750: 96 pieces of 16,384 bytes are a block: K and V of 48 layers, 4 heads per rank."""
        model = Model.uniform(48, 4, 128)
        rank = blocks(model, 1000, 8192).geometry.ranks[0]
        assert rank.kv_bytes_per_block == 1_572_864
        assert rank.kv_bytes_per_block // (2 * len(rank.layers)) == 16_384


@pytest.mark.parametrize(
    ("prompt", "budget", "steps"),
    [
        pytest.param(130_000, 512, 254, id="vllm-10774"),
        pytest.param(100_000, 16_384, 7, id="vllm-57413-100k"),
        pytest.param(180_000, 16_384, 11, id="vllm-57413-180k"),
    ],
)
def test_steps_of_a_long_prompt(prompt: int, budget: int, steps: int) -> None:
    assert prefill_steps(prompt, budget) == steps
