"""Every call into CuPy, on a stand-in whose functions take exactly what the installed CuPy's take."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcatch.errors import InvalidArgument, KernelError, MissingExtra, OutOfMemory
from kvcatch.kernels import cuda_device
from kvcatch.kernels.cuda_device import CupyDevice, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

try:  # before CuPy is replaced: torch looks through every module while it is imported
    import torch
except ImportError:
    torch = None

real = pytest.importorskip("cupy", reason="CuPy is not installed")
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class StandIn:
    """A module of CuPy: its constants, and its functions with their parameters, recorded and without a driver."""

    def __init__(self, module: Any, log: list[tuple[Any, ...]], results: dict[str, Any]) -> None:
        self._module, self._log, self._results = module, log, results

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or isinstance(found, type):
            return self._results.get(name, found)
        signature = re.match(rf"{name}\((.*?)\)", found.__doc__ or "")
        assert signature, f"{name} has no signature to hold calls to"
        most = len(list(filter(None, signature[1].split(","))))
        fewest = most - signature[1].count("=")

        def call(*arguments: Any) -> Any:
            assert fewest <= len(arguments) <= most, (name, arguments)
            self._log.append((name, *arguments))
            result = self._results.get(name)
            if isinstance(result, Exception):
                raise result
            return result(*arguments) if callable(result) else result

        return call


@pytest.fixture
def log() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def results() -> dict[str, Any]:
    """What functions return, or the error they raise; tests change it."""
    return {
        "getDeviceCount": 2,
        "getDevice": 0,
        "deviceGetAttribute": 132,
        "memPoolCreate": 77,
        "mallocFromPoolAsync": 4096,
        "hostAlloc": 1 << 30,
        "streamIsCapturing": False,
        "MemPoolProps": lambda *arguments: arguments,
    }


@pytest.fixture
def make(
    monkeypatch: pytest.MonkeyPatch, log: list[tuple[Any, ...]], results: dict[str, Any]
) -> Callable[..., CupyDevice]:
    runtime = StandIn(real.cuda.runtime, log, results)
    memory = bytearray(1 << 20)

    class Handle:
        """A stream or an event."""

        count = 0

        def __init__(self, **options: bool) -> None:
            Handle.count += 1
            self.ptr, self.options, self.done = 1000 + Handle.count, options, True

        def synchronize(self) -> None:
            log.append(("synchronize", self.ptr))

    class Module:
        def load(self, cubin: bytes) -> None:
            log.append(("load", cubin))

        def get_function(self, name: str) -> Any:
            def function(*arguments: Any, **options: Any) -> None:
                log.append((name, *arguments, options))

            function.ptr = 555  # type: ignore[attr-defined]
            return function

    class PinnedMemory:
        def __init__(self, size: int, flags: int) -> None:
            self.ptr = runtime.hostAlloc(size, flags)

    def props(*arguments: int) -> Any:
        return real.cuda.runtime.MemPoolProps(*arguments)

    runtime.MemPoolProps = props  # type: ignore[attr-defined]
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=StandIn(real.cuda.driver, log, results),
        memory=real.cuda.memory,
        Device=lambda index: SimpleNamespace(compute_capability="90"),
        Stream=Handle,
        Event=Handle,
        Module=Module,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=lambda owner, offset: memory,
        get_current_stream=lambda index: SimpleNamespace(ptr=7, index=index),
    )

    def allocate(kind: str) -> Any:
        def call(shape: Any, dtype: Any) -> Any:
            log.append((kind, shape, dtype))
            if isinstance(results.get(kind), Exception):
                raise results[kind]
            return np.zeros(shape, dtype)

        return call

    monkeypatch.setitem(
        sys.modules,
        "cupy",
        SimpleNamespace(cuda=cuda, zeros=allocate("zeros"), empty=allocate("empty")),
    )

    def device(index: int = 0, batch: Any = None) -> CupyDevice:
        monkeypatch.setattr(cuda_device, "_batched_copies", lambda: batch)
        found = CupyDevice(index, "cupy")
        log.clear()
        return found

    return device


def test_a_device_has_a_pool_of_its_own_that_keeps_scratch(
    make: Any, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make(1)
    assert (device.name, device.library, device.capability, device.num_sms) == (
        "cuda:1",
        "cupy",
        90,
        132,
    )
    assert device.allocate(100, Stream(9)) == 4096
    assert log == [
        ("getDevice",),
        ("setDevice", 1),
        ("mallocFromPoolAsync", 100, 77, 9),
        ("setDevice", 0),
    ]


def test_the_current_device_is_put_back_after_an_error(
    make: Any, log: list[Any], results: dict[str, Any]
) -> None:
    device = make(1)
    results["streamSynchronize"] = real.cuda.runtime.CUDARuntimeError(700)
    with pytest.raises(KernelError, match=r"a kernel on cuda:1: cudaErrorIllegalAddress"):
        device.synchronise(Stream(5))
    assert log[-1] == ("setDevice", 0)


def test_nothing_is_switched_where_the_device_is_current(make: Any, log: list[Any]) -> None:
    device = make(0)
    device.free(4096, Stream(9))
    assert log == [("getDevice",), ("freeAsync", 4096, 9)]


def test_streams_and_events(make: Any, log: list[Any], results: dict[str, Any]) -> None:
    device = make()
    current, own = device.current_stream(), device.new_stream()
    assert current.ptr == 7
    assert own.owner.options == {"non_blocking": True}
    event = device.record(own)
    assert event.options == {"disable_timing": True}
    assert device.record(own, event) is event
    device.wait(current, event)
    device.synchronise_event(event)
    assert device.done(event)
    device.synchronise(current)
    calls = [call for call in log if call != ("getDevice",)]
    assert calls == [
        ("eventRecord", event.ptr, own.ptr),
        ("eventRecord", event.ptr, own.ptr),
        ("streamWaitEvent", 7, event.ptr),
        ("synchronize", event.ptr),
        ("streamSynchronize", 7),
    ]
    results["streamIsCapturing"] = True
    assert device.capturing(current)
    assert not device.capturing(Stream(0))  # the default stream cannot be


@pytest.mark.parametrize("what", ["scratch", "pinned", "zeros", "empty"])
def test_out_of_memory_states_the_bytes(make: Any, results: dict[str, Any], what: str) -> None:
    device = make()
    error = real.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY)
    refused = real.cuda.memory.OutOfMemoryError(4000, 10, 20)
    results |= {
        "mallocFromPoolAsync": error,
        "hostAlloc": error,
        "zeros": refused,
        "empty": refused,
    }
    calls = {
        "scratch": lambda: device.allocate(4000, Stream(9)),
        "pinned": lambda: device.pinned(4000),
        "zeros": lambda: device.zeros(4000),
        "empty": lambda: device.empty((10, 100), np.zeros(1, np.float32)),
    }
    with pytest.raises(OutOfMemory, match="cannot allocate 4000 bytes on") as caught:
        calls[what]()
    assert "\n" not in str(caught.value)


def test_pinned_memory_is_for_all_devices_and_mapped(make: Any, log: list[Any]) -> None:
    array = make().pinned(5000)
    assert array.nbytes == 5000
    assert array.flags.writeable
    assert ("hostAlloc", 5000, 1 | 2) in log  # portable, mapped


def test_copies_are_one_batch_where_there_is_the_call(make: Any, log: list[Any]) -> None:
    batches: list[Any] = []
    device = make(batch=lambda *arguments: batches.append(arguments) or True)
    device.copy_many([1, 2], [3, 4], [16, 32], Stream(9))
    assert batches == [([1, 2], [3, 4], [16, 32], 9)]
    assert log == [("getDevice",)]
    device.copy_many([1], [3], [16], Stream(9))  # one copy needs no batch
    assert log[-1] == ("memcpyAsync", 1, 3, 16, 4, 9)


def test_copies_are_one_each_where_the_driver_does_not_know_batches(
    make: Any, log: list[Any]
) -> None:
    tried: list[Any] = []
    device = make(batch=lambda *arguments: bool(tried.append(arguments)))
    for _ in range(2):
        device.copy_many([1, 2], [3, 4], [16, 32], Stream(9))
    assert len(tried) == 1
    assert [call for call in log if call[0] == "memcpyAsync"] == [
        ("memcpyAsync", 1, 3, 16, 4, 9),
        ("memcpyAsync", 2, 4, 32, 4, 9),
    ] * 2


def test_kernels_are_loaded_and_launched_on_the_stream_given(make: Any, log: list[Any]) -> None:
    device = make()
    small = device.load(b"cubin", "small", 48 << 10)
    device.load(b"cubin", "large", 64 << 10)
    attribute = real.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [call for call in log if call[0] == "funcSetAttribute"] == [
        ("funcSetAttribute", 555, attribute, 64 << 10)
    ]
    device.launch(small, (4,), (32,), (np.uint64(1),), 128, Stream(9))
    options = {"shared_mem": 128, "stream": Stream(9)}
    assert log[-1] == ("small", (4,), (32,), (np.uint64(1),), options)


def test_tensors_of_cupy(make: Any, log: list[Any]) -> None:
    device = make()
    assert device.zeros(12).dtype == np.uint8
    assert device.empty((2, 3), np.zeros(1, np.float16)).shape == (2, 3)
    assert log[1] == ("zeros", 12, np.uint8)
    host = np.zeros(4, np.uint8)
    assert device.host_tensor(host) is host


@pytest.mark.parametrize("index", [2, 7])
def test_a_gpu_that_is_not_there(make: Any, index: int) -> None:
    with pytest.raises(KernelError, match=f"there is no GPU {index}: CUDA sees 2"):
        make(index)


def test_torch_decides_where_it_is_installed_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.9")
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert cuda_device._torch(None) is None
    with pytest.raises(KernelError, match=r"torch 2\.9 was built without CUDA"):
        cuda_device._torch("torch")
    fake.version.cuda = "13.0"
    assert cuda_device._torch(None) is fake
    assert cuda_device._torch("cupy") is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cuda_device._torch(None) is None
    with pytest.raises(MissingExtra, match=r"needs torch: pip install 'kvcatch\[engine\]'"):
        cuda_device._torch("torch")


def test_tensors_and_stream_of_torch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch is None:
        pytest.skip("torch is not installed")
    device = make()
    stream = SimpleNamespace(cuda_stream=321)
    fake = SimpleNamespace(
        uint8=torch.uint8,
        zeros=lambda n, dtype, device: torch.zeros(n, dtype=dtype),
        from_numpy=torch.from_numpy,
        cuda=SimpleNamespace(
            current_stream=lambda index: stream, OutOfMemoryError=torch.cuda.OutOfMemoryError
        ),
    )
    monkeypatch.setattr(device, "_torch", fake)
    assert device.current_stream() == Stream(321, stream)
    assert device.zeros(5).dtype == torch.uint8
    assert isinstance(device.host_tensor(np.zeros(3, np.uint8)), torch.Tensor)

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes\nmore")

    fake.zeros = refuse
    with pytest.raises(OutOfMemory, match=r"9 bytes on cuda:0: CUDA out of memory.*bytes$"):
        device.zeros(9)


def test_an_unknown_library(make: Any) -> None:
    make()
    with pytest.raises(InvalidArgument, match="torch or cupy, not 'numpy'"):
        CupyDevice(0, "numpy")  # type: ignore[arg-type]
