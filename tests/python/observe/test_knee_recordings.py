"""The knee of a recording: what a point is, the fit on made-up queues, and when it cannot be told."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.observe.changepoint import KneePoint, fit_curve, fit_knee
from kvcatch.observe.knee import DEPLOYED_LEVELS, MAX_POINTS, find_knees, knee_looks
from kvcatch.observe.record import Recorder
from kvcatch.observe.sample import EngineSample

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch


def ramp(
    knee: float,
    steep: float = 10.0,
    *,
    seconds: int = 400,
    top: float = 1.0,
    noise: float = 0.15,
    seed: int = 0,
    replica: str = "engine=0",
    **gauges: Any,
) -> list[EngineSample]:
    """Load that swings twice; TTFT is 50 ms, and climbs by ``steep`` per unit above the knee. Below 1 s."""
    rng = random.Random(seed)
    samples, started, total = [], 0.0, 0.0
    for second in range(seconds):
        used = top * (0.5 - 0.5 * math.cos(4 * math.pi * second / seconds))
        ttft = 0.05 * math.exp(steep * max(0.0, used - knee) + rng.gauss(0, noise))
        count = rng.randint(1, 5)
        started += count
        total += count * min(ttft, 0.99)
        samples.append(
            EngineSample(
                float(second),
                "vllm",
                replica,
                kv_usage_share=used,
                started_total=started,
                ttft_seconds_sum=total,
                prompt_tokens_total=100 * started,
                **{"running_requests": 4.0, "waiting_requests": 0.0, **gauges},
            )
        )
    return samples


class TestLooks:
    def sample(self, at: float, used: float, started: float, total: float) -> EngineSample:
        return EngineSample(
            at,
            "vllm",
            kv_usage_share=used,
            started_total=started,
            ttft_seconds_sum=total,
            prompt_tokens_total=started * 7,
        )

    def test_the_utilisation_is_what_the_request_met(self) -> None:
        # Its first token came at 10 s after 6.5 s: it arrived at 3.5, and the look after that is at 4.
        samples = [self.sample(float(t), t / 10, 0, 0) for t in range(10)]
        samples.append(self.sample(10.0, 1.0, 2, 13.0))
        (look,) = knee_looks(samples)
        assert (look.utilisation, look.ttft_seconds, look.started) == (0.4, 6.5, 2)
        assert look.prompt_tokens == 7

    def test_a_quick_first_token_met_the_look_that_counts_it(self) -> None:
        samples = [self.sample(0.0, 0.1, 0, 0), self.sample(1.0, 0.3, 1, 0.2)]
        assert [look.utilisation for look in knee_looks(samples)] == [0.3]

    def test_who_came_before_the_window_and_what_a_restart_hides_gives_no_point(self) -> None:
        early = [self.sample(0.0, 0.1, 5, 1.0), self.sample(1.0, 0.3, 6, 11.0)]
        assert knee_looks(early) == []
        restart = [self.sample(0.0, 0.1, 5, 9.0), self.sample(1.0, 0.3, 2, 0.5)]
        assert knee_looks(restart) == []

    def test_reserved_blocks_count(self) -> None:
        samples = [self.sample(0.0, 0.1, 0, 0), self.sample(1.0, 0.3, 1, 0.2)]
        for sample in samples:
            sample.num_blocks, sample.reserved_blocks = 100.0, 20.0
        assert [look.utilisation for look in knee_looks(samples)] == [0.5]


@pytest.mark.parametrize("knee", [0.5, 0.75])
def test_a_knee_is_found_where_it_was_put(knee: float) -> None:
    (report,) = find_knees(ramp(knee))
    found = report.knee
    assert not found.reason
    assert found.utilisation == pytest.approx(knee, abs=0.05)
    assert found.water_level is not None
    assert found.low is not None
    assert found.water_level <= found.low <= knee + 0.03
    assert report.usage_of.startswith("blocks that requests reference")


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (ramp(0.6, 0.0), "straight line|does not climb"),
        (ramp(0.6, top=0.15), "utilisation stayed between 0.00 and 0.15"),
        (ramp(0.6, seconds=15), "intervals with a first token: at least 20"),
        ([EngineSample(0.0, "tgi"), EngineSample(1.0, "tgi")], "KV usage and TTFT and started"),
        (
            [
                EngineSample(t, "vllm", kv_usage_share=0.0, ttft_seconds_sum=0.0, started_total=0.0)
                for t in (0.0, 1.0)
            ],
            "no request got a first token",
        ),
    ],
)
def test_what_cannot_be_told_is_said(samples: list[EngineSample], said: str) -> None:
    (report,) = find_knees(samples)
    assert re.search(said, report.knee.reason)
    assert report.knee.water_level is None


def test_a_climb_that_another_gate_makes_is_not_the_pools() -> None:
    queued = ramp(0.6, running_requests=8.0, max_num_seqs=8.0)
    for sample in queued:
        sample.waiting_requests = 5.0 if (sample.kv_usage_share or 0) > 0.6 else 0.0
        sample.finished_total = sample.started_total
        sample.generated_tokens_total = 10 * (sample.started_total or 0.0)
    (report,) = find_knees(queued)
    assert "spent at max_num_seqs, not at the pool" in report.knee.reason
    assert report.knee.water_level is None


def test_longer_prompts_at_higher_utilisation_are_said() -> None:
    samples = ramp(0.6)
    prompts = 0.0
    for before, after in itertools.pairwise(samples):
        count = (after.started_total or 0.0) - (before.started_total or 0.0)
        prompts += count * (100 + 2000 * (after.kv_usage_share or 0.0))
        after.prompt_tokens_total = prompts
    samples[0].prompt_tokens_total = 0.0
    (report,) = find_knees(samples)
    assert any("longer prompts came at higher utilisation" in note for note in report.notes)
    assert find_knees(ramp(0.6))[0].notes == []


def test_replicas_are_fitted_on_their_own() -> None:
    reports = find_knees([*ramp(0.5), *ramp(0.8, replica="engine=1")])
    assert [report.replica for report in reports] == ["engine=0", "engine=1"]
    low, high = (report.knee.utilisation for report in reports)
    assert low is not None
    assert high is not None
    assert low == pytest.approx(0.5, abs=0.06)
    assert high == pytest.approx(0.8, abs=0.06)


def test_many_intervals_are_merged_and_say_the_same() -> None:
    (report,) = find_knees(ramp(0.7, seconds=4000))
    assert len(report.looks) <= MAX_POINTS
    assert sum(look.started for look in report.looks) > 9000
    assert report.knee.utilisation == pytest.approx(0.7, abs=0.05)


def test_points_that_depend_on_each_other_are_not_more_evidence() -> None:
    """Scatter that stays for a while looks like a bend; drawn point by point it would be taken for one."""
    wrong = {1: 0, 20: 0}
    for seed in range(24):
        rng = random.Random(seed)
        points, drift = [], 0.0
        for number in range(300):
            drift = 0.95 * drift + rng.gauss(0, 0.1)
            used = 0.5 - 0.5 * math.cos(2 * math.pi * number / 300)
            points.append(KneePoint(used, math.exp(1.5 * used + drift)))
        for length in wrong:
            wrong[length] += not fit_knee(points, run_length=length).reason
    assert wrong[20] < wrong[1]
    assert wrong[20] <= 4
    with pytest.raises(InvalidArgument, match="run_length = 0"):
        fit_knee(points, run_length=0)


def test_the_curve_is_bent_at_the_knee() -> None:
    points = [KneePoint(n / 200, 0.1 * math.exp(10 * max(0.0, n / 200 - 0.6))) for n in range(200)]
    low, at, high = fit_curve(points, [0.3, 0.6, 0.9])
    assert low == pytest.approx(0.1, rel=0.05)
    assert at == pytest.approx(0.1, rel=0.1)
    assert high == pytest.approx(0.1 * math.exp(3), rel=0.1)


def test_knee_cases(recordings: Path) -> None:
    """Levels that are deployed, as llm-d-autoscaling#312 lists them, are what a fitted one is set beside."""
    lines = (recordings.parents[1] / "cases" / "cases.jsonl").read_text().splitlines()
    cases = [case for case in map(json.loads, lines) if case["kind"] == "knee"]
    assert cases
    ours = sorted(level for _, level in DEPLOYED_LEVELS)
    for case in cases:
        told = [float(text) for text in re.findall(r"0?\.\d+", case["expected"]["answer"])]
        assert sorted(told) == ours
        assert case["inputs"]["kvCacheUtilThreshold"] in ours


