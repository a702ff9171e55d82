"""Bookkeeping of a whole replay of the built-in chat workload: kvcatch and managers in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baselines import has_vllm, python_replay, vllm_replay
from kvcatch.bench import BenchConfig
from kvcatch.workload.generators import generate
from kvcatch.workload.replay import replay

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from kvcatch.workload.request import Workload

pytestmark = pytest.mark.benchmark(group="replay")

NUM_BLOCKS = 8_192
ROUNDS = {"rounds": 3, "iterations": 1}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate("chat", 150)


@pytest.mark.parametrize("policy", ["queue", "bitmap"])
def test_kvcatch(benchmark: BenchmarkFixture, workload: Workload, policy: str) -> None:
    config = BenchConfig(num_blocks=NUM_BLOCKS)

    def setup() -> tuple[tuple[object, ...], dict[str, object]]:
        return (workload, config.pool(policy)), {}

    result = benchmark.pedantic(replay, setup=setup, rounds=3)
    benchmark.extra_info["us_per_decode_token"] = result.us_per_decode_token


def test_python_manager(benchmark: BenchmarkFixture, workload: Workload) -> None:
    result = benchmark.pedantic(python_replay, args=(workload, NUM_BLOCKS), **ROUNDS)
    benchmark.extra_info["us_per_decode_token"] = result.us_per_decode_token


@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
def test_vllm_manager(benchmark: BenchmarkFixture, workload: Workload) -> None:
    result = benchmark.pedantic(vllm_replay, args=(workload, NUM_BLOCKS), **ROUNDS)
    benchmark.extra_info["us_per_decode_token"] = result.us_per_decode_token
