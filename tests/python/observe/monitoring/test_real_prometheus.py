"""A real Prometheus: it scrapes a running kvcatch and replayed vLLMs, answers every query, raises every alert."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from exporter_make import make_look, text_of
from monitoring_incidents import (
    ALERT_OF,
    KINDS,
    QUIET,
    SECONDS,
    full_vllm_page,
    record,
    series_of,
)
from serving import start

from kvcatch.observe.monitoring import read_file
from kvcatch.observe.record import Recorder
from kvcatch.observe.replay import Replay, make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED = Path(__file__).resolve().parents[4].parent / "shared"
REAL_VLLM = SHARED / "recordings" / "vllm-0.32.0" / "kvfull.jsonl.gz"
PREFIX = {"kvcatch": "Kvcatch", "vllm": "Vllm", "vllm-old": "Vllm"}
# vLLM 0.8 has none of these.
NOT_IN_OLD = ("admission_rejections", "prompt_tokens_cached")


class Prometheus:
    """The server, and what to ask it."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20)

    def get(self, path: str, **params: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, (params, answer.text)
        return answer.json()["data"]

    def is_ready(self) -> bool:
        try:
            return bool(self._client.get("/-/ready").status_code == 200)
        except httpx.HTTPError:
            return False

    def values(self, query: str) -> list[float]:
        return [float(row["value"][1]) for row in self.get("query", query=query)["result"]]

    def up(self) -> dict[str, str]:
        targets = self.get("targets", state="active")["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in targets}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Any, seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.1)


def backfill(folder: Path, data: Path) -> None:
    """Incidents that end now, and one page with all that no engine on a CPU has."""
    begin = time.time() - SECONDS
    lines = []
    for engine in PREFIX:
        for kind in (*KINDS, *QUIET):
            path = folder / f"{kind}@{engine}.jsonl"
            record(path, kind, engine)
            lines += [
                f"{series} {value} {begin + t:.3f}"
                for series, t, value in series_of(path, f"{kind}@{engine}")
            ]
    page = [line for line in text_of(make_look()).splitlines() if line[0] != "#"]
    for back in range(60, -1, -5):
        at = f"{begin + SECONDS - back:.3f}"
        for line in page:
            series, _, value = line.rpartition(" ")
            lines.append(f'{series[:-1]},instance="gpu"}} {value} {at}')
    text = folder / "backfill.txt"
    text.write_text("\n".join(lines) + "\n# EOF\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def config(folder: Path, targets: dict[str, str]) -> Path:
    rules = re.sub(r"for: \d+m", "for: 0s", read_file("alerts.yml"))
    (folder / "alerts.yml").write_text(rules)
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [address], "labels": {"instance": job}}],
            }
            for job, address in targets.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


def old_vllm(path: Path, *, is_old: bool) -> Path:
    with Recorder(path, "http://vllm/metrics", 0.0) as recorder:
        for t in range(120):
            recorder.add(float(t), full_vllm_page(float(t), is_old=is_old))
    return path


def keep_busy(url: str, stop: threading.Event, number: int) -> None:
    """Ask without end: shared prefixes, and more at once than the pool holds."""
    with httpx.Client(base_url=url, timeout=30) as client:
        turn = 0
        while not stop.is_set():
            turn += 1
            prompt = "all alike " * 2 + chr(97 + (number + turn) % 20) * (4 + 3 * number)
            body = {"model": "toy", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
            try:
                client.post("/v1/completions", json=body)
            except httpx.HTTPError:
                return


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    data = folder / "data"
    served = start(
        num_blocks=40, max_model_len=120, max_num_seqs=8, preemption="swap", host_blocks=40
    )
    served.runner.pause = 0.004
    new = REAL_VLLM if REAL_VLLM.is_file() else old_vllm(folder / "new.jsonl", is_old=False)
    replays = [
        make_server(Replay(path, loop=True, speed=4), "127.0.0.1", 0)
        for path in (new, old_vllm(folder / "old.jsonl", is_old=True))
    ]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in replays]
    stop = threading.Event()
    threads += [
        threading.Thread(target=keep_busy, args=(served.url, stop, number), daemon=True)
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    addresses = [f"127.0.0.1:{server.server_address[1]}" for server in replays]
    targets = dict(zip(("live-vllm", "live-vllm-old"), addresses, strict=True))
    targets["live-kvcatch"] = served.url.removeprefix("http://")
    backfill(folder, data)
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config(folder, targets)}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for(server.is_ready, 30, "Prometheus does not come up")
        live = dict.fromkeys(targets, "up")
        wait_for(lambda: server.up() == live, 20, "a target is not up")
        yield server
    finally:
        process.terminate()
        process.wait(20)
        stop.set()
        for replay in replays:
            replay.shutdown()
            replay.server_close()
        served.stop()


