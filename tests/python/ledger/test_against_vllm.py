"""Capacities that vLLM 0.32.0's own code gives.

``vllm_0_32_capacity.csv`` holds what its ``get_kv_cache_configs``, ``get_kv_cache_capacity`` and
``get_kv_cache_groups`` returned for 30 GiB per rank, blocks of 16, bf16, steps of 2048 tokens, the
layer-outermost layout and prefix caching, called with specs of the built-in models' layers. Its groups are
``block size x layers``, 0 for states; ``refused`` is a startup it refuses.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvcatch.geometry import Kind, Parallel, read_model
from kvcatch.ledger import GIB, Pool, Run, plan

with (Path(__file__).parent / "vllm_0_32_capacity.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row['model']}-tp{row['tp']}-pp{row['pp']}" for row in ROWS]
)
def test_the_same_capacity(row: dict[str, str]) -> None:
    ledger = plan(
        read_model(row["model"]),
        Pool(kv_bytes=(30 * GIB,)),
        engine="vllm@0.32",
        parallel=Parallel(int(row["tp"]), int(row["pp"]), 1, int(row["dcp"])),
        max_model_len=int(row["max_model_len"]),
        run=Run(2048, speculative_tokens=int(row["speculative_tokens"])),
    )
    if row["num_blocks"] == "refused":
        assert ledger.starts is False
        return
    assert ledger.starts is True
    assert ledger.num_blocks == int(row["num_blocks"])
    assert ledger.max_concurrency == pytest.approx(float(row["max_concurrency"]), rel=1e-12)
    assert ledger.printed_tokens == int(row["printed_tokens"])
    groups = sorted(
        (0 if group.kind is Kind.STATE else group.block_size, len(group.layers))
        for group in ledger.geometry.groups
    )
    assert " ".join(f"{size}x{layers}" for size, layers in groups) == row["groups"]


def test_the_table_has_both_outcomes() -> None:
    refused = sum(row["num_blocks"] == "refused" for row in ROWS)
    assert 0 < refused < len(ROWS) / 2
