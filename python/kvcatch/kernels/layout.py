"""Where each key and value lies in the pool: the one description that every backend and kernel uses.

A pool is one allocation of bytes. In block-major order (the default) it reads::

    [num_blocks][layer][K, V][kv_head][block_size][head_dim]

so that a block is one run of bytes: one copy moves it, one DMA swaps it, and one launch serves all layers.
Layer-major order puts the layer outermost::

    [layer][num_blocks][K, V][kv_head][block_size][head_dim]

and is a matter of strides, never of another kernel. The keys (or values) of one layer in one block are an *area*:
the elements of all kv heads and, for e4m3 caches, their float32 scales behind them, padded to 16 bytes. Scales travel
with the block whatever moves it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kvcatch.errors import InvalidArgument

__all__ = ["ITEM_BYTES", "KVDtype", "KVLayout", "Order", "ScaleKind", "Strides", "is_whole"]

KVDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3"]
Order = Literal["block", "layer"]
ScaleKind = Literal["none", "token", "head", "block"]

ITEM_BYTES: dict[KVDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}
"""Bytes of one element of a key or value."""

ALIGNMENT = 16
"""Every area starts at a multiple of this many bytes: kernels load 16 at a time."""

MAX_HEAD_DIM = 1024
"""Most elements of a head: what the kernels' tiles are sized for (``MAX_HEAD_DIM`` of ``src/cpu/layout.rs``)."""

