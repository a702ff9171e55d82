from __future__ import annotations

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch import InvalidArgument, MissingExtra
from kvcatch.bench import BenchConfig, BenchResult, Policy, each_policy, run_bench
from kvcatch.report import html_report
from kvcatch.workload import ReplaySettings, generate

if TYPE_CHECKING:
    from kvcatch.workload import Workload


@pytest.fixture(scope="module")
def work() -> Workload:
    return generate("chat", 40)


@pytest.fixture(scope="module")
def result(work: Workload) -> BenchResult:
    config = BenchConfig(policies=("queue", "sorted"), num_blocks=1_500)
    return run_bench(work, config)


def test_policies_run_in_order_under_the_same_conditions(result: BenchResult) -> None:
    assert list(result.policies) == ["queue", "sorted"]
    assert result.is_complete
    queue, other = result.policies.values()
    assert queue.finished == other.finished == 40
    assert queue.hit_tokens == other.hit_tokens


def test_json_keys_and_units(result: BenchResult) -> None:
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(data) == {"policies", "workload", "config", "complete", "kvcatch"}
    assert data["config"]["block_size_tokens"] == 16
    assert data["config"]["order"] == "fcfs"
    assert data["workload"]["requests"] == 40
    row = data["policies"]["queue"]
    assert {
        "runs_per_sequence",
        "runs_per_sequence_p99",
        "prompt_runs",
        "hit_tokens",
        "first_admission_hit_tokens",
        "prefill_tokens",
        "preemptions",
        "us_per_decode_token",
        "export_us_per_decode_token",
        "least_runs",
        "largest_free_run",
        "pages_pinned",
        "waiting_steps_median",
        "waiting_steps_p99",
        "passed_over_max",
        "transfer_ms",
        "samples",
    } <= set(row)
    assert row["least_runs"] <= row["runs_per_sequence"]


def test_results_come_one_by_one(work: Workload) -> None:
    config = BenchConfig(policies=("queue", "sorted"), num_blocks=1_500)
    results = each_policy(work, config)
    assert next(results)[0] == "queue"
    assert next(results)[0] == "sorted"


def test_progress_names_the_policy(work: Workload) -> None:
    seen: set[str] = set()
    config = BenchConfig(policies=("queue", "sorted"), num_blocks=1_500)
    run_bench(work, config, lambda policy, _done, _total: seen.add(policy))
    assert seen == {"queue", "sorted"}


@pytest.mark.parametrize(
    ("text", "policy"),
    [("queue", Policy("queue", "lru")), ("bitmap+slru", Policy("bitmap", "slru"))],
)
def test_a_policy_is_read(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy


@pytest.mark.parametrize("text", ["", "best", "queue+", "queue+best", "queue+lru+lru"])
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="policy = "):
        Policy.parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"policies": ()},
        {"policies": ("queue", "queue")},
        {"num_blocks": 1},
        {"block_size": 0},
        {"page_blocks": 0},
        {"seed": -1},
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        BenchConfig(**changes)


class _Page(HTMLParser):
    """Collects what a browser would load, and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}:
                self.loads.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def html(result: BenchResult) -> str:
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    return html_report(result)


class TestReport:
    def test_it_is_one_self_contained_file(self, html: str) -> None:
        page = _Page()
        page.feed(html)
        assert all(load.startswith(("#", "data:")) for load in page.loads)
        assert not {"script", "link", "iframe", "object", "embed", "img"} & set(page.tags)
        assert "@import" not in html
        assert set(re.findall(r"url\((.)", html)) <= {"#"}
        assert set(re.findall(r"https?://[^\s\"'<>/]+", html)) <= {"http://www.w3.org"}

    def test_it_shows_every_policy_and_plot(self, html: str) -> None:
        page = _Page()
        page.feed(html)
        assert page.tags.count("svg") == 5
        for words in (
            "queue",
            "sorted",
            "Runs per sequence",
            "Free runs over time",
            "Hit tokens",
            "Preemptions",
            "Cost per token",
            "40 requests",
        ):
            assert words in page.text

    def test_names_are_escaped(self, result: BenchResult) -> None:
        pytest.importorskip("matplotlib", reason="the report extra is not installed")
        workload = dataclasses.replace(
            result.workload, name="<script>alert(1)</script>", notes=("a <b> & c",)
        )
        html = html_report(dataclasses.replace(result, workload=workload))
        assert "<script" not in html
        assert "a &lt;b&gt; &amp; c" in html

    def test_a_pool_without_clean_blocks(self, work: Workload) -> None:
        pytest.importorskip("matplotlib", reason="the report extra is not installed")
        config = BenchConfig(
            policies=("queue",), num_blocks=500, settings=ReplaySettings(max_num_seqs=4)
        )
        assert "</html>" in html_report(run_bench(work, config))


def test_a_missing_extra_is_named(result: BenchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install kvcatch\[report\]"):
        html_report(result)
