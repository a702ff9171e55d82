"""The types a KV cache may have, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

WEIGHT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4, "fp32": 4, "float": 4,
        "float16": 2, "fp16": 2, "half": 2,
        "bfloat16": 2, "bf16": 2,
    }
)  # fmt: skip
"""Bytes of a weight by the name a config or a user gives its type."""

SCALE_BYTES = 4
"""A scale stored beside the values is a float32."""

DS_MLA_BYTES = 656
"""Bytes per token and layer of vLLM's ``fp8_ds_mla``: 512 fp8 + 4 float32 scales + 64 bf16."""


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How K and V are stored.

    Attributes:
        name: As the user gave it, or the model's type for ``auto``.
        element_bytes: Bytes of one value.
        scale_bytes: Bytes of the scales stored in the cache per token and head, for K and for V each;
            0 where a scale is kept per tensor or there is none.
        is_packed_mla: The 656-byte row of sparse MLA.
    """

    name: str
    element_bytes: int
    scale_bytes: int = 0
    is_packed_mla: bool = False

    @classmethod
    def parse(cls, name: str, model_dtype: str) -> KvDtype:
        """Read a type's name; ``auto`` takes the model's.

        Raises:
            InvalidArgument: a type that is not in KV_DTYPES.
        """
        key = name.strip().lower()
        if key == "auto":
            return cls(model_dtype, WEIGHT_BYTES[model_dtype])
        if key in WEIGHT_BYTES:
            return cls(key, WEIGHT_BYTES[key])
        known = _QUANTISED.get(key)
        if known is None:
            raise InvalidArgument(f"kv_dtype = {name!r}: unknown; known are {', '.join(KV_DTYPES)}")
        return known


_QUANTISED: Mapping[str, KvDtype] = {
    **{
        name: KvDtype(name, 1)
        for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8")
    },
    # vLLM's Triton backend writes one float32 behind the values of each head, for K and for V.
    **{
        name: KvDtype(name, 1, SCALE_BYTES)
        for name in ("fp8_per_token_head", "int8_per_token_head")
    },
    "fp8_ds_mla": KvDtype("fp8_ds_mla", 1, is_packed_mla=True),
}  # fmt: skip

KV_DTYPES = (
    "auto", "bf16", "fp16", "fp32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8",
    "fp8_per_token_head", "int8_per_token_head", "fp8_ds_mla",
)  # fmt: skip
"""The names ``--kv-dtype`` takes (others of WEIGHT_BYTES too)."""
