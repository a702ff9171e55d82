"""What the KV kernels must do, in numpy: a pool's bytes seen as arrays, and the e4m3 formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels import KVLayout

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]

__all__ = [
    "DTYPES",
    "by_block",
    "codes_of",
    "elements",
    "expected_write",
    "scale_of",
    "scales",
    "values_of",
]

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
}
TINY = np.float32(2.0**-100)
MOST = np.float32(448)


def by_block(pool: Bytes, layout: KVLayout) -> Bytes:
    """A pool's bytes as ``[block, layer, K or V, byte of the area]``, a view whatever the order."""
    areas = pool.reshape(-1, 2, layout.area_bytes)
    if layout.order == "block":
        return areas.reshape(-1, layout.num_layers, 2, layout.area_bytes)
    return areas.reshape(layout.num_layers, -1, 2, layout.area_bytes).swapaxes(0, 1)


def elements(pool: Bytes, layout: KVLayout) -> NDArray[Any]:
    """The keys and values ``[block, layer, K or V, kv head, token, head_dim]``, a view; codes as uint8."""
    shape = (layout.num_kv_heads, layout.block_size, layout.head_dim)
    dtype = np.uint8 if layout.dtype == "float8_e4m3" else DTYPES[layout.dtype]
    data = by_block(pool, layout)[..., : int(np.prod(shape)) * layout.item_bytes]
    return _split(data.view(dtype), shape)


def scales(pool: Bytes, layout: KVLayout) -> Floats:
    """The scales in the pool, ``[block, layer, K or V, kv head, token]`` or without ``token``, a view."""
    start = layout.num_kv_heads * layout.block_size * layout.head_dim * layout.item_bytes
    data = by_block(pool, layout)[..., start : start + 4 * layout.scales_per_area].view(np.float32)
    if layout.scale == "token":
        return _split(data, (layout.num_kv_heads, layout.block_size))
    return data


def _split(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Split the last axis, without a copy."""
    strides = array.itemsize * np.cumprod((1, *shape[:0:-1]))[::-1]
    return np.lib.stride_tricks.as_strided(
        array, (*array.shape[:-1], *shape), (*array.strides[:-1], *strides.tolist())
    )


def scale_of(x: Floats, axes: tuple[int, ...]) -> Floats:
    """The scale of the elements along ``axes``: their largest magnitude, NaN left out, over 448; 1 below 2^-100."""
    most = np.nanmax(np.abs(np.where(np.isnan(x), np.float32(0), x)), axis=axes)
    return np.where(most >= TINY, most / MOST, np.float32(1)).astype(np.float32)


def codes_of(x: Floats, scale: Floats) -> Bytes:
    """The e4m3 codes of ``x``; ``scale`` as broadcast against it."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = x.astype(np.float32) * (np.float32(1) / scale.astype(np.float32))
    codes = np.clip(scaled, -MOST, MOST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(0x7F), codes)


def values_of(codes: Bytes, scale: Floats, dtype: str) -> NDArray[Any]:
    """What codes stand for, rounded to ``dtype``."""
    with np.errstate(invalid="ignore", over="ignore"):
        return (codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).astype(
            DTYPES[dtype]
        )


def expected_write(
    pool: Bytes,
    layout: KVLayout,
    layer: int,
    key: NDArray[Any],
    value: NDArray[Any],
    slots: NDArray[np.int64],
    head_scales: Floats | None = None,
) -> Bytes:
    """The pool's bytes after ``write_kv``."""
    after = pool.copy()
    data = elements(after, layout)
    for kv, rows in enumerate((key, value)):
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if slot < 0:
                continue
            place = (slot // layout.block_size, layer, kv, slice(None), slot % layout.block_size)
            if layout.scale == "none":
                data[place] = row
                continue
            x = row.astype(np.float32)
            scale = head_scales[layer, kv] if head_scales is not None else scale_of(x, (1,))
            data[place] = codes_of(x, scale[:, None])
            if layout.scale == "token":
                scales(after, layout)[place] = scale
    return after
