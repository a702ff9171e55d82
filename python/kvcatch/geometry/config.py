"""From a ``config.json`` to a Model: find the file, know the architecture, read its layers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvcatch.errors import ConfigError
from kvcatch.geometry import attention, states
from kvcatch.geometry.builtin import BUILT_IN
from kvcatch.geometry.dtypes import WEIGHT_BYTES
from kvcatch.geometry.fields import MAX_COUNT, Fields
from kvcatch.geometry.model import Model
from kvcatch.geometry.strict_json import parse_json
from kvcatch.geometry.weights import count_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcatch.geometry.attention import Layers

__all__ = ["known_architectures", "read_config", "read_model"]

MAX_FILE_BYTES = 16 * 2**20

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a model with images or sound keeps its language model."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one ``model_type`` is read.

    Attributes:
        read: Attention models: (fields, kv_heads, head_dim) -> layers.
        hybrid: Models with states: the same with the dtype.
        latent: MLA models: (fields, dtype) -> layers; they have no KV heads.
        may_derive: A missing head_dim is hidden / heads by the architecture's definition.
        same_as_query: Missing KV heads are the query heads by the architecture's definition.
        defaults: What the architecture's own config class fills in, where configs leave it out.
    """

    read: Callable[[Fields, int, int], Layers] | None = None
    hybrid: Callable[[Fields, int, int, str], Layers] | None = None
    latent: Callable[[Fields, str], Layers] | None = None
    may_derive: bool = True
    same_as_query: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_MHA = Architecture(attention.plain, same_as_query=True)
_GQA = Architecture(attention.plain)
_OWN_DIM = Architecture(attention.plain, may_derive=False)
_WINDOWED = Architecture(attention.windowed)
_QWEN = Architecture(attention.qwen)
_QWEN3 = Architecture(attention.qwen, may_derive=False)
_GEMMA3_DEFAULTS = MappingProxyType(
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
     "sliding_window": 4096, "max_position_embeddings": 131_072}
)  # fmt: skip
_GEMMA3 = Architecture(attention.gemma3, may_derive=False, defaults=_GEMMA3_DEFAULTS)
_LLAMA4 = Architecture(
    attention.llama4, may_derive=False, defaults=MappingProxyType({"attention_chunk_size": 8192})
)
_MLA = Architecture(latent=lambda fields, _: attention.mla(fields))
_GDN = Architecture(hybrid=states.qwen3_next, may_derive=False)

_ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        ("llama", "olmo", "olmo2", "internlm2", "stablelm", "phi", "granite", "granitemoe", "opt",
         "gpt_neox", "gpt2", "bloom", "deepseek", "cohere", "persimmon", "exaone", "baichuan", "aquila",
         "xverse", "minicpm"),
        _MHA,
    ),
    **dict.fromkeys(
        ("mixtral", "phimoe", "ernie4_5", "ernie4_5_moe", "smollm3", "seed_oss", "hunyuan_v1_dense",
         "hunyuan_v1_moe", "mimo", "arcee", "olmoe", "internlm3", "nemotron", "apertus"),
        _GQA,
    ),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "gemma", "minimax_m2", "helium"), _OWN_DIM),
    **dict.fromkeys(("mistral", "ministral", "phi3", "starcoder2"), _WINDOWED),
    **dict.fromkeys(("qwen2", "qwen2_moe"), _QWEN),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    "gemma2": Architecture(attention.gemma2, may_derive=False),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    "gpt_oss": Architecture(attention.gpt_oss, may_derive=False),
    "cohere2": Architecture(attention.cohere2),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa",
         "longcat_flash", "pangu_ultra_moe"),
        _MLA,
    ),
    "kimi_linear": Architecture(latent=states.kimi_linear),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GDN
    ),
    "nemotron_h": Architecture(hybrid=states.nemotron_h),
    "jamba": Architecture(hybrid=states.jamba),
    "bamba": Architecture(hybrid=states.bamba),
    "granitemoehybrid": Architecture(hybrid=states.granite_hybrid),
}  # fmt: skip


def known_architectures() -> tuple[str, ...]:
    """Every ``model_type`` that can be read."""
    return tuple(_ARCHITECTURES)


def read_model(source: str | Path) -> Model:
    """The model of a ``config.json``, of a folder that has one, or of a built-in name.

    Raises:
        ConfigError: no such model, malformed JSON, an unknown architecture, a missing or contradictory field.
        OSError: a file that cannot be read.
    """
    name = str(source)
    if not name.strip():
        raise ConfigError(f"model {name!r}: no name")
    path = Path(name)
    built_in = BUILT_IN.get(name.lower())
    if built_in is not None and not path.exists():
        return read_config(built_in, name.lower())
    if path.is_dir():
        path /= "config.json"
    elif not path.exists():
        if path.suffix != ".json" and "\0" not in name and len(path.parts) <= 2:
            raise ConfigError(
                f"model {name}: neither a file nor a folder, nor built in; {_instead(name.lower())}"
            )
        raise ConfigError(f"model {name}: no such file or folder")
    content = _content(path)
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return read_config(data, str(path))


