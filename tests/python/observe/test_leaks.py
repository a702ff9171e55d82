"""One law per engine, on idle engines; what cannot be told is said. Snapshots: zombies and pins."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observe_make import steady, vllm_body

from kvcatch import BlockPool
from kvcatch.observe.leaks import (
    LAWS,
    Holder,
    LeakCheck,
    check_leaks,
    check_replica,
    conservation,
    holders,
    look_inside,
)
from kvcatch.observe.record import Recorder
from kvcatch.observe.zombies import check_snapshot
from kvcatch.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch

IDLE: dict[str, Any] = {"running_requests": 0.0, "waiting_requests": 0.0}


def check(engine: str, seconds: int = 60, **gauges: Any) -> LeakCheck:
    (found,) = check_leaks(steady(engine, seconds, **{**IDLE, **gauges}))
    return found


class TestSglang:
    @pytest.mark.parametrize(
        ("total", "available", "evictable", "state", "held"),
        [
            (270331.0, 644.0, 269628.0, "leak", 59.0),  # issue 11970
            (3185200.0, 2864304.0, 325120.0, "double_free", -4224.0),  # issue 6888
            (396701.0, 6016.0, 390685.0, "conserved", 0.0),  # pull 16067, its full pool
        ],
    )
    def test_public_sums(
        self, total: float, available: float, evictable: float, state: str, held: float
    ) -> None:
        found = check(
            "sglang",
            pool_tokens=total,
            available_tokens=available,
            evictable_tokens=evictable,
            block_size_tokens=16.0,
        )
        assert (found.state, found.held, found.unit) == (state, held, "tokens")
        if held < 0:
            assert "264 pages of 16 too many" in found.arithmetic

    def test_protected_and_session_tokens_are_accounted_for(self) -> None:
        found = check(
            "sglang",
            pool_tokens=1000.0,
            available_tokens=500.0,
            evictable_tokens=300.0,
            protected_tokens=150.0,
            session_held_tokens=50.0,
        )
        assert found.state == "conserved"

    @settings(max_examples=100, deadline=None)
    @given(
        st.integers(1, 10**7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(-99, 99)
    )
    def test_any_sum(self, total: int, available: int, evictable: int, missing: int) -> None:
        assert conservation(total, available, evictable) == total - available - evictable
        total = available + evictable + missing
        if total <= 0:
            return
        found = check(
            "sglang",
            pool_tokens=float(total),
            available_tokens=float(available),
            evictable_tokens=float(evictable),
        )
        right = "conserved" if not missing else "leak" if missing > 0 else "double_free"
        assert found.state == right
        assert found.held == missing


class TestKvcatch:
    def test_nothing_active_is_conserved(self) -> None:
        found = check("kvcatch", num_blocks=100.0, clean_blocks=40.0, cached_blocks=60.0)
        assert found.state == "conserved"
        assert found.arithmetic == "100 total - 40 free - 60 cached = 0 blocks"

    def test_the_null_block_is_not_leaked(self) -> None:
        gauges = {"num_blocks": 100.0, "clean_blocks": 39.0, "cached_blocks": 60.0}
        assert check("kvcatch", active_blocks=0.0, **gauges).state == "conserved"
        assert check("kvcatch", **gauges).state == "leak"  # without it told, one block is missing

    def test_held_and_reserved_blocks(self) -> None:
        held = check(
            "kvcatch", num_blocks=100.0, clean_blocks=40.0, cached_blocks=53.0, active_blocks=7.0
        )
        assert (held.state, held.held, held.unit) == ("leak", 7.0, "blocks")
        reserved = check(
            "kvcatch",
            num_blocks=100.0,
            clean_blocks=100.0,
            cached_blocks=0.0,
            active_blocks=0.0,
            reserved_blocks=5.0,
        )
        assert reserved.state == "leak"
        assert "5 blocks are still reserved" in reserved.arithmetic


class TestOthers:
    def test_vllm_and_trtllm_hold_nothing_when_idle(self) -> None:
        blocks = {"num_blocks": 1001.0, "kv_usage_share": 0.0, "used_blocks": 0.0}
        assert check("vllm", **blocks).state == "conserved"
        leak = check("vllm", num_blocks=1001.0, used_blocks=12.0, kv_usage_share=0.012)
        assert (leak.state, leak.held) == ("leak", 12.0)
        assert check("trtllm", num_blocks=64.0, used_blocks=1.0).state == "leak"
        assert check("dynamo", kv_usage_share=0.25).unit == "share"

    def test_what_is_not_exported_cannot_be_told(self) -> None:
        tgi = check("tgi")
        assert tgi.state == "unknown"
        assert tgi.arithmetic == LAWS["tgi"]
        assert check("vllm").state == "unknown"
        only_available = check("sglang", pool_tokens=42308.0, available_tokens=35244.0)
        assert only_available.state == "unknown"  # issue 105 before there was an evictable term

    @pytest.mark.parametrize(
        "busy",
        [
            {"running_requests": 1.0},
            {"waiting_requests": 2.0},
            {"swapped_requests": 1.0},
            {"running_requests": 33.0, "waiting_requests": 47.0, "kv_usage_share": 0.99},
        ],
    )
    def test_while_requests_run_it_is_a_backlog(self, busy: dict[str, float]) -> None:
        found = check("vllm", num_blocks=1001.0, used_blocks=990.0, **busy)
        assert found.state == "backlog"
        assert "a backlog, not a leak" in found.arithmetic
        assert not found.is_leak

    def test_idle_for_too_short(self) -> None:
        found = check("vllm", seconds=10, num_blocks=1001.0, used_blocks=5.0)
        assert found.state == "too_short"
        assert "idle for 10 s, 30 s are needed" in found.arithmetic

    def test_a_lease_may_still_run(self) -> None:
        gauges = {"num_blocks": 1001.0, "used_blocks": 5.0, "transfer_descriptors_sum": 9.0}
        assert check("vllm", seconds=300, **gauges).state == "lease"
        assert check("vllm", seconds=500, **gauges).state == "leak"

    def test_one_block_per_request(self) -> None:
        samples = []
        for number, (done, used) in enumerate([(0, 0), (120, 212), (144, 236), (168, 260)]):
            samples += steady(
                "vllm",
                5,
                start=100.0 * number,
                num_blocks=11528.0,
                used_blocks=float(used),
                finished_total=float(done),
                **IDLE,
            )
        found = check_replica(samples)
        assert found.state == "leak"
        assert "1.00 blocks per request" in found.arithmetic
        assert "after about 11,436 requests" in found.arithmetic

    def test_lmcache_pins(self) -> None:
        grows = steady(
            "lmcache",
            600,
            10,
            pinned_objects=100.0,
            ramps={"pinned_objects": 1.0},
            rates={"failed_allocations_total": 4.0},
        )
        assert check_replica(grows).state == "leak"
        assert check_replica(grows[:2]).state == "too_short"
        still = steady("lmcache", 600, 10, pinned_objects=3.0, failed_allocations_total=0.0)
        assert check_replica(still).state == "conserved"

    def test_replicas_are_checked_on_their_own_and_the_worst_stands_first(self) -> None:
        good = steady("vllm", 60, num_blocks=11.0, used_blocks=0.0, replica="engine=0", **IDLE)
        bad = steady("vllm", 60, num_blocks=11.0, used_blocks=3.0, replica="engine=1", **IDLE)
        found = check_leaks(good + bad)
        assert [(item.replica, item.state) for item in found] == [
            ("engine=1", "leak"),
            ("engine=0", "conserved"),
        ]


def test_who_holds_blocks_is_read_from_the_page() -> None:
    page = {
        'kvcatch_holdings_blocks{by="owner",model_name="m",name="req-1"}': 3.0,
        'kvcatch_holdings_blocks{by="owner",model_name="m",name="other"}': 9.0,
        'kvcatch_holdings_blocks{by="owner",model_name="m",name="gone"}': 0.0,
        'kvcatch_holdings_blocks{by="tenant",model_name="m",name="acme"}': 12.0,
        "kvcatch_num_blocks": 100.0,
    }
    assert holders(page.items()) == [Holder("other", 9.0), Holder("req-1", 3.0)]


@pytest.mark.parametrize(
    ("idle", "holds", "state", "holder"),
    [
        (True, True, "conserved", "req-1"),
        (True, False, "leak", "lost"),
        (False, True, "backlog", "req-1"),
    ],
)
def test_a_plugin_inside_names_the_requests(
    idle: bool, holds: bool, state: str, holder: str
) -> None:
    found = check("vllm", num_blocks=101.0, used_blocks=9.0, running_requests=1.0)
    zombies = [] if holds else [{"request": "lost", "blocks": 5}]
    look_inside(
        found,
        {
            "conservation": {"is_idle": idle, "holds": holds, "law": "the law", "zombies": zombies},
            "holdings": [{"request": "req-1", "blocks": 4}, {"request": "none", "blocks": 0}],
            "blocks": {"total": 100, "free": 90, "held": 5, "retired": 1, "unaccounted": 4},
        },
    )
    assert found.state == state
    assert [item.owner for item in found.holders] == [holder]
    assert (found.arithmetic == "the law") == idle
    assert not idle or found.held == 9.0


class Pages(BaseHTTPRequestHandler):
    """One page for every path."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


