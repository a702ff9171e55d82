"""Live endpoints, good and bad, the commands, and recordings that are damaged."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from observe_make import v1_line, vllm_body

from kvcatch.errors import InvalidArgument
from kvcatch.observe.errors import RecordingError
from kvcatch.observe.record import Recorder, read_recording
from kvcatch.observe.replay import Replay, make_server
from kvcatch.observe.scrape import Scraper, metrics_url
from kvcatch.observe.source import read_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import RunKvcatch


class Handler(BaseHTTPRequestHandler):
    """One path per fault."""

    started = time.monotonic()

    def do_GET(self) -> None:
        path = self.path
        if path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            self.end_headers()
        elif path == "/slow":
            time.sleep(3)
        elif path == "/missing":
            self.send_error(404)
        elif path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(b"vllm:num_requests_running 1\n")
        elif path == "/large":
            self.answer(b"#" * 100_000)
        elif path == "/html":
            self.answer(b"<html><body>hello</body></html>\n")
        elif path == "/version":
            self.answer(json.dumps({"version": "0.32.0"}).encode())
        else:
            tick = (time.monotonic() - Handler.started) * 100
            self.answer(
                vllm_body(
                    {
                        "num_requests_running": 4,
                        "num_requests_waiting": 12,
                        "kv_cache_usage_perc": 0.04,
                        "prompt_tokens_total": tick,
                        "generation_tokens_total": 4 * tick,
                        "request_success_total": tick // 50,
                    }
                ).encode()
            )

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        return None


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


FAULTS = {
    "/loop": "redirects: a loop",
    "/slow": "no answer in 0.3 s",
    "/missing": "HTTP 404",
    "/short": "peer closed connection",
    "/large": "a body of more than 50,000 bytes",
}


def test_each_fault_is_one_line_and_the_others_go_on(root: str) -> None:
    async def run() -> list[Any]:
        async with Scraper(timeout_s=0.3, max_bytes=50_000) as scraper:
            urls = [root + path for path in FAULTS]
            return await scraper.fetch_all([*urls, "http://127.0.0.1:1/metrics", root + "/metrics"])

    *bad, refused, good = asyncio.run(run())
    for page, (path, says) in zip(bad, FAULTS.items(), strict=True):
        assert page.body is None
        assert page.error.startswith(f"{root}{path}: ")
        assert says in page.error
        assert "\n" not in page.error
    assert refused.error.startswith("http://127.0.0.1:1/metrics: ")
    assert b"vllm:num_requests_running" in good.body


def test_endpoints_are_looked_at_side_by_side(root: str) -> None:
    urls = [root + "/html", root]
    bad, good = asyncio.run(read_endpoints(urls, window_s=0.5, interval_s=0.1))
    assert bad.samples == []
    assert "an HTML page" in bad.notes[0]
    assert len(good.samples) >= 3
    assert good.version is not None
    assert good.version.title == "vLLM 0.32.0"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x", "http://x:99999"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="must be an address"):
        metrics_url(url)


class TestCommands:
    def test_diagnose_a_live_engine(self, root: str, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(
            "diagnose",
            root,
            "--window",
            2,
            "--interval",
            0.25,
            "--engine-args",
            "--max-num-seqs 4",
            "--json",
        )
        assert done.returncode == 1, done.stderr
        answer = json.loads(done.stdout)
        assert answer["gate"] == "max_num_seqs"
        assert answer["engine"] == "vLLM 0.32.0"
        assert {"gate", "also", "confidence", "evidence", "arithmetic", "advice"} <= set(answer)

    @pytest.mark.parametrize("path", ["/html", "/missing", "/loop"])
    def test_a_bad_endpoint_is_bad_input(
        self, root: str, run_kvcatch: RunKvcatch, path: str
    ) -> None:
        done = run_kvcatch("diagnose", root + path, "--window", 1, "--interval", 0.2)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert root + path in done.stderr

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda path: path.write_text("hello\n"), "no line of a vLLM log"),
            (lambda path: path.write_text("{}\n"), "not a recording"),
            (lambda path: path.write_text('{"t": 0, "text": "x\\n"}\n'), "no sample in it"),
            (lambda path: path.write_bytes(b"\x1f\x8bnonsense"), "Unknown compression method"),
            (lambda path: path.write_bytes(b""), ": empty"),
            (lambda path: None, "No such file"),
        ],
    )
    def test_a_bad_file_is_bad_input(
        self, tmp_path: Path, run_kvcatch: RunKvcatch, make: Callable[[Path], Any], says: str
    ) -> None:
        path = tmp_path / "input"
        make(path)
        done = run_kvcatch("diagnose", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert str(path) in done.stderr
        assert says in done.stderr

    def test_record_then_diagnose(self, root: str, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "kept.jsonl.gz"
        done = run_kvcatch("record", root, "-o", path, "--duration", 1.2, "--interval", 0.1)
        assert done.returncode == 0, done.stderr
        recording = read_recording(path)
        assert len(recording.samples) >= 8
        assert recording.version is not None
        assert recording.version.title == "vLLM 0.32.0"
        healthy = run_kvcatch("diagnose", path, "--timeline")
        assert healthy.returncode == 1
        assert "docs/runbook.md#" in healthy.stdout
        assert max(map(len, healthy.stdout.splitlines())) <= 100

    def test_a_source_that_gives_nothing_is_not_healthy(
        self, run_kvcatch: RunKvcatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "vllm.log"
        lines = [v1_line(4, 0, 12.0, 300.0, 90.0, second=second) for second in range(0, 120, 10)]
        path.write_text("\n".join(lines) + "\n")
        alone = run_kvcatch("diagnose", path, "--json")
        assert (alone.returncode, json.loads(alone.stdout)["gate"]) == (0, "healthy")
        with_missing = run_kvcatch("diagnose", path, tmp_path / "gone.log", "--json")
        assert (with_missing.returncode, json.loads(with_missing.stdout)["gate"]) == (1, "healthy")
        assert "No such file" in with_missing.stdout

    def test_out_of_device_memory_is_not_kv(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        # vllm#37428
        path = tmp_path / "vllm.log"
        path.write_text(
            "CUDA out of memory. Tried to allocate 384.00 MiB. and 402.27 MiB is reserved by PyTorch but "
            "unallocated.\n"
        )
        done = run_kvcatch("diagnose", path, "--json")
        assert done.returncode == 1
        answer = json.loads(done.stdout)
        assert answer["gate"] == "not_enough_evidence"
        assert "KV pool is allocated once and is not the cause" in answer["notes"][0]


class TestReplay:
    def kept(self, path: Path) -> Path:
        with Recorder(path, "http://e/metrics", 1.7e9) as recorder:
            recorder.add(0.0, vllm_body({"num_requests_running": 1, "prompt_tokens_total": 5}))
            recorder.fail(1.0, "http://e/metrics: no answer")
            recorder.add(2.0, vllm_body({"num_requests_running": 2}))
        return path

    def test_each_moment_has_its_page(self, tmp_path: Path) -> None:
        replay = Replay(self.kept(tmp_path / "a.jsonl"))
        assert replay.at(0.5) == (
            '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 1\n'
            '# TYPE vllm:prompt_tokens_total gauge\nvllm:prompt_tokens_total{engine="0",model_name="m"} 5\n'
        )
        assert replay.at(1.5) is None
        later = replay.at(99)
        assert later is not None
        assert "prompt_tokens" not in later
        assert Replay(self.kept(tmp_path / "b.jsonl"), loop=True).at(2.5) == replay.at(0.5)

    def test_it_is_served(self, tmp_path: Path) -> None:
        server = make_server(Replay(self.kept(tmp_path / "a.jsonl")), "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        (source,) = asyncio.run(read_endpoints([url], window_s=0.3, interval_s=0.1))
        server.shutdown()
        server.server_close()
        assert source.samples[0].running_requests == 1

    def test_a_failed_scrape_is_told(self, tmp_path: Path) -> None:
        recording = read_recording(self.kept(tmp_path / "a.jsonl"))
        assert [sample.t_seconds for sample in recording.samples] == [0, 2]
        assert recording.errors == ["line 5: http://e/metrics: no answer"]
        assert recording.samples[1].prompt_tokens_total is None


class TestDamage:
    def test_a_recording_that_breaks_off_is_read_up_to_there(self, tmp_path: Path) -> None:
        path = TestReplay().kept(tmp_path / "a.jsonl")
        text = path.read_text()
        path.write_text(text[:-5])
        recording = read_recording(path)
        assert len(recording.samples) == 1
        assert "breaks off in line" in recording.notes[0]

    def test_gzip_that_breaks_off(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl.gz"
        row = json.dumps({"t": 0, "text": vllm_body({"num_requests_running": 1})})
        import random

        rng = random.Random(1)
        rows = [row, *(json.dumps({"t": n, "error": str(rng.random())}) for n in range(5000))]
        data = gzip.compress("\n".join(rows).encode())
        path.write_bytes(data[: len(data) // 2])
        recording = read_recording(path)
        assert len(recording.samples) == 1
        assert "breaks off after line" in recording.notes[0]

    @pytest.mark.parametrize(
        ("lines", "says"),
        [
            (['{"kvcatch_recording": 2}'], "format 2; this kvcatch reads 1"),
            (['{"kvcatch_recording": 1}', "[0, [7, 1]]"], "line 2: malformed row"),
            (['{"kvcatch_recording": 1}', '["x", []]'], "line 2: t = 'x'"),
            (['{"kvcatch_recording": 1}', '{"what": 1}'], "line 2: unknown kind"),
            (['{"t": 0, "text": "a"}', "{", "{}"], "line 2: not JSON"),
            (['{"t": null, "text": "a"}'], "line 1: t = None"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, lines: list[str], says: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(RecordingError) as error:
            read_recording(path)
        assert says in str(error.value)
        assert str(path) in str(error.value)
