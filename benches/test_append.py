"""Append one token to each of 256 sequences: one call, and a Python loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import operations

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.benchmark(group="append")

# The sequences grow with every call: the pool has room for so many.
CALLS = {"rounds": 100, "iterations": 20, "warmup_rounds": 1}


@pytest.mark.parametrize("placement", ["queue", "bitmap"])
def test_kvcatch(benchmark: BenchmarkFixture, placement: str) -> None:
    benchmark.pedantic(operations.append_batch(placement), **CALLS)  # type: ignore[no-untyped-call]


def test_per_sequence(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(operations.append_batch_python(), **CALLS)  # type: ignore[no-untyped-call]
