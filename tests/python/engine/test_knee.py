"""The change point of TTFT over utilisation: found where one was put, not found where there is none."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine extra")

from toy import ToyRunner

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine
from kvcatch.engine.knee import KneeLoad, KneePoint, find_knee, fit_knee
from kvcatch.errors import InvalidArgument


def points(
    knee: float,
    steep: float,
    *,
    slope: float = 0.3,
    noise: float = 0.1,
    count: int = 200,
    seed: int = 0,
    top: float = 1.0,
) -> list[KneePoint]:
    """TTFT of 0.2 s times e^(slope u + steep max(0, u - knee)) with log-normal scatter."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        u = rng.uniform(0, top)
        y = slope * u + steep * max(0.0, u - knee) + rng.gauss(0, noise)
        found.append(KneePoint(u, 0.2 * math.exp(y)))
    return found


@pytest.mark.parametrize("knee", [0.4, 0.6, 0.85])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_a_knee_is_found_where_it_is(knee: float, noise: float) -> None:
    found = fit_knee(points(knee, 12.0, noise=noise))
    assert not found.reason
    assert found.utilisation is not None
    assert found.low is not None
    assert found.high is not None
    assert abs(found.utilisation - knee) < (0.03 if noise < 0.1 else 0.1)
    assert found.low <= found.utilisation <= found.high
    assert found.water_level == pytest.approx(found.low, abs=0.0101)
    assert found.water_level <= found.low
    assert found.rise == pytest.approx(math.exp(12.3 * (1 - knee)), rel=0.5)


def test_the_interval_holds_the_knee_about_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(40):
        found = fit_knee(points(0.7, 8.0, noise=0.3, seed=seed, count=80))
        inside += found.low is not None and found.low - 0.02 <= 0.7 <= (found.high or 0) + 0.02
    assert inside >= 32  # of 40; 36 expected


def test_straight_lines_are_seldom_taken_for_a_knee() -> None:
    wrong = sum(not fit_knee(points(1.0, 0.0, slope=2.0, seed=s)).reason for s in range(60))
    assert wrong <= 8  # 3 expected
    flat = fit_knee(points(1.0, 0.0, slope=0.0, seed=1))
    assert flat.water_level is None
    assert "straight line" in flat.reason or "does not climb" in flat.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "0 requests measured"),
        (points(0.5, 9.0, count=19), "19 requests measured: at least 20"),
        (points(0.5, 9.0, top=0.15), "utilisation stayed between 0.0"),
        ([KneePoint(0.5, 0.1)] * 50, "utilisation stayed between 0.50 and 0.50"),
        (points(0.5, -6.0, slope=4.0), "does not climb"),
        (points(0.5, 0.35, noise=0.01), "does not climb"),
        (points(0.55, 2.6, noise=0.9, count=300, seed=4), "somewhere between|straight line"),
    ],
)
def test_what_cannot_be_told_is_said(given: list[KneePoint], said: str) -> None:
    import re

    found = fit_knee(given)
    assert re.search(said, found.reason)
    assert found.water_level is None
    assert found.num_points == len(given)


def test_the_fit_does_not_depend_on_order_or_unit_of_time() -> None:
    given = points(0.6, 10.0)
    first = fit_knee(given)
    slower = fit_knee([KneePoint(p.utilisation, p.ttft * 1000) for p in given])
    assert slower.utilisation == pytest.approx(first.utilisation)
    assert slower.low == pytest.approx(first.low)
    assert fit_knee(given) == first
    mixed = fit_knee(sorted(given, key=lambda p: p.ttft))
    assert mixed.utilisation == pytest.approx(first.utilisation)


@pytest.mark.parametrize(
    "bad", [(-0.1, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, math.inf), (math.nan, 1.0)]
)
def test_impossible_points_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(InvalidArgument, match="utilisation must be within"):
        fit_knee([*points(0.5, 9.0), KneePoint(*bad)])


class Timed(ToyRunner):
    """A step costs 10 ms and 0.1 ms per token, on a clock of its own."""

    now = 0.0

    def forward(self, items: Any, pool: Any) -> Any:
        self.now += 0.01 + 1e-4 * sum(item.count for item in items)
        return super().forward(items, pool)


def timed_engine(**options: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_blocks": 120,
        "block_size": 4,
        "max_model_len": 100,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        **options,
    }
    config = EngineConfig(**settings)
    runner = Timed(config)
    return Engine(config, runner, clock=lambda: runner.now)


@pytest.mark.parametrize("law", ["full_prompt", "worst_case"])
def test_the_level_parts_short_waits_from_long_ones(law: str) -> None:
    engine = timed_engine(law=law, num_blocks=480, max_num_seqs=64, max_num_batched_tokens=256)
    load = KneeLoad.for_engine(engine, seconds=25)
    seen: list[int] = []
    knee, levels = find_knee(engine, load, lambda level: seen.append(level.concurrency))
    engine.check_idle()
    assert [level.concurrency for level in levels] == load.levels()
    assert set(seen) <= set(load.levels())
    assert knee.num_points == sum(len(level.points) for level in levels) > 100
    assert not knee.reason
    assert knee.utilisation is not None
    assert 0.4 < knee.utilisation < 0.9
    level = knee.water_level or 0.0
    below = [p.ttft for one in levels for p in one.points if p.utilisation < level - 0.05]
    assert levels[-1].ttft() > 3 * statistics.median(below)
    assert statistics.quantiles(below, n=10)[-1] < levels[-1].ttft() / 2
    assert (sum(one.preemptions for one in levels) == 0) == (law == "worst_case")


def test_a_pool_that_cannot_fill_gives_no_level() -> None:
    engine = timed_engine(num_blocks=4000)
    knee, _ = find_knee(engine, KneeLoad.for_engine(engine, seconds=20))
    assert knee.water_level is None
    assert "another limit than the pool" in knee.reason
    engine.check_idle()


def test_a_load_that_cannot_run_and_an_engine_in_use_are_refused() -> None:
    engine = timed_engine()
    with pytest.raises(InvalidArgument, match="max_model_len 100"):
        KneeLoad.for_engine(engine, prompt_tokens=99)
    with pytest.raises(InvalidArgument, match="seconds = 0"):
        KneeLoad.for_engine(engine, seconds=0)
    engine.add([1, 2])
    with pytest.raises(InvalidArgument, match="must be idle"):
        find_knee(engine, KneeLoad.for_engine(engine, seconds=1))
