"""What is chosen for a processor, and what is set before torch loads."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcatch import InvalidArgument, MissingExtra
from kvcatch.models.extras import need
from kvcatch.models.precision import CPU, choose_precision, read_cpu
from kvcatch.models.threads import Threads, _quota, available_cpus, set_threads

if TYPE_CHECKING:
    from pathlib import Path

ZEN3 = CPU("AuthenticAMD", frozenset({"avx2", "fma"}))
ZEN4 = CPU("AuthenticAMD", frozenset({"avx2", "avx512f", "avx512_bf16"}))
SAPPHIRE_RAPIDS = CPU("GenuineIntel", frozenset({"avx512_bf16", "amx_tile", "amx_bf16"}))
WITHOUT_AMX = CPU("GenuineIntel", frozenset({"avx512f", "avx512_bf16"}))


@pytest.mark.parametrize(
    ("cpu", "weights"),
    [
        (ZEN3, "float32"),
        (ZEN4, "bfloat16"),
        (SAPPHIRE_RAPIDS, "bfloat16"),
        (WITHOUT_AMX, "bfloat16"),
        (CPU(), "float32"),
    ],
)
def test_weights_by_processor(cpu: CPU, weights: str) -> None:
    chosen = choose_precision(cpu=cpu)
    assert chosen.weights == weights
    wide = ", float32 from 32 rows" if cpu is WITHOUT_AMX else ""
    assert str(chosen).startswith(f"{weights} weights{wide}, {chosen.matmul} matmul (")
    assert choose_precision(requested="bfloat16", cpu=cpu).wide_rows == 0
    assert choose_precision(requested="float32", cpu=cpu).weights == "float32"
    assert choose_precision(requested="bfloat16", cpu=cpu).weights == "bfloat16"


def test_a_gpu_multiplies_plainly() -> None:
    chosen = choose_precision("cuda:0", cpu=ZEN3)
    assert (chosen.weights, chosen.matmul) == ("bfloat16", "plain")


@pytest.mark.parametrize("requested", ["fp32", "", "float16"])
def test_unknown_precision(requested: str) -> None:
    with pytest.raises(InvalidArgument, match="must be one of auto, float32, bfloat16"):
        choose_precision(requested=requested)


def test_cpuinfo(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    core = "processor : 0\nvendor_id\t: AuthenticAMD\nmodel name : X\nflags\t\t: fpu avx2 f16c\n\n"
    path.write_text(core + core.replace("avx2", "other"))
    assert read_cpu(path) == CPU("AuthenticAMD", frozenset({"fpu", "avx2", "f16c"}))
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert read_cpu(path) == CPU("", frozenset({"fp", "asimd"}))
    assert read_cpu(tmp_path / "none") == CPU()


BEFORE_TORCH = """
import os, sys
from kvcatch.models.threads import set_threads
assert "torch" not in sys.modules
print(set_threads(*map(int, sys.argv[1:])))
import torch
print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"])
print(set_threads(1).late, torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("arguments", "env", "said", "threads", "policy"),
    [
        ((), {}, "OMP_WAIT_POLICY=PASSIVE, GOMP_SPINCOUNT=4000", None, "PASSIVE"),
        ((), {"GOMP_SPINCOUNT": "7"}, "PASSIVE, GOMP_SPINCOUNT=7", None, "PASSIVE"),
        ((1,), {"OMP_NUM_THREADS": "2"}, "1 threads", 1, "PASSIVE"),
        ((), {"OMP_NUM_THREADS": "1"}, "1 threads", 1, "PASSIVE"),
        ((), {"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE", None, "ACTIVE"),
    ],
)
def test_threads_are_set_before_torch_loads(
    arguments: tuple[int, ...], env: dict[str, str], said: str, threads: int | None, policy: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH, *map(str, arguments)],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    first, seen, late = done.stdout.splitlines()
    assert said in first
    assert ("GOMP_SPINCOUNT" in first) == ("OMP_WAIT_POLICY" not in env)
    assert seen == f"{threads or available_cpus()} {policy}"
    assert late == "True 1"


@pytest.mark.parametrize("count", [0, -1, 1025, True])
def test_impossible_thread_counts(count: int) -> None:
    with pytest.raises(InvalidArgument, match="must be within"):
        set_threads(count)


def test_quota_of_a_control_group(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    for text, cpus in (
        ("max 100000\n", None),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("", None),
        ("1 0", None),
    ):
        path.write_text(text)
        assert _quota(path) == cpus
    assert _quota(tmp_path / "none") is None
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


def test_threads_say_that_they_are_late() -> None:
    assert str(Threads(2, "unset", late=True)).endswith("(torch was loaded before it could be set)")


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"needs no_such_package: pip install kvcatch\[engine\]"):
        need("no_such_package.part")
