"""The alert rules: well formed, each linked to the runbook, each firing on its incident and on no other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from monitoring_incidents import (
    ALERT_OF,
    BEGINS_S,
    KINDS,
    QUIET,
    SECONDS,
    STEP_S,
    record,
    series_of,
)

from kvcatch.observe.diagnose import DIAGNOSES
from kvcatch.observe.monitoring import read_file

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = {"kvcatch": "Kvcatch", "vllm": "Vllm", "vllm-old": "Vllm"}
RULES = [
    rule for group in yaml.safe_load(read_file("alerts.yml"))["groups"] for rule in group["rules"]
]


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def incidents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings by instance: kind@engine."""
    folder = tmp_path_factory.mktemp("incidents")
    paths = {}
    for engine in PREFIX:
        for kind in (*KINDS, *QUIET):
            name = f"{kind}@{engine}"
            paths[name] = folder / f"{name}.jsonl"
            record(paths[name], kind, engine)
    return paths


def expected() -> list[dict[str, Any]]:
    """One firing alert per incident, none elsewhere."""
    return [
        {
            "labels": f'{{alertname="{PREFIX[engine]}{ALERT_OF[kind]}",instance="{kind}@{engine}"}}',
            "value": 1,
        }
        for engine in PREFIX
        for kind in KINDS
    ]


def test_promtool_takes_them(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(read_file("alerts.yml"))
    done = promtool("check", "rules", "alerts.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_each_is_linked_to_a_paragraph_of_the_runbook(rule: dict[str, Any]) -> None:
    anchor = rule["annotations"]["runbook"].removeprefix("docs/runbook.md#")
    assert anchor in (*DIAGNOSES, "{{ $labels.gate }}")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_each_fires_on_its_incident_and_on_nothing_else(
    incidents: dict[str, Path], tmp_path: Path
) -> None:
    """promtool's rule test: the true ``for``, evaluated every 30 seconds."""
    values: dict[str, list[str]] = {}
    for instance, path in incidents.items():
        for series, _, value in series_of(path, instance):
            values.setdefault(series, []).append(value)
    assert all(len(row) == SECONDS // STEP_S + 1 for row in values.values())
    firing = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
    tests = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [
            {
                "interval": f"{STEP_S}s",
                "input_series": [
                    {"series": series, "values": " ".join(row)} for series, row in values.items()
                ],
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{BEGINS_S}s", "exp_samples": []},
                    # None of them for what lasted a minute.
                    {"expr": firing, "eval_time": f"{BEGINS_S + 60}s", "exp_samples": []},
                    {"expr": firing, "eval_time": f"{SECONDS}s", "exp_samples": expected()},
                ],
            }
        ],
    }
    (tmp_path / "alerts.yml").write_text(read_file("alerts.yml"))
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    done = promtool("test", "rules", "tests.yml", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_a_rule_test_that_expects_wrongly_fails(incidents: dict[str, Path], tmp_path: Path) -> None:
    """The test above can fail: without one rule it does."""
    text = re.sub(
        r"increase\(kvcatch_preemptions", "increase(kvcatch_typo", read_file("alerts.yml")
    )
    name = "storm@kvcatch"
    values: dict[str, list[str]] = {}
    for series, _, value in series_of(incidents[name], name):
        values.setdefault(series, []).append(value)
    (tmp_path / "alerts.yml").write_text(text)
    expr = {
        "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
        "eval_time": f"{SECONDS}s",
        "exp_samples": [row for row in expected() if f'"{name}"' in row["labels"]],
    }
    rows = [{"series": series, "values": " ".join(row)} for series, row in values.items()]
    tests = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [{"interval": f"{STEP_S}s", "input_series": rows, "promql_expr_test": [expr]}],
    }
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    assert promtool("test", "rules", "tests.yml", cwd=tmp_path).returncode == 1
