"""The Llama architecture over a flat batch: every sequence's new tokens in one run of rows.

Attention and the writing of keys and values go through a :class:`~kvcatch.kernels.backend.Backend`; all else is
plain torch. A layer is ``x += attention(norm(x)); x += mlp(norm(x))`` with RMSNorm, rotary positions (halves of a
head rotate against each other), grouped query heads and SwiGLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.models.extras import need

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.kernels.backend import Backend
    from kvcatch.kernels.cache import KVCache
    from kvcatch.models.config import LlamaConfig
    from kvcatch.models.precision import Precision
    from kvcatch.models.step import Step

__all__ = ["LayerWeights", "LlamaModel", "LlamaWeights"]

Tensor = Any


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights; products are ``[rows out, columns in]``.

    Attributes:
        attention_norm: [hidden].
        qkv: [(q heads + 2 kv heads) * head_dim, hidden]: queries, keys, values; halves of a head rotate together.
        attention_out: [hidden, q heads * head_dim].
        mlp_norm: [hidden].
        gate_up: [2 * intermediate, hidden]: gate, then up.
        down: [hidden, intermediate].
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights, of any float type; the model converts them.

    Attributes:
        embedding: [vocab, hidden].
        layers: First to last; taken one after the other, so a reader may make them as they are asked for.
        norm: [hidden], before the head.
        head: [vocab, hidden]; None where it is the embedding.
        rope_divisors: [head_dim / 2], what each frequency is divided by; None where nothing is.
    """

    embedding: Tensor
    layers: Iterable[LayerWeights]
    norm: Tensor
    head: Tensor | None = None
    rope_divisors: Tensor | None = None


class _Linear:
    """A matrix to multiply rows with, in oneDNN's order where the precision says so."""

    def __init__(self, weight: Tensor, precision: Precision) -> None:
        torch = need("torch")
        self._linear = torch.nn.functional.linear
        self._packed = None
        self.weight = weight
        if precision.matmul == "packed":
            self._pointwise = torch.ops.mkldnn._linear_pointwise
            # One order serves every batch size; it is tuned for this many rows.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
            self.weight = None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            return self._linear(rows, self.weight)
        return self._pointwise(rows, self._packed, None, "none", [], "")


class _Layer:
    """One layer's weights as the model computes with them: rounded to its format, held in ``dtype``."""

    def __init__(
        self, weights: LayerWeights, device: str, precision: Precision, dtype: Any
    ) -> None:
        rounded = getattr(need("torch"), precision.weights)
        self.attention_norm = weights.attention_norm.to(device, rounded).to(dtype)
        self.mlp_norm = weights.mlp_norm.to(device, rounded).to(dtype)
        self.qkv, self.attention_out, self.gate_up, self.down = (
            _Linear(weight.to(device, rounded).to(dtype), precision)
            for weight in (weights.qkv, weights.attention_out, weights.gate_up, weights.down)
        )


