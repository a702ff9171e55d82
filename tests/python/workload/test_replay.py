from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcatch import BlockPool, InvalidArgument
from kvcatch.workload import (
    Order,
    ReplayResult,
    ReplaySettings,
    Request,
    Workload,
    generate,
    read_trace,
    replay,
)
from kvcatch.workload.foresight import NEVER, next_uses
from kvcatch.workload.measure import MAX_SAMPLES, LeastRuns, histogram, quantile
from model_pool import ModelPool

if TYPE_CHECKING:
    from pathlib import Path

TIMES = {"us_per_decode_token", "export_us_per_decode_token", "seconds"}


def request(index: int, spans: list[tuple[int, int]], output: int) -> Request:
    starts, lengths = np.array(spans, dtype=np.int64).T
    return Request(
        index, 0.0, starts, lengths, int(lengths.sum()), output, 10**6 * (index + 1), f"r{index}"
    )


def workload(*requests: Request) -> Workload:
    return Workload("made", "made", requests)


def pool(num_blocks: int, **changes: Any) -> BlockPool:
    return BlockPool(num_blocks, 16, **{"placement": "queue", "null_block": True, **changes})


def facts(result: ReplayResult) -> dict[str, Any]:
    return {name: value for name, value in result.to_dict().items() if name not in TIMES}


@pytest.fixture(scope="module")
def trace(mooncake_trace: Path) -> Workload:
    return read_trace(mooncake_trace, requests=300)


class TestReference:
    """The figures of vLLM 0.32's own manager on the first 300 requests of the Mooncake trace."""

    @pytest.mark.parametrize(
        ("num_blocks", "runs", "hits", "first_hits", "preemptions"),
        [(60_000, 437.44, 212_784, 153_088, 5), (90_000, 380.74, 161_792, 161_792, 0)],
    )
    def test_queue_is_vllm(
        self,
        trace: Workload,
        num_blocks: int,
        runs: float,
        hits: int,
        first_hits: int,
        preemptions: int,
    ) -> None:
        result = replay(trace, pool(num_blocks))
        assert result.runs_per_sequence == pytest.approx(runs, abs=3)
        assert result.hit_tokens == pytest.approx(hits, abs=100)
        assert result.first_admission_hit_tokens == first_hits
        assert result.preemptions == preemptions
        assert result.blocks_per_sequence == pytest.approx(913.5, abs=0.05)
        assert result.finished == 300
        assert result.never_fits == 0
        assert result.least_runs == pytest.approx(2.0, abs=0.3)

    @pytest.mark.parametrize(("num_blocks", "runs"), [(60_000, 58), (90_000, 46)])
    def test_sorted_is_sglangs_rule(self, trace: Workload, num_blocks: int, runs: float) -> None:
        result = replay(trace, pool(num_blocks, placement="sorted"))
        assert result.runs_per_sequence == pytest.approx(runs, abs=1.5)


