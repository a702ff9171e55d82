"""Builds: found again when nothing changed, made anew when anything did, and refused in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cuda_host import build as builds
from cuda_host.build import BuildError, Unavailable, build, build_all

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include "kvemu.h"
#include "part.cuh"
extern "C" __global__ void number(int* out) { out[0] = NUMBER + PART; }
KVEMU_KERNEL(number)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def source(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCATCH_CUDA_HOST_CACHE", str(cache))
    (tmp_path / "part.cuh").write_text("#define PART 1\n")
    path = tmp_path / f"{tmp_path.name}.cu"
    path.write_text(SOURCE)
    return path


def number(source: Path, value: int) -> int:
    builds._load.cache_clear()  # as another process would
    out = np.zeros(1, np.int32)
    build(source, {"NUMBER": value}).get_function("number")((1,), (1,), (out,))
    return int(out[0])


def objects(source: Path) -> set[str]:
    return {path.name for path in builds.cache_folder().glob(f"{source.stem}*.so")}


def test_found_again_or_made_anew(source: Path) -> None:
    assert number(source, 5) == 6
    first = objects(source)
    assert number(source, 5) == 6
    assert objects(source) == first
    assert number(source, 6) == 7
    (source.parent / "part.cuh").write_text("#define PART 10\n")
    assert number(source, 5) == 15
    source.write_text(SOURCE + "\n")
    assert number(source, 5) == 15
    assert len(objects(source)) == 4


def test_side_by_side(source: Path) -> None:
    modules = build_all([(source, {"NUMBER": i}) for i in (1, 2, 1)])
    assert len(objects(source)) == 2
    assert modules[0] is modules[2] or modules[0].path == modules[2].path


def test_prune_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCATCH_CUDA_HOST_CACHE", str(tmp_path))
    (tmp_path / "header").mkdir()
    for used, name in enumerate(["a", "header/b", "c", "d"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (used, used))
    builds.prune(250)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["c", "d"]
    builds.prune(250)
    builds.prune(200)
    assert (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("extern int x\n", "expected"),
        (
            "__global__ void k(float* p) { __shared__ float x[4]; p[0] = x[0]; }",
            "shared memory goes through KV_SMEM",
        ),
        ("int f() { int x; return x; }", "uninitialized"),
        ('void f() { asm volatile("st.global.f32 [%0], 0;" :: "l"(0)); }', "Error: "),
    ],
)
def test_what_does_not_compile(source: Path, text: str, why: str) -> None:
    source.write_text('#include "kvemu.h"\n' + text)
    with pytest.raises(BuildError, match=why):
        build(source)


def test_unknown_sanitizer(source: Path) -> None:
    with pytest.raises(
        ValueError, match="sanitizer 'msan': must be one of '', 'asan', 'tsan', 'ubsan'"
    ):
        build(source, {"NUMBER": 1}, "msan")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCATCH_CXX", "no-such-compiler")
    assert builds.unavailable() == (
        "no C++ compiler no-such-compiler: install g++, or name one in KVCATCH_CXX"
    )
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        builds.compiler()
    monkeypatch.delenv("KVCATCH_CXX")
    builds.cuda_headers.cache_clear()
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(builds.Path, "is_file", lambda _: False)
    try:
        assert builds.unavailable().startswith("no CUDA headers: install nvidia-cuda-runtime")
    finally:
        builds.cuda_headers.cache_clear()
