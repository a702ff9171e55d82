"""What the launching code needs of a machine that runs CUDA kernels: a GPU through CuPy, or the tests' emulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvcatch.kernels.tensors import TensorView

__all__ = ["Argument", "Runtime"]

Argument = Any
"""A :class:`TensorView` for a pointer, ``None`` for a null one, or a numpy scalar of the exact width."""


class Runtime(Protocol):
    """Builds kernels from ``cuda/`` and launches them on the current stream."""

    @property
    def name(self) -> str:
        """``cuda`` or ``emulated``: the backend's name."""

    @property
    def device(self) -> str:
        """Where tensors must lie: ``cuda:N``, or ``cpu`` under emulation."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors: how many blocks of threads run side by side."""

    def launch(
        self,
        source: str,
        kernel: str,
        defines: Mapping[str, int],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Launch ``kernel`` of ``cuda/<source>.cu`` compiled with ``defines``; returns at once.

        Raises:
            KernelError: it does not compile for this device, or the launch was refused.
        """

    def upload(self, array: NDArray[np.generic[Any]]) -> TensorView:
        """Copy a small host array to the device, ordered on the current stream.

        It is kept until the launches after it ran.
        """

    def download(self, view: TensorView) -> NDArray[np.generic[Any]]:
        """Copy a small device array to the host; waits for the current stream."""

    def scratch(self, shape: tuple[int, ...], dtype: str) -> TensorView:
        """Uninitialised device memory for this call's launches, given back in stream order.

        Raises:
            OutOfMemory: there is none.
        """

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """An uninitialised tensor of the library, dtype and device of ``like``, for a result."""

    def zeros(self, num_bytes: int) -> Any:
        """A zeroed uint8 buffer on the device, at a multiple of 256 bytes.

        Raises:
            OutOfMemory: there is none; states ``num_bytes``.
        """

    def synchronise(self) -> None:
        """Wait for the current stream."""
