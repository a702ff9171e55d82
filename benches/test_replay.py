"""Bookkeeping of a whole replay of the built-in chat workload: kvcatch and a manager in Python.

Prompts are hashed before the clock starts, for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baselines import PythonManager, python_requests, replay_through
from kvcatch import BlockPool, Prefix
from kvcatch.workload.generators import generate
from operations import BLOCK_SIZE, replay_calls

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from kvcatch.workload.request import Workload

pytestmark = pytest.mark.benchmark(group="replay")

NUM_BLOCKS = 8_192
Setup = tuple[tuple[object, ...], dict[str, object]]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate("chat", 300)


@pytest.mark.parametrize("placement", ["queue", "bitmap"])
def test_kvcatch(benchmark: BenchmarkFixture, workload: Workload, placement: str) -> None:
    prompts = [Prefix(request.tokens(), BLOCK_SIZE) for request in workload.requests]

    def setup() -> Setup:
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, placement=placement, null_block=True)
        return (workload, prompts, pool), {}

    benchmark.pedantic(replay_calls, setup=setup, rounds=5)  # type: ignore[no-untyped-call]


def test_python_manager(benchmark: BenchmarkFixture, workload: Workload) -> None:
    def setup() -> Setup:
        return (PythonManager(NUM_BLOCKS, BLOCK_SIZE), python_requests(workload)), {}

    benchmark.pedantic(replay_through, setup=setup, rounds=5)  # type: ignore[no-untyped-call]
