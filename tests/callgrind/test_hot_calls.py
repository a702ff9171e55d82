"""No hot call of the core may grow by more than 10 % in instructions."""

from __future__ import annotations

import pytest

import harness

COUNTS = harness.Counts.load()


@pytest.fixture(scope="module")
def counter() -> None:
    if lacking := harness.missing():
        pytest.skip(lacking)
    if harness.toolchain()[0] != COUNTS.target:
        pytest.skip(f"the counts on file are of {COUNTS.target}")


@pytest.mark.parametrize("scenario", COUNTS.instructions)
def test_instructions_per_call(scenario: str, counter: None) -> None:
    before, now = COUNTS.instructions[scenario], harness.count(scenario)
    assert now <= before * (1 + harness.TOLERANCE), (
        f"{scenario}: {now:,.1f} instructions per call, {now / before - 1:+.1%} from the {before:,.1f} on file"
        f" (made with rustc {COUNTS.rustc}, this is {harness.toolchain()[1]}). If that is meant: make callgrind-update"
    )


def test_every_scenario_is_on_file(counter: None) -> None:
    assert set(harness.scenarios()) == set(COUNTS.instructions), "make callgrind-update"