@pytest.mark.parametrize("name", ["headofline", "kvfull", "prefill_bound", "prefix_good", "seqcap"])
def test_no_real_recording_shows_a_knee(recordings: Path, name: str) -> None:
    """They are short, and what binds in three of them is not the pool: no level is made up."""
    from kvcatch.observe.record import read_recording

    (report,) = find_knees(read_recording(recordings / f"{name}.jsonl.gz").samples)
    assert report.knee.water_level is None
    assert report.knee.reason


class TestCommand:
    def recording(self, path: Path, samples: list[EngineSample]) -> Path:
        with Recorder(path, "http://e/metrics", 0.0) as recorder:
            for sample in samples:
                values = {
                    "num_requests_running": sample.running_requests,
                    "num_requests_waiting": sample.waiting_requests,
                    "kv_cache_usage_perc": sample.kv_usage_share,
                    "time_to_first_token_seconds_sum": sample.ttft_seconds_sum,
                    "time_to_first_token_seconds_count": sample.started_total,
                }
                body = "".join(f'vllm:{k}{{engine="0"}} {v}\n' for k, v in values.items())
                recorder.add(sample.t_seconds, body)
        return path

    def test_a_knee_with_plot_and_json(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = self.recording(tmp_path / "r.jsonl.gz", ramp(0.7))
        plot = tmp_path / "knee.svg"
        done = run_kvcatch("knee", path, "--plot", plot)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "water level 0." in done.stdout
        assert "KEDA example 0.60" in " ".join(done.stdout.split())
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert plot.read_text().lstrip().startswith("<?xml")
        data = json.loads(run_kvcatch("knee", path, "--json").stdout)
        assert data["replicas"][0]["knee"]["utilisation"] == pytest.approx(0.7, abs=0.05)

    def test_no_knee(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = self.recording(tmp_path / "r.jsonl.gz", ramp(0.7, 0.0))
        done = run_kvcatch("knee", path, "--plot", tmp_path / "flat.png")
        assert done.returncode == 1
        assert "no water level" in done.stdout
        assert (tmp_path / "flat.png").stat().st_size > 1000

    def test_bad_input(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = self.recording(tmp_path / "r.jsonl.gz", ramp(0.7, seconds=5))
        for arguments, said in (
            ((tmp_path / "none",), "none"),
            ((path, "--plot", "knee.txt"), "must end in"),
            (("http://127.0.0.1:9", "--window", 1, "--timeout", 0.3), "127.0.0.1:9"),
            ((path, "--engine-args", "--max-num-seqs none"), "max-num-seqs"),
        ):
            done = run_kvcatch("knee", *arguments)
            assert done.returncode == 2, (arguments, done.stdout)
            assert said in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
