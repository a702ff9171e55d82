"""What kvcatch needs to know of a tensor, whichever library made it: address, shape, strides, dtype, device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcatch.errors import InvalidArgument, InvalidType

__all__ = ["TensorView", "expect", "view"]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor's place in memory. ``strides`` are in bytes; ``owner`` keeps the memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    writable: bool
    owner: Any

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element to the end of the last, for a tensor without negative strides."""
        if 0 in self.shape:
            return 0
        spans = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return spans + item_bytes(self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        expected = item_bytes(self.dtype)
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3": 1,
}
_RENAMED = {"float8_e4m3fn": "float8_e4m3"}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype by name."""
    return _ITEM_BYTES[dtype]


def view(tensor: Any, name: str = "tensor") -> TensorView:
    """Describe a torch tensor, a CuPy array or a numpy array.

    Raises:
        InvalidType: it is none of them, its elements do not lie in memory as they read (sparse, nested, negated
            lazily), or its dtype is none that a kernel takes.
    """
    if hasattr(tensor, "data_ptr"):  # torch, which is not imported for this
        dtype = str(tensor.dtype).removeprefix("torch.")
        try:
            pointer, device = tensor.data_ptr(), str(tensor.device)
            size = tensor.element_size()
            strides = tuple(s * size for s in tensor.stride())
            negated = tensor.is_neg()
        except (RuntimeError, NotImplementedError) as error:  # sparse, nested, traced
            raise _not_plain(name, tensor) from error
        if negated:
            raise _not_plain(name, tensor)
        writable = True
    elif hasattr(tensor, "__cuda_array_interface__"):
        dtype, pointer, device = str(tensor.dtype), tensor.data.ptr, f"cuda:{tensor.device.id}"
        strides, writable = tuple(tensor.strides), True
    elif isinstance(tensor, np.ndarray):
        dtype, pointer, device = str(tensor.dtype), tensor.ctypes.data, "cpu"
        strides, writable = tensor.strides, tensor.flags.writeable
    else:
        raise InvalidType(
            f"{name} must be a torch, CuPy or numpy array, not {type(tensor).__name__}"
        )
    dtype = _RENAMED.get(dtype, dtype)
    if dtype not in _ITEM_BYTES:
        raise InvalidType(f"{name} has dtype {dtype}: no kernel takes it")
    return TensorView(pointer, tuple(tensor.shape), strides, dtype, device, writable, tensor)


def _not_plain(name: str, tensor: Any) -> InvalidType:
    return InvalidType(
        f"{name} is a tensor of layout {tensor.layout} whose elements do not lie in memory as they read: must be a"
        " plain one"
    )


def expect(
    name: str,
    tensor: Any,
    *,
    shape: tuple[int | None, ...],
    dtype: str | tuple[str, ...],
    device: str,
    contiguous: bool = True,
    writable: bool = False,
) -> TensorView:
    """Describe a tensor and refuse one that a kernel cannot take.

    Args:
        name: what it is called in the message.
        tensor: the tensor.
        shape: sizes it must have; ``None`` where any will do.
        dtype: names it may have.
        device: where it must lie.
        contiguous: C order without gaps. Otherwise only the last dimension must be without gaps.
        writable: it will be written.

    Raises:
        InvalidType: not a tensor, or of another dtype.
        InvalidArgument: another shape, device, stride, or read-only.
    """
    seen = view(tensor, name)
    dtypes = (dtype,) if isinstance(dtype, str) else dtype
    if seen.dtype not in dtypes:
        raise InvalidType(f"{name} has dtype {seen.dtype}: must be {' or '.join(dtypes)}")
    if len(seen.shape) != len(shape) or any(
        wanted is not None and have != wanted
        for have, wanted in zip(seen.shape, shape, strict=True)
    ):
        wanted_shape = ", ".join("any" if n is None else str(n) for n in shape)
        raise InvalidArgument(f"{name} has shape {list(seen.shape)}: must be [{wanted_shape}]")
    if seen.device != device:
        raise InvalidArgument(f"{name} lies on {seen.device}: must be on {device}")
    if any(size > 1 and step < 0 for size, step in zip(seen.shape, seen.strides, strict=True)):
        raise InvalidArgument(
            f"{name} has strides of {list(seen.strides)} bytes: none may be negative"
        )
    packed = seen.contiguous if contiguous else _last_packed(seen)
    if not packed:
        raise InvalidArgument(
            f"{name} has strides of {list(seen.strides)} bytes for shape {list(seen.shape)}: must be contiguous"
            + ("" if contiguous else " in its last dimension")
        )
    if writable and not seen.writable:
        raise InvalidArgument(f"{name} is read-only: it is written to")
    return seen


def _last_packed(seen: TensorView) -> bool:
    return 0 in seen.shape or seen.shape[-1] == 1 or seen.strides[-1] == item_bytes(seen.dtype)
