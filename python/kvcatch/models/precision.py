"""Which number format the weights take on this processor, and how matrices are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvcatch.errors import InvalidArgument
from kvcatch.models.extras import need

__all__ = ["CPU", "Precision", "WeightDtype", "choose_precision", "read_cpu"]

WeightDtype = Literal["float32", "bfloat16"]

WIDE_ROWS = 32
"""Rows from which float32 is faster on Intel with AVX-512 BF16 and no AMX: a decode of 32, or a chunk of a prompt."""

_NATIVE_BF16 = {"amx_bf16": "AMX with BF16", "avx512_bf16": "AVX-512 with BF16"}


@dataclass(frozen=True, slots=True)
class CPU:
    """What the choice depends on.

    Attributes:
        vendor: As CPUID says it; empty where unknown.
        flags: Names of instruction sets as Linux writes them.
    """

    vendor: str = ""
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Precision:
    """The choice. Keys and values take the same format unless the engine is told otherwise.

    Attributes:
        weights: Format of weights and activations.
        matmul: ``packed``: oneDNN's own weight order, made once at load. ``plain``: ``torch.nn.functional.linear``.
        reason: Why, in words.
        wide_rows: Steps of so many rows and more compute their layers in float32, from a second copy of the same
            (rounded) weights; 0 for never.
    """

    weights: WeightDtype
    matmul: Literal["packed", "plain"]
    reason: str
    wide_rows: int = 0

    def __str__(self) -> str:
        wide = f", float32 from {self.wide_rows} rows" if self.wide_rows else ""
        return f"{self.weights} weights{wide}, {self.matmul} matmul ({self.reason})"


def choose_precision(
    device: str = "cpu", requested: str = "auto", cpu: CPU | None = None
) -> Precision:
    """Choose by device and processor.

    On a CPU: bfloat16 where it multiplies natively (AMX, AVX-512 BF16): weights and cache take half the memory, which
    is what a decode step waits for. Else float32: without those instructions a bfloat16 product of 32 rows and more
    is several times slower. MKL's float32 product, which plain ``linear`` calls, is slow at small batches; oneDNN's
    with weights packed once is up to 3 times faster. ``benches/model.py`` compares all four on the machine at hand.

    Intel's cores take two cycles for what a BF16 instruction of AVX-512 does and have two float32 units: without AMX
    a product of many rows, which waits for arithmetic and not for memory, is up to 1.7 times faster in float32. There
    the layers are kept twice (``wide_rows``); few rows read the small copy, many the wide one.

    Args:
        device: ``cpu`` or ``cuda:N``.
        requested: ``float32``, ``bfloat16`` or ``auto``.
        cpu: the processor; this machine's by default.

    Raises:
        InvalidArgument: an unknown format.
    """
    if requested not in ("auto", *get_args(WeightDtype)):
        known = ", ".join(("auto", *get_args(WeightDtype)))
        raise InvalidArgument(f"precision {requested!r}: must be one of {known}")
    if device != "cpu":
        weights: WeightDtype = "float32" if requested == "float32" else "bfloat16"
        return Precision(weights, "plain", "a GPU" if requested == "auto" else "asked for")
    matmul: Literal["packed", "plain"] = "packed" if _can_pack() else "plain"
    if requested != "auto":
        return Precision("float32" if requested == "float32" else "bfloat16", matmul, "asked for")
    cpu = cpu or read_cpu()
    for flag, name in _NATIVE_BF16.items():
        if flag in cpu.flags:
            slow = cpu.vendor == "GenuineIntel" and "amx_bf16" not in cpu.flags
            wide = WIDE_ROWS if slow else 0
            return Precision("bfloat16", matmul, f"the CPU has {name}", wide)
    return Precision("float32", matmul, "the CPU has no native BF16")


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> CPU:
    """This machine's processor; nothing known where the system has no such file."""
    vendor, flags = "", frozenset[str]()
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                vendor = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = frozenset(value.split())
            elif not line.strip() and flags:
                break  # the other cores say the same
    except OSError:
        return CPU()
    return CPU(vendor, flags)


def _can_pack() -> bool:
    """Whether this torch has oneDNN's packed product: operators that torch's compiler uses, not public ones."""
    torch = need("torch")
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
