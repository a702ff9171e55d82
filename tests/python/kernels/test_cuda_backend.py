"""The cuda backend whole, on a simulated GPU whose kernels the emulator runs when their stream gets to them.

The same calls on the backend that has no streams say what must come out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from busy_step import LAYOUT, QUANTISED, a_busy_step, filled
from simulated_gpu import FakeNvrtc, Operation, SimulatedGpu

from kvcatch.errors import InvalidArgument, KernelError, MissingExtra, OutOfMemory
from kvcatch.kernels import Backend, get_backend, modules
from kvcatch.kernels import cuda as cuda_module
from kvcatch.kernels.cuda_device import CupyDevice
from kvcatch.kernels.cuda_runtime import CudaRuntime, DeviceMemory
from kvcatch.kernels.cuda_variants import attention_variants, block_variants
from kvcatch.kernels.modules import KernelCompiler
from kvcatch.kernels.tensors import TensorView

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.kernels.cuda import CudaBackend

    Make = Callable[..., tuple[CudaBackend, SimulatedGpu]]

CUDA = Path(__file__).resolve().parents[3] / "cuda"
SEEDS = range(6)

launched: list[tuple[str, frozenset[tuple[str, int]]]] = []


class DeferredRuntime(CudaRuntime):
    """The GPU's runtime, but for what a launch is: the kernel of the emulator, when the stream gets to it."""

    def launch(
        self,
        source: str,
        kernel: str,
        defines: Any,
        grid: Any,
        block: Any,
        arguments: Any,
        shared_bytes: int = 0,
    ) -> None:
        from cuda_host.build import build

        stream, passed = self.stream(), []
        for argument in arguments:
            passed.append(argument)
            if isinstance(argument, TensorView) and isinstance(argument.owner, DeviceMemory):
                argument.owner.use_on(stream)
                # A launch keeps nothing alive. Memory of torch and CuPy goes back in stream order by itself.
                passed[-1] = replace(argument, owner=None)
        launched.append((source, frozenset(defines.items())))
        function = build(f"{source}.cu", defines).get_function(kernel)
        run = Operation(lambda: function(grid, block, passed, shared_bytes))
        self._gpu.submit(stream, run)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    build = pytest.importorskip("cuda_host.build")
    if why := build.unavailable():
        pytest.skip(why)

    def backend(seed: int = 0, *, check_ids: bool = False, **options: Any) -> Any:
        gpu = SimulatedGpu(seed, **options)
        compiler = KernelCompiler(CUDA, tmp_path, nvrtc=FakeNvrtc())
        monkeypatch.setattr(modules, "_built", {})
        monkeypatch.setattr(cuda_module, "CupyDevice", lambda index, library: gpu)
        monkeypatch.setattr(cuda_module, "CudaRuntime", DeferredRuntime)
        monkeypatch.setattr(cuda_module, "KernelCompiler", lambda *_: compiler)
        launched.clear()
        return cuda_module.CudaBackend(check_ids=check_ids), gpu

    return backend


@pytest.fixture
def emulated() -> Any:
    pytest.importorskip("torch", reason="the emulated backend needs torch")
    module = pytest.importorskip("cuda_host.emulated")
    return module.EmulatedBackend()


@pytest.fixture
def expected(emulated: Any) -> list[Any]:
    return a_busy_step(emulated, sys.modules["torch"].from_numpy)


def test_streams_change_nothing(make: Make, expected: list[Any]) -> None:
    for seed in SEEDS:
        backend, gpu = make(seed, pace=0.2)
        found = a_busy_step(backend)
        assert not any(gpu.queues.values())
        for one, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), wanted.view(np.uint8))


def test_attention_while_a_graph_is_recorded(make: Make) -> None:
    """A decode with a plan is recorded; a prefill is refused, for its lists do not live as long as the graph."""
    backend, gpu = make()
    cache = filled(backend, LAYOUT, 6, seed=2)
    rng = np.random.default_rng(5)
    query = rng.normal(size=(2, 4, 64)).astype(np.float16)
    tables, lens = np.array([[1, 2], [3, 4]], np.int32), np.array([20, 31], np.int32)
    plan = backend.plan_decode(LAYOUT, lens, 4)

    def decode() -> Any:
        return backend.decode_attention(cache, 0, query, tables, lens, scale=0.1, plan=plan)

    def prefill() -> Any:
        return backend.prefill_attention(cache, 0, query, [0, 1, 2], tables, lens, scale=0.1)

    wanted, _ = decode(), prefill()
    backend.synchronise()
    recording = gpu.new_stream()
    gpu.capture.add(recording.ptr)
    with backend._launcher.on(recording):
        found = decode()
        with pytest.raises(
            KernelError, match="the lists of a prefill cannot be kept while a CUDA graph"
        ):
            prefill()
        with pytest.raises(KernelError, match="ids cannot be copied to the GPU while a CUDA graph"):
            backend.move_blocks(cache, [0], [1])
    gpu.capture.clear()
    gpu.finish()
    np.testing.assert_array_equal(found, wanted)


