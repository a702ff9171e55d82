"""A decode step of the model with keys and values end to end instead of in blocks: what paging is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcatch.kernels import get_backend
from kvcatch.models.step import DecodePart, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.models.load import LoadedModel

__all__ = ["ContiguousBackend", "paged_and_contiguous"]

BLOCK = 16
ALLOWED = 0.05
"""Most that two outputs of attention may differ by, as a share of the largest: bfloat16 rounds both."""


class ContiguousBackend:
    """Keys and values ``[seqs, kv heads, tokens, head_dim]`` per layer, all sequences equally long, no mask.

    SDPA takes the query heads of one kv head as rows of one product, which is its fastest form for a decode.
    """

    def __init__(self, keys: list[Any], values: list[Any]) -> None:
        self.keys, self.values = keys, values

    def write_kv(self, cache: Any, layer: int, key: Any, value: Any, slots: Any) -> None:
        """The new token is the last of its sequence."""
        self.keys[layer][:, :, -1] = key
        self.values[layer][:, :, -1] = value

    def decode_attention(
        self,
        cache: Any,
        layer: int,
        query: Any,
        tables: Any,
        lens: Any,
        *,
        scale: float,
        plan: Any,
        out: Any,
    ) -> Any:
        """Attention over all that is there."""
        keys = self.keys[layer]
        rows = query.view(keys.shape[0], keys.shape[1], -1, keys.shape[3])
        found = torch.nn.functional.scaled_dot_product_attention(
            rows, keys, self.values[layer], scale=scale
        )
        out.copy_(found.reshape(out.shape))
        return out


def paged_and_contiguous(
    loaded: LoadedModel, num_seqs: int, context: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One decode step by either way, over the same random keys and values; the attention is compared first."""
    config, model = loaded.config, loaded.model
    backend = get_backend("cpu")
    layout = config.kv_layout(block_size=BLOCK, dtype=loaded.precision.weights)
    width = -(-context // BLOCK)
    cache = backend.allocate(layout, num_seqs * width)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_seqs * width, generator=generator)
    tables = order.to(torch.int32).view(num_seqs, width)
    at = torch.arange(context)
    slots = (tables[:, at // BLOCK].long() * BLOCK + at % BLOCK).view(-1)
    keys, values = [], []
    shape = (num_seqs, context, config.num_kv_heads, config.head_dim)
    for layer in range(config.num_layers):
        key, value = (
            torch.randn(shape, generator=generator).to(getattr(torch, loaded.precision.weights))
            for _ in range(2)
        )
        flat = (num_seqs * context, *shape[2:])
        backend.write_kv(cache, layer, key.view(flat), value.view(flat), slots)
        keys.append(key.transpose(1, 2).contiguous())
        values.append(value.transpose(1, 2).contiguous())
    lens = np.full(num_seqs, context, np.int32)
    plan = backend.plan_decode(layout, lens, config.num_q_heads)
    rows = torch.arange(num_seqs)
    step = Step(
        torch.arange(100, 100 + num_seqs),
        torch.full((num_seqs,), context - 1),
        slots.view(num_seqs, context)[:, -1].contiguous(),
        rows,
        DecodePart(tables, torch.from_numpy(lens), plan),
    )
    other: Any = ContiguousBackend(keys, values)
    _compare(backend, other, cache, step, config, generator)
    return (
        lambda: model.forward(step, cache, backend),
        lambda: model.forward(step, cache, other),
    )


def _compare(
    backend: Any, other: Any, cache: Any, step: Step, config: Any, generator: torch.Generator
) -> None:
    """Attention of the first and the last layer by both ways; behind a whole model of bfloat16 it tells nothing."""
    part = step.decode
    assert part is not None
    shape = (len(step.input_ids), config.num_q_heads, config.head_dim)
    query = torch.randn(shape, generator=generator).to(other.keys[0].dtype)
    for layer in (0, config.num_layers - 1):
        outs = [torch.empty_like(query) for _ in range(2)]
        for way, out in zip((backend, other), outs, strict=True):
            way.decode_attention(
                cache,
                layer,
                query,
                part.block_tables,
                part.seq_lens,
                scale=config.head_dim**-0.5,
                plan=part.plan,
                out=out,
            )
        one, two = (out.float() for out in outs)
        difference = float((one - two).abs().max() / two.abs().max())
        if not difference < ALLOWED:
            raise SystemExit(f"layer {layer}: paged and contiguous differ by {difference:.3f}")
