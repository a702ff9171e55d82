"""Attention and KV writes in plain torch: gather a sequence's tokens, then SDPA. Slow and obvious."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcatch.kernels import KVCache, KVLayout

if TYPE_CHECKING:
    from collections.abc import Sequence


class TorchBackend:
    """As much of :class:`kvcatch.kernels.Backend` as a model's forward pass calls."""

    name = "torch"
    device = "cpu"

    def allocate(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """NaN everywhere, so that a slot read before it is written spoils the result."""
        buffer = torch.full((layout.pool_bytes(num_blocks),), 0xFF, dtype=torch.uint8)
        return KVCache(layout, num_blocks, buffer)

    def _area(self, cache: KVCache, layer: int, kv: int) -> torch.Tensor:
        """[num_blocks, kv_head, block_size, head_dim], a view of the pool."""
        at, dtype = cache.layout, getattr(torch, cache.layout.dtype)
        strides, size = cache.strides, cache.layout.item_bytes
        return cache.buffer.view(dtype).as_strided(
            (cache.num_blocks, at.num_kv_heads, at.block_size, at.head_dim),
            (strides.block // size, strides.head // size, strides.token // size, 1),
            (layer * strides.layer + kv * strides.kv) // size,
        )

    def write_kv(
        self, cache: KVCache, layer: int, key: Any, value: Any, slot_mapping: torch.Tensor
    ) -> None:
        keep = slot_mapping >= 0
        slots = slot_mapping[keep]
        block, offset = slots // cache.layout.block_size, slots % cache.layout.block_size
        for kv, new in enumerate((key, value)):
            assert new.dtype == getattr(torch, cache.layout.dtype)
            self._area(cache, layer, kv)[block, :, offset] = new[keep]

    def _attend(
        self,
        cache: KVCache,
        layer: int,
        query: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """``query`` [seqs, rows, heads, head_dim], the last rows of each sequence."""
        longest = int(lengths.max())
        blocks = tables[:, : -(-longest // cache.layout.block_size)].long()
        used = torch.arange(longest) < lengths[:, None]
        key, value = (
            self._area(cache, layer, kv)[blocks].transpose(1, 2).flatten(2, 3)[:, :, :longest]
            for kv in (0, 1)
        )
        # What lies behind a sequence may be NaN, and NaN times 0 is NaN.
        key, value = (torch.where(used[:, None, :, None], part, 0) for part in (key, value))
        rows = query.shape[1]
        last = lengths[:, None] - rows + torch.arange(rows)
        mask = torch.arange(longest) <= last[:, :, None]
        return torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, mask[:, None], scale=scale, enable_gqa=True
        ).transpose(1, 2)

    def decode_attention(
        self,
        cache: KVCache,
        layer: int,
        query: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        plan: object = None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        out[:] = self._attend(cache, layer, query[:, None], block_tables, seq_lens, scale)[:, 0]
        return out

    def prefill_attention(
        self,
        cache: KVCache,
        layer: int,
        query: torch.Tensor,
        query_starts: Sequence[int],
        block_tables: torch.Tensor,
        seq_lens: Sequence[int],
        *,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert block_tables.dtype == torch.int32
        for row, length in enumerate(seq_lens):
            start, end = query_starts[row], query_starts[row + 1]
            new, table = query[None, start:end], block_tables[row : row + 1]
            out[start:end] = self._attend(cache, layer, new, table, torch.tensor([length]), scale)[
                0
            ]
        return out
