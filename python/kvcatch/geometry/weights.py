"""How much the weights weigh: parameters counted from the config, times the bytes of their type.

Norms, biases and routers' corrections are left out: together they stay below a hundredth. What a config
does not let one count gives no figure at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.geometry import attention
from kvcatch.geometry.dtypes import WEIGHT_BYTES
from kvcatch.geometry.fields import MissingField
from kvcatch.geometry.layers import Attention, Kind, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.geometry.fields import Fields
    from kvcatch.geometry.layers import LayerCache

__all__ = ["Weights", "count_weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Counted weights.

    Attributes:
        parameters: Parameters of the language model.
        layer_bytes: Bytes of each decoder layer.
        embedding_bytes: Bytes of the input embedding, on the first stage.
        head_bytes: Bytes of the output projection, on the last stage; with tied embeddings the last stage
            of several has its own copy.
        is_tied: The output projection is the input embedding.
        hidden: Values of a hidden vector.
        inner: Width of the MLP a token passes.
        vocab: Entries of the vocabulary.
        how: The types used, for the explanation.
    """

    parameters: int
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    is_tied: bool
    hidden: int
    inner: int
    vocab: int
    how: str

    def rank_bytes(self, stage: range, tp: int) -> int:
        """Bytes on one of ``tp`` ranks of a pipeline stage, everything split evenly."""
        total = sum(self.layer_bytes[stage.start : stage.stop])
        first, last = stage.start == 0, stage.stop == len(self.layer_bytes)
        if first:
            total += self.embedding_bytes
        if last and not (self.is_tied and first):
            total += self.head_bytes
        return -(-total // tp)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.rank_bytes(range(len(self.layer_bytes)), 1)


_GATED = frozenset(
    ("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
     "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "llama4_text", "phi3", "internlm2", "olmo",
     "olmo2", "olmoe", "granite", "glm4_moe", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
     "jamba", "smollm3", "seed_oss", "glm4", "minimax_m2", "cohere", "cohere2")
)  # fmt: skip
"""Architectures whose MLP has three matrices and whose fields are read below."""

_TWO_MATRICES = frozenset(("starcoder2", "nemotron_h", "nemotron"))


def count_weights(
    fields: Fields, whole: Fields, layers: Sequence[tuple[LayerCache, ...]], dtype: str
) -> Weights | None:
    """Count what the config describes; None where it does not say enough or the architecture is not counted.

    Args:
        fields: The language model's config.
        whole: The whole config: quantisation stands there.
        layers: The caches read from it.
        dtype: Type of unquantised weights.

    Raises:
        ConfigError: a field that is there and malformed.
    """
    try:
        return _count(fields, whole, layers, dtype)
    except MissingField:
        return None


def _count(
    fields: Fields, whole: Fields, layers: Sequence[tuple[LayerCache, ...]], dtype: str
) -> Weights | None:
    model_type = fields.text("model_type") or ""
    if model_type not in _GATED | _TWO_MATRICES or not fields.has("vocab_size"):
        return None
    quantised = _quantised_bytes(fields, whole)
    if quantised is None:
        return None
    plain = WEIGHT_BYTES[dtype]
    per_linear, how, experts_only = quantised if quantised != _NONE else (plain, dtype, False)
    hidden = fields.count(*attention.HIDDEN)
    matrices = 2 if model_type in _TWO_MATRICES else 3
    parameters, layer_bytes = 0, []
    for index, caches in enumerate(layers):
        mixing = sum(_cache_parameters(fields, cache, hidden) for cache in caches)
        dense, experts = _mlp_parameters(fields, model_type, index, hidden, matrices, bool(caches))
        linear = mixing + dense + experts
        parameters += linear
        small = plain if experts_only else per_linear
        layer_bytes.append(round((mixing + dense) * small + experts * per_linear))
    embedding = fields.count("vocab_size") * hidden
    tied = fields.flag("tie_word_embeddings", model_type.startswith("gemma"))
    parameters += embedding if tied else 2 * embedding
    return Weights(
        parameters,
        tuple(layer_bytes),
        embedding * plain,
        embedding * plain,
        tied,
        hidden,
        _inner(fields),
        fields.count("vocab_size"),
        how,
    )


def _inner(fields: Fields) -> int:
    """The widest MLP a token passes: the dense one, or its experts together."""
    active = fields.count_or("num_experts_per_tok", 1)
    expert = fields.count_or("moe_intermediate_size", 0, minimum=0) * active
    return max(expert, fields.count("intermediate_size"))


_NONE = (0.0, "", False)


def _quantised_bytes(fields: Fields, whole: Fields) -> tuple[float, str, bool] | None:
    """Bytes per quantised parameter, its name, and whether only experts have it; None for an unknown one."""
    part = next((p for p in (fields, whole) if p.has("quantization_config")), None)
    if part is None:
        return _NONE
    quant = part.part("quantization_config")
    method = quant.text("quant_method")
    if method == "fp8":
        return 1.0, "fp8", False
    if method == "mxfp4":
        # 4 bits and one 8-bit scale for 32 values.
        return 4.25 / 8, "mxfp4 experts", True
    if method in ("awq", "gptq"):
        bits = quant.optional_count("bits") or quant.optional_count("w_bit")
        group = quant.optional_count("group_size", minimum=-1) or quant.optional_count(
            "q_group_size"
        )
        if bits not in (2, 3, 4, 8) or group is None:
            return None
        scale = (16 + bits) / group if group > 0 else 0.0
        return (bits + scale) / 8, f"{method} {bits}-bit", False
    return None


def _cache_parameters(fields: Fields, cache: LayerCache, hidden: int) -> int:
    if isinstance(cache, State):
        return _state_parameters(fields, cache, hidden)
    heads = attention.query_heads(fields)
    if cache.kind is Kind.MLA:
        return _mla_parameters(fields, cache, hidden, heads)
    if cache.kind is Kind.INDEXER:
        index_heads = fields.count_or("index_n_heads", 0, minimum=0)
        query = fields.count_or("q_lora_rank", hidden)
        return query * index_heads * cache.head_dim + hidden * (cache.head_dim + index_heads)
    gate = 2 if fields.text("model_type") == "qwen3_next" else 1
    width = (heads * (1 + gate) + 2 * cache.kv_heads) * cache.head_dim
    return hidden * width


def _mla_parameters(fields: Fields, cache: Attention, hidden: int, heads: int) -> int:
    nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    value, low = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    query = heads * (nope + rope)
    q_low = fields.optional_count("q_lora_rank")
    queries = hidden * query if q_low is None else q_low * (hidden + query)
    return queries + hidden * cache.head_dim + low * heads * (nope + value) + heads * value * hidden


def _state_parameters(fields: Fields, state: State, hidden: int) -> int:
    channels = state.conv_dim + 2 * state.groups * state.group_dim
    conv = channels * state.conv_kernel
    if state.recipe == "mamba1":
        rank = fields.count("mamba_dt_rank")
        inner, values = state.conv_dim, state.head_values
        return (
            conv + 3 * hidden * inner + inner * (rank + 2 * values) + rank * inner + inner * values
        )
    if state.recipe == "mamba2":
        return (
            conv
            + hidden * (2 * state.conv_dim + 2 * state.groups * state.group_dim + state.heads)
            + (state.conv_dim * hidden)
        )
    values = fields.count("linear_num_value_heads") * fields.count("linear_value_head_dim")
    return conv + hidden * (channels + values + 2 * state.heads) + values * hidden


def _mlp_parameters(
    fields: Fields, model_type: str, index: int, hidden: int, matrices: int, has_cache: bool
) -> tuple[int, int]:
    """Parameters of the dense part and of the routed experts of layer ``index``."""
    if model_type == "nemotron_h":
        return (0, 0) if has_cache else (matrices * hidden * fields.count("intermediate_size"), 0)
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((fields.count(name) for name in names if fields.has(name)), 0)
    if not experts or not _is_sparse(fields, index):
        name = (
            "intermediate_size_mlp" if fields.has("intermediate_size_mlp") else "intermediate_size"
        )
        return matrices * hidden * fields.count(name), 0
    width = fields.count("moe_intermediate_size", "intermediate_size")
    shared = fields.count_or("n_shared_experts", 0, minimum=0) * width
    shared += fields.count_or("shared_expert_intermediate_size", 0, minimum=0)
    if model_type == "llama4_text":
        shared += width
    return matrices * hidden * shared + hidden * experts, matrices * hidden * width * experts


def _is_sparse(fields: Fields, index: int) -> bool:
    if index < fields.count_or("first_k_dense_replace", 0, minimum=0):
        return False
    if index in (fields.counts("mlp_only_layers") or ()):
        return False
    if fields.has("expert_layer_period"):
        offset = fields.count_or("expert_layer_offset", 0, minimum=0)
        return index % fields.count("expert_layer_period") == offset
    step = fields.count_or("interleave_moe_layer_step", fields.count_or("decoder_sparse_step", 1))
    return (index + 1) % step == 0
