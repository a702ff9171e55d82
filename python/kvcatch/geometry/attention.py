"""Reading attention layers: heads, windows and chunks by layer, latent rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.geometry.layers import Attention, Kind, LayerCache

if TYPE_CHECKING:
    from kvcatch.geometry.fields import Fields

Layers = list[tuple[LayerCache, ...]]

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

MAX_LAYERS = 10_000


def num_layers(fields: Fields) -> int:
    """Decoder layers of the model."""
    count = fields.count(*LAYERS)
    if count > MAX_LAYERS:
        name = next(name for name in LAYERS if fields.has(name))
        fields.reject(name, f"more than {MAX_LAYERS} layers")
    return count


def query_heads(fields: Fields) -> int:
    """Query heads of an attention layer."""
    return fields.count(*HEADS)


def kv_heads(fields: Fields, *, same_as_query: bool) -> int:
    """Key/value heads; equal to the query heads where the architecture defines that for a missing field."""
    heads = query_heads(fields)
    if same_as_query and not any(fields.has(name) for name in KV_HEADS):
        return heads
    count = fields.count(*KV_HEADS)
    name = next(name for name in KV_HEADS if fields.has(name))
    if heads % count:
        fields.reject(name, f"does not divide the {heads} attention heads")
    return count


def head_dim(fields: Fields, *, may_derive: bool) -> int:
    """Values per head: the config's own ``head_dim``, else hidden / heads where that is the definition."""
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if fields.has(name):
            return fields.count(name)
    if not may_derive:
        fields.missing("head_dim")
    hidden, heads = fields.count(*HIDDEN), query_heads(fields)
    if hidden % heads:
        fields.fail(
            f"hidden size {hidden} is not divisible by {heads} attention heads, and no head_dim"
        )
    return hidden // heads


def window(fields: Fields) -> int:
    """The sliding window; the layers that have one need it."""
    return fields.count("sliding_window")


def local(fields: Fields, kind: Kind, heads: int, dim: int) -> Attention:
    """A layer with a window or a chunk."""
    name = "sliding_window" if kind is Kind.SLIDING_WINDOW else "attention_chunk_size"
    return Attention(kind, heads, dim, dim, reach=fields.count(name))


_LAYER_TYPES = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING_WINDOW,
    "chunked_attention": Kind.CHUNKED_LOCAL,
}


def layer_types(fields: Fields, count: int) -> list[str] | None:
    """The config's list of layer types, as long as the model; None where it has none."""
    types = fields.names("layer_types")
    if types is not None and len(types) != count:
        fields.fail(f"layer_types has {len(types)} entries, but the model has {count} layers")
    return types


def by_types(fields: Fields, types: list[str], heads: int, dim: int) -> Layers:
    """Attention layers as ``layer_types`` names them."""
    layers: Layers = []
    made: dict[str, Attention] = {}
    for name in types:
        if name not in made:
            kind = _LAYER_TYPES.get(name)
            if kind is None:
                fields.fail(f"layer_types has {name!r}, which this architecture does not define")
            made[name] = (
                Attention(kind, heads, dim, dim)
                if kind is Kind.FULL
                else local(fields, kind, heads, dim)
            )
        layers.append((made[name],))
    return layers


def alternate(fields: Fields, is_full: list[bool], kind: Kind, heads: int, dim: int) -> Layers:
    """Full layers where ``is_full`` says so, local ones elsewhere."""
    full = Attention(Kind.FULL, heads, dim, dim)
    near = full if all(is_full) else local(fields, kind, heads, dim)
    return [(full,) if whole else (near,) for whole in is_full]


def every_nth(fields: Fields, name: str, count: int, default: int | None = None) -> list[bool]:
    """True for each layer whose number, from 1, is a multiple of the field ``name``."""
    period = fields.count(name) if default is None else fields.count_or(name, default)
    return [(index + 1) % period == 0 for index in range(count)]


