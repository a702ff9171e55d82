"""Order on a GPU's streams, tried on a simulated one that runs as late and as mixed as CUDA allows."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from simulated_gpu import FakeNvrtc, SimulatedGpu

from kvcatch.errors import InvalidType, KernelError, OutOfMemory
from kvcatch.kernels import cuda_runtime
from kvcatch.kernels.cuda_runtime import CudaRuntime, DeviceMemory
from kvcatch.kernels.modules import KernelCompiler

SEEDS = range(25)


def copy_words(source: np.uint64, target: np.uint64, count: np.int32) -> None:
    ctypes.memmove(int(target), int(source), 4 * int(count))


@pytest.fixture
def sources(tmp_path: Any) -> Any:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "copy.cu").write_text("// a kernel\n")
    return folder


@pytest.fixture
def make(sources: Any, tmp_path: Any) -> Any:
    def runtime(seed: int = 0, **options: Any) -> tuple[CudaRuntime, SimulatedGpu]:
        gpu = SimulatedGpu(seed, kernels={"copy_words": copy_words}, **options)
        compiler = KernelCompiler(sources, tmp_path / "cache", nvrtc=FakeNvrtc())
        return CudaRuntime(gpu, compiler), gpu

    return runtime


def launch_copy(runtime: CudaRuntime, source: Any, target: np.ndarray) -> None:
    arguments = (source, np.uint64(target.ctypes.data), np.int32(target.size))
    runtime.launch("copy", "copy_words", {}, (1,), (32,), arguments)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_upload_may_be_overwritten_by_the_caller_at_once(make: Any, seed: int) -> None:
    runtime, gpu = make(seed)
    results = []
    ids = np.zeros(40, np.int32)
    for step in range(20):
        ids[:] = step
        results.append(np.full(40, -1, np.int32))
        launch_copy(runtime, runtime.upload(ids), results[-1])
        ids[:] = -7
    gpu.finish()
    assert [set(result.tolist()) for result in results] == [{step} for step in range(20)]


def test_pinned_pieces_are_used_again_after_their_copies_and_not_before(make: Any) -> None:
    runtime, gpu = make(pace=0.0)
    for _ in range(5):
        runtime.upload(np.arange(10, dtype=np.int32))
    assert len(gpu.pinned_sizes) == 5
    gpu.finish()
    for _ in range(5):
        runtime.upload(np.arange(10, dtype=np.int32))
    assert len(gpu.pinned_sizes) == 5
    gpu.finish()
    runtime.upload(np.zeros(1 << 20, np.uint8))
    assert gpu.pinned_sizes[5:] == [1 << 20]


def test_scratch_and_uploads_go_back_to_the_stream_they_came_from(make: Any) -> None:
    runtime, gpu = make(pace=0.0)
    for _ in range(10):
        runtime.scratch((100,), "float32")
        runtime.upload(np.zeros(100, np.int32))
    assert gpu.used == 400
    with runtime.on(gpu.new_stream()):
        runtime.scratch((100,), "float32")
    assert gpu.used == 800


def use_on_another_stream(make: Any, seed: int) -> bool:
    """A plan uploaded on one stream, read on another, dropped at once: whether the reader saw it."""
    runtime, gpu = make(seed)
    plan = np.arange(64, dtype=np.int32)
    view = runtime.upload(plan)
    result = np.full(64, -1, np.int32)
    with runtime.on(gpu.new_stream()):
        launch_copy(runtime, view, result)
    del view
    runtime.upload(plan + 1000)  # takes the memory just given back
    gpu.finish()
    return bool((result == plan).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_used_on_another_stream_is_ordered_both_ways(make: Any, seed: int) -> None:
    assert use_on_another_stream(make, seed)


def test_the_simulated_gpu_finds_a_stream_that_does_not_wait(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemory, "use_on", lambda self, stream: None)
    assert not all(use_on_another_stream(make, seed) for seed in SEEDS)


def test_the_simulated_gpu_finds_pinned_memory_used_too_early(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedGpu, "done", lambda self, event: True)
    runtime, gpu = make(pace=0.0)
    results = [np.full(8, -1, np.int32) for _ in range(2)]
    for step, result in enumerate(results):
        launch_copy(runtime, runtime.upload(np.full(8, step, np.int32)), result)
    gpu.finish()
    assert results[0].tolist() == [1] * 8


def test_a_kernel_is_built_and_loaded_once(make: Any) -> None:
    runtime, gpu = make()
    target = np.zeros(4, np.int32)
    for _ in range(3):
        launch_copy(runtime, runtime.upload(np.arange(4, dtype=np.int32)), target)
    assert gpu.loaded == ["copy_words"]
    assert gpu.launches == ["copy_words"] * 3
    runtime.launch("copy", "copy_words", {}, (1,), (1,), (None, None, np.int32(0)), 1 << 16)
    assert gpu.loaded == ["copy_words"] * 2  # it needs more shared memory now
    gpu.finish()


def test_arguments_are_passed_at_their_width(make: Any) -> None:
    runtime, gpu = make()
    seen: list[Any] = []
    gpu.kernels["copy_words"] = lambda *arguments: seen.extend(arguments)
    scalars = (np.int32(-1), np.float32(0.5), np.int64(1 << 40), np.uint32(7))
    runtime.launch("copy", "copy_words", {}, (1,), (1,), (None, *scalars))
    gpu.finish()
    assert [type(value) for value in seen] == [np.uint64, *map(type, scalars)]
    assert seen[0] == 0
    with pytest.raises(InvalidType, match="copy_words must be a tensor view or a numpy scalar"):
        runtime.launch("copy", "copy_words", {}, (1,), (1,), (3,))


def test_download_waits_for_what_was_launched(make: Any) -> None:
    runtime, _ = make(pace=0.0)
    view = runtime.upload(np.arange(12, dtype=np.int64).reshape(3, 4))
    assert (view.shape, view.strides, view.dtype) == ((3, 4), (32, 8), "int64")
    np.testing.assert_array_equal(runtime.download(view), np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_empty_uploads(make: Any, shape: tuple[int, ...]) -> None:
    runtime, gpu = make()
    view = runtime.upload(np.zeros(shape, np.int32))
    assert view.shape == shape
    assert view.num_bytes == 0
    assert runtime.download(view).shape == shape
    assert not gpu.copies


def test_out_of_memory_states_the_bytes(make: Any) -> None:
    runtime, _ = make(memory_limit=1000)
    with pytest.raises(OutOfMemory, match="4000 bytes"):
        runtime.scratch((1000,), "float32")
    runtime.scratch((10,), "float32")


def test_no_upload_while_a_graph_is_recorded(make: Any) -> None:
    runtime, gpu = make()
    gpu.capture.add(gpu.current.ptr)
    with pytest.raises(KernelError, match="CUDA graph is recorded"):
        runtime.upload(np.zeros(4, np.int32))
    view = runtime.scratch((4,), "float32")
    with pytest.raises(KernelError, match="read back while a CUDA graph is recorded"):
        runtime.download(view)


def test_memory_dropped_while_a_graph_is_recorded_goes_back_after(make: Any) -> None:
    runtime, gpu = make(pace=0.0)
    plan = runtime.upload(np.zeros(4, np.int32))
    gpu.capture.add(gpu.current.ptr)
    scratch = runtime.scratch((8,), "int32")
    given_back: list[int] = []
    free = gpu.free
    gpu.free = lambda pointer, stream: given_back.append(pointer) or free(pointer, stream)
    wanted = [scratch.pointer, plan.pointer]
    del plan
    assert given_back == []
    del scratch  # the graph's own: given back within it
    assert given_back == wanted[:1]
    gpu.capture.clear()
    runtime.scratch((1,), "int32")
    assert given_back[1] == wanted[1]


def test_a_graph_is_recorded_on_another_stream_than_the_plan_was_made_on(make: Any) -> None:
    """CUDA lets nothing that is recorded wait for an event from outside; torch records on a stream of its own."""
    runtime, gpu = make()
    seen: list[Any] = []
    gpu.kernels["read"] = seen.append
    plan = runtime.upload(np.arange(4, dtype=np.int32))
    gpu.finish()  # as torch.cuda.graph waits before it records
    recording = gpu.new_stream()
    gpu.capture.add(recording.ptr)
    with runtime.on(recording):
        runtime.launch("copy", "read", {}, (1,), (1,), (plan,))
    gpu.capture.clear()
    gpu.finish()
    assert seen == [plan.pointer]
    other = gpu.new_stream()  # a stream that is not recorded still waits for the upload
    with runtime.on(other):
        runtime.launch("copy", "read", {}, (1,), (1,), (plan,))
    del plan
    gpu.finish()
    assert len(seen) == 2


def test_memory_used_on_a_recorded_stream_goes_back_after_the_recording(make: Any) -> None:
    runtime, gpu = make(pace=0.0)
    plan = runtime.upload(np.arange(4, dtype=np.int32))
    gpu.kernels["read"] = lambda pointer: None
    guest = gpu.new_stream()
    with runtime.on(guest):
        runtime.launch("copy", "read", {}, (1,), (1,), (plan,))
    gpu.capture.add(guest.ptr)
    freed: list[int] = []
    waits: list[int] = []
    free, wait = gpu.free, gpu.wait
    gpu.free = lambda pointer, stream: freed.append(pointer) or free(pointer, stream)
    gpu.wait = lambda stream, event: waits.append(event.stream) or wait(stream, event)
    pointer = plan.pointer
    del plan
    assert not freed
    assert not waits
    gpu.capture.clear()
    kept = runtime.scratch((1,), "int32")
    assert freed == [pointer]
    assert kept.pointer
    assert waits == [guest.ptr]  # its guest's work comes first all the same


def test_each_thread_has_its_own_choice_of_stream(make: Any) -> None:
    runtime, gpu = make()
    here, there = gpu.new_stream(), gpu.new_stream()
    seen = []
    with runtime.on(here):
        thread = threading.Thread(target=lambda: seen.append(runtime.stream()))
        thread.start()
        thread.join()
        with runtime.on(there):
            seen.append(runtime.stream())
        seen.append(runtime.stream())
    assert [stream.ptr for stream in seen] == [gpu.current.ptr, there.ptr, here.ptr]


@pytest.mark.parametrize(
    ("capability", "words"), [(75, "7.5: the kernels need 8.0"), (120, "12.0, which this NVRTC")]
)
def test_a_gpu_that_no_kernel_is_built_for(make: Any, capability: int, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        make(capability=capability)


def test_memory_lost_with_the_gpu_raises_nothing_when_dropped(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, gpu = make()
    view = runtime.scratch((4,), "float32")

    def lost(*_: object) -> None:
        raise KernelError("the GPU is lost")

    monkeypatch.setattr(gpu, "free", lost)
    del view  # pytest fails on an exception in __del__


def test_the_module_offers_what_it_names() -> None:
    assert cuda_runtime.__all__ == ["CudaRuntime", "DeviceMemory"]