@pytest.mark.parametrize("name", ["chat", "agent", "documents"])
@pytest.mark.parametrize("placement", ["queue", "sorted"])
def test_the_pool_does_what_the_model_does(name: str, placement: str) -> None:
    work = generate(name, 60 if name == "chat" else 40, seed=1)
    work = replace(work, requests=tuple(r for r in work.requests if r.num_tokens < 12_000))
    blocks = 2 * max(-(-(r.num_tokens + r.output_tokens) // 16) for r in work.requests)
    real = replay(work, pool(blocks, placement=placement))
    model: Any = ModelPool(blocks, 16, placement=placement, null_block=True)
    assert facts(real) == facts(replay(work, model))
    assert real.preemptions > 0


def test_one_request_by_hand() -> None:
    result = replay(workload(request(0, [(0, 40)], 10)), pool(10))
    assert result.finished == 1
    assert result.steps == 10
    assert result.decode_tokens == 9
    assert result.prefill_tokens == 40
    assert result.hit_tokens == 0
    assert result.blocks_per_sequence == 4
    assert result.runs_per_sequence == result.least_runs == result.prompt_runs == 1
    assert result.runs_histogram == {"1": 1}


def test_one_output_token_is_never_computed() -> None:
    result = replay(workload(request(0, [(0, 16)], 1)), pool(4))
    assert (result.steps, result.decode_tokens, result.blocks_per_sequence) == (1, 0, 1)


def test_at_least_one_prompt_token_is_computed() -> None:
    twice = [request(i, [(0, 64)], 4) for i in range(2)]
    result = replay(workload(*twice), pool(20))
    assert result.hit_tokens == result.first_admission_hit_tokens == 48
    assert result.prefill_tokens == 64 + 16


def test_a_prompt_that_never_fits_is_dropped() -> None:
    work = workload(*(request(i, [(1000 * i, n)], 3) for i, n in enumerate([32, 999, 32])))
    result = replay(work, pool(11))
    assert (result.finished, result.never_fits) == (2, 1)


def test_a_sequence_that_outgrows_the_pool_is_dropped() -> None:
    result = replay(workload(request(0, [(0, 32)], 500)), pool(6))
    assert (result.finished, result.never_fits, result.preemptions) == (0, 1, 1)


def test_the_last_running_sequence_is_preempted_and_keeps_what_it_generated() -> None:
    work = workload(request(0, [(0, 48)], 40), request(1, [(1000, 48)], 40))
    result = replay(work, pool(9))
    assert result.preemptions > 0
    assert result.finished == 2
    assert result.decode_tokens + result.preemptions + 2 == 80


def test_a_watermark_holds_admissions_back() -> None:
    work = workload(*(request(i, [(1000 * i, 160)], 5) for i in range(4)))
    free = replay(work, pool(101))
    held = replay(work, pool(101), ReplaySettings(watermark=0.85))
    assert free.waiting_steps_max == 1
    assert held.waiting_steps_max > 10
    assert held.finished == 4


def test_max_num_seqs() -> None:
    work = workload(*(request(i, [(1000 * i, 16)], 10) for i in range(4)))
    assert replay(work, pool(101), ReplaySettings(max_num_seqs=1)).waiting_steps_max == 31
    assert replay(work, pool(101), ReplaySettings(max_num_seqs=4)).waiting_steps_max == 1


class TestCacheAware:
    def settings(self, window: int) -> ReplaySettings:
        return ReplaySettings(max_num_seqs=1, order=Order("cache_aware", window))

    def alternating(self, n: int) -> Workload:
        return workload(*(request(i, [(10_000 * (i % 2), 320)], 4) for i in range(n)))

    def test_the_longest_cached_prefix_goes_first(self) -> None:
        plain = replay(self.alternating(20), pool(26), ReplaySettings(max_num_seqs=1))
        aware = replay(self.alternating(20), pool(26), self.settings(8))
        assert aware.hit_tokens > 2 * plain.hit_tokens
        assert plain.passed_over_max == 0
        assert 0 < aware.passed_over_max <= 10

    def test_nobody_is_passed_over_without_bound(self) -> None:
        same = [request(i, [(0, 320)], 1) for i in range(700)]
        same[1] = request(1, [(50_000, 320)], 1)
        result = replay(workload(*same), pool(64), self.settings(64))
        assert result.passed_over_max == 512
        assert result.finished == 700

    def test_a_window_of_one_is_fcfs(self) -> None:
        work = generate("chat", 60)
        one = replay(work, pool(2_000), ReplaySettings(order=Order.parse("cache_aware:1")))
        assert facts(one) == facts(replay(work, pool(2_000)))


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("fcfs", Order()),
        ("cache_aware", Order("cache_aware", 64)),
        ("cache_aware:256", Order("cache_aware", 256)),
    ],
)
def test_order_is_read(text: str, order: Order) -> None:
    assert Order.parse(text) == order
    assert Order.parse(str(order)) == order


@pytest.mark.parametrize("text", ["", "lifo", "cache_aware:", "cache_aware:0", "cache_aware:-1"])
def test_a_wrong_order_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="order = "):
        Order.parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 0},
        {"watermark": 1.0},
        {"watermark": -0.1},
        {"watermark": float("nan")},
        {"descriptor_us": -1.0},
        {"descriptor_us": float("nan")},
        {"bandwidth_gb_s": 0.0},
        {"bytes_per_token": 0},
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidArgument, match=f"{name} = "):
        ReplaySettings(**changes)


