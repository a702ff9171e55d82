"""Recordings, pages and endpoints that somebody broke: told in one line, and never a wrong number."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from observe_make import vllm_body

from kvcatch.observe import Reader
from kvcatch.observe.errors import RecordingError
from kvcatch.observe.record import Recorder, bodies, read_recording, series_rows
from kvcatch.observe.replay import Replay, make_server
from kvcatch.observe.source import read_endpoints, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import RunKvcatch

RUNNING = 'vllm:num_requests_running{engine="0",model_name="m"}'
HEAD = [
    '{"kvcatch_recording":1,"endpoint":"x","start_unix_s":0,"version":null}',
    json.dumps({"series": [RUNNING, RUNNING.replace("running", "waiting")]}),
]


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in (*HEAD, *lines)))
    return path


def everything(path: Path) -> None:
    read_recording(path)
    list(bodies(path))
    list(series_rows(path, lambda name: True))


class TestCompact:
    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("[1,[-1,7]]", "a series that was not named before"),
            ("[1,[2,7]]", "a series that was not named before"),
            ("[1,[0,7],[-1]]", "a series that was not named before"),
            ("[1,[0]]", "malformed row"),
            ('[1,[0,"7"]]', "malformed row"),
            ("[1,[0,true]]", "malformed row"),
            ("[1,[0.5,1]]", "malformed row"),
            ('[1,"ab"]', "malformed row"),
            ('[1,[0,1],"a"]', "malformed row"),
            ("[]", "malformed row"),
            ('{"series":5}', "malformed series"),
            ('{"series":[5]}', "malformed series"),
            ('{"types":{"a":5}}', "malformed types"),
            ('["x",[0,1]]', "is not a time"),
            (f"[1{'0' * 400},[0,1]]", "is not a time"),
            (HEAD[0], "another recording begins here"),
        ],
    )
    def test_each_reader_names_the_line(self, tmp_path: Path, line: str, says: str) -> None:
        path = written(tmp_path / "a.jsonl", "[0,[0,1,1,2]]", line, "[2,[0,3]]")
        for read in (
            read_recording,
            lambda path: list(bodies(path)),
            lambda path: list(series_rows(path, lambda name: True)),
        ):
            with pytest.raises(RecordingError) as error:
                read(path)
            assert f"{path}, line 4: " in str(error.value)
            assert says in str(error.value)

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1e400", f"1{'0' * 400}", "null"])
    def test_what_is_no_count_is_unknown(self, tmp_path: Path, value: str) -> None:
        path = written(tmp_path / "a.jsonl", f"[0,[0,{value},1,2]]", "[1,[0,3]]")
        first, second = read_recording(path).samples
        assert (first.running_requests, first.waiting_requests) == (None, 2)
        assert second.running_requests == 3
        everything(path)

    def test_another_format_and_an_unreadable_version(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"kvcatch_recording":2}\n')
        for read in (read_recording, lambda path: list(bodies(path))):
            with pytest.raises(RecordingError, match="format 2; this kvcatch reads 1"):
                read(path)
        lines = [HEAD[0].replace("null", '"foo@x"'), HEAD[1], "[0,[0,1]]"]
        path.write_text("\n".join(lines) + "\n")
        recording = read_recording(path)
        assert recording.version is None
        assert "its version is not read: engine = 'foo@x'" in recording.notes[0]


class TestTime:
    def test_a_clock_that_was_set_back_goes_on(self, tmp_path: Path) -> None:
        rows = ["[100,[0,1]]", "[102,[0,2]]", "[50,[0,3]]", "[52,[0,4]]", "[10,[0,5]]"]
        path = written(tmp_path / "a.jsonl", *rows)
        recording = read_recording(path)
        assert [(s.t_seconds, s.running_requests) for s in recording.samples] == [
            (100, 1),
            (102, 2),
            (104, 3),
            (106, 4),
            (108, 5),
        ]
        assert "time goes back 2 times, first in line 5" in recording.notes[0]
        assert [at for at, _ in bodies(path)] == [100, 102, 104, 106, 108]
        assert [at for at, _ in series_rows(path, lambda name: True)] == [100, 102, 104, 106, 108]

    def test_raw_recordings_one_after_the_other(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        rows = [{"t": t, "text": vllm_body({"num_requests_running": t})} for t in (0, 1, 2)] * 2
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recording = read_recording(path)
        assert [s.t_seconds for s in recording.samples] == [0, 1, 2, 3, 4, 5]

    def test_time_that_goes_on_is_left_alone(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.jsonl", "[0.1234567,[0,1]]", "[0.1234567,[0,2]]", "[9,[0,2]]")
        recording = read_recording(path)
        assert [s.t_seconds for s in recording.samples] == [0.1234567, 0.1234567, 9]
        assert recording.notes == []


class TestPages:
    def test_blanks_and_tabs_where_the_format_allows_them(self) -> None:
        body = (
            '\tvllm:num_requests_running {engine="0"}\t3 \n'
            "kvcatch_num_blocks\t120\n"
            '  vllm:num_requests_waiting{engine="0"} 4 1700000000\n'
            '# x\nvllm:cache_config_info {engine="0",num_gpu_blocks="9",block_size="16"} 1\n'
        )
        reader = Reader("x")
        for _ in range(3):
            samples = {sample.engine: sample for sample in reader.read(body, 0.0)}
            assert samples["vllm"].running_requests == 3
            assert samples["vllm"].waiting_requests == 4
            assert samples["vllm"].num_blocks == 9
            assert samples["kvcatch"].num_blocks == 120

    def test_values_of_labels_that_hold_the_separators(self) -> None:
        body = (
            'vllm:num_requests_running{model_name="m,engine=1"} 3\n'
            'vllm:num_requests_running{model_name="m",engine="1"} 4\n'
            'vllm:num_requests_running{model_name="a\\nb\\\\c\\"d",engine="\x1b[31m"} 5\n'
        )
        found = {sample.replica: sample.running_requests for sample in Reader("x").read(body, 0.0)}
        assert found == {
            "model_name=m\\x2cengine=1": 3,
            "model_name=m,engine=1": 4,
            'model_name=a\\nb\\x5cc"d,engine=\\x1b[31m': 5,
        }

    def test_long_values_stay_apart(self) -> None:
        body = "".join(
            f'vllm:num_requests_running{{model_name="{"m" * 5000}{end}"}} 3\n' for end in "ab"
        )
        names = {sample.replica for sample in Reader("x").read(body, 0.0)}
        assert len(names) == 2
        assert max(map(len, names)) < 300

    def test_errors_hold_no_sign_a_terminal_acts_on(self) -> None:
        with pytest.raises(ValueError, match=r"\\x1b\[2J") as error:
            Reader("x").read('vllm:num_requests_running{model_name="\x1b[2J"} -1\n', 0.0)
        assert str(error.value).isprintable()


class Handler(BaseHTTPRequestHandler):
    asked: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"#")
                    time.sleep(0.1)
            except OSError:
                return
        elif self.path == "/version":
            self.send_error(404)
        else:
            Handler.asked.append(self.headers.get("Authorization"))
            body = vllm_body({"num_requests_running": 1}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        return None


@contextmanager
def served() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


class TestEndpoints:
    def test_one_that_drips_does_not_slow_the_others(self) -> None:
        with served() as port:
            root = f"http://127.0.0.1:{port}"
            slow, good = asyncio.run(
                read_endpoints([f"{root}/drip", root], window_s=2.0, interval_s=0.1, timeout_s=0.5)
            )
        assert slow.samples == []
        assert "no whole answer in 1 s" in slow.notes[0]
        assert len(good.samples) >= 5

    def test_a_password_is_sent_and_never_kept(
        self, tmp_path: Path, run_kvcatch: RunKvcatch
    ) -> None:
        out = tmp_path / "a.jsonl"
        with served() as port:
            url = f"http://me:hush@127.0.0.1:{port}"
            Handler.asked.clear()
            (source,) = asyncio.run(read_endpoints([url], window_s=0.2, interval_s=0.1))
            done = run_kvcatch("record", url, "-o", str(out), "--duration", "0.2")
        assert set(Handler.asked) == {"Basic bWU6aHVzaA=="}
        assert source.samples[0].endpoint == f"http://127.0.0.1:{port}/metrics"
        assert done.returncode == 0
        assert "hush" not in out.read_text()
        down = run_kvcatch("record", f"{url}/metrics", "-o", str(out))
        assert down.returncode == 2
        assert "hush" not in down.stderr
        assert f"http://127.0.0.1:{port}/metrics: " in down.stderr

    @pytest.mark.parametrize("name", ["localhost:8000", "10.0.0.1:8000/metrics", "localhost"])
    def test_an_address_without_its_scheme(self, name: str) -> None:
        with pytest.raises(RecordingError, match="an address begins with http://"):
            read_file(Path(name))

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("\n")
        with pytest.raises(RecordingError, match="a: empty"):
            read_file(tmp_path / "a")


class TestRecord:
    @pytest.mark.skipif(os.name == "nt", reason="signals")
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
    def test_a_signal_ends_it_well(self, tmp_path: Path, number: int, name: str) -> None:
        out = tmp_path / name
        with served() as port:
            url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "kvcatch.cli", "record", url, "-o", str(out)]
            process = subprocess.Popen(
                [*command, "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            end = time.monotonic() + 60
            # The file is there once the signal is looked after.
            while not out.exists() and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(1.0)
            process.send_signal(number)
            try:
                said, errors = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 0
        assert errors.decode().splitlines()[-1] == "stopped"
        recording = read_recording(out)
        assert recording.notes == []
        assert said.decode().startswith(f"{len(recording.samples)} rows in ")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_a_full_disk_is_told_with_the_file(self, run_kvcatch: RunKvcatch) -> None:
        with served() as port:
            done = run_kvcatch(
                "record", f"http://127.0.0.1:{port}", "-o", "/dev/full", "--duration", "0.3",
                "--interval", "0.1",
            )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr == "kvcatch: /dev/full: No space left on device\n"

    def test_failed_scrapes_are_counted(self, tmp_path: Path) -> None:
        with Recorder(tmp_path / "a.jsonl", "x", 0.0) as recorder:
            recorder.add(0.0, vllm_body({"num_requests_running": 1}))
            recorder.fail(1.0, "no answer")
        assert (recorder.rows, recorder.failed) == (2, 1)


class TestReplay:
    def kept(self, path: Path, rows: int = 5) -> Path:
        with Recorder(path, "http://e/metrics", 1.7e9) as recorder:
            for at in range(rows):
                recorder.add(float(at), vllm_body({"num_requests_running": at}))
        return path

    def test_any_order_of_moments(self, tmp_path: Path) -> None:
        path = self.kept(tmp_path / "a.jsonl")
        whole = [body for _, body in bodies(path)]
        replay = Replay(path)
        assert (replay.rows, replay.seconds) == (5, 4.0)
        for at in (0, 3, 3, 1, 4, 0, 2):
            assert replay.at(at + 0.5) == whole[at]

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_who_goes_away_leaves_no_trace(
        self, tmp_path: Path, host: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"t": 0, "text": "# x\n" * 4_000_000}) + "\n")
        try:
            server = make_server(Replay(path), host, 0)
        except ValueError:
            pytest.skip(f"no {host} here")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for _ in range(3):
            client = socket.create_connection((host, server.server_address[1]))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.recv(10)
            client.close()
        time.sleep(0.3)
        server.shutdown()
        server.server_close()
        assert capfd.readouterr() == ("", "")


def test_a_value_beyond_a_float_is_nan_where_series_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", f"[0,[0,1{'0' * 400}]]")
    ((_, values),) = series_rows(path, lambda name: True)
    assert math.isnan(values[RUNNING])
