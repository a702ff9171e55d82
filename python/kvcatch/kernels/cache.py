"""A KV cache: the bytes of a pool and the layout they follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.kernels.layout import KVLayout, Strides

__all__ = ["KVCache"]


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """One pool's bytes on one device; made by :meth:`Backend.allocate` or :meth:`Backend.allocate_host`.

    Attributes:
        layout: where each key and value lies.
        num_blocks: blocks in the pool; ids are ``0..num_blocks-1``.
        buffer: ``[layout.pool_bytes(num_blocks)]`` uint8, a tensor of the backend, starting at a multiple of 16 bytes.
        head_scales: ``[num_layers, 2, num_kv_heads]`` float32 on the same device where ``layout.scale == "head"``,
            else ``None``.
        device: ``cpu`` or ``cuda:N``.
        pinned: host memory that a device may read and write directly.
    """

    layout: KVLayout
    num_blocks: int
    buffer: Any
    head_scales: Any = None
    device: str = "cpu"
    pinned: bool = False

    @property
    def strides(self) -> Strides:
        """Distances in bytes between blocks, layers, keys and values, heads and tokens."""
        return self.layout.strides(self.num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.layout.pool_bytes(self.num_blocks)

    def __repr__(self) -> str:
        kind = self.layout
        return (
            f"<KVCache {self.num_blocks} blocks of {kind.block_size} tokens, {kind.num_layers} layers, "
            f"{kind.num_kv_heads} kv heads of {kind.head_dim}, {kind.dtype}, {kind.order}-major, "
            f"{self.num_bytes / 2**20:.1f} MiB on {self.device}>"
        )