KVCATCH_BODY = (
    "\n".join(
        f"kvcatch_{name} {value}"
        for name, value in {
            'requests_running{model_name="m"}': 0,
            'requests_waiting{model_name="m"}': 0,
            'num_blocks{model_name="m"}': 50,
            'blocks{model_name="m",state="free"}': 30,
            'blocks{model_name="m",state="cached"}': 16,
            'blocks{model_name="m",state="active"}': 4,
            'holdings_blocks{model_name="m",by="owner",name="req-17"}': 4,
        }.items()
    )
    + "\n"
)


class TestSnapshot:
    def pool(self) -> BlockPool:
        pool = BlockPool(num_blocks=32, block_size=4, manual_clock=True)
        for number, owner in enumerate(["alive", "dead", None]):
            pool.create(list(range(100 * number, 100 * number + 9)), owner=owner)
        return pool

    def read(self, pool: BlockPool) -> Snapshot:
        return Snapshot(json.loads(json.dumps(pool.snapshot())))

    def test_zombies_are_those_of_the_pools_own_audit(self) -> None:
        pool = self.pool()
        found = check_snapshot(self.read(pool), ["alive"])
        audit = pool.audit(["alive"])
        assert found.state == "leak"
        assert [holding.name for holding in found.zombies] == ["dead"]
        assert sum(holding.own_blocks for holding in found.zombies) == audit["zombie_blocks"] == 3
        assert found.unowned_blocks == 3

    def test_without_a_list_it_cannot_be_told(self) -> None:
        found = check_snapshot(self.read(self.pool()))
        assert found.state == "unknown"
        assert "--live" in found.arithmetic
        everybody = check_snapshot(self.read(self.pool()), ["alive", "dead"])
        assert everybody.state == "unknown"
        assert "without an owner" in everybody.arithmetic

    def test_an_empty_pool_is_conserved(self) -> None:
        found = check_snapshot(self.read(BlockPool(num_blocks=8, block_size=4)), [])
        assert found.state == "conserved"
        assert found.arithmetic.startswith("8 free + 0 cached + 0 active = 8 blocks")

    def test_pins_past_their_deadline(self) -> None:
        pool = BlockPool(num_blocks=32, block_size=4, manual_clock=True)
        seq = pool.create(list(range(9)), owner="alive")
        pool.pin(seq, owner="transfer", deadline=5.0)
        snapshot = self.read(pool)
        early = check_snapshot(snapshot, ["alive"], now_s=4.0)
        assert early.state == "conserved"
        late = check_snapshot(snapshot, ["alive"], now_s=12.5)
        assert late.state == "leak"
        (lease,) = late.leases
        assert (lease.owner, lease.deadline_s, lease.overdue_s) == ("transfer", 5.0, 7.5)
        pool.now = 12.5
        assert len(pool.audit(["alive"])["overdue_pins"]) == 1
        unknown = check_snapshot(snapshot, ["alive"])
        assert unknown.state == "unknown"
        assert "--now" in unknown.arithmetic