def plain(fields: Fields, heads: int, dim: int) -> Layers:
    """All layers full, or as ``layer_types`` says."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    return alternate(fields, [True] * count, Kind.FULL, heads, dim)


def windowed(fields: Fields, heads: int, dim: int) -> Layers:
    """All layers with the window of ``sliding_window``, or all full where it is null (Mistral, Phi-3)."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    whole = not fields.has("sliding_window") or fields.get("sliding_window") == 0
    return alternate(fields, [whole] * count, Kind.SLIDING_WINDOW, heads, dim)


def qwen(fields: Fields, heads: int, dim: int) -> Layers:
    """Qwen: windows only with ``use_sliding_window``, from layer ``max_window_layers`` on."""
    count = num_layers(fields)
    if not fields.flag("use_sliding_window", False):
        return alternate(fields, [True] * count, Kind.FULL, heads, dim)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    first = fields.count("max_window_layers", minimum=0)
    return alternate(
        fields, [index < first for index in range(count)], Kind.SLIDING_WINDOW, heads, dim
    )


def gemma2(fields: Fields, heads: int, dim: int) -> Layers:
    """Gemma 2: every second layer is full, the first is not."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    full = [index % 2 == 1 for index in range(count)]
    return alternate(fields, full, Kind.SLIDING_WINDOW, heads, dim)


def gemma3(fields: Fields, heads: int, dim: int) -> Layers:
    """Gemma 3: one full layer in ``sliding_window_pattern`` (6)."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    full = every_nth(fields, "sliding_window_pattern", count, 6)
    return alternate(fields, full, Kind.SLIDING_WINDOW, heads, dim)


def gpt_oss(fields: Fields, heads: int, dim: int) -> Layers:
    """gpt-oss: windows on layers 0, 2, 4, ..."""
    return gemma2(fields, heads, dim)


def cohere2(fields: Fields, heads: int, dim: int) -> Layers:
    """Command R7B and later: one full layer in four; its window sees itself and ``sliding_window`` more."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    full = (
        [name == "full_attention" for name in types]
        if types is not None
        else every_nth(fields, "sliding_window_pattern", count, 4)
    )
    near = Attention(Kind.SLIDING_WINDOW, heads, dim, dim, reach=window(fields) + 1)
    whole = Attention(Kind.FULL, heads, dim, dim)
    return [(whole,) if is_full else (near,) for is_full in full]


def llama4(fields: Fields, heads: int, dim: int) -> Layers:
    """Llama 4: chunks of ``attention_chunk_size``, except on layers without rotary positions."""
    count = num_layers(fields)
    types = layer_types(fields, count)
    if types is not None:
        return by_types(fields, types, heads, dim)
    rope = fields.counts("no_rope_layers")
    if rope:
        if len(rope) != count:
            fields.fail(f"no_rope_layers has {len(rope)} entries, but the model has {count} layers")
        full = [entry == 0 for entry in rope]
    else:
        full = every_nth(fields, "no_rope_layer_interval", count, 4)
    return alternate(fields, full, Kind.CHUNKED_LOCAL, heads, dim)


def mla_cache(fields: Fields) -> tuple[LayerCache, ...]:
    """The latent row of a layer, and the indexer's row beside it where the model is sparse.

    DeepSeek V3.2's index keys are fp8 with one float32 scale per 128 values, whatever the KV type.
    """
    row = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim", minimum=0)
    caches = [Attention(Kind.MLA, 1, row, 0)]
    if fields.has("index_topk"):
        dim = fields.count("index_head_dim")
        caches.append(Attention(Kind.INDEXER, 1, dim, 0, row_bytes=dim + dim // 128 * 4))
    return tuple(caches)


def mla(fields: Fields) -> Layers:
    """DeepSeek V2, V3, R1, Kimi K2, GLM: a latent row in every layer."""
    for name in ("compress_ratios", "compress_ratio"):
        if fields.has(name):
            fields.reject(
                name, "compressed latent rows (DeepSeek V4) are not known to this version"
            )
    if not fields.has("kv_lora_rank"):
        fields.missing("kv_lora_rank")
    return [mla_cache(fields)] * num_layers(fields)
