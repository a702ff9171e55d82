"""The table of one replica against a plain list, and figures against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.watch.history import AT, Budget, History, between, bins, figures, thin


def fill(table: History, rows: list[dict[str, float | None]]) -> None:
    for row in rows:
        table.append(row)


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 400), st.integers(0, 1500), st.integers(0, 2000))
def test_the_newest_rows_are_kept_in_order(most: int, count: int, room: int) -> None:
    budget = Budget(room)
    table = History(most, budget)
    for number in range(count):
        table.append({"t_seconds": number, "waiting_requests": number % 7})
        rows = table.rows
        assert rows[-1, 0] == number
    kept = len(table)
    assert kept <= max(most, 2)
    assert list(table.rows[:, 0]) == list(range(count - kept, count))
    # Never less than some, never more than the budget beyond that.
    assert kept >= min(count, most, 64)
    if room >= 2 * most:
        assert kept == min(count, max(most, 2))
    table.release()
    assert budget.take(room)


def test_unknown_is_not_zero() -> None:
    table = History(10, Budget(100))
    table.append({"t_seconds": 1.0, "waiting_requests": None, "kv_usage_share": 0.0})
    assert math.isnan(table.rows[0, AT["waiting_requests"]])
    assert table.rows[0, AT["kv_usage_share"]] == 0.0
    assert math.isnan(table.rows[0, AT["available"]])


def rows_of(*rows: dict[str, float]) -> np.ndarray:
    table = History(1000, Budget(10_000))
    fill(table, [{"restarts": 0, **row} for row in rows])
    return table.rows


class TestFigures:
    def test_of_a_window(self) -> None:
        found = figures(
            rows_of(
                {"t_seconds": 10, "preemptions_total": 3, "ttft_seconds_sum": 5.0,
                 "started_total": 10, "prefix_query_tokens_total": 100,
                 "prefix_hit_tokens_total": 50, "prompt_tokens_total": 1000},
                {"t_seconds": 15, "preemptions_total": 3, "ttft_seconds_sum": 6.0,
                 "started_total": 12, "prefix_query_tokens_total": 200,
                 "prefix_hit_tokens_total": 60, "prompt_tokens_total": 1500},
                {"t_seconds": 20, "preemptions_total": 7, "ttft_seconds_sum": 9.0,
                 "started_total": 14, "prefix_query_tokens_total": 300,
                 "prefix_hit_tokens_total": 110, "prompt_tokens_total": 2500},
            )
        )  # fmt: skip
        assert found == {
            "preemptions": 4,
            "ttft_seconds": 1.0,
            "hit_share": 0.3,
            "prompt_tokens_per_second": 150.0,
            "generated_tokens_per_second": None,
        }

    def test_nothing_is_subtracted_across_a_restart(self) -> None:
        found = figures(
            rows_of(
                {"t_seconds": 0, "preemptions_total": 100},
                {"t_seconds": 1, "preemptions_total": 103},
                {"t_seconds": 2, "preemptions_total": 500, "restarts": 1},
                {"t_seconds": 3, "preemptions_total": 502, "restarts": 1},
            )
        )
        assert found["preemptions"] == 5

    def test_one_look_tells_no_rate(self) -> None:
        found = figures(rows_of({"t_seconds": 0, "preemptions_total": 9, "hit_share": 0.25}))
        assert found["preemptions"] is None
        assert found["ttft_seconds"] is None
        assert found["hit_share"] == 0.25

    def test_no_request_started_is_unknown_and_not_zero(self) -> None:
        row = {"ttft_seconds_sum": 5.0, "started_total": 10, "preemptions_total": 2}
        found = figures(rows_of({"t_seconds": 0, **row}, {"t_seconds": 1, **row}))
        assert found["ttft_seconds"] is None
        assert found["preemptions"] == 0


class TestBins:
    def test_highest_waiting_and_lowest_available(self) -> None:
        rows = rows_of(
            *({"t_seconds": t, "waiting_requests": t, "available": 10 - t} for t in range(10))
        )
        assert list(bins(rows, "waiting_requests", 0, 10, 5, 2.0)) == [1, 3, 5, 7, 9]
        assert list(bins(rows, "available", 0, 10, 5, 2.0)) == [9, 7, 5, 3, 1]

    def test_a_value_holds_until_the_next_look_but_not_for_ever(self) -> None:
        rows = rows_of(
            {"t_seconds": 0, "waiting_requests": 3}, {"t_seconds": 20, "waiting_requests": 5}
        )
        found = bins(rows, "waiting_requests", 0, 24, 24, 2.5)
        assert list(found[:3]) == [3, 3, 3]
        assert np.isnan(found[3:20]).all()
        assert list(found[20:23]) == [5, 5, 5]

    def test_a_value_that_became_unknown_does_not_hold(self) -> None:
        rows = rows_of({"t_seconds": 0, "waiting_requests": 3}, {"t_seconds": 1})
        found = bins(rows, "waiting_requests", 0, 4, 8, 2.5)
        assert list(found[:2]) == [3, 3]
        assert np.isnan(found[2:]).all()

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.floats(0, 100), min_size=1, max_size=60, unique=True).map(sorted),
        st.integers(1, 90),
    )
    def test_the_extremes_are_never_lost(self, times: list[float], count: int) -> None:
        values = [(37 * number) % 101 for number in range(len(times))]
        rows = rows_of(
            *(
                {"t_seconds": at, "waiting_requests": value, "available": value}
                for at, value in zip(times, values, strict=True)
            )
        )
        start, end = times[0], max(times[-1], times[0] + 1e-3)
        assert np.nanmax(bins(rows, "waiting_requests", start, end, count, 1.0)) == max(values)
        assert np.nanmin(bins(rows, "available", start, end, count, 1.0)) == min(values)


class TestThin:
    def test_few_rows_come_as_they_are(self) -> None:
        rows = rows_of(
            {"t_seconds": 1, "waiting_requests": 2},
            {"t_seconds": 2, "restarts": 1},
            {"t_seconds": 9, "waiting_requests": 5, "restarts": 1},
        )
        found = thin(rows, 0, 5, 100, 2.0)
        assert found["t_seconds"] == [1, 2]
        assert found["waiting_requests"] == [2, None]
        assert found["restarted_at_seconds"] == [2]

    def test_many_are_binned(self) -> None:
        rows = rows_of(
            *(
                {"t_seconds": t, "waiting_requests": t == 777, "restarts": t >= 500}
                for t in range(1000)
            )
        )
        found = thin(rows, 0, 1000, 100, 2.0)
        assert len(found["t_seconds"]) == 100
        assert sum(found["waiting_requests"]) == 1
        assert found["waiting_requests"][77] == 1
        assert found["restarted_at_seconds"] == [pytest.approx(505)]


def test_between_takes_both_ends() -> None:
    rows = rows_of(*({"t_seconds": t} for t in range(10)))
    assert list(between(rows, 3, 6)[:, 0]) == [3, 4, 5, 6]
