"""Building kernels: what is built, what is kept, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu import FakeNvrtc

from kvcatch.errors import InvalidArgument, KernelError, MissingExtra
from kvcatch.kernels import modules
from kvcatch.kernels.modules import OPTIONS, KernelCompiler, cache_folder, choose_arch, included

KERNEL = """
#include "scale.cuh"
extern "C" __global__ void scale(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor();
}
"""
HEADER = """
#pragma once
#include <cuda_bf16.h>
#ifndef FACTOR
#define FACTOR 2
#endif
__device__ float factor() { return __bfloat162float(__float2bfloat16(FACTOR)); }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sources = tmp_path / "cuda"
    sources.mkdir()
    (sources / "scale.cu").write_text(KERNEL)
    (sources / "scale.cuh").write_text(HEADER)
    (sources / "other.cuh").write_text("// nobody's")
    return sources


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts as a process that has built nothing."""
    monkeypatch.setattr(modules, "_built", {})


def forget() -> None:
    modules._built.clear()


def test_built_once_a_process_and_kept_for_the_next(folder: Path, tmp_path: Path) -> None:
    nvrtc = FakeNvrtc()
    first = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc)
    second = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc)
    cubin = first.cubin("scale", {"B": 2, "A": 1}, 90)
    assert second.cubin("scale", {"A": 1, "B": 2}, 90) is cubin
    assert nvrtc.compiled == [("scale.cu", (*OPTIONS, "-DA=1", "-DB=2", "-arch=sm_90"))]
    forget()
    assert second.cubin("scale", {"A": 1, "B": 2}, 90) == cubin
    assert len(nvrtc.compiled) == 1
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".cubin"]


def test_without_a_folder_that_keeps_them_kernels_are_still_built_once(
    folder: Path, tmp_path: Path
) -> None:
    nvrtc = FakeNvrtc()
    (tmp_path / "file").write_text("")
    compiler = KernelCompiler(folder, tmp_path / "file" / "kernels", nvrtc=nvrtc)
    with pytest.warns(RuntimeWarning, match="set KVCATCH_CACHE_DIR"):
        compiler.cubin("scale", {}, 90)
    compiler.cubin("scale", {}, 90)
    assert len(nvrtc.compiled) == 1


@pytest.mark.parametrize("change", ["source", "header", "define", "arch", "compiler"])
def test_everything_that_decides_the_result_is_in_the_key(
    folder: Path, tmp_path: Path, change: str
) -> None:
    nvrtc = FakeNvrtc()
    before = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc).cubin("scale", {"A": 1}, 90)
    forget()
    if change == "source":
        (folder / "scale.cu").write_text(KERNEL + "// more")
    elif change == "header":
        (folder / "scale.cuh").write_text(HEADER + "// more")
    elif change == "compiler":
        nvrtc.identity = lambda: "fake 2"  # type: ignore[method-assign]
    defines, arch = ({"A": 2} if change == "define" else {"A": 1}), 80 if change == "arch" else 90
    after = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc).cubin("scale", defines, arch)
    assert len(nvrtc.compiled) == 2
    assert (after != before) == (change != "compiler")


def test_a_header_that_is_not_included_is_not_in_the_key(folder: Path, tmp_path: Path) -> None:
    nvrtc = FakeNvrtc()
    KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc).cubin("scale", {}, 90)
    forget()
    (folder / "other.cuh").write_text("// changed")
    KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc).cubin("scale", {}, 90)
    assert len(nvrtc.compiled) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_file_is_built_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    nvrtc = FakeNvrtc()
    compiler = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc)
    cubin = compiler.cubin("scale", {}, 90)
    (path,) = (tmp_path / "kept").iterdir()
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes(
        {"cut": data[:-5], "flipped": flipped, "emptied": b"", "foreign": b"\x7fELF"}[damage]
    )
    forget()
    assert compiler.cubin("scale", {}, 90) == cubin
    assert len(nvrtc.compiled) == 2
    assert path.read_bytes() == data


def test_threads_that_want_one_kernel_share_its_build(folder: Path, tmp_path: Path) -> None:
    nvrtc, results = FakeNvrtc(), []
    compile_now = nvrtc.compile

    def slowly(*arguments: Any) -> bytes:
        time.sleep(0.05)
        return compile_now(*arguments)

    nvrtc.compile = slowly  # type: ignore[method-assign]
    compiler = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc)
    threads = [
        threading.Thread(target=lambda: results.append(compiler.cubin("scale", {}, 90)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1
    assert len(nvrtc.compiled) == 1


def test_a_failed_build_names_its_constants_and_is_tried_again(
    folder: Path, tmp_path: Path
) -> None:
    nvrtc = FakeNvrtc(fail="scale.cu(3): error: no such thing")
    compiler = KernelCompiler(folder, tmp_path / "kept", nvrtc=nvrtc)
    message = (
        r"^scale.cu does not compile with -DA=1 -arch=sm_90: scale.cu\(3\): error: no such thing$"
    )
    for _ in range(2):
        with pytest.raises(KernelError, match=message):
            compiler.cubin("scale", {"A": 1}, 90)
    assert len(nvrtc.compiled) == 2
    assert not (tmp_path / "kept").exists()
    nvrtc.fail = ""
    assert compiler.cubin("scale", {"A": 1}, 90)


def test_an_unknown_source_names_the_known_ones(folder: Path, tmp_path: Path) -> None:
    compiler = KernelCompiler(folder, tmp_path, nvrtc=FakeNvrtc())
    with pytest.raises(InvalidArgument, match=r"no kernel source scales.cu: there are scale.cu"):
        compiler.cubin("scales", {}, 90)
    with pytest.raises(InvalidArgument, match="no kernel sources"):
        KernelCompiler(tmp_path / "nowhere", tmp_path, nvrtc=FakeNvrtc())


def test_headers_are_found_through_headers() -> None:
    sources = {
        "a.cu": '#include "b.cuh"\n#include <cuda_fp16.h>\n',
        "b.cuh": '  #  include "c.cuh"\n#include "kvemu.h"\n',
        "c.cuh": '#include "b.cuh"\n',
        "d.cuh": "",
    }
    assert list(included("a.cu", sources)) == ["b.cuh", "c.cuh"]


def test_the_sources_of_the_extension_are_those_of_the_checkout() -> None:
    checkout = Path(__file__).resolve().parents[3] / "cuda"
    sources = KernelCompiler(nvrtc=FakeNvrtc()).sources
    stale = "the extension was built from other sources: build it again (make dev)"
    files = {path.name: path for path in checkout.iterdir() if path.suffix in {".cu", ".cuh"}}
    assert set(sources) == set(files), stale
    for name, text in sources.items():
        assert text == files[name].read_text(encoding="utf-8"), f"{name}: {stale}"


@pytest.mark.parametrize(
    ("capability", "arch"), [(80, 80), (86, 86), (87, 86), (90, 90), (100, 100), (103, 100)]
)
def test_the_newest_architecture_of_the_generation(capability: int, arch: int) -> None:
    assert choose_arch(capability, (75, 80, 86, 90, 100)) == arch


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        (75, "GPU 3 has compute capability 7.5: the kernels need 8.0 or newer"),
        (110, "GPU 3 has compute capability 11.0, which this NVRTC does not know"),
    ],
)
def test_a_gpu_that_is_too_old_or_too_new(capability: int, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        choose_arch(capability, (75, 80, 90, 100, 120), "GPU 3")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCATCH_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path / "kernels"
    monkeypatch.delenv("KVCATCH_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvcatch" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "kvcatch" / "kernels"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "kvcatch" / "kernels"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "kvcatch" / "kernels"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None


def test_missing_cupy_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MissingExtra, match=r"need CuPy: pip install 'kvcatch\[cuda\]'"):
        KernelCompiler(folder)


def test_missing_nvrtc_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def absent() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", absent)
    with pytest.raises(MissingExtra, match=r"need NVRTC \(nvidia-cuda-nvrtc\): pip install"):
        KernelCompiler(folder)


# --- with the real NVRTC, which needs no GPU ----------------------------------------------------


@pytest.fixture
def real() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        modules.CupyNvrtc()
    except MissingExtra as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("real")
def test_nvrtc_builds_without_a_gpu(folder: Path, tmp_path: Path) -> None:
    compiler = KernelCompiler(folder, tmp_path / "kept")
    one = compiler.cubin("scale", {"FACTOR": 3}, 80)
    other = compiler.cubin("scale", {"FACTOR": 5}, 80)
    assert one[:4] == b"\x7fELF"
    assert one != other
    assert b"scale" in one
    # As long as its own header says: CuPy drops the last byte.
    section_table = int.from_bytes(one[40:48], "little") + 64 * int.from_bytes(one[60:62], "little")
    assert len(one) >= section_table


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("#error stop here\n", r"scale.cu\(1\): catastrophic error: #error directive: stop here$"),
        ("__device__ int x = y;\n", r'scale.cu\(1\): error: identifier "y" is undefined$'),
        ('#include "gone.cuh"\n', "scale.cu.*gone.cuh"),
    ],
)
def test_the_first_error_is_the_message(
    folder: Path, tmp_path: Path, source: str, message: str
) -> None:
    (folder / "scale.cu").write_text(source)
    with pytest.raises(KernelError, match=message) as error:
        KernelCompiler(folder, tmp_path / "kept").cubin("scale", {}, 90)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("real")
def test_what_identifies_nvrtc_holds_its_build_and_headers() -> None:
    identity = modules.CupyNvrtc().identity()
    assert identity.startswith("nvrtc 1")
    assert "CL-" in identity
    assert len(identity.split("headers ")[1]) == 16


FROM_THREADS = """
import sys, threading
from pathlib import Path
from kvcatch.kernels.modules import KernelCompiler
compiler = KernelCompiler(Path(sys.argv[1]))
together = threading.Barrier(4)
def build(factor):
    together.wait()
    print(len(compiler.cubin("scale", {"FACTOR": factor}, 90)) > 0)
threads = [threading.Thread(target=build, args=(factor,)) for factor in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.usefixtures("real")
def test_the_first_builds_of_a_process_from_several_threads(folder: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FROM_THREADS, str(folder)],
        env={**os.environ, "KVCATCH_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.split() == ["True"] * 4, run.stderr


BUILD = """
import sys
from pathlib import Path
from kvcatch.kernels.modules import KernelCompiler
print(len(KernelCompiler(Path(sys.argv[1])).cubin("scale", {}, 90)))
"""


@pytest.mark.usefixtures("real")
def test_processes_that_build_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "KVCATCH_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    sizes = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(sizes) == 1
    assert [p.suffix for p in (tmp_path / "cache" / "kernels").iterdir()] == [".cubin"]
