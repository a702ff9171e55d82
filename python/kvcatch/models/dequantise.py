"""From the quantised blocks of a GGUF file to float32, whole tensors at a time.

A block of 32 weights has a float16 scale ``d``, for ``_1`` types a float16 minimum ``m``, for 5-bit types
32 high bits, and the codes: nibbles of byte ``j`` are weight ``j`` (low) and ``j + 16`` (high)
(ggml-quants.c). Weight = ``d * (code - zero) + m``. K-quants are left to the ``gguf`` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcatch.models.extras import need

if TYPE_CHECKING:
    from kvcatch.models.gguf import GGUFFile

__all__ = ["read_tensor"]

_FOUR_BITS = {"Q4_0": -8, "Q4_1": 0, "Q5_0": -16, "Q5_1": 0}
"""What is added to a code before it is scaled."""


def read_tensor(file: GGUFFile, name: str) -> Any:
    """A tensor of the file as float32, in its own memory.

    Raises:
        ModelError: there is no such tensor.
        MissingExtra: its type needs a package that is not installed.
    """
    torch = need("torch")
    raw = file.bytes_of(name)
    info = file.tensors[name]
    if info.dtype not in ("F32", "F16", "BF16", "Q8_0", *_FOUR_BITS):
        quants = need("gguf.quants")
        kind = need("gguf").GGMLQuantizationType[info.dtype]
        rows = raw.reshape(*info.shape[:-1], -1)
        return torch.from_numpy(quants.dequantize(rows, kind)).reshape(info.shape)
    wide = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(info.dtype)
    data = _from_read_only(torch, raw)
    if wide is not None:
        values = data.view(getattr(torch, wide)).float()
        return (values.clone() if wide == "float32" else values).reshape(info.shape)
    if info.dtype == "Q8_0":
        blocks = data.view(-1, 34)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].view(torch.int8) * scale).reshape(info.shape)
    return _nibbles(torch, data, info.dtype).reshape(info.shape)


def _nibbles(torch: Any, data: Any, dtype: str) -> Any:
    has_minimum, has_fifth = dtype.endswith("_1"), dtype.startswith("Q5")
    head = 4 if has_minimum else 2
    start = head + (4 if has_fifth else 0)
    blocks = data.view(-1, start + 16)
    factors = blocks[:, :head].contiguous().view(torch.float16).float()
    packed = blocks[:, start:]
    codes = torch.cat((packed & 15, packed >> 4), dim=1)
    if has_fifth:
        bits = blocks[:, head:start].contiguous().view(torch.int32)
        codes |= ((bits >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.uint8) << 4
    values = codes.float()
    if _FOUR_BITS[dtype]:
        values += _FOUR_BITS[dtype]
    values *= factors[:, :1]
    if has_minimum:
        values += factors[:, 1:]
    return values


def _from_read_only(torch: Any, raw: Any) -> Any:
    """A tensor over bytes that may not be written; torch warns of it, and nothing here writes."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(raw)