def queries(name: str) -> list[tuple[str, str]]:
    """Title and query of every panel, as Grafana would send it with all instances chosen."""
    dashboard = json.loads(read_file(name))
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "5s").replace("$model", ".*")
            found.append((panel["title"], query))
    return found


def missing(
    server: Prometheus, name: str, instances: str, known: Callable[[str, str], bool]
) -> list[tuple[str, str]]:
    """Queries without a number; asked again for a while, for rates need some scrapes.

    It is not waited for those that ``known`` says can have none.
    """
    left = [(title, query.replace("$instance", instances)) for title, query in queries(name)]
    assert left
    assert not any("$" in query for _, query in left)
    end = time.monotonic() + 25
    while time.monotonic() < end:
        left = [
            (title, query) for title, query in left if all(map(math.isnan, server.values(query)))
        ]
        if all(known(*item) for item in left):
            break
        time.sleep(0.5)
    return left


def test_every_query_on_kvcatch_has_data(prometheus: Prometheus) -> None:
    """On a running server; what needs a GPU, a real model or tags on a backfilled page."""
    elsewhere = (
        ("Device memory", "kvcatch_device_memory_bytes"),
        ("Memory of KV cache and process", "kvcatch_kv_cache_bytes"),
        ("Blocks by tag", "kvcatch_holdings_blocks"),
    )

    def known(title: str, query: str) -> bool:
        return any(title == panel and query.startswith(name) for panel, name in elsewhere)

    left = missing(prometheus, "kvcatch.json", "live-kvcatch", known)
    assert [item for item in left if not known(*item)] == []
    assert len(left) == len(elsewhere)
    for _, query in left:
        assert prometheus.values(query.replace("live-kvcatch", "gpu")), query


def test_every_query_on_vllm_has_data(prometheus: Prometheus) -> None:
    assert missing(prometheus, "vllm.json", "live-vllm", lambda *_: False) == []


def test_every_query_on_an_old_vllm_has_data(prometheus: Prometheus) -> None:
    """By the names of 0.8, but for what that version does not export."""

    def known(title: str, query: str) -> bool:
        return any(name in query for name in NOT_IN_OLD)

    left = missing(prometheus, "vllm.json", "live-vllm-old", known)
    assert [item for item in left if not known(*item)] == []
    assert len(left) == len(NOT_IN_OLD)


def test_every_rule_fires_on_its_incident_alone(prometheus: Prometheus) -> None:
    right = {
        (f"{PREFIX[engine]}{ALERT_OF[kind]}", f"{kind}@{engine}")
        for engine in PREFIX
        for kind in KINDS
    }

    def firing() -> dict[tuple[str, str], dict[str, str]]:
        return {
            (alert["labels"]["alertname"], alert["labels"]["instance"]): alert["annotations"]
            for alert in prometheus.get("alerts")["alerts"]
            # The replayed and the live engines may raise some of their own.
            if alert["state"] == "firing" and "@" in alert["labels"]["instance"]
        }

    wait_for(lambda: set(firing()) >= right, 20, "an alert does not fire")
    found = firing()
    assert set(found) == right
    for (name, instance), notes in found.items():
        text = " ".join(notes.values())
        assert "<" not in text, (name, text)
        assert instance in notes["summary"]
    refused = found["KvcatchRefusedWhilePoolLooksFree", "refused@kvcatch"]
    assert refused["runbook"] == "docs/runbook.md#worst_case"
    assert refused["summary"].endswith("at the gate worst_case though blocks are free")


def test_rules_ask_for_names_that_the_exporter_has(prometheus: Prometheus) -> None:
    names = set(re.findall(r"kvcatch_[a-z_]+", read_file("alerts.yml")))
    assert len(names) >= 10
    exported = set(
        prometheus.get("label/__name__/values", **{"match[]": '{instance="live-kvcatch"}'})
    )
    assert names <= exported


def test_the_live_engine_is_told_right(prometheus: Prometheus) -> None:
    """What Prometheus holds obeys the conservation law at every scrape."""
    query = 'sum(kvcatch_blocks{instance="live-kvcatch"}) - sum(kvcatch_num_blocks{instance="live-kvcatch"})'
    assert prometheus.values(query) == [0]
    total = 'kvcatch_holdings_sequences{instance="live-kvcatch",by="owner"}'
    assert sum(prometheus.values(total)) <= 8
    assert prometheus.values(f"count({total})")[0] <= 11
