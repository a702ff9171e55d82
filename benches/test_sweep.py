"""A sweep of 100 replays of 2,000 requests on all cores, and one of its replays alone.

``python -m pytest benches/test_sweep.py``; the figure to hold is 60 s for the sweep on 2 cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcatch.sweep import Grid, run_point, sweep
from kvcatch.workload.generators import generate

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from kvcatch.workload.request import Workload

pytestmark = pytest.mark.benchmark(group="sweep")

GRID = Grid(
    num_blocks=(4_096, 6_144, 8_192, 12_288, 16_384),
    policies=("queue", "bitmap"),
    laws=("full_prompt", "worst_case"),
    watermarks=(0.0, 0.01, 0.02, 0.05),
    max_num_seqs=(64, 128),
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate("chat", 2_000)


def test_hundred_replays(benchmark: BenchmarkFixture, workload: Workload) -> None:
    assert len(GRID.points()) == 100
    rows = benchmark.pedantic(lambda: list(sweep(workload, GRID)), rounds=1)
    assert len(rows) == 100


def test_one_replay(benchmark: BenchmarkFixture, workload: Workload) -> None:
    point = GRID.points()[0]
    row = benchmark.pedantic(lambda: run_point(workload, GRID, point), rounds=3)
    assert row.finished == 2_000
