"""Take 64 blocks and give them back, pool half full at random: each placement and a linked list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import operations
from kvcatch import placements

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.benchmark(group="allocate")


@pytest.mark.parametrize("placement", placements())
def test_kvcatch(benchmark: BenchmarkFixture, placement: str) -> None:
    benchmark(operations.allocate_and_free(placement))


def test_linked_list(benchmark: BenchmarkFixture) -> None:
    benchmark(operations.allocate_and_free_linked_list())