def test_it_is_a_backend(make: Make) -> None:
    backend, _ = make()
    assert isinstance(backend, Backend)
    assert (backend.name, backend.library) == ("cuda", "cupy")


@pytest.mark.parametrize("check_ids", [False, True])
def test_what_is_launched_is_what_is_built_ahead(make: Make, check_ids: bool) -> None:
    backend, _ = make(check_ids=check_ids)
    nvrtc = backend._launcher._compiler.nvrtc
    options: list[dict[str, bool]] = [{}, {"window": True}, {"soft_cap": True}]
    both = [(layout, option) for layout in (LAYOUT, QUANTISED) for option in options]
    counts = [backend.build(layout, 4, **option) for layout, option in both]
    assert counts == [2 + 1 + 3] * 3 + [2 + 2 * 3 + 2 * 3] * 3
    listed = {
        (variant.source, frozenset(variant.defines.items()))
        for layout, option in both
        for variant in (
            *block_variants(layout, check_ids=check_ids),
            *attention_variants(layout, 4, check_ids=check_ids, **option),
        )
    }
    assert len(nvrtc.compiled) == len(listed)  # each once, however often it is listed
    a_busy_step(backend)
    assert {source for source, _ in launched} == {source for source, _ in listed}
    assert set(launched) <= listed


def test_no_attention_kernels_for_what_they_do_not_take(make: Make) -> None:
    backend, _ = make()
    with pytest.raises(InvalidArgument, match="no attention kernels for float32 caches"):
        backend.build(replace(LAYOUT, dtype="float32"), 4)
    assert backend.build(replace(LAYOUT, dtype="float32")) == 3


def test_a_bad_slot_found_on_the_device(make: Make) -> None:
    backend, _ = make(check_ids=True, pace=0.0)
    cache = filled(backend, LAYOUT, 4, seed=2)
    before = np.array(cache.buffer)
    keys = np.ones((1, 2, 64), np.float16)
    backend.write_kv(cache, 0, keys, keys, np.array([64], np.int64))
    with pytest.raises(KernelError, match=r"write_kv met slot 64 at index 0: must be within 0..63"):
        backend.synchronise()
    np.testing.assert_array_equal(cache.buffer, before)
    backend.write_kv(cache, 0, keys, keys, np.array([63], np.int64))
    backend.synchronise()
    assert (np.asarray(cache.buffer) != before).any()


@pytest.mark.parametrize("bad", ["unpinned", "layout", "id", "twice", "device"])
def test_a_refused_swap_changes_nothing(make: Make, bad: str) -> None:
    backend, gpu = make()
    cache, host = filled(backend, LAYOUT, 4, seed=1), backend.allocate_host(LAYOUT, 4)
    src, dst, words = [0, 1], [2, 3], ""
    if bad == "unpinned":
        host, words = replace(host, pinned=False), "host is not pinned memory"
    elif bad == "layout":
        host = backend.allocate_host(replace(LAYOUT, head_dim=128), 4)
        words = "head_dim 64 cannot be copied to blocks with head_dim 128"
    elif bad == "id":
        dst, words = [2, 4], "4"
    elif bad == "twice":
        dst, words = [2, 2], "2"
    else:
        cache, words = replace(cache, device="cuda:1"), "cache lies on cuda:1"
    before = np.array(host.buffer)
    with pytest.raises(InvalidArgument, match=words):
        backend.swap_out(cache, host, src, dst)
    with pytest.raises(InvalidArgument, match=words):
        backend.swap_in(host, cache, src, dst)
    assert not gpu.copies
    assert not launched
    gpu.finish()
    np.testing.assert_array_equal(host.buffer, before)


