"""Refusals that all backends share, made before anything is launched or copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.layout import ALIGNMENT, KVLayout, is_whole
from kvcatch.kernels.tensors import expect, view

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import BlockIds
    from kvcatch.kernels.tensors import TensorView

    Ids = NDArray[np.int32]

__all__ = [
    "check_apart",
    "check_buffer",
    "check_cache",
    "check_cache_scales",
    "check_conversion",
    "check_group",
    "check_head_scales",
    "check_ids",
    "check_layer",
    "check_layout",
    "check_lengths",
    "check_moves",
    "check_result_apart",
    "check_same_layout",
    "check_window",
    "check_write",
]

WIDE_DTYPES = ("float32", "float16", "bfloat16")
"""What keys and values may be before they are quantised."""

MAX_GROUP = 16
"""Most query heads per kv head: the rows of one tensor-core tile."""

MAX_TOKENS = 1 << 30
"""Most tokens of a sequence: the kernels count positions in 32 bits, and look a step ahead."""


def check_cache(name: str, cache: Any, device: str) -> KVCache:
    """Refuse what is not a KV cache on ``device``."""
    if not isinstance(cache, KVCache):
        raise InvalidType(f"{name} must be a KVCache, not {type(cache).__name__}")
    if cache.device != device:
        raise InvalidArgument(f"{name} lies on {cache.device}: must be on {device}")
    return cache


def check_layout(layout: Any) -> KVLayout:
    """Refuse what is not a layout."""
    if not isinstance(layout, KVLayout):
        raise InvalidType(f"layout must be a KVLayout, not {type(layout).__name__}")
    return layout


def check_lengths(name: str, values: BlockIds) -> Ids:
    """Numbers of tokens or rows as int32, each within ``0..2^30``.

    Raises:
        InvalidType: not integers.
        InvalidArgument: one is out of range.
    """
    return _core.check_block_ids(name, values, MAX_TOKENS + 1)


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
        InvalidType: not a whole number.
        InvalidArgument: the heads do not divide, or there are more.
    """
    if not is_whole(num_q_heads, -MAX_TOKENS, MAX_TOKENS):
        raise InvalidType(f"num_q_heads must be a whole number of heads, not {num_q_heads!r}")
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


def check_buffer(name: str, cache: KVCache) -> TensorView:
    """The bytes of a pool, on the cache's device and as many as its layout takes.

    Raises:
        InvalidType: the buffer is no uint8 tensor.
        InvalidArgument: it has another size, device or stride, or does not start at a multiple of 16 bytes.
    """
    buffer = expect(
        f"{name}.buffer",
        cache.buffer,
        shape=(cache.num_bytes,),
        dtype="uint8",
        device="cpu" if cache.pinned else cache.device,
        writable=True,
    )
    _check_aligned(f"{name}.buffer", buffer)
    return buffer


def check_apart(source: KVCache, target: KVCache) -> None:
    """Refuse two pools that share memory: copies between them would race with each other.

    Raises:
        InvalidArgument: they overlap.
    """
    one, other = view(source.buffer), view(target.buffer)
    if _overlap(one, other):
        raise InvalidArgument(
            f"the two pools overlap in memory ({one.num_bytes} bytes at {one.pointer:#x} and"
            f" {other.num_bytes} at {other.pointer:#x}): give two separate pools"
        )


def check_result_apart(name: str, result: TensorView, **read: TensorView) -> None:
    """Refuse a result that shares memory with what a kernel reads while it writes: who comes first is nobody's to say.

    Raises:
        InvalidArgument: it overlaps one of ``read``, which is named.
    """
    for other, seen in read.items():
        if _overlap(result, seen):
            raise InvalidArgument(
                f"{name} overlaps {other} in memory ({result.num_bytes} bytes at {result.pointer:#x}): give a tensor"
                " of its own"
            )


def check_conversion(wide: KVCache, quantised: KVCache) -> None:
    """Refuse to convert between pools unless one is e4m3, the other is not, and their blocks hold the same things.

    Args:
        wide: the float32, float16 or bfloat16 pool.
        quantised: the e4m3 pool.

    Raises:
        InvalidArgument: wrong dtypes, unlike sizes, or pools that overlap.
    """
    if wide.layout.dtype not in WIDE_DTYPES:
        raise InvalidArgument(
            f"blocks of {wide.layout.dtype}: conversion is between an e4m3 pool and one of {' or '.join(WIDE_DTYPES)}"
        )
    if quantised.layout.dtype != "float8_e4m3":
        raise InvalidArgument(
            f"blocks of {quantised.layout.dtype} take no codes: must be an e4m3 pool"
        )
    for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        one, other = getattr(wide.layout, field), getattr(quantised.layout, field)
        if one != other:
            raise InvalidArgument(
                f"blocks with {field} {one} cannot be converted to or from blocks with {field} {other}"
            )
    check_apart(wide, quantised)


