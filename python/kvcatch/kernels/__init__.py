"""Moving, writing and reading KV bytes: one interface (:class:`Backend`), one implementation per device.

    from kvcatch.kernels import KVLayout, get_backend

    backend = get_backend("cpu")
    cache = backend.allocate(KVLayout(num_layers=30, num_kv_heads=3, head_dim=64), num_blocks=1024)
    backend.write_kv(cache, layer, key, value, slot_mapping)
    backend.decode_attention(cache, layer, query, block_tables, seq_lens, scale=0.125)

``layout.py`` says where each byte lies, ``cpu.py`` is torch and the Rust core, ``cuda.py`` CuPy over the kernels of
``cuda/``. Importing this needs numpy alone; ``get_backend`` imports the rest.
"""

from __future__ import annotations

from typing import Any

from kvcatch.errors import InvalidArgument
from kvcatch.kernels.backend import Backend, DecodePlan, Transfer
from kvcatch.kernels.cache import KVCache
from kvcatch.kernels.layout import KVLayout

__all__ = ["Backend", "DecodePlan", "KVCache", "KVLayout", "Transfer", "get_backend"]


def get_backend(device: str = "cpu", **options: Any) -> Backend:
    """The backend of a device: ``cpu``, ``cuda`` or ``cuda:N``. ``options`` go to its class.

    Raises:
        InvalidArgument: an unknown device.
        MissingExtra: torch or CuPy is not installed; names the extra.
        KernelError: there is no such GPU.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        from kvcatch.kernels.cpu import CpuBackend

        return CpuBackend(**options)
    if kind == "cuda" and (index.isdecimal() or not index):
        from kvcatch.kernels.cuda import CudaBackend

        return CudaBackend(int(index or 0), **options)
    raise InvalidArgument(f"device {device!r}: must be cpu, cuda or cuda:N")
