"""The ramp against real servers on loopback: kvcatch's own, and some that misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Served


def command(url: str, *options: object) -> list[str]:
    return [sys.executable, "-m", "kvcatch.cli", "loadtest", url, *map(str, options)]


def run(url: str, *options: object) -> tuple[int, Any, str]:
    done = subprocess.run(
        command(url, "--json", *options), capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


LENGTHS = ("--prompt-tokens", 40, "--output-tokens", 200, "--id-range", "1:90")


@pytest.mark.parametrize("law", ["full_prompt", "worst_case"])
def test_the_first_to_wait_is_the_one_predicted(serve_toy: Callable[..., Served], law: str) -> None:
    served = serve_toy(
        num_blocks=200 if law == "worst_case" else 100, law=law, max_num_seqs=30, max_model_len=240
    )
    served.runner.pause = 0.03
    options = (*LENGTHS, "--max-concurrency", 20, "--law", law)
    status, found, errors = run(served.url, *options)
    assert (status, found["verdict"]) == (0, "as_predicted"), (found, errors)
    assert found["gate"] == ("worst_case" if law == "worst_case" else "capacity")
    if law == "worst_case":  # 60 blocks each of 200: exactly
        assert found["first_refusal_requests"] == found["predicted_first_refusal_requests"] == 4
    assert found["prompt_tokens"] == 40


def test_max_num_seqs_is_named(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(num_blocks=400, max_num_seqs=3, max_model_len=240)
    served.runner.pause = 0.02
    options = (*LENGTHS, "--max-concurrency", 12)
    status, found, _ = run(served.url, *options)
    assert (status, found["first_refusal_requests"]) == (1, 4)
    assert (found["verdict"], found["gate"]) == ("configuration_fault", "max_num_seqs")
    status, found, _ = run(served.url, *options, "--max-num-seqs", 3)
    assert (status, found["verdict"], found["gate"]) == (0, "as_predicted", "max_num_seqs")


def test_never_more_load_than_asked_for_and_nothing_left_behind(
    serve_toy: Callable[..., Served],
) -> None:
    served = serve_toy(num_blocks=400, max_num_seqs=30, max_model_len=240)
    served.runner.pause = 0.02
    status, found, _ = run(served.url, *LENGTHS, "--max-concurrency", 4)
    assert (status, found["verdict"], len(found["requests"])) == (0, "nothing_waited", 4)
    assert max(size for size, _ in served.runner.log) <= 4
    end = time.monotonic() + 3
    while not served.engine.is_idle and time.monotonic() < end:
        time.sleep(0.02)
    served.engine.check_idle()


def test_outputs_that_end_too_soon_are_no_evidence(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(num_blocks=400, max_num_seqs=30, max_model_len=240)
    options = ("--prompt-tokens", 10, "--output-tokens", 2, "--id-range", "1:90")
    status, found, _ = run(served.url, *options, "--max-concurrency", 9)
    assert (status, found["verdict"]) == (0, "not_enough_evidence")


def test_ctrl_c_stops_and_says_what_was_measured(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(num_blocks=400, max_num_seqs=30, max_model_len=240)
    served.runner.pause = 0.05
    with subprocess.Popen(
        command(served.url, "--json", *LENGTHS, "--max-concurrency", 30),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while len(served.engine.scheduler.running) < 3:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    found = json.loads(out)
    assert found["interrupted"]
    assert len(found["requests"]) >= 2
    assert "Traceback" not in errors


@pytest.fixture
def odd_server() -> Iterator[Callable[[Callable[[Any], None]], str]]:
    servers: list[ThreadingHTTPServer] = []

    def make(answer: Callable[[Any], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield make
    for server in servers:
        server.shutdown()


def send(handler: Any, status: int, body: bytes, kind: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_servers_that_are_none(odd_server: Callable[[Callable[[Any], None]], str]) -> None:
    html = odd_server(lambda h: send(h, 200, b"<html>hello</html>", "text/html"))
    empty = odd_server(lambda h: send(h, 200, b'{"data": []}'))

    def refuses(handler: Any) -> None:
        if "models" in handler.path:
            send(handler, 200, b'{"data": [{"id": "m"}]}')
        else:
            send(handler, 500, b'{"error": {"message": "out of order"}}')

    broken = odd_server(refuses)
    for url, message in (
        (html, "not JSON"),
        (empty, "lists no model"),
        (broken, "out of order"),
        ("http://127.0.0.1:9", "ConnectError"),
    ):
        status, found, errors = run(url)
        assert (status, found) == (1, None)
        assert message in errors
        assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-tokens", 0), "prompt_tokens = 0"),
        (("--max-concurrency", -1), "max_concurrency = -1"),
        (("--engine", "vllm@banana"), "banana"),
        (("--law", "nothing"), "nothing"),
        (("--id-range", "9:3"), "9:3"),
        (("--plot", "picture.txt"), "picture.txt"),
    ],
)
def test_bad_options_make_no_load(options: tuple[object, ...], message: str) -> None:
    status, found, errors = run("http://127.0.0.1:9", *options)
    assert (status, found) == (2, None)
    assert message in errors
    status, _, errors = run("localhost:8000")
    assert (status, "http://" in errors) == (2, True)


def test_the_plot_is_a_picture(serve_toy: Callable[..., Served], tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    served = serve_toy(num_blocks=400, max_num_seqs=2, max_model_len=240)
    served.runner.pause = 0.02
    picture = tmp_path / "ramp.png"
    run(served.url, *LENGTHS, "--max-concurrency", 4, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
