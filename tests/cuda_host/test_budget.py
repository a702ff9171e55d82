"""Every kernel builds for every architecture and stays within its budget; no GPU is needed for that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("cupy", reason="the compile budget needs CuPy: pip install 'kvcatch[cuda]'")

from cuda_host import budget
from cuda_host.cubin import KernelUsage

if TYPE_CHECKING:
    from pathlib import Path

if WHY := budget.unavailable():
    pytest.skip(WHY, allow_module_level=True)

CASES = budget.cases()
QUICK = [case for case in CASES if case.quick]
REST = [case for case in CASES if not case.quick]


@pytest.fixture(scope="module")
def table() -> budget.Table:
    return budget.read()


@pytest.fixture(scope="module")
def quick() -> tuple[budget.Table, dict[str, str]]:
    return budget.measure(QUICK, budget.compiler())


@pytest.fixture(scope="module")
def rest() -> tuple[budget.Table, dict[str, str]]:
    return budget.measure(REST, budget.compiler())


def hold(case: str, built: tuple[budget.Table, dict[str, str]], table: budget.Table) -> None:
    measured, errors = built
    assert case not in errors, errors[case]
    assert budget.beyond(case, measured, table) == []


@pytest.mark.parametrize("case", [case.name for case in QUICK])
def test_within_budget(
    case: str, quick: tuple[budget.Table, dict[str, str]], table: budget.Table
) -> None:
    hold(case, quick, table)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.name for case in REST])
def test_the_rest_within_budget(
    case: str, rest: tuple[budget.Table, dict[str, str]], table: budget.Table
) -> None:
    hold(case, rest, table)


def test_the_table_holds_what_is_built_and_nothing_else(table: budget.Table) -> None:
    assert sorted(table) == sorted(case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_no_kernel_may_spill(table: budget.Table) -> None:
    spilling = {
        f"{case}: {kernel} on {arch}"
        for case, kernels in table.items()
        for kernel, by_arch in kernels.items()
        for arch, allowed in by_arch.items()
        if allowed.spills or allowed.stack
    }
    assert spilling == set()


def test_attention_runs_on_tensor_cores_with_wide_loads(table: budget.Table) -> None:
    for case, kernels in table.items():
        for kernel, by_arch in kernels.items():
            for arch, allowed in by_arch.items():
                if kernel in {"decode_attention", "prefill_attention"}:
                    assert allowed.hmma >= 8, (case, arch)
                if kernel == "prefill_attention":
                    assert allowed.ldgsts >= 4, (case, arch)
                if kernel == "move_blocks":
                    assert min(allowed.ldg128, allowed.stg128) >= 8, (case, arch)


USED = KernelUsage(registers=64, stack=0, spills=0, ldg128=8, ldg64=2, stg128=4, ldgsts=3, hmma=16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"registers": 60, "ldg128": 9}, []),
        ({"registers": 65}, ["has 65 registers, at most 64 allowed"]),
        ({"stack": 16, "spills": 2}, ["16 stack, at most 0", "2 spills, at most 0"]),
        ({"ldg128": 7}, ["7 ldg128, at least 8"]),
        ({"ldg64": 1, "stg128": 0}, ["1 ldg64, at least 2", "0 stg128, at least 4"]),
        ({"hmma": 0}, ["0 hmma, at least 16"]),
    ],
)
def test_beyond_the_budget(change: dict[str, int], words: list[str]) -> None:
    allowed = {"a": {"kernel": {"sm_90": USED}}}
    found = budget.beyond("a", {"a": {"kernel": {"sm_90": replace(USED, **change)}}}, allowed)
    assert len(found) == len(words)
    for fault, word in zip(found, words, strict=True):
        assert fault.startswith("a: kernel on sm_90 has")
        assert word in fault


def test_what_the_table_does_not_know_is_beyond_it() -> None:
    one = {"a": {"kernel": {"sm_90": USED}}}
    assert "not in budget.toml" in budget.beyond("a", one, {})[0]
    assert "kernel on sm_90 is not in" in budget.beyond("a", one, {"a": {}})[0]
    more = {"a": {"kernel": {"sm_90": USED, "sm_100": USED}}}
    assert budget.beyond("a", one, more) == ["a: kernel on sm_100 is in budget.toml and not built"]


def test_the_table_reads_as_it_was_written(tmp_path: Path) -> None:
    one: budget.Table = {"a b": {"kernel": {"sm_90": USED, "sm_100": replace(USED, hmma=0)}}}
    budget.write(one, tmp_path / "budget.toml")
    assert budget.read(tmp_path / "budget.toml") == one
