"""Memory of the device that holds the KV cache, through nvidia-ml-py. Unknown is None, never 0."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DeviceMemory", "DeviceReader"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
        total_bytes: All there is.
        used_bytes: Used by all processes together.
        process_bytes: Used by this process; None where the driver does not tell (in a container it often
            sees other process ids).
    """

    total_bytes: int
    used_bytes: int
    process_bytes: int | None


class DeviceReader:
    """Reads the memory of one device; the driver's library is opened once.

    Args:
        device: As torch names it; the number counts what CUDA_VISIBLE_DEVICES leaves visible.
        environ: Instead of the process's environment; for tests.
    """

    def __init__(self, device: str, environ: Mapping[str, str] | None = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if not device.startswith("cuda"):
            return
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handle = _handle(pynvml, device, os.environ if environ is None else environ)
        except (pynvml.NVMLError, ValueError, IndexError):
            return
        self._nvml = pynvml

    def read(self) -> DeviceMemory | None:
        """Memory now; None for a device that is no GPU, or where NVIDIA's library is not there."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            total, used = int(memory.total), int(memory.used)
        except nvml.NVMLError:
            return None
        try:
            return DeviceMemory(total, used, _of_process(nvml, self._handle))
        except nvml.NVMLError:
            return DeviceMemory(total, used, None)


def _handle(pynvml: Any, device: str, environ: Mapping[str, str]) -> Any:
    """NVIDIA's library numbers all devices, torch the visible ones."""
    number = int(device.partition(":")[2] or 0)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(number)
    name = visible.split(",")[number].strip()
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _of_process(pynvml: Any, handle: Any) -> int | None:
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None
