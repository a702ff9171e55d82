"""Which kernels a pool and a model use: each source with the constants it is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.kernels.attention_checks import query_dtypes
from kvcatch.kernels.checks import WIDE_DTYPES, check_group
from kvcatch.kernels.device_attention import (
    BLOCK_SIZES,
    HEAD_DIMS,
    attention_defines,
    thread_blocks_per_sm,
)
from kvcatch.kernels.device_blocks import DTYPE_CODES, SCALE_CODES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcatch.kernels.layout import KVLayout

__all__ = ["Variant", "attention_variants", "block_variants"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A source of ``cuda/`` (without ``.cu``) and the constants (``-D``) of one build of it."""

    source: str
    defines: Mapping[str, int]


def block_variants(layout: KVLayout, *, check_ids: bool = False) -> list[Variant]:
    """The kernels that move, write and convert blocks of one layout, for keys and values of every dtype it takes."""
    ids = {"KV_CHECK_IDS": int(check_ids)}
    found = [Variant("block_move", ids), Variant("block_assign", ids)]
    quantised = layout.dtype == "float8_e4m3"
    for dtype in WIDE_DTYPES if quantised else (layout.dtype,):
        defines = {
            **ids,
            "KV_DTYPE": DTYPE_CODES[layout.dtype],
            "KV_IO": DTYPE_CODES[dtype],
            "KV_SCALE": SCALE_CODES[layout.scale],
            "KV_HEAD_DIM": layout.head_dim,
            "KV_BLOCK_SIZE": layout.block_size,
        }
        if layout.scale != "block":
            found.append(Variant("write_kv", defines))
        if quantised:
            found.append(Variant("quantise", defines))
    return found


def attention_variants(
    layout: KVLayout,
    num_q_heads: int,
    *,
    window: bool = False,
    soft_cap: bool = False,
    alibi: bool = False,
    check_ids: bool = False,
) -> list[Variant]:
    """The attention kernels of one layout and model, for queries of every dtype it takes.

    Raises:
        InvalidArgument: there are none: float32, an unusual head_dim or block size, heads that do not divide.
    """
    group = check_group(num_q_heads, layout)
    known = layout.head_dim in HEAD_DIMS and layout.block_size in BLOCK_SIZES
    if layout.dtype == "float32" or not known:
        raise InvalidArgument(
            f"there are no attention kernels for {layout.dtype} caches with head_dim {layout.head_dim} and"
            f" block_size {layout.block_size}"
        )
    found = []
    for dtype in query_dtypes(layout):
        defines = attention_defines(
            layout, dtype, group, soft_cap=soft_cap, alibi=alibi, check_ids=check_ids
        )
        fit = {
            kernel: {"KV_MIN_CTAS": thread_blocks_per_sm(kernel, layout, group)}
            for kernel in ("decode", "prefill")
        }
        found += [
            Variant("decode", defines | fit["decode"]),
            Variant("merge", {name: defines[name] for name in ("KV_IO", "KV_HEAD_DIM")}),
            Variant("prefill", defines | fit["prefill"] | {"KV_WINDOW": int(window)}),
        ]
    return found
