"""The shipped files: well-formed dashboards, and the command that writes them out."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.monitoring import FILES, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch

DASHBOARDS = [name for name in FILES if name.endswith(".json")]
RENAMED = (
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    ("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
    ("vllm:request_queue_time_seconds_bucket", "vllm:time_in_queue_requests_bucket"),
)


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(read_file(name))["panels"]
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
class TestDashboards:
    def test_panels_have_their_own_id_and_place(self, name: str) -> None:
        all_panels = panels(name)
        assert len({panel["id"] for panel in all_panels}) == len(all_panels)
        for one, other in combinations([panel["gridPos"] for panel in all_panels], 2):
            apart = (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            )
            assert apart, (one, other)
            assert one["x"] + one["w"] <= 24

    def test_every_panel_says_what_it_shows_and_asks_for_it(self, name: str) -> None:
        for panel in panels(name):
            if panel["type"] == "row":
                continue
            assert panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)

    def test_no_data_source_is_wired_in(self, name: str) -> None:
        dashboard = json.loads(read_file(name))
        variables = {item["name"] for item in dashboard["templating"]["list"]}
        assert variables == {"datasource", "instance", "model"}
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize(("new", "old"), RENAMED)
def test_a_renamed_metric_is_asked_for_by_both_names(new: str, old: str) -> None:
    exprs = [target["expr"] for p in panels("vllm.json") for target in p.get("targets", [])]
    asked = [expr for expr in exprs if new in expr or old in expr]
    assert asked
    assert all(new in expr and old in expr for expr in asked)
    known = {metric.name for metric in FAMILIES["vllm"].metrics}
    for name in (new, old):
        base = name.removesuffix("_total").removesuffix("_bucket")
        assert base in known or f"{base}_sum" in known


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"name = '\.\./x'"):
        read_file("../x")


class TestCommand:
    def test_it_writes_them(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "monitoring"
        done = run_kvcatch("monitoring", "-o", folder)
        assert done.returncode == 0, done.stderr
        assert {path.name: path.read_text() for path in folder.iterdir()} == {
            name: read_file(name) for name in FILES
        }
        assert run_kvcatch("monitoring", "-o", folder).returncode == 0, "the same again is no harm"

    def test_a_file_of_ones_own_is_not_replaced(
        self, run_kvcatch: RunKvcatch, tmp_path: Path
    ) -> None:
        mine = tmp_path / "vllm.json"
        mine.write_text("mine")
        done = run_kvcatch("monitoring", "-o", tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "vllm.json" in done.stderr
        assert "--force" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["vllm.json"], "nothing was written"
        assert run_kvcatch("monitoring", "-o", tmp_path, "--force").returncode == 0
        assert mine.read_text() == read_file("vllm.json")

    def test_a_folder_that_cannot_be(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = run_kvcatch("monitoring", "-o", tmp_path / "file")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("kvcatch: ")
        assert done.stderr.count("\n") == 1
