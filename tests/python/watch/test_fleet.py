"""Endpoints good and bad side by side: the good ones go on, the bad ones say why and since when."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from watch_make import body

from kvcatch.errors import InvalidArgument
from kvcatch.observe.errors import MetricsError
from kvcatch.observe.limits import EngineVersion, read_engine_args
from kvcatch.watch import Fleet, Rules, rows, state
from kvcatch.watch import fleet as fleet_module
from kvcatch.watch.fleet import Endpoint, public_name
from kvcatch.watch.history import Budget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watch_make import FakeEngine

    Make = Callable[..., FakeEngine]

FAST = Rules(interval_s=0.1, window_s=5, history_s=60, diagnose_s=0.2)


async def _run_until(fleet: Fleet, done: Callable[[], bool], bound_s: float = 15.0) -> None:
    task = asyncio.create_task(fleet.run())
    end = time.monotonic() + bound_s
    while not done() and time.monotonic() < end and not task.done():
        await asyncio.sleep(0.02)
    failed = task.done()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.done(), "it does not stop"
    assert not failed, task
    assert done(), "not so within the bound"


def run_until(fleet: Fleet, done: Callable[[], bool], bound_s: float = 15.0) -> None:
    asyncio.run(_run_until(fleet, done, bound_s))


FAULTS = {
    "html": "an HTML page, not metrics: is the path right?",
    "hang": "no answer in",
    "loop": "more than 3 redirects: a loop?",
    "huge": "a body of more than 1,000,000 bytes",
    "drip": "a body of more than 1,000,000 bytes",
    "404": "HTTP 404",
    "503": "HTTP 503",
}


def test_faults_are_told_and_the_others_go_on(make_engine: Make) -> None:
    good = make_engine()
    bad = {mode: make_engine(mode) for mode in FAULTS}
    urls = [engine.url for engine in bad.values()] + ["http://127.0.0.1:1", good.url]
    fleet = Fleet.of_urls(urls, FAST, timeout_s=1.0, max_bytes=1_000_000)
    *wrong, refused, fine = fleet.endpoints
    began = time.time()
    run_until(
        fleet,
        lambda: fine.looks >= 20 and refused.error is not None and all(e.error for e in wrong),
    )
    for endpoint, says in zip(wrong, FAULTS.values(), strict=True):
        assert says in (endpoint.error or "")
        assert "\n" not in (endpoint.error or "")
        assert endpoint.name not in (endpoint.error or "")
        assert began - 1 <= (endpoint.error_since_s or 0) <= time.time()
        assert endpoint.seen_s is None
    assert refused.error is not None
    assert fine.error is None
    by_status = [row.status for row in rows(fleet)]
    assert by_status == ["unreachable"] * 8 + ["ok"]
    last = rows(fleet)[-1]
    assert last.gate == "max_num_seqs"
    assert last.values["waiting_requests"] == 12
    assert last.values["available"] == 960
    assert last.values["longest"] == 126


def test_connections_are_kept_and_who_fails_is_asked_less_often(make_engine: Make) -> None:
    good, bad = make_engine(), make_engine("503")
    fleet = Fleet.of_urls([good.url, bad.url], FAST)
    run_until(fleet, lambda: fleet.endpoints[0].looks >= 25)
    assert good.connections == 1
    assert 2 <= bad.asked <= 6


def test_a_restart_is_seen_and_nothing_is_subtracted_across_it(make_engine: Make) -> None:
    engine = make_engine(rate=1000.0)
    fleet = Fleet.of_urls([engine.url], FAST, timeout_s=0.5)
    endpoint = fleet.endpoints[0]
    run_until(fleet, lambda: endpoint.looks >= 10)
    before = endpoint.seen_s or 0.0
    engine.stop()
    run_until(fleet, lambda: endpoint.error is not None)
    row = rows(fleet)[0]
    assert row.status == row.gate == "unreachable"
    assert (row.since_s or 0) >= before
    assert row.values == {}
    assert row.figures == {}
    # What was seen before is still there to scroll back to.
    past = rows(fleet, before)[0]
    assert past.status == "ok"
    assert past.values["waiting_requests"] == 12
    engine.start()
    run_until(fleet, lambda: endpoint.error is None and endpoint.replicas_list()[0].restarts == 1)
    looks = endpoint.looks
    run_until(fleet, lambda: endpoint.looks >= looks + 5)
    found = rows(fleet)[0]
    assert found.status == "ok"
    assert found.replica is not None
    assert found.replica.restarts == 1
    assert found.figures["ttft_seconds"] == pytest.approx(0.5, rel=0.05)
    assert (found.figures["preemptions"] or 0) <= 20
    assert found.replica.version.title == "vLLM 0.32.0"
    curves = state(fleet, None, found.key, 60.0)["curves"]
    assert len(curves["restarted_at_seconds"]) == 1


def test_ranks_are_kept_apart_and_one_that_is_gone_is_said_so(make_engine: Make) -> None:
    engine = make_engine(ranks=3)
    fleet = Fleet.of_urls([engine.url], FAST)
    endpoint = fleet.endpoints[0]
    run_until(fleet, lambda: endpoint.looks >= 5)
    found = rows(fleet)
    assert [row.label for row in found] == ["engine=0", "engine=1", "engine=2"]
    assert len({row.key for row in found}) == 3
    engine.options["ranks"] = 2
    run_until(fleet, lambda: any(row.status == "gone" for row in rows(fleet)))
    assert [row.status for row in rows(fleet)] == ["ok", "ok", "gone"]
    assert rows(fleet)[2].since_s is not None


def test_ever_new_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_REPLICAS", 4)
    budget = Budget(10_000)
    endpoint = Endpoint("x", FAST, budget)
    for number in range(50):
        endpoint.read(body(number, model=f"m{number}").encode(), float(number))
        assert len(endpoint.replicas) <= 4
    newest = [labels for _, labels in endpoint.replicas]
    assert "model_name=m49,engine=0" in newest
    many = Endpoint("y", FAST, budget)
    many.read(body(1, ranks=6).encode(), 1.0)
    assert len(many.replicas) == 4
    assert many.notes == ["only the first 4 replicas are kept"]


def test_a_body_that_cannot_be_believed_changes_nothing() -> None:
    endpoint = Endpoint("x", FAST, Budget(1000))
    endpoint.read(body(1).encode(), 1.0)
    with pytest.raises(MetricsError, match="cut off"):
        endpoint.read(body(2).encode()[:-20], 2.0)
    with pytest.raises(MetricsError, match="is there twice"):
        endpoint.read((body(3) + body(3)).encode(), 3.0)
    replica = endpoint.replicas_list()[0]
    assert len(replica.history) == 1
    endpoint.read(body(4).encode(), 4.0)
    assert list(replica.history.rows[:, 0]) == [1.0, 4.0]


def test_time_that_does_not_advance_is_passed_over() -> None:
    endpoint = Endpoint("x", FAST, Budget(1000))
    for at in (1.0, 2.0, 2.0, 1.5, 3.0):
        endpoint.read(body(at).encode(), at)
    assert list(endpoint.replicas_list()[0].history.rows[:, 0]) == [1.0, 2.0, 3.0]


def test_what_is_given_of_the_engine_holds_for_that_engine_alone() -> None:
    rules = Rules(
        version=EngineVersion.parse("vllm@0.30.1"),
        limits=read_engine_args("--max-num-seqs 4 --max-model-len 1600"),
    )
    endpoint = Endpoint("x", rules, Budget(1000))
    endpoint.read(body(1).encode(), 1.0)
    replica = endpoint.replicas_list()[0]
    assert replica.version.title == "vLLM 0.30.1"
    endpoint.read(body(2).encode(), 2.0)
    assert replica.row_at(None)["longest"] == 126  # 1,001 blocks for 8 of the longest
    other = Endpoint("y", rules, Budget(1000))
    other.read(
        b'sglang:num_running_reqs{model_name="m"} 1.0\nsglang:token_usage{model_name="m"} 0.5\n',
        1.0,
    )
    assert other.replicas_list()[0].version.name == "sglang"
    assert other.replicas_list()[0].version.low is None


def test_unknown_says_unknown() -> None:
    endpoint = Endpoint("x", FAST, Budget(1000))
    endpoint.read(b'sglang:num_running_reqs{model_name="m"} 1.0\n', 1.0)
    fleet = Fleet(FAST)
    fleet.endpoints.append(endpoint)
    record = state(fleet)["replicas"][0]
    for name in ("kv_usage_share", "waiting_requests", "preemptions", "ttft_seconds", "hit_share"):
        assert record[name] is None, name
    assert record[f"available_{record['unit']}"] is None
    assert record[f"head_needs_{record['unit']}"] is None
    assert record["gate"] == "not_enough_evidence"
    assert record["waiting_by_reason"] == {"capacity": None, "deferred": None}


class TestAddresses:
    def test_a_password_is_not_shown(self) -> None:
        assert public_name("http://me:secret@host:8000/metrics") == "http://host:8000"
        fleet = Fleet.of_urls(["http://me:secret@127.0.0.1:1/metrics"], FAST)
        asyncio.run(fleet.look(1))
        assert "secret" not in str(state(fleet))
        assert fleet.endpoints[0].error

    def test_one_given_twice_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="is given twice"):
            Fleet.of_urls(["http://a:1", "http://a:1/metrics"])

    def test_a_bad_one_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="must be an address"):
            Fleet.of_urls(["http://a:1", "ftp://b"])


def test_a_socket_is_watched_as_an_address(tmp_path: Path) -> None:
    import socketserver
    import threading

    path = tmp_path / "engine.sock"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            page = body(5.0).encode()
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + page)

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fleet = Fleet.of_urls([f"unix:{path}"], FAST)
        asyncio.run(fleet.look(1))
        server.shutdown()
    (row,) = rows(fleet)
    assert (row.endpoint, row.status) == (f"unix:{path}", "ok")
    assert row.values["running_requests"] == 4
    assert fleet.is_live


def test_a_token_is_shown_to_the_endpoints() -> None:
    from kvcatch.observe.scrape import Scraper

    fleet = Fleet.of_urls(["http://a:1"], FAST, token="word")
    scraper = fleet._scraper()
    assert isinstance(scraper, Scraper)
    client = scraper._client("http://a:1/metrics")
    assert client.headers["authorization"] == "Bearer word"