class LlamaModel:
    """A Llama model on one device.

    Args:
        config: Its shape.
        weights: Its weights; taken over, not copied where they have the right format.
        precision: Format and matmul path.
        device: ``cpu`` or ``cuda:N``.

    Raises:
        InvalidArgument: a weight's shape is not what ``config`` says.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, precision: Precision, device: str = "cpu"
    ) -> None:
        torch = need("torch")
        self.config, self.precision, self.device = config, precision, device
        self.dtype = getattr(torch, precision.weights)
        self._torch = torch
        hidden, vocab = config.hidden_size, config.vocab_size
        _expect("embedding", weights.embedding, vocab, hidden)
        _expect("norm", weights.norm, hidden)
        if (weights.head is None) != config.tie_embeddings:
            raise InvalidArgument(f"tie_embeddings is {config.tie_embeddings}: head does not agree")
        with torch.inference_mode():
            self._embedding = weights.embedding.to(device, self.dtype)
            self._norm = weights.norm.to(device, self.dtype)
            head = self._embedding
            if weights.head is not None:
                _expect("head", weights.head, vocab, hidden)
                head = weights.head.to(device, self.dtype)
            self._head = _Linear(head, precision)
            self._layers: list[_Layer] = []
            self._wide_layers: list[_Layer] = []
            for index, layer in enumerate(weights.layers):
                _expect_layer(index, layer, config)
                self._layers.append(_Layer(layer, device, precision, self.dtype))
                if precision.wide_rows:
                    self._wide_layers.append(_Layer(layer, device, precision, torch.float32))
            if len(self._layers) != config.num_layers:
                raise InvalidArgument(
                    f"{len(self._layers)} layers of weights: must be {config.num_layers}"
                )
            # In float32 step by step, as the models were trained: at position 8,000 a last bit counts.
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            frequencies = 1.0 / config.rope_theta**exponents
            frequencies = config.scale_frequencies(frequencies)
            if weights.rope_divisors is not None:
                _expect("rope_divisors", weights.rope_divisors, config.head_dim // 2)
                frequencies = frequencies / weights.rope_divisors
            self._frequencies = frequencies.to(device)
        self._scale = 1.0 / math.sqrt(config.head_dim)

    def forward(self, step: Step, cache: KVCache, backend: Backend) -> Tensor:
        """Write the step's keys and values and return the logits of ``step.logit_rows``.

        Args:
            step: the batch; see :class:`~kvcatch.models.step.Step`.
            cache: the pool; its layout has this model's layers, heads and head_dim.
            backend: the device's.

        Returns:
            [rows, vocab_size] float32.

        Raises:
            InvalidArgument: from the backend, for tables, lengths or slots that do not fit.
        """
        torch = self._torch
        with torch.inference_mode():
            layers, dtype = self._layers, self.dtype
            if self._wide_layers and step.input_ids.shape[0] >= self.precision.wide_rows:
                layers, dtype = self._wide_layers, torch.float32
            cos, sin = self._rotations(step.positions, dtype)
            hidden = self._embedding[step.input_ids].to(dtype)
            last = len(layers) - 1
            for index, layer in enumerate(layers):
                rows = self._norm_rows(hidden, layer.attention_norm)
                attended = self._attend(index, layer.qkv(rows), cos, sin, step, cache, backend)
                if index == last:  # only what is asked for goes on
                    attended, hidden = attended[step.logit_rows], hidden[step.logit_rows]
                hidden = hidden + layer.attention_out(attended)
                rows = self._norm_rows(hidden, layer.mlp_norm)
                gate, up = layer.gate_up(rows).chunk(2, dim=-1)
                hidden = hidden + layer.down(torch.nn.functional.silu(gate).mul_(up))
            hidden = hidden.to(self.dtype)
            return self._head(self._norm_rows(hidden, self._norm)).float()

    def _attend(
        self,
        index: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Step,
        cache: KVCache,
        backend: Backend,
    ) -> Tensor:
        config, torch = self.config, self._torch
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        heads = qkv.view(-1, num_q + 2 * num_kv, config.head_dim)
        turning = heads[:, : num_q + num_kv]
        turned = torch.addcmul(turning * cos, turning.roll(config.head_dim // 2, -1), sin)
        kept = self.dtype
        if cache.layout.dtype != "float8_e4m3":
            kept = getattr(torch, cache.layout.dtype)
        # Contiguous, as the backends' shortest path takes them.
        query, key, value = (
            part.to(kept).contiguous()
            for part in (turned[:, :num_q], turned[:, num_q:], heads[:, num_q + num_kv :])
        )
        backend.write_kv(cache, index, key, value, step.slot_mapping)
        out = torch.empty_like(query)
        num_decode = 0
        if step.decode is not None:
            part = step.decode
            num_decode = part.seq_lens.shape[0]
            backend.decode_attention(
                cache,
                index,
                query[:num_decode],
                part.block_tables,
                part.seq_lens,
                scale=self._scale,
                plan=part.plan,
                out=out[:num_decode],
            )
        if step.prefill is not None:
            backend.prefill_attention(
                cache,
                index,
                query[num_decode:],
                step.prefill.query_starts,
                step.prefill.block_tables,
                step.prefill.seq_lens,
                scale=self._scale,
                out=out[num_decode:],
            )
        return out.view(-1, num_q * config.head_dim).to(qkv.dtype)

    def _rotations(self, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        """Cosine, and sine with the sign of the half it is for: [tokens, 1, head_dim]."""
        torch = self._torch
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(dtype),
            torch.cat((-sin, sin), -1)[:, None].to(dtype),
        )

    def _norm_rows(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._torch.nn.functional.rms_norm(
            rows, (rows.shape[-1],), weight, self.config.rms_norm_eps
        )

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<LlamaModel {config.num_parameters / 1e6:.0f} M parameters, {config.num_layers} layers, "
            f"{config.num_q_heads}/{config.num_kv_heads} heads of {config.head_dim}, "
            f"{self.precision.weights} on {self.device}>"
        )


def _expect(name: str, weight: Tensor, *shape: int) -> None:
    if tuple(weight.shape) != shape:
        raise InvalidArgument(f"{name} has shape {list(weight.shape)}: must be {list(shape)}")


def _expect_layer(index: int, layer: LayerWeights, config: LlamaConfig) -> None:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries = config.num_q_heads * head
    for name, shape in (
        ("attention_norm", (hidden,)),
        ("qkv", (queries + 2 * config.num_kv_heads * head, hidden)),
        ("attention_out", (hidden, queries)),
        ("mlp_norm", (hidden,)),
        ("gate_up", (2 * inner, hidden)),
        ("down", (hidden, inner)),
    ):
        _expect(f"layer {index}: {name}", getattr(layer, name), *shape)