def check_head_scales(layout: KVLayout, head_scales: Any, device: str) -> None:
    """Refuse the scales of a new pool unless they are those that its layout takes.

    Raises:
        InvalidType: not a float32 tensor.
        InvalidArgument: missing or needless, of another shape, or one that is not within 2^-100..2^100: beyond it a
            product could pass the range of float32.
    """
    if layout.scale != "head":
        if head_scales is not None:
            raise InvalidArgument(
                f"head_scales given for scale={layout.scale!r}: only scale='head' takes them"
            )
        return
    if head_scales is None:
        raise InvalidArgument("scale='head' needs head_scales [num_layers, 2, num_kv_heads]")
    shape = (layout.num_layers, 2, layout.num_kv_heads)
    expect("head_scales", head_scales, shape=shape, dtype="float32", device=device)
    for scale in head_scales.reshape(-1).tolist():
        if not 2.0**-100 <= scale <= 2.0**100:
            raise InvalidArgument(f"head_scales holds {scale}: each must be within 2^-100..2^100")


def check_cache_scales(cache: KVCache) -> TensorView | None:
    """The scales beside a pool where its layout keeps them there; their values were checked when it was made.

    Raises:
        InvalidType: not a float32 tensor.
        InvalidArgument: another shape, device or stride.
    """
    layout = cache.layout
    if layout.scale != "head":
        return None
    shape = (layout.num_layers, 2, layout.num_kv_heads)
    return expect(
        "head_scales", cache.head_scales, shape=shape, dtype="float32", device=cache.device
    )


def check_write(
    cache: KVCache, layer: int, key: Any, value: Any, slot_mapping: Any, device: str
) -> tuple[TensorView, TensorView, TensorView]:
    """New keys, values and their slots, as ``write_kv`` takes them; the slots' range is the backend's to check.

    Raises:
        InvalidType: a wrong dtype, or not tensors.
        InvalidArgument: a wrong shape, device, stride or layer, or a cache with scales per block.
    """
    layout = check_cache("cache", cache, device).layout
    check_layer(layer, layout)
    if layout.scale == "block":
        raise InvalidArgument(
            "the cache has one scale per block, fixed for full blocks: write to a 16-bit cache and quantise_blocks"
        )
    dtypes = WIDE_DTYPES if layout.dtype == "float8_e4m3" else (layout.dtype,)
    shape: tuple[int | None, ...] = (None, layout.num_kv_heads, layout.head_dim)
    keys = expect("key", key, shape=shape, dtype=dtypes, device=device, contiguous=False)
    values = expect(
        "value", value, shape=keys.shape, dtype=keys.dtype, device=device, contiguous=False
    )
    slots = expect("slot_mapping", slot_mapping, shape=keys.shape[:1], dtype="int64", device=device)
    for name, seen in (("key", keys), ("value", values)):
        _check_aligned(name, seen)
        for size, stride in zip(seen.shape[:2], seen.strides[:2], strict=True):
            if size > 1 and stride % ALIGNMENT:
                raise InvalidArgument(
                    f"{name} has strides of {list(seen.strides)} bytes: must be multiples of {ALIGNMENT} between rows"
                )
        if _overlap(seen, view(cache.buffer)):
            raise InvalidArgument(
                f"{name} lies inside the cache it is written to: copy it out first"
            )
    return keys, values, slots


def _check_aligned(name: str, seen: TensorView) -> None:
    if 0 not in seen.shape and seen.pointer % ALIGNMENT:
        raise InvalidArgument(
            f"{name} starts at {seen.pointer:#x}: must start at a multiple of {ALIGNMENT} bytes"
        )


def _overlap(one: TensorView, other: TensorView) -> bool:
    """Whether two tensors without negative strides share a byte, or lie between each other's bytes."""
    return (
        one.pointer < other.pointer + other.num_bytes
        and other.pointer < one.pointer + one.num_bytes
    )
