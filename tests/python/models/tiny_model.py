"""A Llama model of a few thousand random weights, as a GGUF file and as a safetensors folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LAYERS, HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_end|>", *ALPHABET, "aa", "user_defined"]
THETA, EPS = 5000.0, 1e-5


def hf_tensors(*, tied: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face's names."""
    make = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make) * 0.2

    queries, keys = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": random(len(TOKENS), HIDDEN),
        "model.norm.weight": random(HIDDEN) + 1,
    }
    if not tied:
        tensors["lm_head.weight"] = random(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": random(HIDDEN) + 1,
            f"{at}self_attn.q_proj.weight": random(queries, HIDDEN),
            f"{at}self_attn.k_proj.weight": random(keys, HIDDEN),
            f"{at}self_attn.v_proj.weight": random(keys, HIDDEN),
            f"{at}self_attn.o_proj.weight": random(HIDDEN, queries),
            f"{at}post_attention_layernorm.weight": random(HIDDEN) + 1,
            f"{at}mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    return tensors


def hf_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    tokenizer: Any,
    *,
    shards: int = 1,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    places = {}
    for index in range(shards):
        name = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[index::shards])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


_RENAMED = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, Any] | None = None,
    quantised: str | None = None,
) -> Path:
    """``metadata``: values to set instead; None leaves a key out. ``quantised``: the matrices' type."""
    writer = gguf.GGUFWriter(path, arch="llama")
    values: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": Q_HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "llama.rope.freq_base": THETA,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 3), 4],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 0,
        **(metadata or {}),
    }
    for key, value in values.items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType.STRING)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        data = tensor.numpy()
        heads = {"q": Q_HEADS, "k": KV_HEADS}.get(name.split("_proj")[0][-1:], 0)
        if heads and "self_attn" in name:
            # As llama.cpp's converter does: what rotates together side by side.
            halves = data.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
            data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
        stored = name
        for old, new in _RENAMED.items():
            stored = stored.replace(old, new)
        kind = None
        if quantised and data.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantised]
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
