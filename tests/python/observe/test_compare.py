"""Two recordings side by side: like loads only, right values, and no change where there is none."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_make import BOUNDS, Load, write_load

from kvcatch.errors import InvalidArgument
from kvcatch.observe.compare import Comparison, Figure, compare, pair_sides, read_sides
from kvcatch.observe.histograms import quantiles, read_latencies

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch


def run(tmp_path: Path, a: Load, b: Load, **options: Any) -> Comparison:
    sides = [
        read_sides(write_load(tmp_path / f"{name}.jsonl.gz", load))
        for name, load in (("a", a), ("b", b))
    ]
    ((first, second),) = pair_sides(*sides)
    return compare(first, second, **options)


def figure(result: Comparison, name: str) -> Figure:
    return next(item for item in result.figures if item.name == name)


def test_what_got_better_and_worse_is_named(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        Load(seconds=600, num_gpu_blocks=1000),
        Load(
            seconds=600,
            seed=1,
            ttft=1.2,
            hit_share=0.6,
            usage=0.8,
            preempted=0.2,
            num_gpu_blocks=500,
        ),
    )
    assert result.is_like
    changes = {item.name: item.change for item in result.changed()}
    for name in ("ttft_seconds_mean", "ttft_seconds_p50", "ttft_seconds_p95"):
        assert changes[name] == "worse"
    assert changes["preemptions_per_request"] == "worse"
    assert changes["prefix_hit_share"] == "better"
    assert changes["kv_usage_share_mean"] == "different"
    assert figure(result, "itl_seconds_mean").change == "same"
    assert ("num_gpu_blocks", "1000", "500") in result.settings
    assert (
        figure(result, "block_fill_share_mean").a is None
        if any(item.name == "block_fill_share_mean" for item in result.figures)
        else True
    )


def test_the_values_are_those_that_were_put_in(tmp_path: Path) -> None:
    load = Load(seconds=1200)
    result = run(tmp_path, load, Load(seconds=1200, seed=5))
    assert figure(result, "prompt_tokens_mean").a == pytest.approx(load.prompt_tokens)
    assert figure(result, "output_tokens_mean").a == pytest.approx(load.output_tokens)
    assert figure(result, "requests_under_way_mean").a == pytest.approx(9.0, rel=0.05)
    assert figure(result, "kv_usage_share_mean").a == pytest.approx(load.usage, rel=0.02)
    assert figure(result, "ttft_seconds_mean").a == pytest.approx(load.ttft, rel=0.06)
    assert figure(result, "itl_seconds_mean").a == pytest.approx(load.itl, rel=0.06)
    assert figure(result, "prefix_hit_share").a == pytest.approx(load.hit_share, abs=0.03)
    assert figure(result, "preemptions_per_request").a == pytest.approx(load.preempted, abs=0.01)
    # Exponential: lines between the distribution's values at the bucket's ends.
    for name, share, low, high in (
        ("ttft_seconds_p50", 0.5, 0.25, 0.5),
        ("ttft_seconds_p95", 0.95, 1.0, 2.5),
    ):
        below, above = (1 - math.exp(-edge / load.ttft) for edge in (low, high))
        right = low + (high - low) * (share - below) / (above - below)
        assert figure(result, name).a == pytest.approx(right, rel=0.1)


def test_like_loads_seldom_seem_to_differ(tmp_path: Path) -> None:
    wrong = total = 0
    for seed in range(4):
        result = run(
            tmp_path, Load(seconds=400, seed=2 * seed), Load(seconds=400, seed=2 * seed + 1)
        )
        assert result.is_like, result.unlike
        outcomes = [item for item in result.figures if item.role == "outcome"]
        total += sum(item.change != "unknown" for item in outcomes)
        wrong += len(result.changed())
    assert total > 45
    assert wrong <= 4  # 1 % of each, and several of them move together


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"prompt_tokens": 700}, "prompt_tokens_mean 500 against 700"),
        ({"output_tokens": 50}, "output_tokens_mean 100 against 50"),
        ({"per_second": 8.0, "running": 20.0}, "arrivals_per_second"),
    ],
)
def test_unlike_loads_are_refused_with_the_figure(
    tmp_path: Path, other: dict[str, Any], name: str
) -> None:
    result = run(tmp_path, Load(), Load(**{"seed": 3, **other}))
    assert not result.is_like
    assert any(name in text for text in result.unlike)
    assert all(item.role == "load" for item in result.figures)
    assert run(tmp_path, Load(), Load(**{"seed": 3, **other}), tolerance=3.0).is_like


def test_a_closed_loop_may_arrive_faster_and_an_open_one_be_fuller(tmp_path: Path) -> None:
    assert run(tmp_path, Load(), Load(per_second=6.0, seed=4)).is_like
    assert run(tmp_path, Load(), Load(running=20.0, seed=4)).is_like


def test_a_recording_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    path = write_load(tmp_path / "a.jsonl.gz", Load())
    (side,), (other,) = read_sides(path), read_sides(path)
    result = compare(side, other)
    assert result.settings == []
    assert result.changed() == []
    assert all(item.a == item.b for item in result.figures)
    swapped = compare(other, side)
    assert [item.a for item in swapped.figures] == [item.b for item in result.figures]


def test_short_recordings_claim_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, Load(seconds=30), Load(seconds=30, ttft=4.0, seed=9))
    outcomes = [item for item in result.figures if item.role == "outcome"]
    assert outcomes
    assert all(item.change == "unknown" and item.low is None for item in outcomes)
    assert any("too short for an interval" in note for note in result.notes)


def test_a_restart_takes_nothing_away(tmp_path: Path) -> None:
    plain = run(tmp_path, Load(seconds=600), Load(seconds=600, seed=1))
    again = run(tmp_path, Load(seconds=600, restart_at=300), Load(seconds=600, seed=1))
    for name in ("ttft_seconds_p95", "ttft_seconds_mean", "arrivals_per_second"):
        first, second = figure(plain, name).a, figure(again, name).a
        assert first == pytest.approx(second, rel=0.05)


def test_replicas_are_paired_by_name(tmp_path: Path) -> None:
    two = Load(seconds=60, engines=("0", "1"))
    a = read_sides(write_load(tmp_path / "a.jsonl.gz", two))
    b = read_sides(write_load(tmp_path / "b.jsonl.gz", two))
    pairs = pair_sides(a, list(reversed(b)))
    assert [(x.replica, y.replica) for x, y in pairs] == [
        (f"model_name=m,engine={n}",) * 2 for n in ("0", "1")
    ]
    one = read_sides(write_load(tmp_path / "c.jsonl.gz", Load(seconds=60)))
    with pytest.raises(InvalidArgument, match="the replicas differ"):
        pair_sides(a, one)


def test_no_load_cannot_be_compared(tmp_path: Path) -> None:
    idle = write_load(tmp_path / "idle.jsonl.gz", Load(seconds=0, idle_after=20))
    (side,) = read_sides(idle)
    with pytest.raises(InvalidArgument, match="no request ran"):
        compare(side, side)
    (busy,) = read_sides(write_load(tmp_path / "busy.jsonl.gz", Load(seconds=20)))
    for tolerance in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match="tolerance"):
            compare(busy, busy, tolerance=tolerance)


class TestHistograms:
    def test_buckets_are_those_of_the_page(self, tmp_path: Path) -> None:
        path = write_load(tmp_path / "a.jsonl.gz", Load(seconds=50, engines=("0", "1")))
        found = read_latencies(path)
        assert set(found.histograms) == {("vllm", f"model_name=m,engine={n}") for n in "01"}
        history = found.histograms["vllm", "model_name=m,engine=0"]["ttft"]
        assert history.bounds.tolist() == [*BOUNDS, math.inf]
        assert history.counts.shape == (53, 11)
        assert (np.diff(history.counts, axis=0) >= 0).all()
        assert (np.diff(history.counts, axis=1) >= 0).all()
        pairs = list(zip(history.times, history.times[1:], strict=False))
        grown = history.between(pairs)
        assert grown is not None
        assert grown.sum() == history.counts[-1, -1]
        assert history.between([(0.0, 0.5)]) is None

    def test_quantiles_of_known_counts(self) -> None:
        bounds = np.array([1.0, 2.0, 4.0, math.inf])
        counts = np.array(
            [[10.0, 0, 0, 0], [0, 10, 0, 0], [5, 0, 5, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
        )
        assert quantiles(bounds, counts, 0.5)[:4].tolist() == [0.5, 1.5, 1.0, 4.0]
        assert quantiles(bounds, counts, 0.75)[2] == 3.0
        assert np.isnan(quantiles(bounds, counts, 0.5)[4])

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any),
        st.floats(0.01, 0.99),
        st.floats(0.01, 0.99),
    )
    def test_quantiles_rise_and_lie_in_their_bucket(
        self, counts: list[int], one: float, other: float
    ) -> None:
        bounds = np.array([1.0, 2.0, 4.0, math.inf])
        rows = np.array([counts], dtype=float)
        low, high = sorted((one, other))
        first, second = (float(quantiles(bounds, rows, share)[0]) for share in (low, high))
        assert first <= second + 1e-9
        cumulated = np.cumsum(counts)
        place = int((cumulated < low * cumulated[-1]).sum())
        edges = [0.0, 1.0, 2.0, 4.0, 4.0]
        assert edges[place] - 1e-9 <= first <= edges[place + 1] + 1e-9


class TestCommand:
    def test_text_and_json(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        a = write_load(tmp_path / "a.jsonl.gz", Load())
        b = write_load(tmp_path / "b.jsonl.gz", Load(seed=1, ttft=2.0))
        done = run_kvcatch("compare", a, b)
        assert done.returncode == 0, done.stderr
        assert "ttft_seconds_mean (worse)" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100
        data = json.loads(run_kvcatch("compare", a, b, "--json").stdout)
        (item,) = data["comparisons"]
        assert item["is_like_load"] is True
        assert "ttft_seconds_mean" in item["changed"]

    def test_unlike_loads(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        a = write_load(tmp_path / "a.jsonl.gz", Load())
        b = write_load(tmp_path / "b.jsonl.gz", Load(prompt_tokens=900))
        done = run_kvcatch("compare", a, b)
        assert done.returncode == 1
        assert "prompt_tokens_mean 500 against 900" in done.stdout
        assert "ttft" not in done.stdout

    def test_a_real_pair(self, run_kvcatch: RunKvcatch, recordings: Path) -> None:
        paths = [recordings / f"{name}.jsonl.gz" for name in ("kvfull", "prefill_bound")]
        done = run_kvcatch("compare", *paths)
        assert done.returncode == 1
        assert "not compared" in done.stdout
        assert run_kvcatch("compare", paths[0], paths[0]).returncode == 0

    def test_bad_input(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        good = write_load(tmp_path / "a.jsonl.gz", Load(seconds=10))
        text = tmp_path / "b.txt"
        text.write_text("hello\n")
        for other, said in (
            (tmp_path / "none.jsonl", "none.jsonl"),
            (text, "b.txt"),
            ("http://127.0.0.1:9", "record it first"),
        ):
            done = run_kvcatch("compare", good, other)
            assert done.returncode == 2, other
            assert said in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