def _content(path: Path) -> bytes:
    """The file's bytes; a device such as /dev/zero has a size of 0 and no end, so it is read to a limit."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB are no model config")
    return content


def _instead(name: str) -> str:
    """Built-in names that an unknown one may have meant; all of them where none is near."""
    close = [known for known in BUILT_IN if known.startswith(name) or name.startswith(known)]
    close = close or difflib.get_close_matches(name, BUILT_IN, 3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"built in are {', '.join(BUILT_IN)}"


def read_config(data: object, name: str) -> Model:
    """The model a parsed config describes.

    Args:
        data: The JSON object.
        name: How messages name it.

    Raises:
        ConfigError: as ``read_model``.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: not a JSON object")
    whole = Fields(data, name)
    fields, notes = _language_part(whole)
    model_type = fields.text("model_type")
    names = whole.names("architectures")
    if model_type is None:
        fields.missing("model_type")
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is None:
        shown = f" ({', '.join(names)})" if names else ""
        fields.fail(
            f"unknown architecture {model_type[:60]!r}{shown}: missing is the rule for what its layers cache; "
            f"give its pool with --num-blocks and a config of a known architecture with the same heads"
        )
    if architecture.defaults:
        present = {key: value for key, value in fields.data.items() if value is not None}
        fields = Fields({**architecture.defaults, **present}, fields.where)
    dtype = _dtype(fields, whole)
    layers = _layers(fields, architecture, dtype)
    weights = count_weights(fields, whole, layers, dtype)
    return Model(
        name=name,
        architecture=names[0] if names else model_type,
        dtype=dtype,
        attention_heads=attention.query_heads(fields),
        max_model_len=_max_model_len(fields, whole),
        layers=tuple(layers),
        weights=weights,
        notes=tuple(notes),
    )


def _language_part(whole: Fields) -> tuple[Fields, list[str]]:
    fields, notes = whole, []
    for _ in range(3):
        part = next((name for name in TEXT_PARTS if fields.has(name)), None)
        if part is None:
            break
        if part == TEXT_PARTS[0] or not fields.has("num_hidden_layers"):
            fields = fields.part(part)
            notes = [f"only the language model ({part}) is counted, no image or sound tower"]
        else:
            break
    return fields, notes


def _layers(fields: Fields, architecture: Architecture, dtype: str) -> Layers:
    if architecture.latent is not None:
        return architecture.latent(fields, dtype)
    if fields.has("kv_lora_rank"):
        fields.fail(
            f"kv_lora_rank = {fields.get('kv_lora_rank')!r} contradicts model_type "
            f"{fields.get('model_type')!r}, which is not known to have latent attention"
        )
    heads = attention.kv_heads(fields, same_as_query=architecture.same_as_query)
    dim = attention.head_dim(fields, may_derive=architecture.may_derive)
    if architecture.hybrid is not None:
        return architecture.hybrid(fields, heads, dim, dtype)
    assert architecture.read is not None
    return architecture.read(fields, heads, dim)


def _dtype(fields: Fields, whole: Fields) -> str:
    """Type of weights and activations; vLLM runs a float32 model in 16 bits unless told otherwise."""
    for part in (fields, whole):
        for name in ("torch_dtype", "dtype"):
            text = part.text(name)
            if text is None:
                continue
            if text not in WEIGHT_BYTES:
                part.reject(name, f"unknown type; known are {', '.join(WEIGHT_BYTES)}")
            return "float16" if WEIGHT_BYTES[text] == 4 else text
    raise ConfigError(f"{fields.where}: no torch_dtype in the config; add one, such as bfloat16")


_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip

_ALREADY_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "mrope")
"""Rotary scalings whose factor the config's length holds already (vLLM 0.32 ``_get_and_verify_max_len``)."""


def _max_model_len(fields: Fields, whole: Fields) -> int:
    """Longest sequence in tokens; 0 where the config states none."""
    lengths = [fields.count(name) for name in _LENGTHS if fields.has(name)]
    if fields.has("model_max_length"):
        return fields.count("model_max_length")
    if not lengths:
        return 0
    length = min(lengths)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if not isinstance(scaling, dict) or str(fields.get("model_type")).startswith("gemma3"):
            continue
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        factor = scaling.get("factor")
        if kind in _ALREADY_SCALED or factor is None:
            continue
        if (
            isinstance(factor, bool)
            or not isinstance(factor, int | float)
            or not 1 <= factor <= 2**20
        ):
            whole.fail(f"{name}.factor = {factor!r}: not a factor of 1 or more")
        length = int(length * factor)
    return min(length, MAX_COUNT)