class TestCommand:
    def recording(self, path: Path, usage: float, running: int = 0, seconds: int = 60) -> Path:
        values = {
            "num_requests_running": float(running),
            "num_requests_waiting": 0.0,
            "kv_cache_usage_perc": usage,
        }
        with Recorder(path, "http://e/metrics", 0.0) as recorder:
            for second in range(seconds):
                recorder.add(float(second), vllm_body(values, info='num_gpu_blocks="101"'))
        return path

    @pytest.mark.parametrize(
        ("usage", "running", "seconds", "code", "said"),
        [
            (0.0, 0, 60, 0, "conserved"),
            (0.1, 0, 60, 1, "10 of 101 blocks held"),
            (0.1, 0, 5, 3, "30 s are needed"),
            (0.1, 4, 60, 3, "backlog, no leak"),
        ],
    )
    def test_the_exit_code_tells(
        self,
        run_kvcatch: RunKvcatch,
        tmp_path: Path,
        usage: float,
        running: int,
        seconds: int,
        code: int,
        said: str,
    ) -> None:
        path = self.recording(tmp_path / "r.jsonl.gz", usage, running, seconds)
        done = run_kvcatch("leaks", path)
        assert done.returncode == code, done.stdout + done.stderr
        assert said in done.stdout
        data = json.loads(run_kvcatch("leaks", path, "--json").stdout)
        assert data["replicas"][0]["engine"] == "vllm"

    def test_a_leak_of_kvcatch_names_who_holds_it(
        self, run_kvcatch: RunKvcatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "k.jsonl"
        with Recorder(path, "http://e/metrics", 0.0) as recorder:
            for second in range(60):
                recorder.add(float(second), KVCATCH_BODY)
        done = run_kvcatch("leaks", path)
        assert done.returncode == 1
        assert "= 4 blocks" in done.stdout
        assert "req-17" in done.stdout

    def test_an_endpoint_is_looked_at_and_asked_who_holds_blocks(
        self, run_kvcatch: RunKvcatch
    ) -> None:
        handler = type("Handler", (Pages,), {"body": KVCATCH_BODY.encode()})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            done = run_kvcatch("leaks", url, "--window", 1, "--interval", 0.2)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        assert done.returncode == 3
        assert "30 s are needed" in done.stdout
        assert "req-17" in done.stdout

    def test_a_snapshot(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "s.json"
        path.write_text(json.dumps(TestSnapshot().pool().snapshot(), indent=1))
        done = run_kvcatch("leaks", path, "--live", "alive")
        assert done.returncode == 1
        assert "dead" in done.stdout
        data = json.loads(run_kvcatch("leaks", path, "--live", "", "--json").stdout)
        assert [item["name"] for item in data["zombies"]] == ["alive", "dead"]
        assert run_kvcatch("leaks", path).returncode == 3

    def test_real_recordings_hold_nothing_at_their_end(
        self, run_kvcatch: RunKvcatch, recordings: Path
    ) -> None:
        for name in ("kvfull", "headofline"):
            done = run_kvcatch("leaks", recordings / f"{name}.jsonl.gz")
            assert done.returncode == 0
            assert "0 of 120 blocks held" in done.stdout

    def test_bad_input(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        recording = self.recording(tmp_path / "r.jsonl.gz", 0.0, seconds=3)
        broken = tmp_path / "b.json"
        broken.write_text('{\n"format": "kvcatch.snapshot"}')
        for arguments, said in (
            ((tmp_path / "none",), "none"),
            ((broken,), "b.json"),
            ((recording, "--live", "a"), "for a snapshot"),
            (("http://127.0.0.1:9", "--window", 1, "--timeout", 0.3), "127.0.0.1:9"),
        ):
            done = run_kvcatch("leaks", *arguments)
            assert done.returncode == 2, arguments
            assert said in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
