"""Refusals that all backends share, made before anything is launched or copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.layout import is_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds
    from kvcatch.kernels.layout import KVLayout

    Ids = NDArray[np.int32]

__all__ = [
    "check_cache",
    "check_group",
    "check_ids",
    "check_layer",
    "check_moves",
    "check_same_layout",
    "check_window",
]

MAX_GROUP = 16
"""Most query heads per kv head: the rows of one tensor-core tile."""


def check_cache(name: str, cache: Any, device: str) -> KVCache:
    """Refuse what is not a KV cache on ``device``."""
    if not isinstance(cache, KVCache):
        raise InvalidType(f"{name} must be a KVCache, not {type(cache).__name__}")
    if cache.device != device:
        raise InvalidArgument(f"{name} lies on {cache.device}: must be on {device}")
    return cache


def check_ids(name: str, ids: BlockIds, num_blocks: int) -> Ids:
    """Block ids as int32, each within ``0..num_blocks-1``.

    Raises:
        InvalidType: not integers.
        InvalidArgument: one is out of range.
    """
    return _core.check_block_ids(name, ids, num_blocks)


def check_moves(
    src: BlockIds, dst: BlockIds, source: KVCache, target: KVCache, *, hazards: bool = False
) -> tuple[Ids, Ids]:
    """Sources and destinations of block copies as int32.

    Args:
        src: block ids in ``source``.
        dst: block ids in ``target``, each at most once.
        source: the cache read.
        target: the cache written; the same one for moves within a pool.
        hazards: allow a destination that is also a source (the caller orders the copies).

    Raises:
        InvalidArgument: of unlike lengths, an id out of range, a destination named twice, or one that is also a source.
    """
    same = source is target or source.buffer is target.buffer
    sources = check_ids("src", src, source.num_blocks)
    targets = check_ids("dst", dst, target.num_blocks)
    _core.check_moves(sources, targets, allow_overlap=hazards or not same)
    return sources, targets


def check_same_layout(source: KVCache, target: KVCache) -> None:
    """Refuse to copy blocks between caches whose blocks hold unlike things (their order may differ)."""
    for field in ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "scale"):
        one, other = getattr(source.layout, field), getattr(target.layout, field)
        if one != other:
            raise InvalidArgument(
                f"blocks with {field} {one!r} cannot be copied to blocks with {field} {other!r}"
            )


def check_layer(layer: int, layout: KVLayout) -> int:
    """A layer's index."""
    if not is_whole(layer, 0, layout.num_layers - 1):
        raise InvalidArgument(f"layer {layer!r}: must be within 0..{layout.num_layers - 1}")
    return int(layer)


def check_group(num_q_heads: int, layout: KVLayout) -> int:
    """Query heads per kv head, 1..16.

    Raises:
        InvalidArgument: the heads do not divide, or there are more.
    """
    group, rest = divmod(num_q_heads, layout.num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise InvalidArgument(
            f"{num_q_heads} query heads over {layout.num_kv_heads} kv heads: must be 1 to {MAX_GROUP} times as many"
        )
    return group


def check_window(window: int | None) -> int:
    """A sliding window in tokens; 0 where there is none."""
    if window is None:
        return 0
    if not is_whole(window, 1, (1 << 31) - 1):
        raise InvalidArgument(f"window must be a positive number of tokens, not {window!r}")
    return int(window)