SCALE_BYTES = 4
MAX_BYTES = 1 << 46
"""No pool is larger (64 TiB): a product beyond it is a mistake in the arguments."""


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether ``value`` is a whole number (Python's or numpy's, not a bool) between ``least`` and ``most``."""
    if isinstance(value, bool):
        return False
    try:
        return least <= operator.index(value) <= most
    except TypeError:
        return False


@dataclass(frozen=True, slots=True)
class Strides:
    """Distances in bytes. The key of (block, layer, head, token) starts at the sum of index times stride.

    The value starts ``kv`` further. ``scale`` is the offset from the start of an area to its first scale; the scale of
    (head, token) lies ``head * scale_head + token * scale_token`` behind that.
    """

    block: int
    layer: int
    kv: int
    head: int
    token: int
    scale: int
    scale_head: int
    scale_token: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one rank's keys and values lie in its pool.

    Attributes:
        num_layers: layers whose keys and values a block holds.
        num_kv_heads: kv heads of this rank (see :meth:`for_rank`).
        head_dim: elements of a key or value of one head.
        block_size: tokens of a block.
        dtype: type of the elements.
        scale: what an e4m3 element is multiplied by. ``token``: one float32 per (token, kv head),
            written with the token. ``head``: one per (layer, K or V, kv head), fixed when the cache
            is made (a calibrated model). ``block``: one per (block, kv head), fixed when a full
            block is converted, so that tokens cannot be appended. ``none`` for other dtypes.
        order: ``block`` (block-major) or ``layer`` (layer-major).

    Raises:
        InvalidArgument: a size that is not positive, an unknown name, scales without e4m3 (or the reverse), heads whose
            bytes are no multiple of 16, or of more than 1,024 elements.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: KVDtype = "bfloat16"
    scale: ScaleKind = "none"
    order: Order = "block"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not is_whole(value, 1, (1 << 31) - 1):
                raise InvalidArgument(f"{name} must be a positive whole number, not {value!r}")
            object.__setattr__(self, name, int(value))  # numpy's would overflow
        for name, names in (("dtype", KVDtype), ("scale", ScaleKind), ("order", Order)):
            if getattr(self, name) not in get_args(names):
                known = ", ".join(get_args(names))
                raise InvalidArgument(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        if (self.dtype == "float8_e4m3") != (self.scale != "none"):
            wanted = "token, head or block" if self.scale == "none" else "none"
            raise InvalidArgument(f"a {self.dtype} cache takes scale={wanted}, not {self.scale!r}")
        if self.head_dim * ITEM_BYTES[self.dtype] % ALIGNMENT:
            raise InvalidArgument(
                f"head_dim {self.head_dim} of {self.dtype} is {self.head_dim * ITEM_BYTES[self.dtype]} bytes:"
                f" a head must be a multiple of {ALIGNMENT} bytes"
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise InvalidArgument(f"head_dim {self.head_dim}: at most {MAX_HEAD_DIM}")
        if self.block_bytes > MAX_BYTES:
            raise InvalidArgument(f"a block of {self.block_bytes} bytes: more than {MAX_BYTES}")

    def for_rank(self, tp_size: int, tp_rank: int = 0) -> KVLayout:
        """This layout with one tensor-parallel rank's share of the kv heads.

        Where there are fewer heads than ranks each head is held by several ranks, as in vLLM
        (``max(1, total_num_kv_heads // tensor_parallel_size)``, vllm/config/model.py, 0.32).

        Raises:
            InvalidArgument: neither of heads and ranks divides the other, or no such rank.
        """
        if tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise InvalidArgument(f"tp_rank {tp_rank} of tp_size {tp_size}: no such rank")
        heads = self.num_kv_heads
        if (heads % tp_size if heads >= tp_size else tp_size % heads) != 0:
            raise InvalidArgument(f"{heads} kv heads do not divide among {tp_size} ranks")
        return replace(self, num_kv_heads=max(1, heads // tp_size))

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def scales_per_area(self) -> int:
        """Float32 scales stored behind the elements of an area."""
        return {
            "none": 0,
            "head": 0,
            "block": self.num_kv_heads,
            "token": self.num_kv_heads * self.block_size,
        }[self.scale]

    @property
    def area_bytes(self) -> int:
        """Bytes of the keys (or the values) of one layer in one block, scales and padding included."""
        data = self.num_kv_heads * self.block_size * self.head_dim * self.item_bytes
        return data + -(-self.scales_per_area * SCALE_BYTES // ALIGNMENT) * ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return 2 * self.num_layers * self.area_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes per token: a block's bytes over its tokens."""
        return self.block_bytes / self.block_size

    @property
    def regions_per_block(self) -> int:
        """Runs of bytes that make up a block: 1 in block-major order, one per layer otherwise."""
        return 1 if self.order == "block" else self.num_layers

    @property
    def region_bytes(self) -> int:
        """Bytes of one such run."""
        return self.block_bytes // self.regions_per_block

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a pool of ``num_blocks`` blocks.

        Raises:
            InvalidArgument: ``num_blocks`` is not positive, or the pool would pass 64 TiB.
        """
        if not is_whole(num_blocks, 1, (1 << 31) - 1):
            raise InvalidArgument(f"num_blocks must be a positive whole number, not {num_blocks!r}")
        total = num_blocks * self.block_bytes
        if total > MAX_BYTES:
            raise InvalidArgument(
                f"{num_blocks} blocks of {self.block_bytes} bytes are {total} bytes: over {MAX_BYTES}"
            )
        return total

    def strides(self, num_blocks: int) -> Strides:
        """Distances in bytes in a pool of ``num_blocks`` blocks."""
        area = self.area_bytes
        head = self.block_size * self.head_dim * self.item_bytes
        return Strides(
            block=self.block_bytes if self.order == "block" else 2 * area,
            layer=2 * area if self.order == "block" else 2 * area * num_blocks,
            kv=area,
            head=head,
            token=self.head_dim * self.item_bytes,
            scale=self.num_kv_heads * head,
            scale_head=SCALE_BYTES * (self.block_size if self.scale == "token" else 1),
            scale_token=SCALE_BYTES if self.scale == "token" else 0,
        )

    def offset(
        self, num_blocks: int, block: int, layer: int, kv: int = 0, head: int = 0, token: int = 0
    ) -> int:
        """Byte at which the key (``kv=0``) or value (``kv=1``) of one (block, layer, head, token) starts.

        Raises:
            InvalidArgument: an index out of range.
        """
        bounds = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size)
        names = ("block", "layer", "kv", "head", "token")
        for name, index, bound in zip(names, (block, layer, kv, head, token), bounds, strict=True):
            if not 0 <= index < bound:
                raise InvalidArgument(f"{name} {index} is outside 0..{bound - 1}")
        s = self.strides(num_blocks)
        return block * s.block + layer * s.layer + kv * s.kv + head * s.head + token * s.token
