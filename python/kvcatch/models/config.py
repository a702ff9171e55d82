"""The shape of a Llama model, read from a ``config.json`` or from a GGUF file's metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvcatch.errors import ConfigError
from kvcatch.geometry.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcatch.kernels.layout import KVDtype, KVLayout

__all__ = ["LlamaConfig", "RopeScaling"]

ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        kind: ``linear``: all divided by ``factor``. ``llama3``: long wavelengths divided by ``factor``, short
            ones kept, those between interpolated (Llama 3.1's ``rope_type``).
        factor: What is divided by, at least 1.
        low_freq_factor: ``llama3``: wavelengths above ``original_context / low_freq_factor`` are divided.
        high_freq_factor: ``llama3``: those below ``original_context / high_freq_factor`` are kept.
        original_context: ``llama3``: context the model was first trained for, in tokens.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A Llama model's shape.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Transformer layers.
        num_q_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        head_dim: Elements of a head.
        max_model_len: Longest context in tokens.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: What is added to the mean square.
        tie_embeddings: The output head is the embedding.
        rope_scaling: None where positions are taken as they are.

    Raises:
        ConfigError: heads that do not divide, an odd head_dim.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_q_heads} query heads over {self.num_kv_heads} kv heads: must divide"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim}: rotary positions need an even one")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], where: str) -> LlamaConfig:
        """From a parsed ``config.json``.

        Args:
            data: The JSON object.
            where: How messages name it.

        Raises:
            ConfigError: another architecture, a variant that is not computed here (biases, another activation,
                another rope), a field missing or out of range.
        """
        fields = Fields(data, where)
        kind = fields.text("model_type")
        if kind != ARCHITECTURE:
            fields.fail(f"architecture {kind!r} is not run here: only {ARCHITECTURE!r} is")
        activation = fields.text("hidden_act") or "silu"
        if activation != "silu":
            fields.reject("hidden_act", "only silu is computed")
        for name in ("attention_bias", "mlp_bias", "rope_interleaved"):
            if fields.flag(name, False):
                fields.reject(name, "is not computed here")
        if fields.has("quantization_config"):
            fields.fail("quantised weights (quantization_config) are not read: use GGUF")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        head_dim = fields.optional_count("head_dim")
        if head_dim is None:
            if hidden % heads:
                fields.fail(f"hidden_size {hidden} over {heads} heads: must divide")
            head_dim = hidden // heads
        theta, scaling = _hf_rope(fields)
        return cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_q_heads=heads,
            num_kv_heads=fields.count_or("num_key_value_heads", heads),
            head_dim=head_dim,
            max_model_len=fields.count_or("max_position_embeddings", 2048),
            rope_theta=theta,
            rms_norm_eps=_real(fields, "rms_norm_eps", 1e-6),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            rope_scaling=scaling,
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], where: str, *, tie_embeddings: bool, vocab_size: int
    ) -> LlamaConfig:
        """From a GGUF file's metadata.

        Args:
            metadata: Key to value.
            where: How messages name the file.
            tie_embeddings: The file has no ``output.weight``.
            vocab_size: Rows of ``token_embd.weight``.

        Raises:
            ConfigError: as :meth:`from_hf`.
        """
        fields = Fields(metadata, where)
        kind = fields.text("general.architecture")
        if kind != ARCHITECTURE:
            fields.fail(f"architecture {kind!r} is not run here: only {ARCHITECTURE!r} is")
        for name in ("split.count", "llama.expert_count"):
            if fields.count_or(name, 0, minimum=0) > 1:
                fields.reject(name, "only dense models in one file are read")
        hidden = fields.count("llama.embedding_length")
        heads = fields.count("llama.attention.head_count")
        head_dim = fields.optional_count("llama.attention.key_length")
        if head_dim is None:
            if hidden % heads:
                fields.fail(f"embedding_length {hidden} over {heads} heads: must divide")
            head_dim = hidden // heads
        if fields.count_or("llama.attention.value_length", head_dim) != head_dim:
            fields.reject("llama.attention.value_length", f"keys have {head_dim}")
        if fields.count_or("llama.rope.dimension_count", head_dim) != head_dim:
            fields.reject("llama.rope.dimension_count", f"only whole heads of {head_dim} rotate")
        scaling = None
        rope = fields.text("llama.rope.scaling.type") or "none"
        if rope == "linear":
            scaling = RopeScaling("linear", _real(fields, "llama.rope.scaling.factor", 1.0))
        elif rope != "none":
            fields.reject("llama.rope.scaling.type", "only none and linear are computed")
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=fields.count("llama.feed_forward_length"),
            num_layers=fields.count("llama.block_count"),
            num_q_heads=heads,
            num_kv_heads=fields.count_or("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_model_len=fields.count("llama.context_length"),
            rope_theta=_real(fields, "llama.rope.freq_base", 10000.0),
            rms_norm_eps=_real(fields, "llama.attention.layer_norm_rms_epsilon", None),
            tie_embeddings=tie_embeddings,
            rope_scaling=scaling,
        )

    @property
    def num_parameters(self) -> int:
        """Weights, a tied head counted once."""
        head, hidden = self.head_dim, self.hidden_size
        attention = 2 * hidden * head * (self.num_q_heads + self.num_kv_heads)
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + hidden

    def kv_layout(self, *, block_size: int = 16, dtype: KVDtype = "bfloat16") -> KVLayout:
        """The layout of a pool for this model; see :class:`KVLayout` for scales and order.

        Raises:
            InvalidArgument: a layout that no pool can have.
        """
        from kvcatch.kernels.layout import KVLayout

        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            scale="token" if dtype == "float8_e4m3" else "none",
        )

    def scale_frequencies(self, frequencies: Any) -> Any:
        """Rotary frequencies (radians per token, an array or tensor) with ``rope_scaling`` applied.

        ``llama3`` as transformers' ``modeling_rope_utils`` defines it.
        """
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_context * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clip(0.0, 1.0)
        return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _hf_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    part = fields.part(name) if fields.has(name) else Fields({}, fields.where)
    theta = _real(part if part.has("rope_theta") else fields, "rope_theta", 10000.0)
    if fields.count_or("partial_rotary_factor", 1) != 1:
        fields.reject("partial_rotary_factor", "only whole heads rotate")
    kind = part.text("rope_type") or part.text("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _real(part, "factor", None))
    if kind != "llama3":
        part.fail(f"rope type {kind!r} is not computed: default, linear and llama3 are")
    scaling = RopeScaling(
        "llama3",
        _real(part, "factor", None),
        _real(part, "low_freq_factor", None),
        _real(part, "high_freq_factor", None),
        part.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        part.reject("high_freq_factor", f"must pass low_freq_factor {scaling.low_freq_factor}")
    return theta, scaling


def _real(fields: Fields, name: str, default: float | None) -> float:
    """A positive finite number."""
    value = fields.get(name)
    if value is None:
        if default is None:
            fields.missing(name)
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        fields.reject(name, "not a number")
    if not 0 < value < math.inf:
        fields.reject(name, "must be positive and finite")
    return float(value)
