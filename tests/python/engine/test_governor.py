"""The governor: who goes first above the water level, what long requests may hold, what is not queued."""

from __future__ import annotations

from typing import Any

import pytest
from toy import ToyRunner, expected, run

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine, Rejected
from kvcatch.engine.governor import GovernorConfig, QueueFull
from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument


def make(governor: dict[str, Any], **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_blocks": 60,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        **options,
    }
    config = EngineConfig(**settings)
    clock = iter(range(1 << 40)).__next__
    return Engine(config, ToyRunner(config), clock=clock, governor=GovernorConfig(**governor))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def finish_order(engine: Engine) -> list[str]:
    order = []
    while not engine.is_idle:
        order += [delta.request_id for delta in engine.step() if delta.finish]
        engine.pool.validate()
    engine.check_idle()
    return order


def test_short_requests_go_first_above_the_water_level_and_in_order_below() -> None:
    for level, first in ((0.1, "short"), (None, "long")):
        engine = make({"water_level": level, "short_tokens": 30}, max_num_seqs=2)
        engine.add([7] * 40, greedy(40), request_id="runs")
        engine.step()
        engine.add([8] * 40, greedy(10), request_id="long")
        engine.add([9] * 4, greedy(10), request_id="short")
        order = finish_order(engine)
        assert min(("short", "long"), key=order.index) == first


def test_long_requests_together_stay_within_their_share_and_block_no_short_one() -> None:
    engine = make({"long_share": 0.5, "short_tokens": 30})
    for number in range(4):
        engine.add([number] * 40, greedy(20), request_id=f"long{number}")  # 15 blocks each
    engine.add([90] * 4, greedy(8), request_id="short")
    engine.step()
    engine.step()
    running = {branch.request.id for branch in engine.scheduler.running}
    assert running == {"long0", "long1", "short"}
    refusal = next(iter(engine.scheduler.waiting)).refusal
    assert refusal is not None
    assert refusal.gate == "watermark"
    assert "30 blocks run + 15 = 45 > long_share 0.5 x 60 = 30" in refusal.detail
    assert engine.scheduler.refusal is not None
    assert set(finish_order(engine)) == {"long0", "long1", "long2", "long3", "short"}


def test_one_long_request_always_may_run() -> None:
    engine = make({"long_share": 0.01, "short_tokens": 10})
    engine.add([1] * 100, greedy(50), request_id="x")
    assert run(engine) == {("x", 0): expected([1] * 100, 50)}


def test_a_long_request_is_not_passed_over_without_bound() -> None:
    engine = make({"water_level": 0.01, "short_tokens": 30}, max_num_seqs=2, max_passed_over=5)
    engine.add([7] * 20, greedy(60), request_id="runs")
    engine.step()
    engine.add([8] * 40, greedy(4), request_id="long")
    for number in range(40):
        engine.add([number], greedy(3), request_id=f"s{number}")
    order = finish_order(engine)
    assert order.index("long") <= 7


def test_the_door() -> None:
    engine = make({"max_input": 50, "max_queued": 3, "max_queued_tokens": 100})
    with pytest.raises(Rejected, match="prompt 51 > max_input 50"):
        engine.add([1] * 51, greedy(1))
    engine.add([1] * 40, greedy(40))
    with pytest.raises(QueueFull, match="1 requests of 80 tokens wait, this one has 21"):
        engine.add([1], greedy(20))
    engine.add([1], greedy(5))
    engine.add([1], greedy(5))
    with pytest.raises(QueueFull, match="max_queued is 3"):
        engine.add([1], greedy(1))
    run(engine)
    # A request larger than the limit alone enters an empty queue.
    engine.add([1] * 40, greedy(100))
    run(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"water_level": 0},
        {"water_level": 1.1},
        {"long_share": -0.5},
        {"short_tokens": 0},
        {"max_input": 0},
        {"max_queued": -1},
        {"max_queued_tokens": 1.5},
    ],
)
def test_limits_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        GovernorConfig(**options)
