"""What the CPU backend asks of torch tensors: numpy views for the core, and whether a call is plainly right.

A decode step makes a call per layer. The full checks of :mod:`kvcatch.kernels.checks` take longer than a small kernel,
so the common case is recognised by a few comparisons; whatever is not recognised goes through them all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch import _core
from kvcatch.errors import MissingExtra
from kvcatch.kernels.attention_checks import MAGNITUDE
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.checks import MAX_GROUP, check_cache_scales
from kvcatch.kernels.layout import ALIGNMENT

try:
    import torch
except ImportError as missing:
    raise MissingExtra("the CPU backend needs torch: pip install 'kvcatch[engine]'") from missing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels.backend import Tensor
    from kvcatch.kernels.layout import KVLayout

    Array = NDArray[Any]

__all__ = [
    "array_of",
    "dtype_name",
    "empty_like",
    "head_scales_of",
    "is_vector",
    "layout_of",
    "numpy_of",
    "plain_attention",
    "plain_write",
    "torch",
]

DTYPES: dict[str, Any] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
NAMES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}


def plain_write(
    cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> bool:
    """Whether a write is plainly right: the common case in few steps. Anything else goes through all checks."""
    if not _plain_cache(cache, layer) or not isinstance(key, torch.Tensor):
        return False
    layout = cache.layout
    shape = key.shape
    return (
        len(shape) == 3
        and shape[1] == layout.num_kv_heads
        and shape[2] == layout.head_dim
        and _is_plain(key, DTYPES.get(layout.dtype))
        and _is_plain(value, key.dtype)
        and value.shape == shape
        and is_vector(slot_mapping, torch.int64, shape[0])
    )


def plain_attention(
    cache: KVCache,
    layer: int,
    query: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor | None,
) -> bool:
    """As :func:`plain_write`, for attention."""
    if not _plain_cache(cache, layer) or not isinstance(query, torch.Tensor):
        return False
    layout = cache.layout
    shape = query.shape
    return (
        type(scale) is float
        and -MAGNITUDE <= scale <= MAGNITUDE
        and len(shape) == 3
        and shape[2] == layout.head_dim
        and shape[1] % layout.num_kv_heads == 0
        and 1 <= shape[1] // layout.num_kv_heads <= MAX_GROUP
        and _is_plain(query, DTYPES.get(layout.dtype))
        and _is_plain(block_tables, torch.int32)
        and len(block_tables.shape) == 2
        and block_tables.shape[0] == shape[0]
        and (out is None or (_is_plain(out, query.dtype) and out.shape == shape))
    )


def _plain_cache(cache: KVCache, layer: int) -> bool:
    if type(cache) is not KVCache or cache.device != "cpu":
        return False
    layout = cache.layout
    return (
        type(layer) is int
        and type(cache.num_blocks) is int
        and layout.scale == "none"
        and 0 <= layer < layout.num_layers
        and _is_plain(cache.buffer, torch.uint8)
    )


def _is_plain(tensor: Tensor, dtype: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is dtype
        and not tensor.requires_grad
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.is_cpu
        and tensor.data_ptr() % ALIGNMENT == 0
    )


def is_vector(tensor: Tensor, dtype: Any, length: int) -> bool:
    """Whether a tensor is a packed vector of a dtype and length."""
    return _is_plain(tensor, dtype) and len(tensor.shape) == 1 and tensor.shape[0] == length


def array_of(tensor: Tensor) -> Array:
    """A numpy view of a tensor of floats; 16-bit ones as int16, which numpy has and bfloat16 it has not."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.view(np.int16) if tensor.itemsize == 2 else tensor  # type: ignore[no-any-return]
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not torch.float32:
        tensor = tensor.view(torch.int16)
    return tensor.numpy()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _core_layout(layout: KVLayout, num_blocks: int) -> _core.CpuLayout:
    s = layout.strides(num_blocks)
    return _core.CpuLayout(
        num_blocks,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.dtype,
        layout.scale,
        (s.block, s.layer, s.kv, s.head, s.token, s.scale, s.scale_head, s.scale_token),
    )


def layout_of(cache: KVCache) -> _core.CpuLayout:
    """A pool's layout as the core takes it, made once."""
    return _core_layout(cache.layout, cache.num_blocks)


def head_scales_of(cache: KVCache) -> Array | None:
    """The scales beside a pool, where its layout keeps them there."""
    return None if check_cache_scales(cache) is None else numpy_of(cache.head_scales)


def numpy_of(tensor: Tensor) -> Array:
    """A contiguous numpy array of a tensor that numpy has a dtype for."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.numpy()  # type: ignore[no-any-return]


def empty_like(query: Tensor) -> Tensor:
    """A packed result of the shape, dtype and library of ``query``; on the host whatever torch's default device is."""
    if isinstance(query, np.ndarray):
        return np.empty(query.shape, query.dtype)
    return torch.empty(query.shape, dtype=query.dtype, device="cpu")


def dtype_name(tensor: Tensor) -> str:
    """A tensor's dtype as ``layout.py`` spells it."""
    return NAMES.get(tensor.dtype) or str(tensor.dtype)