def test_a_used_pool_is_refused() -> None:
    used = pool(40)
    used.create(list(range(50)), commit=True)
    with pytest.raises(InvalidArgument, match="4 active and 0 cached blocks"):
        replay(workload(request(0, [(0, 16)], 2)), used)


def test_transfer_model() -> None:
    work = workload(request(0, [(0, 1600)], 2))
    settings = ReplaySettings(descriptor_us=10.0, bandwidth_gb_s=1.6, bytes_per_token=1000)
    assert replay(work, pool(200), settings).transfer_ms == pytest.approx(0.010 + 1.0)


def test_samples_are_few_and_even() -> None:
    result = replay(workload(request(0, [(0, 16)], 3_000)), pool(400))
    steps = [row["step"] for row in result.samples]
    assert MAX_SAMPLES / 4 < len(steps) <= MAX_SAMPLES
    assert len(set(np.diff(steps))) == 1


def test_progress_reaches_the_end() -> None:
    calls: list[tuple[int, int]] = []
    replay(generate("chat", 20), pool(4_000), progress=lambda *call: calls.append(call))
    assert calls[-1] == (20, 20)
    assert calls == sorted(calls)


def test_foresight_beats_lru_on_any_window_of_a_workload() -> None:
    whole = generate("chat", 600)
    work = replace(whole, requests=whole.requests[200:500])
    settings = ReplaySettings(max_num_seqs=8)
    lru = replay(work, pool(3_000), settings)
    best = replay(work, pool(3_000, eviction="clairvoyant"), settings)
    assert best.first_admission_hit_tokens > lru.first_admission_hit_tokens


def test_next_uses() -> None:
    work = workload(
        request(0, [(0, 48)], 1),
        request(1, [(0, 32), (900, 40)], 1),
        request(2, [(900, 40)], 1),
        request(3, [(0, 48)], 1),
    )
    uses = next_uses(work, 16)
    assert [part.tolist() for part in uses] == [
        [1, 1, 3],
        [3, 3, NEVER, NEVER],
        [NEVER, NEVER],
        [NEVER, NEVER, NEVER],
    ]


class TestLeastRuns:
    def blocks(self, *ids: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(ids, dtype=np.int32)

    def test_without_sharing_one_run_is_possible(self) -> None:
        least = LeastRuns(100)
        least.admit(self.blocks(9, 3, 70), 0)
        assert least.finish(self.blocks(9, 3, 70, 50), 3) == 1

    def test_only_one_of_two_heirs_can_follow_the_prefix(self) -> None:
        least = LeastRuns(100)
        least.admit(self.blocks(1, 2, 3), 0)
        least.admit(self.blocks(1, 2, 50), 2)
        assert least.finish(self.blocks(1, 2, 50, 60), 3) == 2
        assert least.finish(self.blocks(1, 2, 3, 4), 3) == 1

    def test_who_follows_a_whole_sequence_needs_no_break(self) -> None:
        least = LeastRuns(100)
        least.admit(self.blocks(1, 2, 3), 0)
        least.finish(self.blocks(1, 2, 3), 3)
        least.admit(self.blocks(1, 2, 3, 80), 3)
        assert least.finish(self.blocks(1, 2, 3, 80), 4) == 1

    def test_a_block_handed_out_anew_is_no_obstacle(self) -> None:
        least = LeastRuns(100)
        least.admit(self.blocks(1, 2, 3), 0)
        least.finish(self.blocks(1, 2, 3), 3)
        least.admit(self.blocks(3), 0)
        least.admit(self.blocks(1, 2, 40), 2)
        assert least.finish(self.blocks(1, 2, 40), 3) == 1


def test_quantile_and_histogram() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([5, 1, 3], 0.5) == 3
    assert histogram([1, 2, 3, 4, 1024]) == {"1": 1, "2-3": 2, "4-7": 1, "1024-2047": 1}
