"""Reading a GGUF file: its metadata and where its tensors lie.

The file is little-endian: magic, version, counts, then key-value pairs, then one record per tensor, then
the tensors' bytes at a multiple of ``general.alignment`` (the GGUF specification of ggml, version 3).
The ``gguf`` package reads the same, but makes an array of every string: 5 s for this model's vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from kvcatch.models.errors import ModelError

__all__ = ["GGUFFile", "TensorInfo"]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
"""Version 1 had 32-bit lengths; nothing writes it any more."""

MAX_DIMS: Final = 4
MAX_DEPTH: Final = 4
"""Arrays within arrays; the specification sets no bound, no writer nests twice."""

_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
                   10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9

TYPE_SIZES: Final = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}  # fmt: skip
"""Types that are read: number in the file, elements of a block, bytes of a block (ggml-common.h)."""

_TYPES: Final = {number: (name, items, size) for name, (number, items, size) in TYPE_SIZES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: As written.
        shape: Rows first, as torch has it (the file states the fastest dimension first).
        dtype: ``F32``, ``Q4_1``...
        offset: Byte of the file where it starts.
        num_bytes: Its length.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        path: The file.
        metadata: Key to value; arrays of numbers are numpy arrays, arrays of strings lists.
        tensors: Name to where it lies, every one within the file.

    Raises:
        ModelError: no such file, not GGUF, of another version, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._at = 0
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    self._fail(f"{size} bytes are no GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self.path}: {error.strerror or error}") from error
        self._size = size
        if self._map[:4] != MAGIC:
            self._fail(f"starts with {self._map[:4]!r}, a GGUF file with {MAGIC!r}")
        self._at = 4
        version = self._number("<I", "version")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            self._fail(f"GGUF version {version} is not read, {known} are")
        num_tensors = self._count("number of tensors", least=24)
        num_values = self._count("number of metadata entries", least=13)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text("a metadata key")
            if key in self.metadata:
                self._fail(f"metadata {key!r} is there twice")
            self.metadata[key] = self._value(self._number("<I", key), key, 0)
        self.tensors = self._read_tensors(num_tensors)

    def bytes_of(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The raw bytes of a tensor, a read-only view of the file.

        Raises:
            ModelError: there is no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            self._fail(f"has no tensor {name!r}")
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two")
        records = []
        for _ in range(count):
            name = self._text("a tensor's name")
            num_dims = self._number("<I", name)
            if not 1 <= num_dims <= MAX_DIMS:
                self._fail(f"tensor {name!r} has {num_dims} dimensions: damaged")
            dims = [self._number("<Q", name) for _ in range(num_dims)]
            number = self._number("<I", name)
            records.append((name, dims, number, self._number("<Q", name)))
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, dims, number, offset in records:
            if number not in _TYPES:
                known = ", ".join(TYPE_SIZES)
                self._fail(f"tensor {name!r} has type number {number}: only {known} are read")
            dtype, items, size = _TYPES[number]
            if dims[0] % items or not all(0 < dim < 1 << 40 for dim in dims):
                self._fail(f"tensor {name!r} has shape {dims[::-1]} of {dtype}: damaged")
            num_bytes = math.prod(dims) // items * size
            if start + offset + num_bytes > self._size or offset % alignment:
                self._fail(
                    f"truncated: tensor {name!r} ends at byte {start + offset + num_bytes:,},"
                    f" the file has {self._size:,}"
                    if not offset % alignment
                    else f"tensor {name!r} starts at {offset}, not a multiple of {alignment}"
                )
            if name in tensors:
                self._fail(f"tensor {name!r} is there twice")
            tensors[name] = TensorInfo(name, tuple(dims[::-1]), dtype, start + offset, num_bytes)
        return tensors

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY or depth == MAX_DEPTH:
            self._fail(f"metadata {key!r} has type number {kind}: damaged")
        item = self._number("<I", key)
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            count = self._count(key, least=dtype.itemsize)
            values = np.frombuffer(self._map, dtype, count, self._at)
            self._at += values.nbytes
            return values
        count = self._count(key, least=4)
        if item == _STRING:
            return self._texts(count, key)
        return [self._value(item, key, depth + 1) for _ in range(count)]

    def _texts(self, count: int, key: str) -> list[str]:
        """Strings one after the other; a loop without calls, for there are 100,000 of them."""
        at, size, data, unpack = self._at, self._size, self._map, struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                at += 8 + length
                if at > size:
                    self._truncated(key)
                texts.append(data[at - length : at].decode())
        except struct.error:
            self._truncated(key)
        except UnicodeDecodeError:
            self._fail(f"metadata {key!r} is not UTF-8: damaged")
        self._at = at
        return texts

    def _text(self, what: str) -> str:
        return self._texts(1, what)[0]

    def _count(self, what: str, least: int) -> int:
        """A count of things of at least ``least`` bytes each: more than the rest of the file is damage."""
        count = int(self._number("<Q", what))
        if count > (self._size - self._at) // least:
            self._fail(f"truncated or damaged: {what} says {count:,} entries")
        return count

    def _number(self, code: str, what: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self._map, self._at)
        except struct.error:
            self._truncated(what)
        self._at += struct.calcsize(code)
        return value

    def _truncated(self, what: str) -> NoReturn:
        self._fail(f"truncated: ends at byte {self._size:,}, inside {what!r}")

    def _fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem}")
