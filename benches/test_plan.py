"""A plan of a config, after import: from the parsed JSON to every figure of the report.

The baseline is what calculators do: one multiplication of the config's numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcatch.geometry import BUILT_IN, Parallel, read_config
from kvcatch.ledger import LengthDistribution, Pool, plan, to_dict

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.benchmark(group="plan")

LENGTHS = LengthDistribution.of([(length, 1.0) for length in range(16, 16_016, 16)])


@pytest.mark.parametrize("name", BUILT_IN)
def test_kvcatch(benchmark: BenchmarkFixture, name: str) -> None:
    def run() -> object:
        model = read_config(BUILT_IN[name], name)
        ledger = plan(model, Pool(num_blocks=50_000), parallel=Parallel(pp=2), lengths=LENGTHS)
        return to_dict(ledger, explain=True)

    benchmark(run)
    if benchmark.stats is not None:
        assert benchmark.stats["median"] <= 0.05


def test_one_multiplication(benchmark: BenchmarkFixture) -> None:
    config = BUILT_IN["llama-3.1-8b"]

    def run() -> int:
        dim = config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 2)

    assert benchmark(run) == 131_072
