"""From a file's tensors to the model's: names, fused matrices, and the order of query and key rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvcatch.models.dequantise import read_tensor
from kvcatch.models.errors import ModelError
from kvcatch.models.extras import need
from kvcatch.models.llama import LayerWeights, LlamaWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcatch.models.config import LlamaConfig
    from kvcatch.models.gguf import GGUFFile

__all__ = ["halves_first", "load_gguf", "load_safetensors"]

Tensor = Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Names:
    """What a format calls each tensor; ``{}`` is the layer."""

    embedding: str
    norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str

    def of_layer(self, index: int) -> list[str]:
        attention = (self.attention_norm, self.query, self.key, self.value, self.attention_out)
        mlp = (self.mlp_norm, self.gate, self.up, self.down)
        return [name.format(index) for name in (*attention, *mlp)]


_GGUF = _Names(
    "token_embd.weight", "output_norm.weight", "output.weight", "blk.{}.attn_norm.weight",
    "blk.{}.attn_q.weight", "blk.{}.attn_k.weight", "blk.{}.attn_v.weight",
    "blk.{}.attn_output.weight", "blk.{}.ffn_norm.weight", "blk.{}.ffn_gate.weight",
    "blk.{}.ffn_up.weight", "blk.{}.ffn_down.weight",
)  # fmt: skip
_ATTENTION, _MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
_HF = _Names(
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    "model.layers.{}.input_layernorm.weight", _ATTENTION + "q_proj.weight",
    _ATTENTION + "k_proj.weight", _ATTENTION + "v_proj.weight", _ATTENTION + "o_proj.weight",
    "model.layers.{}.post_attention_layernorm.weight", _MLP + "gate_proj.weight",
    _MLP + "up_proj.weight", _MLP + "down_proj.weight",
)  # fmt: skip
_ROPE_DIVISORS = "rope_freqs.weight"


class _Reader(Protocol):
    """Reads one tensor by name."""

    def __call__(self, name: str) -> Tensor: ...


def halves_first(rows: Tensor, num_heads: int) -> Tensor:
    """Query or key rows of a GGUF file in the order the model wants.

    GGUF's Llama files keep the two elements that rotate together side by side (0, 1, 2, 3...), as llama.cpp rotates
    them; here element ``i`` rotates against ``i + head_dim / 2``. Left alone, the text still looks like language.

    Args:
        rows: [num_heads * head_dim, hidden].
        num_heads: heads in ``rows``.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def load_gguf(file: GGUFFile, config: LlamaConfig) -> LlamaWeights:
    """The weights of a GGUF file; each layer is read when it is asked for.

    Raises:
        ModelError: a tensor is missing, or there is one that a Llama model does not have (a bias, an expert).
    """
    names = set(file.tensors)
    _check_names(str(file.path), names, _GGUF, config, ignored={_ROPE_DIVISORS})

    def read(name: str) -> Tensor:
        return read_tensor(file, name)

    return LlamaWeights(
        embedding=read(_GGUF.embedding),
        layers=_layers(read, _GGUF, config, halves_first),
        norm=read(_GGUF.norm),
        head=None if config.tie_embeddings else read(_GGUF.head),
        rope_divisors=read(_ROPE_DIVISORS) if _ROPE_DIVISORS in names else None,
    )


def load_safetensors(folder: Path, config: LlamaConfig) -> LlamaWeights:
    """The weights of a folder with ``model.safetensors`` or its shards and their index.

    Raises:
        ModelError: a file or a tensor is missing or damaged, or there is one that a Llama model does not have.
    """
    safetensors = need("safetensors")
    files, where = _shards(folder)
    opened = {}
    names: dict[str, str] = {}
    for name in files:
        path = folder / name
        try:
            opened[name] = safetensors.safe_open(str(path), framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else f"damaged: {error}"
            raise ModelError(f"{path}: {reason}") from error
        names.update(dict.fromkeys(opened[name].keys(), name))
    tied = {_HF.head} if config.tie_embeddings else set()
    rotary = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    _check_names(where, set(names), _HF, config, ignored=tied | rotary)

    def read(name: str) -> Tensor:
        try:
            return opened[names[name]].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ModelError(f"{folder / names[name]}: {name}: damaged: {error}") from error

    return LlamaWeights(
        embedding=read(_HF.embedding),
        layers=_layers(read, _HF, config, lambda rows, _: rows),
        norm=read(_HF.norm),
        head=None if config.tie_embeddings else read(_HF.head),
    )


def _layers(
    read: _Reader, names: _Names, config: LlamaConfig, order: Callable[[Tensor, int], Tensor]
) -> Iterator[LayerWeights]:
    torch = need("torch")
    for index in range(config.num_layers):
        norm, query, key, value, out, mlp_norm, gate, up, down = (
            read(name) for name in names.of_layer(index)
        )
        if query.shape[0] != config.num_q_heads * config.head_dim or (
            key.shape[0] != config.num_kv_heads * config.head_dim
        ):
            raise ModelError(
                f"layer {index}: {query.shape[0]} query and {key.shape[0]} key rows: the config says "
                f"{config.num_q_heads} and {config.num_kv_heads} heads of {config.head_dim}"
            )
        yield LayerWeights(
            attention_norm=norm,
            qkv=torch.cat(
                (order(query, config.num_q_heads), order(key, config.num_kv_heads), value)
            ),
            attention_out=out,
            mlp_norm=mlp_norm,
            gate_up=torch.cat((gate, up)),
            down=down,
        )


def _shards(folder: Path) -> tuple[list[str], str]:
    """The files that hold the weights, and how a message names them."""
    index = folder / INDEX
    if not index.exists():
        return [SINGLE], str(folder / SINGLE)
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of shards: damaged") from error
    for name in files:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelError(f"{index}: shard {name!r} is not a file of the same folder")
    return files, str(index)


def _check_names(
    where: str, have: set[str], names: _Names, config: LlamaConfig, ignored: set[str]
) -> None:
    wanted = {names.embedding, names.norm}
    if not config.tie_embeddings:
        wanted.add(names.head)
    for index in range(config.num_layers):
        wanted.update(names.of_layer(index))
    for problem, which in (("lacks", wanted - have), ("has", have - wanted - ignored)):
        if which:
            more = f" and {len(which) - 1} more" if len(which) > 1 else ""
            unknown = ", which a Llama model does not have" if problem == "has" else ""
            raise ModelError(f"{where}: {problem} tensor {min(which)}{more}{unknown}")
