"""``kvcatch watch`` as a user runs it: one state for scripts, the real terminal, the page, bad input."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from watch_make import body

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watch_make import FakeEngine

    from conftest import RunKvcatch

    Make = Callable[..., FakeEngine]


class TestOnce:
    def test_one_state_of_all_endpoints(self, make_engine: Make, run_kvcatch: RunKvcatch) -> None:
        good, bad = make_engine(ranks=2), make_engine("html")
        done = run_kvcatch("watch", good.url, bad.url, "--once", "--json", "--interval", 0.3)
        assert done.returncode == 1, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["endpoints"], answer["unreachable"]) == (2, 1)
        first, second, wrong = answer["replicas"]
        assert [first["label"], second["label"]] == ["engine=0", "engine=1"]
        assert first["kv_usage_share"] == 0.04
        assert first["waiting_by_reason"] == {"capacity": 10, "deferred": 2}
        assert first["available_blocks"] == 960
        assert first["longest_request_blocks"] == 126
        assert first["head_needs_blocks"] is None
        assert first["prompt_tokens_per_second"] == pytest.approx(100, rel=0.3)
        assert wrong["status"] == "unreachable"
        assert wrong["reason"] == "an HTML page, not metrics: is the path right?"
        assert wrong["kv_usage_share"] is None

    def test_all_well_is_0(self, make_engine: Make, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch("watch", make_engine().url, "--once", "--interval", 0.2)
        assert done.returncode == 0, done.stderr
        assert "KV of vllm: blocks that requests reference" in done.stdout

    def test_a_recording(self, recordings: Path, run_kvcatch: RunKvcatch) -> None:
        file = recordings / "kvfull.jsonl.gz"
        done = run_kvcatch("watch", file, "--once", "--json", "--at", 16)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["is_live"] is False
        assert answer["replicas"][0]["gate"] == "capacity"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ftp://x"], "must be an address"),
        (["http://a:1", "http://a:1/metrics", "--once"], "is given twice"),
        (["http://a:1", "--json"], "--json goes with --once"),
        (["http://a:1", "--once", "--web"], "exclude each other"),
        (["http://a:1"], "not a terminal: use --once, --web or --screenshot"),
        (["http://a:1", "--at", "3", "--once"], "--at goes with recordings"),
        (["http://a:1", "no-such-file", "--once"], "not watched together"),
        (["no-such-file", "--once"], "No such file"),
        (["http://a:1", "--once", "--engine", "what@1"], "unknown engine"),
        (["http://a:1", "--once", "--engine-args", "--max-num-seqs no"], "is not a number"),
        (["http://a:1", "--web", "--host", "999.0.0.1"], "999.0.0.1:9118"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch("watch", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_picture(tmp_path: Path, run_kvcatch: RunKvcatch) -> None:
    rows = [json.dumps({"t": at, "text": body(at)}) for at in range(20)]
    (tmp_path / "r.jsonl").write_text("\n".join(rows) + "\n")
    target = tmp_path / "x.svg"
    done = run_kvcatch("watch", tmp_path / "r.jsonl", "--screenshot", target)
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs" in target.read_text()


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_a_real_terminal_is_left_clean(
    leave: bytes, make_engine: Make, kvcatch_command: list[str]
) -> None:
    command = [*kvcatch_command, "watch", make_engine().url, "--interval", "0.2"]
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", LINES="24", COLUMNS="80")
        os.execv(command[0], command)
    drawn, status, pressed, end = b"", None, False, time.monotonic() + 40
    while status is None and time.monotonic() < end:
        if select.select([fd], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                drawn += os.read(fd, 65536)
        if not pressed and b"max_num_seqs" in drawn:
            os.write(fd, leave)
            pressed = True
        found, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if found else None
    os.close(fd)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert status == 0, drawn[-2000:]
    assert b"Traceback" not in drawn
    # The other screen was entered and left, and the cursor is shown again.
    assert drawn.count(b"\x1b[?1049h") == drawn.count(b"\x1b[?1049l") == 1
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")


def test_the_page_by_its_command(make_engine: Make, kvcatch_command: list[str]) -> None:
    command = [*kvcatch_command, "watch", make_engine().url, "--web", "--port", "0"]
    with subprocess.Popen(
        [*command, "--interval", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[0]
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert b"kvcatch watch" in answer.read()
            end = time.monotonic() + 20
            data: dict[str, object] = {}
            while not data.get("from_s") and time.monotonic() < end:
                with urllib.request.urlopen(url + "state.json", timeout=10) as answer:
                    data = json.load(answer)
                time.sleep(0.1)
            assert data["unreachable"] == 0
            refused = {"state.json?at=x": 400, "state.json?seconds=nan": 400, "../x": 404}
            for path, code in refused.items():
                with pytest.raises(urllib.error.HTTPError) as error:
                    urllib.request.urlopen(url + path, timeout=10)
                assert error.value.code == code
            # A page of another name that resolves to this address must not read it.
            request = urllib.request.Request(url + "state.json", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=10)
            assert error.value.code == 403
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        assert process.returncode == 0
        assert said == ""
