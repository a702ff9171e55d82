from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch.errors import ConfigError, InvalidArgument
from kvcatch.geometry import BUILT_IN, Kind, KvDtype, State, read_config, read_model

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 1024,
    "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def kinds(config: dict[str, Any]) -> str:
    """One letter per layer: Full, Window, Chunk, State, Latent, - for none."""
    letters = {
        Kind.FULL: "F", Kind.SLIDING_WINDOW: "W", Kind.CHUNKED_LOCAL: "C", Kind.STATE: "S", Kind.MLA: "L",
    }  # fmt: skip
    layers = read_config(config, "test").layers
    return "".join(letters[layer[0].kind] if layer else "-" for layer in layers)


def with_(**more: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **more}.items() if value != "gone"}


class TestWhereItComesFrom:
    def test_file_folder_and_name(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA))
        assert (
            read_model(path).layers == read_model(tmp_path).layers == read_config(LLAMA, "x").layers
        )
        assert read_model("Llama-3.1-8B").num_layers == 32

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_every_built_in_model_reads(self, name: str) -> None:
        model = read_model(name)
        assert model.max_model_len >= 4096
        assert model.weights is not None
        assert model.bytes_per_token(KvDtype.parse("auto", model.dtype)) > 0

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("[1]", "not a JSON object"),
            ("[" * 100_000, "not JSON"),
            ('"x"', "not a JSON object"),
        ],
    )
    def test_malformed_files(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_model(path)

    def test_no_such_model(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="neither a file nor a folder, nor built in"):
            read_model("llama-9")
        with pytest.raises(ConfigError, match="no such file"):
            read_model(tmp_path / "x.json")
        with pytest.raises(OSError, match=r"config\.json"):
            read_model(tmp_path)


class TestLayers:
    def test_windows_of_mistral(self) -> None:
        assert kinds(with_(model_type="mistral", sliding_window=4096)) == "WWWW"
        assert kinds(with_(model_type="mistral", sliding_window=None)) == "FFFF"

    def test_qwen_needs_the_switch(self) -> None:
        qwen = {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 3}
        assert kinds(with_(**qwen, use_sliding_window=False)) == "FFFF"
        assert kinds(with_(**qwen, use_sliding_window=True)) == "FFFW"

    def test_gemma(self) -> None:
        gemma = {"head_dim": 256, "sliding_window": 1024}
        assert kinds(with_(model_type="gemma2", **gemma)) == "WFWF"
        assert (
            kinds(with_(model_type="gemma3_text", num_hidden_layers=13, **gemma))
            == "WWWWWF" * 2 + "W"
        )

    def test_a_partial_text_config_takes_the_class_defaults(self) -> None:
        config = {
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
                "intermediate_size": 10_240,
            },
            "vision_config": {"num_hidden_layers": 27},
        }  # fmt: skip
        model = read_config(config, "gemma-3-4b-it")
        assert model.layers == read_model("gemma-3-4b").layers
        assert model.architecture == "Gemma3ForConditionalGeneration"
        assert "no image or sound tower" in model.notes[0]

    def test_gpt_oss(self) -> None:
        types = ["sliding_attention", "full_attention"] * 2
        config = with_(model_type="gpt_oss", head_dim=64, sliding_window=128)
        assert kinds(config) == kinds({**config, "layer_types": types}) == "WFWF"

    def test_llama_4(self) -> None:
        llama4 = with_(model_type="llama4_text", head_dim=128, num_hidden_layers=8)
        assert kinds(llama4) == "CCCFCCCF"
        assert kinds({**llama4, "no_rope_layers": [1, 1, 0, 1, 1, 1, 1, 0]}) == "CCFCCCCF"

    def test_latent(self) -> None:
        latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        assert kinds(with_(**latent)) == "LLLL"
        # Enough for the cache, not enough to count the weights: no figure rather than a refusal.
        assert read_config(with_(**latent), "x").weights is None

    def test_hybrids(self) -> None:
        assert kinds(BUILT_IN["qwen3-next-80b-a3b"]) == "SSSF" * 12
        jamba = kinds(BUILT_IN["jamba-v0.1"])
        assert jamba == "SSSSFSSS" * 4
        nemotron = kinds(BUILT_IN["nemotron-h-8b"])
        assert {letter: nemotron.count(letter) for letter in "SF-"} == {"S": 24, "F": 4, "-": 24}

    def test_kimi_linear(self) -> None:
        linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 64,
                  "short_conv_kernel_size": 4}  # fmt: skip
        config = with_(
            model_type="kimi_linear",
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            linear_attn_config=linear,
        )
        assert kinds(config) == "SSSL"
        with pytest.raises(ConfigError, match="do not share out the 4 layers"):
            read_config({**config, "linear_attn_config": {**linear, "kda_layers": [1, 2]}}, "x")

    def test_states_in_float32(self) -> None:
        state = next(c for c in read_model("nemotron-h-8b").caches() if isinstance(c, State))
        assert state.rank_bytes(1) == 10_240 * 3 * 2 + 128 * 64 * 128 * 4
        half = read_config({**BUILT_IN["nemotron-h-8b"], "mamba_ssm_cache_dtype": "bfloat16"}, "x")
        smaller = next(c for c in half.caches() if isinstance(c, State))
        assert state.rank_bytes(1) - smaller.rank_bytes(1) == 128 * 64 * 128 * 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model_type": "gone"}, "no model_type"),
            ({"model_type": "megamind"}, "unknown architecture 'megamind'"),
            ({"num_hidden_layers": "gone"}, "no num_hidden_layers"),
            ({"num_attention_heads": "gone"}, "no num_attention_heads"),
            ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
            ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
            ({"num_hidden_layers": 10**30}, "num_hidden_layers = 1000"),
            ({"num_hidden_layers": 10**6}, "more than 10000 layers"),
            ({"num_hidden_layers": 2.5}, "not a whole number"),
            ({"num_hidden_layers": "four"}, "not a whole number"),
            ({"num_hidden_layers": True}, "not a whole number"),
            ({"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide the 8"),
            ({"num_key_value_heads": 16}, "does not divide"),
            ({"hidden_size": 513}, "not divisible by 8"),
            ({"hidden_size": "gone"}, "no hidden_size"),
            ({"torch_dtype": "gone"}, "no torch_dtype"),
            ({"torch_dtype": "float3"}, "unknown type"),
            ({"kv_lora_rank": 512}, "contradicts model_type 'llama'"),
            ({"model_type": "qwen3"}, "no head_dim"),
            ({"model_type": "qwen2", "num_key_value_heads": "gone"}, "no num_key_value_heads"),
            ({"model_type": "gemma2", "head_dim": 64}, "no sliding_window"),
            (
                {"model_type": "mistral", "layer_types": ["full_attention"]},
                "1 entries, but the model has 4",
            ),
            ({"model_type": "mistral", "layer_types": ["odd"] * 4}, "'odd'"),
            ({"model_type": "deepseek_v3"}, "no kv_lora_rank"),
            ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "no qk_rope_head_dim"),
            (
                {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 2},
                "must be below",
            ),
            ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "has 2 layers"),
            ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
            ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling.factor = -2"),
            ({"text_config": 5}, "text_config = 5: not an object"),
        ],
    )
    def test_one_clear_line(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read_config(with_(**change), "config.json")
        message = str(caught.value)
        assert words in message
        assert message.startswith("config.json: ")
        assert "\n" not in message


class TestLength:
    @pytest.mark.parametrize(
        ("change", "length"),
        [
            ({}, 4096),
            ({"max_position_embeddings": "gone"}, 0),
            ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16_384),
            ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 8192),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 40}}, 4096),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, 4096),
            ({"model_max_length": 1000}, 1000),
        ],
    )
    def test_as_vllm_derives_it(self, change: dict[str, Any], length: int) -> None:
        assert read_config(with_(**change), "x").max_model_len == length


