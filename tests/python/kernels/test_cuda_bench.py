"""The measuring script of the GPU, rehearsed: every call it makes passes the checks; no figure is made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console
from simulated_gpu import FakeNvrtc, SimulatedGpu

from kvcatch.kernels import cuda as cuda_module
from kvcatch.kernels.cuda_runtime import CudaRuntime
from kvcatch.kernels.modules import KernelCompiler

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("ml_dtypes", reason="the measuring script needs ml_dtypes")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    import gpu as script

    return script


class IdleRuntime(CudaRuntime):
    """Launches nothing."""

    launched = 0

    def launch(self, *_: Any, **__: Any) -> None:
        type(self).launched += 1


class IdleGpu(SimulatedGpu):
    """Copies nothing."""

    def copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        self.copies.append((target, source, num_bytes))


@pytest.fixture
def bench(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    device = IdleGpu(pace=1.0, memory_limit=1 << 40)
    compiler = KernelCompiler(ROOT / "cuda", tmp_path, nvrtc=FakeNvrtc())
    monkeypatch.setattr(cuda_module, "CupyDevice", lambda index, library: device)
    monkeypatch.setattr(cuda_module, "CudaRuntime", IdleRuntime)
    monkeypatch.setattr(cuda_module, "KernelCompiler", lambda *_: compiler)

    class Rehearsal(gpu.Machine):
        name = "no GPU"

        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def time(self, call: Any, calls: int = 20) -> float:
            call()
            return 100.0

        host_time = time

        def copy(self, target: int, source: int, num_bytes: int) -> None:
            assert min(target, source, num_bytes) > 0

        def read(self, buffer: Any, num_bytes: int) -> None:
            assert buffer.nbytes == num_bytes

        def tensor(self, array: Any) -> Any:
            return array

        def bf16(self, shape: tuple[int, ...]) -> Any:
            import ml_dtypes

            return np.zeros(shape, ml_dtypes.bfloat16)

    return gpu.Bench(Rehearsal(cuda_module.CudaBackend()), quick=True)


def test_every_section_runs(gpu: Any, bench: Any) -> None:
    IdleRuntime.launched = 0
    rows = list(gpu.measure(bench, []))
    assert list(dict.fromkeys(row.section for row in rows)) == list(bench.sections())
    assert IdleRuntime.launched > 20
    assert all(row.fraction is not None for row in rows if row.gigabytes)
    copy = next(row for row in rows if row.what.startswith("copy"))
    assert copy.fraction == 1.0
    assert copy.gigabytes == pytest.approx(2 * 256 * 2**20 / 100e-6 / 1e9)
    move = next(row for row in rows if row.what == "move 64 x 2 MiB, block-major")
    assert move.fraction == pytest.approx(64 / 128)  # of a copy of 256 MiB, in the same time
    assert move.target == 0.9
    json.dumps([asdict(row) for row in rows])
    console = Console(width=100, record=True)
    console.print(gpu.table(rows, "no GPU"))
    text = console.export_text()
    assert len(text.splitlines()) < len(rows) + 30
    assert "50% of copy" in text
    assert max(map(len, text.splitlines())) <= 100


def test_limits_are_measured_whatever_is_chosen(gpu: Any, bench: Any) -> None:
    rows = list(gpu.measure(bench, ["decode"]))
    assert {row.section for row in rows} == {"decode"}
    assert {row.of for row in rows} == {"read"}
    row = next(row for row in rows if "group 1, bf16" in row.what)
    read = 8 * 2048 * 2 * 8 * 128 * 2  # sequences, tokens, keys and values, heads, elements, bytes
    assert row.gigabytes == pytest.approx(read / 100e-6 / 1e9)


def test_sorted_placement_leaves_runs_of_several_blocks(gpu: Any) -> None:
    places = gpu.sorted_places(4096, 1024, np.random.default_rng(0))
    runs = 1 + int((np.diff(places) != 1).sum())
    assert len(set(places.tolist())) == 1024
    assert 8 < runs < 256


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU here")
    run = subprocess.run(
        [sys.executable, ROOT / "benches" / "gpu.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("gpu.py needs a GPU: there is no GPU that CUDA can use")
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout
