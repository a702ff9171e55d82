"""Verdicts against an engine that knows why each of its requests waits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from observe_engine import SimulatedEngine

from kvcatch.observe.diagnose import DIAGNOSES, diagnose

SECONDS = 60


def arrivals(
    rng: random.Random, rate: float, prompt: int, output: int
) -> list[tuple[float, int, int]]:
    found, at = [], 0.0
    while at < SECONDS:
        at += rng.expovariate(rate)
        lengths = [max(1, int(rng.lognormvariate(0, 0.5) * mean)) for mean in (prompt, output)]
        found.append((at, min(lengths[0], 8000), lengths[1]))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("engine", "rate", "prompt", "output", "right"),
    [
        ({"num_blocks": 20000, "max_num_seqs": 8}, 10.0, 200, 200, {"max_num_seqs"}),
        (
            {"num_blocks": 30000, "token_s": 2e-4, "max_model_len": 16384, "token_budget": 2048},
            4.0,
            3000,
            10,
            {"token_budget"},
        ),
        (
            {"num_blocks": 600, "max_model_len": 4096},
            5.0,
            200,
            500,
            {"capacity", "preemption_storm"},
        ),
        ({"num_blocks": 20000}, 2.0, 300, 100, {"healthy"}),
    ],
    ids=["cap", "prefill", "kv", "healthy"],
)
def test_the_gate_is_the_true_one(
    engine: dict[str, float], rate: float, prompt: int, output: int, right: set[str], seed: int
) -> None:
    simulated = SimulatedEngine(**engine)  # type: ignore[arg-type]
    simulated.run(arrivals(random.Random(seed), rate, prompt, output), SECONDS)
    assert (
        simulated.gate in right | {"head_of_line"}
        if "capacity" in right
        else simulated.gate in right
    )
    assert diagnose(simulated.samples).worst.gate in right


def test_the_runbook_has_a_paragraph_per_gate() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "runbook.md").read_text()
    assert {line[3:] for line in text.splitlines() if line.startswith("## ")} == set(DIAGNOSES)
