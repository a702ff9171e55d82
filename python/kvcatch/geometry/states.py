"""Reading hybrid models: which layers keep a state, and its shapes.

Shapes and types follow vLLM 0.32 (``MambaStateShapeCalculator`` and each model's own file).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcatch.geometry import attention
from kvcatch.geometry.dtypes import WEIGHT_BYTES
from kvcatch.geometry.layers import Attention, Kind, LayerCache, State

if TYPE_CHECKING:
    from kvcatch.geometry.attention import Layers
    from kvcatch.geometry.fields import Fields


def _bytes_of(fields: Fields, name: str, default: int) -> int:
    text = fields.text(name)
    if text is None or text == "auto":
        return default
    if text not in WEIGHT_BYTES:
        fields.reject(name, f"unknown type; known are {', '.join(WEIGHT_BYTES)}")
    return WEIGHT_BYTES[text]


def gated_delta_net(fields: Fields, dtype: str) -> State:
    """Qwen3-Next and Qwen3.5: the state of a gated delta net."""
    key_heads = fields.count("linear_num_key_heads")
    value_heads = fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    size = WEIGHT_BYTES[dtype]
    return State(
        "gated_delta_net",
        conv_dim=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=fields.count("linear_conv_kernel_dim"),
        heads=value_heads,
        head_values=value_dim * key_dim,
        conv_bytes=size,
        state_bytes_each=_bytes_of(fields, "mamba_ssm_dtype", size),
    )


def qwen3_next(fields: Fields, heads: int, dim: int, dtype: str) -> Layers:
    """One full layer in ``full_attention_interval`` (4), gated delta nets elsewhere."""
    count = attention.num_layers(fields)
    state = gated_delta_net(fields, dtype)
    full = Attention(Kind.FULL, heads, dim, dim)
    types = attention.layer_types(fields, count)
    if types is None:
        is_full = attention.every_nth(fields, "full_attention_interval", count, 4)
        return [(full,) if whole else (state,) for whole in is_full]
    return _by_names(fields, types, {"full_attention": (full,), "linear_attention": (state,)})


def _by_names(fields: Fields, names: list[str], known: dict[str, tuple[LayerCache, ...]]) -> Layers:
    for name in names:
        if name not in known:
            fields.fail(f"layer type {name!r}, which this architecture does not define")
    return [known[name] for name in names]


def mamba2(
    fields: Fields,
    dtype: str,
    inner: int,
    heads: int,
    head: int,
    groups: int,
    state: int,
    kernel: int,
) -> State:
    """A Mamba-2 layer from its numbers."""
    if heads * head != inner:
        fields.fail(
            f"{heads} state heads of {head} values are not the {inner} channels of the state"
        )
    size = WEIGHT_BYTES[dtype]
    return State(
        "mamba2",
        conv_dim=inner,
        conv_kernel=kernel,
        heads=heads,
        head_values=head * state,
        conv_bytes=size,
        state_bytes_each=_bytes_of(fields, "mamba_ssm_cache_dtype", size),
        groups=groups,
        group_dim=state,
    )


def nemotron_h(fields: Fields, heads: int, dim: int, dtype: str) -> Layers:
    """Nemotron-H: ``hybrid_override_pattern`` has M (Mamba-2), * (attention), - (MLP), E (experts)."""
    pattern = fields.text("hybrid_override_pattern")
    if not pattern:
        fields.missing("hybrid_override_pattern")
    count = attention.num_layers(fields)
    if len(pattern) != count:
        fields.fail(
            f"hybrid_override_pattern has {len(pattern)} layers, but num_hidden_layers = {count}"
        )
    inner = fields.count("mamba_num_heads") * fields.count("mamba_head_dim")
    state = mamba2(
        fields,
        dtype,
        inner,
        fields.count("mamba_num_heads"),
        fields.count("mamba_head_dim"),
        fields.count("n_groups"),
        fields.count("ssm_state_size"),
        fields.count("conv_kernel"),
    )
    if not fields.has("mamba_ssm_cache_dtype"):
        # vLLM keeps this model's recurrent state in float32 unless its config names a type.
        state = replace(state, state_bytes_each=4)
    full = Attention(Kind.FULL, heads, dim, dim)
    known: dict[str, tuple[LayerCache, ...]] = {"M": (state,), "*": (full,), "-": (), "E": ()}
    return _by_names(fields, list(pattern), known)


def jamba(fields: Fields, heads: int, dim: int, dtype: str) -> Layers:
    """Jamba: attention where ``i % attn_layer_period == attn_layer_offset``, Mamba-1 elsewhere."""
    count = attention.num_layers(fields)
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", minimum=0)
    if offset >= period:
        fields.reject("attn_layer_offset", f"must be below attn_layer_period = {period}")
    inner = fields.count("mamba_expand") * fields.count(*attention.HIDDEN)
    size = WEIGHT_BYTES[dtype]
    state = State(
        "mamba1",
        conv_dim=inner,
        conv_kernel=fields.count("mamba_d_conv"),
        heads=inner,
        head_values=fields.count("mamba_d_state"),
        conv_bytes=size,
        state_bytes_each=size,
    )
    full = Attention(Kind.FULL, heads, dim, dim)
    return [(full,) if index % period == offset else (state,) for index in range(count)]


def _bamba_state(fields: Fields, dtype: str) -> State:
    return mamba2(
        fields,
        dtype,
        fields.count("mamba_expand") * fields.count(*attention.HIDDEN),
        fields.count("mamba_n_heads"),
        fields.count("mamba_d_head"),
        fields.count("mamba_n_groups"),
        fields.count("mamba_d_state"),
        fields.count("mamba_d_conv"),
    )


def bamba(fields: Fields, heads: int, dim: int, dtype: str) -> Layers:
    """Bamba: attention on ``attn_layer_indices``, Mamba-2 elsewhere."""
    count = attention.num_layers(fields)
    indices = fields.counts("attn_layer_indices")
    if indices is None:
        fields.missing("attn_layer_indices")
    if any(index >= count for index in indices):
        fields.reject("attn_layer_indices", f"the model has only {count} layers")
    state, full = _bamba_state(fields, dtype), Attention(Kind.FULL, heads, dim, dim)
    return [(full,) if index in indices else (state,) for index in range(count)]


def granite_hybrid(fields: Fields, heads: int, dim: int, dtype: str) -> Layers:
    """Granite 4: ``layer_types`` of mamba and attention."""
    count = attention.num_layers(fields)
    types = attention.layer_types(fields, count)
    if types is None:
        fields.missing("layer_types")
    full = Attention(Kind.FULL, heads, dim, dim)
    known: dict[str, tuple[LayerCache, ...]] = {"attention": (full,)}
    if "mamba" in types:
        known["mamba"] = (_bamba_state(fields, dtype),)
    return _by_names(fields, types, known)


def kimi_linear(fields: Fields, dtype: str) -> Layers:
    """Kimi Linear: MLA on ``full_attn_layers`` (from 1), KDA on ``kda_layers``; KDA's state is float32."""
    count = attention.num_layers(fields)
    part = fields.part("linear_attn_config")
    full, kda = part.counts("full_attn_layers"), part.counts("kda_layers")
    if full is None or kda is None:
        part.missing("full_attn_layers", "kda_layers")
    if sorted((*full, *kda)) != list(range(1, count + 1)):
        part.fail(f"full_attn_layers and kda_layers do not share out the {count} layers")
    heads, dim = part.count("num_heads"), part.count("head_dim")
    state = State(
        "kda",
        conv_dim=3 * heads * dim,
        conv_kernel=part.count("short_conv_kernel_size"),
        heads=heads,
        head_values=dim * dim,
        conv_bytes=WEIGHT_BYTES[dtype],
        state_bytes_each=4,
    )
    row = attention.mla_cache(fields)
    return [row if index + 1 in full else (state,) for index in range(count)]