class TestWeights:
    @pytest.mark.parametrize(
        ("name", "billions"),
        [
            ("llama-3.1-8b", 8.03), ("llama-3.3-70b", 70.55), ("mixtral-8x7b", 46.70), ("qwen3-30b-a3b", 30.53),
            ("qwen2.5-7b", 7.62), ("deepseek-v3", 671.0), ("deepseek-v2-lite", 15.71), ("gpt-oss-20b", 20.91),
            ("gpt-oss-120b", 116.8), ("gemma-2-9b", 9.24), ("jamba-v0.1", 51.6), ("nemotron-h-8b", 8.10),
            ("starcoder2-3b", 3.03), ("kimi-k2", 1026.0), ("llama-4-scout", 107.8),
        ],
    )  # fmt: skip
    def test_published_parameters(self, name: str, billions: float) -> None:
        counted = read_model(name).weights
        assert counted is not None
        assert counted.parameters / 1e9 == pytest.approx(billions, rel=2e-3)

    def test_stages_sum_to_the_whole(self) -> None:
        counted = read_model("llama-3.1-8b").weights
        assert counted is not None
        stages = counted.rank_bytes(range(10), 1) + counted.rank_bytes(range(10, 32), 1)
        assert stages == counted.total_bytes == counted.parameters * 2

    def test_quantised(self) -> None:
        awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
        counted = read_config({**BUILT_IN["llama-3.1-8b"], **awq}, "x").weights
        plain = read_model("llama-3.1-8b").weights
        assert counted is not None
        assert plain is not None
        assert 0.3 < counted.total_bytes / plain.total_bytes < 0.4
        unknown = {"quantization_config": {"quant_method": "exl3"}}
        assert read_config({**BUILT_IN["llama-3.1-8b"], **unknown}, "x").weights is None


def test_kv_types() -> None:
    model = read_config(LLAMA, "x")
    sizes = {
        name: model.bytes_per_token(KvDtype.parse(name, model.dtype)) // 4
        for name in ("auto", "fp32", "fp8", "int8", "fp8_per_token_head", "int8_per_token_head")
    }
    # 2 KV heads of 64: K and V, and one float32 scale for each in the per-token-head types.
    assert sizes == {
        "auto": 512, "fp32": 1024, "fp8": 256, "int8": 256, "fp8_per_token_head": 272, "int8_per_token_head": 272,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="kv_dtype = 'fp4'"):
        KvDtype.parse("fp4", "bfloat16")
    with pytest.raises(InvalidArgument, match="row of MLA"):
        model.bytes_per_token(KvDtype.parse("fp8_ds_mla", "bfloat16"))
