"""The soak in the suite's size, and: whoever is admitted finishes within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="needs the engine extra")

from hypothesis import given, settings
from hypothesis import strategies as st
from soak import soak, tiny_engine_maker
from test_governor import greedy
from test_governor import make as make_governed
from toy import expected, make

from kvcatch.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_twenty_seconds_of_random_load() -> None:
    seen = soak(20, seed=1)
    everything = ("recompute", "swap", "compactions", "aborted", "forked", "turned away")
    for name in (*everything, "governed", "fcfs", "priority", "cache_aware"):
        assert seen[name] > 0, f"{name} never happened: {dict(seen)}"


@pytest.mark.slow
def test_random_load_on_a_model_through_the_cpu_backend(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the engine extra")
    make_tiny = tiny_engine_maker(tmp_path)
    seen = soak(30, seed=50, rounds=8, make=make_tiny, wanted=None, requests=25)
    assert seen["finished"] > 20
    assert seen["recompute"] + seen["swap"] > 0


LAWS = ("full_prompt", "first_chunk", "worst_case", "estimate")
REQUEST = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3))


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    law=st.sampled_from(LAWS),
    order=st.sampled_from(["fcfs", "priority", "cache_aware"]),
    victim=st.sampled_from(["newest", "lowest_priority", "cheapest"]),
    swap=st.booleans(),
    num_blocks=st.integers(18, 40),
    gap=st.integers(0, 5),
)
def test_every_admitted_request_finishes_within_a_bound(
    requests: list[tuple[int, int, int, int]],
    law: str,
    order: str,
    victim: str,
    swap: bool,
    num_blocks: int,
    gap: int,
) -> None:
    """The oldest branch that runs is never a victim, so it gains at least a token in every step but those that
    fill its prompt: alone, one after the other, all would take the steps counted here. Redone work at most doubles.
    """
    options: dict[str, Any] = {"law": law, "order": order, "victim": victim}
    if swap:
        options |= {"preemption": "swap", "host_blocks": 12}
    engine = make(num_blocks=num_blocks, max_model_len=72, **options)
    bound, step, outputs = 2, 0, {}
    coming = list(enumerate(requests))
    wanted: dict[tuple[str, int], list[int]] = {}
    for length, count, _, n in requests:
        bound += gap + n * (2 + length + count)
    while coming or not engine.is_idle:
        if coming and step % (gap + 1) == 0:
            number, (length, count, priority, n) = coming.pop(0)
            prompt = [number * 7 % 97] * length
            params = SamplingParams(temperature=0, max_tokens=count, n=n)
            request = engine.add(prompt, params, priority=priority)
            wanted |= {(request.id, index): expected(prompt, count) for index in range(n)}
        for delta in engine.step():
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        step += 1
        assert step <= 2 * bound, f"{engine!r} after {step} steps, {2 * bound} allowed"
    assert outputs == wanted
    engine.check_idle()


def test_a_stream_of_smaller_long_requests_does_not_starve_a_large_one() -> None:
    engine = make_governed({"long_share": 0.5, "short_tokens": 10}, max_passed_over=6)
    large, ended = None, []
    for number in range(120):
        if number == 4:
            large = engine.add(
                [9] * 60, greedy(50), request_id="large"
            )  # 28 of the share's 30 blocks
        if number % 3 == 0:
            engine.add([number % 97] * 20, greedy(20), request_id=f"s{number}")  # 10 blocks
        ended += [delta.request_id for delta in engine.step() if delta.finish]
    assert large is not None
    assert large.scheduled is not None, "it never entered"
    while not engine.is_idle:
        engine.step()
    engine.check_idle()


def test_short_requests_pass_more_long_ones_than_the_window_holds() -> None:
    engine = make_governed({"long_share": 0.2, "short_tokens": 30}, window=4)
    for number in range(10):
        engine.add([number] * 40, greedy(20), request_id=f"long{number}")
    engine.add([90] * 4, greedy(8), request_id="short")
    for _ in range(3):
        engine.step()
    assert "short" in {branch.request.id for branch in engine.scheduler.running}
    while not engine.is_idle:
        engine.step()
    engine.check_idle()