def test_host_pools_are_zeroed_pinned_and_block_major(make: Make) -> None:
    backend, gpu = make()
    host = backend.allocate_host(replace(LAYOUT, order="layer"), 3)
    assert host.pinned
    assert host.device == "cpu"
    assert host.layout == LAYOUT
    assert gpu.pinned_sizes == [LAYOUT.pool_bytes(3)]
    assert not np.asarray(host.buffer).any()


def test_out_of_memory_states_the_bytes(make: Make) -> None:
    backend, _ = make(memory_limit=LAYOUT.pool_bytes(2) - 1)
    with pytest.raises(OutOfMemory, match=f"{LAYOUT.pool_bytes(2)} bytes"):
        backend.allocate(LAYOUT, 2)
    assert backend.allocate(LAYOUT, 1).num_blocks == 1


# --- the real device class, as far as it goes without a driver ---------------------------------------


def test_without_a_gpu_the_reason_is_one_line() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(KernelError, match="there is no GPU that CUDA can use: cuda") as error:
        get_backend("cuda")
    assert "\n" not in str(error.value)


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        MissingExtra, match=r"cuda backend needs CuPy: pip install 'kvcatch\[cuda\]'"
    ):
        get_backend("cuda:0")


def test_an_unknown_library_is_refused() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    with pytest.raises(InvalidArgument, match="torch or cupy, not 'jax'"):
        CupyDevice(0, "jax")  # type: ignore[arg-type]


def test_what_is_called_in_cupy_is_there() -> None:
    """Names and signatures of the installed CuPy: no call can be made without a driver."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    runtime, driver = cupy.cuda.runtime, cupy.cuda.driver
    names = (
        "getDevice setDevice getDeviceCount deviceGetAttribute cudaDevAttrMultiProcessorCount MemPoolProps"
        " cudaMemAllocationTypePinned cudaMemHandleTypeNone cudaMemLocationTypeDevice memPoolCreate"
        " memPoolSetAttribute cudaMemPoolAttrReleaseThreshold eventRecord streamWaitEvent streamSynchronize"
        " streamIsCapturing mallocFromPoolAsync freeAsync hostAllocPortable hostAllocMapped memcpyAsync memcpyDefault"
        " CUDARuntimeError"
    )
    for name in names.split():
        assert hasattr(runtime, name), name
    assert "size_t size, intptr_t pool, intptr_t stream" in runtime.mallocFromPoolAsync.__doc__
    assert "intptr_t ptr, intptr_t stream" in runtime.freeAsync.__doc__
    assert (
        "dst, intptr_t src, size_t size, int kind, intptr_t stream" in runtime.memcpyAsync.__doc__
    )
    assert "intptr_t stream, intptr_t event" in runtime.streamWaitEvent.__doc__
    assert "intptr_t event, intptr_t stream" in runtime.eventRecord.__doc__
    assert "intptr_t pool, int attr, value" in runtime.memPoolSetAttribute.__doc__
    assert "allocType, int handleType, int locationType, int devId" in runtime.MemPoolProps.__doc__
    assert "intptr_t f, int attribute, int value" in driver.funcSetAttribute.__doc__
    assert hasattr(driver, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
    assert hasattr(driver, "CUDADriverError")
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    for name in (
        "Stream",
        "Event",
        "Module",
        "PinnedMemory",
        "PinnedMemoryPointer",
        "get_current_stream",
    ):
        assert hasattr(cupy.cuda, name), name


def test_cupy_takes_launches_as_they_are_made() -> None:
    """A function without a kernel reads the stream and refuses only what is no scalar, before it needs a driver."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    function = cupy.cuda.Function.__new__(cupy.cuda.Function)
    read: list[str] = []

    class Watched:
        @property
        def ptr(self) -> int:
            read.append("ptr")
            return 0

    scalars = (np.uint64(0), np.int32(1), np.uint32(2), np.int64(3), np.float32(4))
    with pytest.raises(TypeError, match="Unsupported type"):
        function((1,), (32,), (*scalars, object()), shared_mem=16, stream=Watched())
    assert read == ["ptr"]


def test_the_batch_of_copies_takes_what_it_is_given() -> None:
    """CUDA's bindings accept the arguments and come as far as the missing driver."""
    from kvcatch.kernels.cuda_device import _batched_copies

    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU here: tests/gpu swaps for real")
    batch = _batched_copies()
    if batch is None:
        pytest.skip("cuda-bindings of CUDA 13 is not installed")
    with pytest.raises(KernelError, match="a batch of 2 copies: cudaError"):
        batch([1 << 20, 2 << 20], [3 << 20, 4 << 20], [4096, 8192], 5)
