"""The backends that exist here, so that one suite holds all of them to the same results.

``cpu`` is torch and the Rust core, ``emulated`` the CUDA kernels run by the CPU (tests/cuda_host), ``cuda`` a GPU.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the package cuda_host

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcatch.kernels import Backend, KVCache, KVLayout

GPU = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))
"""Whether the driver shows one. Elsewhere `cuda` is left out here: tests/gpu says once why it is skipped."""

BACKENDS = ("cpu", "emulated", *(["cuda"] if GPU else []))


@functools.cache
def make_backend(name: str, check_ids: bool = False) -> Backend | str:
    """A backend by name, or why there is none here."""
    from kvcatch.errors import KernelError, MissingExtra
    from kvcatch.kernels import get_backend

    options = {"check_ids": True} if check_ids else {}
    try:
        if name != "emulated":
            return get_backend(name, **options)
        from cuda_host.build import unavailable

        if why := unavailable():
            return why
        from cuda_host.emulated import EmulatedBackend
        from cuda_host.kernel import ORDERS

        return EmulatedBackend(orders=ORDERS, **options)
    except (KernelError, MissingExtra) as why:
        return str(why)
    except ModuleNotFoundError as why:
        if why.name != "kvcatch.kernels.cpu":
            raise
        return str(why)


class Machine:
    """A backend with what a test needs beside it: tensors from numpy arrays and back."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def tensor(self, array: NDArray[Any]) -> Any:
        """A tensor on the backend's device."""
        import torch

        if self.backend.name == "cuda" and not torch.cuda.is_available():
            import cupy

            return cupy.asarray(array)
        array = np.ascontiguousarray(array)
        bits = array.view(np.int16) if array.dtype.name == "bfloat16" else array
        whole = torch.from_numpy(bits.copy())
        if array.dtype.name == "bfloat16":
            whole = whole.view(torch.bfloat16)
        return whole.to(self.backend.device)

    def array(self, tensor: Any) -> NDArray[Any]:
        """A tensor's elements as a numpy array."""
        import ml_dtypes

        if not hasattr(tensor, "data_ptr"):
            return np.asarray(tensor.get())
        tensor = tensor.cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            import torch

            return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(tensor.numpy())

    def pool(
        self, layout: KVLayout, num_blocks: int, data: Any, head_scales: Any = None
    ) -> KVCache:
        """A pool that holds these bytes, or random ones where ``data`` is a generator."""
        scales = None if head_scales is None else self.tensor(head_scales)
        cache = self.backend.allocate(layout, num_blocks, scales)
        if isinstance(data, np.random.Generator):
            data = data.integers(0, 256, cache.num_bytes, dtype=np.uint8)
        cache.buffer[:] = self.tensor(data)
        return cache

    def bytes_of(self, cache: KVCache) -> NDArray[np.uint8]:
        """A pool's bytes, after all work."""
        self.backend.synchronise()
        return self.array(cache.buffer).copy()


def _machine(name: str, check_ids: bool = False) -> Machine:
    pytest.importorskip("torch", reason="the KV backends need torch: pip install 'kvcatch[engine]'")
    backend = make_backend(name, check_ids)
    if isinstance(backend, str):
        pytest.skip(backend)
    return Machine(backend)


@pytest.fixture(params=BACKENDS)
def machine(request: pytest.FixtureRequest) -> Machine:
    """Each backend that exists here, with its helpers."""
    return _machine(request.param)


@pytest.fixture
def backend(machine: Machine) -> Backend:
    """Each backend that exists here."""
    return machine.backend


@pytest.fixture(params=BACKENDS[1:])
def checking(request: pytest.FixtureRequest) -> Machine:
    """Each backend of a device, with the check of ids on the device."""
    return _machine(request.param, check_ids=True)


@pytest.fixture
def cpu() -> Machine:
    """The ``cpu`` backend alone."""
    return _machine("cpu")
