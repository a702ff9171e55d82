"""Where the law says that the first request waits, and what a difference is called."""

from __future__ import annotations

from typing import Any

import pytest

from kvcatch.laws import LAWS
from kvcatch.loadtest.client import Gauges
from kvcatch.loadtest.predict import Limits, predict
from kvcatch.loadtest.ramp import Probe, Ramp
from kvcatch.loadtest.result import judge, to_dict


def limits(law: str = "full_prompt", num_blocks: int = 100, **options: Any) -> Limits:
    return Limits(LAWS[law], num_blocks, 16, **options)


def idle(count: int) -> list[list[int]]:
    return [[0] * number for number in range(count)]


def test_prompts_alone_fill_the_pool() -> None:
    # 100 blocks, 10 each: the eleventh waits.
    found = predict(limits(), 160, 100, idle(20), 20)
    assert found.first_refusal == 11
    assert found.refusal is not None
    assert (found.refusal.gate, found.refusal.required, found.refusal.available) == (
        "capacity",
        10,
        0,
    )
    # With all outputs complete each holds 17: six enter (5 x 17 + 10 <= 100), the seventh waits.
    assert (found.least, found.most) == (7, 11)


def test_generated_tokens_take_blocks_too() -> None:
    # When the eighth is sent, the seven before it hold 10 + 5 blocks each: 105 > 100 - 10.
    generated = [[80] * number for number in range(20)]
    assert predict(limits(), 160, 100, generated, 20).first_refusal == 8


def test_a_null_block_cannot_be_held() -> None:
    assert predict(limits(num_blocks=110), 160, 100, idle(20), 20).first_refusal == 12
    assert (
        predict(limits(num_blocks=110, null_blocks=1), 160, 100, idle(20), 20).first_refusal == 11
    )


def test_the_worst_case_is_the_same_whatever_was_generated() -> None:
    law = limits("worst_case", num_blocks=1000)
    for tokens in (0, 500):
        generated = [[tokens] * number for number in range(10)]
        assert predict(law, 512, 4096, generated, 10).first_refusal == 4  # 288 each


def test_max_num_seqs_is_a_gate() -> None:
    found = predict(limits(max_num_seqs=3), 16, 16, idle(9), 9)
    assert found.first_refusal == 4
    assert found.refusal is not None
    assert found.refusal.gate == "max_num_seqs"


def test_beyond_what_was_seen_the_pace_goes_on() -> None:
    seen = [[], [16], [32, 16]]
    found = predict(limits(), 160, 1000, seen, 20)
    # The n-th meets (n-1) x 10 blocks and 0 + 1 + ... + (n-1) of growth: 10 n + n (n-1) / 2 > 100.
    assert found.first_refusal == 8


def test_none_waits_where_there_is_room() -> None:
    found = predict(limits(num_blocks=10_000), 16, 16, idle(5), 5)
    assert (found.first_refusal, found.refusal) == (None, None)


def ramp(outcomes: list[str], **options: Any) -> Ramp:
    probes = [
        Probe(n, outcome, 0.1, (0,) * (n - 1), Gauges()) for n, outcome in enumerate(outcomes, 1)
    ]
    return Ramp(160, probes, **options)


@pytest.mark.parametrize(
    ("entered", "name"),
    [
        (10, "as_predicted"),
        (9, "as_predicted"),
        (11, "as_predicted"),
        (8, "normal"),
        (7, "off"),
        (3, "configuration_fault"),
        (17, "configuration_fault"),
    ],
)
def test_differences_have_names(entered: int, name: str) -> None:
    prediction = predict(limits(), 160, 100, idle(30), 30)  # 11
    verdict = judge(ramp(["entered"] * entered + ["waited"]), prediction, 30)
    assert verdict.name == name
    assert str(entered + 1) in verdict.text
    if name == "as_predicted":
        assert verdict.gate == "capacity"


def test_too_early_is_probably_max_num_seqs() -> None:
    prediction = predict(limits(), 160, 100, idle(30), 30)
    verdict = judge(ramp(["entered"] * 4 + ["waited"]), prediction, 30)
    assert (verdict.name, verdict.gate) == ("configuration_fault", "max_num_seqs")


def test_what_cannot_tell_says_so() -> None:
    prediction = predict(limits(), 160, 100, idle(30), 30)
    assert judge(ramp(["entered"] * 3, ended_early=1), prediction, 30).name == "not_enough_evidence"
    assert (
        judge(ramp(["entered"] * 3, interrupted=True), prediction, 30).name == "not_enough_evidence"
    )
    assert judge(ramp(["entered"] * 5), None, 5).name == "nothing_waited"
    assert judge(ramp(["entered", "waited"]), None, 5).name == "not_predicted"
    beyond = judge(ramp(["entered"] * 30), prediction, 30)
    assert beyond.name == "configuration_fault"
    assert to_dict(ramp(["entered"]), None, beyond)["predicted_first_refusal_requests"] is None
