"""Configs of common models, so that a plan needs no download: the published fields that matter here."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Config = dict[str, Any]


def _dense(
    model_type: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    inner: int,
    vocab: int,
    length: int,
    **more: Any,
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "torch_dtype": "bfloat16",
        **more,
    }


_FP8: Config = {"quantization_config": {"quant_method": "fp8"}}


def _deepseek(
    layers: int, heads: int, hidden: int, inner: int, vocab: int, length: int, **more: Any
) -> Config:
    fields = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "moe_layer_freq": 1,
    }
    base = _dense("deepseek_v3", layers, heads, heads, hidden, inner, vocab, length)
    return {**base, **fields, **more}


_DEEPSEEK_V3 = _deepseek(
    61, 128, 7168, 18_432, 129_280, 163_840,
    n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, **_FP8,
)  # fmt: skip


def _qwen_moe(
    layers: int, heads: int, kv_heads: int, hidden: int, expert: int, length: int
) -> Config:
    return _dense(
        "qwen3_moe", layers, heads, kv_heads, hidden, 3 * hidden, 151_936, length,
        head_dim=128, num_experts=128, moe_intermediate_size=expert, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Config:
    return _dense(
        "gpt_oss", layers, 64, 8, 2880, 2880, 201_088, 131_072,
        head_dim=64, num_local_experts=experts, sliding_window=128,
        quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip


BUILT_IN: Mapping[str, Config] = MappingProxyType({
    "llama-2-7b": _dense("llama", 32, 32, 32, 4096, 11_008, 32_000, 4096),
    "llama-3-8b": _dense("llama", 32, 32, 8, 4096, 14_336, 128_256, 8192),
    "llama-3.1-8b": _dense("llama", 32, 32, 8, 4096, 14_336, 128_256, 131_072),
    "llama-3.2-1b": _dense(
        "llama", 16, 32, 8, 2048, 8192, 128_256, 131_072, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _dense(
        "llama", 28, 24, 8, 3072, 8192, 128_256, 131_072, head_dim=128, tie_word_embeddings=True
    ),
    "llama-3.3-70b": _dense("llama", 80, 64, 8, 8192, 28_672, 128_256, 131_072),
    "llama-3.1-405b": _dense("llama", 126, 128, 8, 16_384, 53_248, 128_256, 131_072),
    "llama-4-scout": _dense(
        "llama4_text", 48, 40, 8, 5120, 8192, 202_048, 10_485_760, head_dim=128,
        attention_chunk_size=8192, num_local_experts=16, intermediate_size_mlp=16_384,
        interleave_moe_layer_step=1,
    ),
    "smollm2-135m": _dense("llama", 30, 9, 3, 576, 1536, 49_152, 8192, tie_word_embeddings=True),
    "mistral-7b-v0.1": _dense("mistral", 32, 32, 8, 4096, 14_336, 32_000, 32_768, sliding_window=4096),
    "mistral-7b-v0.3": _dense("mistral", 32, 32, 8, 4096, 14_336, 32_768, 32_768),
    "mixtral-8x7b": _dense("mixtral", 32, 32, 8, 4096, 14_336, 32_000, 32_768, num_local_experts=8),
    "qwen1.5-7b": _dense("qwen2", 32, 32, 32, 4096, 11_008, 151_936, 32_768),
    "qwen2.5-7b": _dense("qwen2", 28, 28, 4, 3584, 18_944, 152_064, 32_768),
    "qwen2.5-32b": _dense("qwen2", 64, 40, 8, 5120, 27_648, 152_064, 32_768),
    "qwen2.5-72b": _dense("qwen2", 80, 64, 8, 8192, 29_568, 152_064, 32_768),
    "qwen3-8b": _dense("qwen3", 36, 32, 8, 4096, 12_288, 151_936, 40_960, head_dim=128),
    "qwen3-32b": _dense("qwen3", 64, 64, 8, 5120, 25_600, 151_936, 40_960, head_dim=128),
    "qwen3-30b-a3b": _qwen_moe(48, 32, 4, 2048, 768, 40_960),
    "qwen3-coder-30b-a3b": _qwen_moe(48, 32, 4, 2048, 768, 262_144),
    "qwen3-235b-a22b": _qwen_moe(94, 64, 4, 4096, 1536, 40_960),
    "qwen3-next-80b-a3b": _dense(
        "qwen3_next", 48, 16, 2, 2048, 5120, 151_936, 262_144, head_dim=256, full_attention_interval=4,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "gemma-2-9b": _dense(
        "gemma2", 42, 16, 8, 3584, 14_336, 256_000, 8192, head_dim=256, sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "gemma-2-27b": _dense(
        "gemma2", 46, 32, 16, 4608, 36_864, 256_000, 8192, head_dim=128, sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "gemma-3-4b": _dense(
        "gemma3_text", 34, 8, 4, 2560, 10_240, 262_208, 131_072, head_dim=256, sliding_window=1024,
        tie_word_embeddings=True,
    ),
    "gemma-3-12b": _dense(
        "gemma3_text", 48, 16, 8, 3840, 15_360, 262_208, 131_072, head_dim=256, sliding_window=1024,
        tie_word_embeddings=True,
    ),
    "gemma-3-27b": _dense(
        "gemma3_text", 62, 32, 16, 5376, 21_504, 262_208, 131_072, head_dim=128, sliding_window=1024,
        tie_word_embeddings=True,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "starcoder2-3b": _dense(
        "starcoder2", 30, 24, 2, 3072, 12_288, 49_152, 16_384, sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "deepseek-v2-lite": _deepseek(
        27, 16, 2048, 10_944, 102_400, 163_840, model_type="deepseek_v2", q_lora_rank=None,
        n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-v3.2": {
        **_DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "kimi-k2": _deepseek(
        61, 64, 7168, 18_432, 163_840, 131_072, model_type="kimi_k2", n_routed_experts=384,
        n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1, **_FP8,
    ),
    "glm-4.7": _dense(
        "glm4_moe", 92, 96, 8, 5120, 12_288, 151_552, 202_752, head_dim=128, n_routed_experts=160,
        n_shared_experts=1, moe_intermediate_size=1536, first_k_dense_replace=3,
    ),
    "jamba-v0.1": _dense(
        "jamba", 32, 32, 8, 4096, 14_336, 65_536, 262_144, attn_layer_period=8, attn_layer_offset=4,
        expert_layer_period=2, expert_layer_offset=1, num_experts=16, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_dt_rank=256,
    ),
    "nemotron-h-8b": _dense(
        "nemotron_h", 52, 32, 8, 4096, 21_504, 131_072, 8192, attention_head_dim=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
    ),
})  # fmt: skip
"""Name to config; names are lower case."""
