"""What is read from a cubin, against NVIDIA's own disassembler where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="NVRTC is called through CuPy: pip install 'kvcatch[cuda]'")

from cuda_host import budget
from cuda_host.cubin import usage
from kvcatch.kernels.modules import CupyNvrtc, KernelCompiler

if WHY := budget.unavailable():
    pytest.skip(WHY, allow_module_level=True)

FORMS = {
    "ldg128": r"LDG\.E\S*\.128\b",
    "ldg64": r"LDG\.E\S*\.64\b",
    "stg128": r"STG\.E\S*\.128\b",
    "ldgsts": r"LDGSTS\b",
    "hmma": r"HMMA\.",
    "spills": r"(?:LDL|STL)\b",
}

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const float4* x, float4* y, int n) {
  float4 v[24];
  for (int k = 0; k < 24; k++) v[k] = x[threadIdx.x + k * n];
  for (int i = 0; i < n; i++)
    for (int k = 0; k < 24; k++) v[k].x += v[(k + 1) % 24].y * i, v[k].z -= v[k].w * v[(k + 5) % 24].x;
  for (int k = 0; k < 24; k++) y[threadIdx.x + k * n] = v[k];
}
extern "C" __global__ void plain(const float2* x, float* y) { y[threadIdx.x] = x[threadIdx.x].x; }
"""


def nvdisasm() -> Path:
    for folder in map(Path, sys.path):
        if (tool := folder / "nvidia" / "cu13" / "bin" / "nvdisasm").is_file():
            return tool
    if found := shutil.which("nvdisasm"):
        return Path(found)
    pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm==13.2.86")


def disassembled(cubin: bytes, folder: Path) -> dict[str, dict[str, int]]:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run(
        [nvdisasm(), "-c", "-ndf", path], capture_output=True, text=True, check=True
    ).stdout
    counts = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        # LTC128B is a hint to the cache, not a width.
        code = part.replace(".LTC128B", "")
        name = part.split(",", 1)[0]
        counts[name] = {kind: len(re.findall(rf"\b{form}", code)) for kind, form in FORMS.items()}
    return counts


@pytest.mark.parametrize("arch", budget.ARCHES)
@pytest.mark.parametrize(
    "name",
    [
        "block_move",
        "block_assign",
        "write_kv bf16 d128 b16",
        "quantise e4m3 token io-bf16 d128 b16",
        "decode bf16 d128 b16 g8",
        "decode e4m3 token io-bf16 d128 b16 g8",
        "prefill bf16 d128 b16 g8",
    ],
)
def test_instructions_are_those_of_nvdisasm(name: str, arch: int, tmp_path: Path) -> None:
    case = next(case for case in budget.cases() if case.name == name)
    cubin = budget.compiler().cubin(case.variant.source, case.variant.defines, arch)
    counts = disassembled(cubin, tmp_path)
    found = usage(cubin)
    assert sorted(found) == sorted(counts)
    for kernel, wanted in counts.items():
        assert {kind: getattr(found[kernel], kind) for kind in FORMS} == wanted


@pytest.mark.parametrize("arch", budget.ARCHES)
def test_spills_and_stack_are_seen(arch: int, tmp_path: Path) -> None:
    (tmp_path / "spill.cu").write_text(SPILLING)
    cubin = KernelCompiler(tmp_path, tmp_path, nvrtc=CupyNvrtc()).cubin("spill", {}, arch)
    found = usage(cubin)
    assert found["spilling"].registers <= 32
    assert found["spilling"].stack > 0
    assert found["spilling"].spills > 0
    assert (found["plain"].stack, found["plain"].spills, found["plain"].ldg64) == (0, 0, 0)
    assert found["spilling"].stg128 >= 1


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        usage(b"\x7fELF\x01" + bytes(64))
