"""Paged batches for the benches of the CPU backend, and the contiguous forms they are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from kvcatch.kernels import KVLayout, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.kernels import Backend, KVCache


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: sequences, tokens of each, query heads, kv heads, elements of a head."""

    seqs: int
    tokens: int
    q_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64

    def __str__(self) -> str:
        return (
            f"{self.seqs} x {self.tokens}, {self.q_heads}/{self.kv_heads} heads of {self.head_dim}"
        )


SHAPES = (
    Shape(8, 1024),
    Shape(32, 256),
    Shape(1, 1024),
    Shape(8, 1024, 32, 8, 128),
)


def paged(
    backend: Backend, shape: Shape, dtype: str, rows: int = 1
) -> tuple[KVCache, Any, Any, Any, Any]:
    """Random keys and values, contiguous and in a pool whose blocks lie in random order.

    Returns cache, block tables, query [seqs, q_heads, rows, head_dim], keys and values
    [seqs, kv_heads, tokens, head_dim].
    """
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator).to(kind)

    key = normal(shape.seqs, shape.kv_heads, shape.tokens, shape.head_dim)
    value = normal(shape.seqs, shape.kv_heads, shape.tokens, shape.head_dim)
    query = normal(shape.seqs, shape.q_heads, rows, shape.head_dim)
    layout = KVLayout(1, shape.kv_heads, shape.head_dim, dtype=dtype)  # type: ignore[arg-type]
    per_seq = -(-shape.tokens // layout.block_size)
    cache = backend.allocate(layout, shape.seqs * per_seq)
    order = torch.randperm(shape.seqs * per_seq, generator=generator)
    tables = order.view(shape.seqs, per_seq).to(torch.int32)
    at = torch.arange(shape.tokens)
    for seq in range(shape.seqs):
        slots = (
            tables[seq, at // layout.block_size].long() * layout.block_size + at % layout.block_size
        )
        backend.write_kv(cache, 0, key[seq].transpose(0, 1), value[seq].transpose(0, 1), slots)
    return cache, tables, query, key, value


def decode_calls(shape: Shape, dtype: str, **options: Any) -> dict[str, Callable[[], Any]]:
    """The paged decode (``kvcatch``) and every contiguous form, by name; all give the same result."""
    backend = get_backend("cpu", **options)
    cache, tables, query, key, value = paged(backend, shape, dtype)
    lens = torch.full((shape.seqs,), shape.tokens, dtype=torch.int32)
    scale = shape.head_dim**-0.5
    folded = query.view(shape.seqs, shape.kv_heads, -1, shape.head_dim)
    rows = query.view(shape.seqs, shape.q_heads, shape.head_dim)

    def matmul() -> Any:
        logits = torch.matmul(folded, key.transpose(-1, -2)) * scale
        return torch.matmul(torch.softmax(logits, -1), value)

    return {
        "kvcatch": lambda: backend.decode_attention(cache, 0, rows, tables, lens, scale=scale),
        "sdpa, enable_gqa": lambda: functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=True
        ),
        "sdpa, heads folded": lambda: functional.scaled_dot_product_attention(folded, key, value),
        "matmul, softmax": matmul,
    }


def prefill_calls(shape: Shape, chunk: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """The last ``chunk`` tokens of each sequence over all of them: paged, and SDPA on contiguous keys and values."""
    backend = get_backend("cpu")
    cache, tables, query, key, value = paged(backend, shape, dtype, chunk)
    rows = query.transpose(1, 2).reshape(shape.seqs * chunk, shape.q_heads, shape.head_dim)
    starts = np.arange(shape.seqs + 1) * chunk
    lens = [shape.tokens] * shape.seqs
    seen = torch.ones(chunk, shape.tokens, dtype=torch.bool).tril(shape.tokens - chunk)
    return {
        "kvcatch": lambda: backend.prefill_attention(
            cache, 0, rows, starts, tables, lens, scale=shape.head_dim**-0.5
        ),
        "sdpa, enable_gqa": lambda: functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        ),
    }


def copy_calls(piece: int, pieces: int) -> dict[str, Callable[[], Any]]:
    """``pieces`` blocks of ``piece`` bytes to random places, and one copy of as many bytes in the same memory."""
    backend = get_backend("cpu")
    layout = KVLayout(piece // 8192, 1, 64, dtype="float32")
    if layout.block_bytes != piece:
        raise ValueError(f"piece {piece}: must be a multiple of 8192 bytes")
    cache = backend.allocate(layout, 2 * pieces)
    order = np.random.default_rng(0).permutation(2 * pieces).astype(np.int32)
    src, dst = order[:pieces], order[pieces:]
    half = piece * pieces
    one, other = cache.buffer[:half], cache.buffer[half:]
    return {
        "kvcatch": lambda: backend.move_blocks(cache, src, dst),
        "memcpy": lambda: np.copyto(other.numpy(), one.numpy()),
        "torch copy_": lambda: other.copy_(one),
    }
