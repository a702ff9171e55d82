"""Retention as a request asks for it: on vLLM's own Scheduler, and over HTTP on a real server.

The server needs a model folder: ``KVCATCH_TEST_MODEL`` (a small Llama as Hugging Face saves it). Minutes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")
sys.path.insert(0, str(Path(__file__).parent / "observe"))

from real_scheduler import make_request, make_scheduler, step

from kvcatch.vllm import evict, plugin, register, unregister

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = os.environ.get("KVCATCH_TEST_MODEL", "")
PYTHON = Path(__file__).resolve().parents[2] / "python"
KEPT = 1
"""Seed of the prompt that is to be kept; those of the scan start at 100."""


@pytest.fixture
def scheduler(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """40 blocks of 16 tokens, with the plugin in them."""
    monkeypatch.setenv("KVCATCH_VLLM", "evict")
    register()
    assert plugin._installed is not None
    yield make_scheduler(tmp_path, num_blocks=41, max_num_seqs=4)
    unregister()


def ask(scheduler: Any, name: str, seed: int, extra: dict[str, Any] | None = None) -> int:
    """Serves one request of 160 tokens to its end; the tokens that it found cached."""
    request = make_request(name, 160, seed=seed, max_tokens=1)
    request.sampling_params.extra_args = extra
    scheduler.add_request(request)
    computed = 0
    while scheduler.requests:
        computed += step(scheduler).num_scheduled_tokens.get(name, 0)
    return 160 - computed


def scan(scheduler: Any, extra: dict[str, Any] | None = None, first: int = 100) -> None:
    """Three pools' worth of prompts, each twice: hit once, so that the policy alone keeps them over the rest."""
    for seed in range(first, first + 12):
        for again in range(2):
            ask(scheduler, f"scan-{seed}-{again}", seed, extra)


def test_a_scan_evicts_what_nobody_retains(scheduler):
    ask(scheduler, "a", KEPT)
    assert ask(scheduler, "b", KEPT, {"other": 1}) == 144
    scan(scheduler)
    assert ask(scheduler, "c", KEPT) == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"kvcatch_priority": 50},
        {"kvcatch": {"priority": 1}},
        {"kvcatch_priority": 50, "kvcatch_ttl": 3600},
    ],
)
def test_what_is_retained_survives_a_scan(scheduler, extra):
    ask(scheduler, "a", KEPT, extra)
    scan(scheduler)
    assert ask(scheduler, "b", KEPT) == 144


def test_time_to_live_ends_it(scheduler):
    ask(scheduler, "a", KEPT, {"kvcatch_priority": 50, "kvcatch_ttl": 0.05})
    time.sleep(0.1)
    scan(scheduler)
    assert ask(scheduler, "b", KEPT) == 0


def test_higher_priority_outlives_lower(scheduler):
    ask(scheduler, "a", KEPT, {"kvcatch_priority": 2})
    scan(scheduler, {"kvcatch_priority": 1})
    assert ask(scheduler, "b", KEPT) == 144


def test_retained_blocks_never_keep_a_request_out(scheduler):
    for seed in range(4):
        ask(scheduler, f"kept-{seed}", seed, {"kvcatch_priority": 100})
    # The whole pool is retained, or nearly; a prompt of 39 blocks enters all the same.
    request = make_request("whole", 39 * 16, seed=500, max_tokens=1)
    scheduler.add_request(request)
    while scheduler.requests:
        step(scheduler)
    assert request.num_output_tokens == 1


def test_bad_values_are_one_line_and_nothing_is_retained(scheduler, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(evict.logger, "warning", lambda text, *args: said.append(text % args))
    for at, extra in enumerate(
        (
            {"kvcatch_priority": "high"},
            {"kvcatch_ttl": 5},
            {"kvcatch": [1]},
            {"kvcatch_priority": 101},
        )
    ):
        ask(scheduler, f"bad-{at}", KEPT, extra)
    assert len(said) == 1
    assert "bad-0" in said[0]
    assert "'high'" in said[0]
    scan(scheduler)
    assert ask(scheduler, "after", KEPT) == 0


class Server:
    """A real vLLM server with ``evict``, 63 blocks of 32 tokens."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.log = folder / "server.log"
        # The entry point, as an installed kvcatch has it.
        info = folder / "site" / "kvcatch-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcatch\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvcatch = kvcatch_vllm:register\n"
        )
        environ = os.environ | {
            "PYTHONPATH": f"{info.parent}:{PYTHON}",
            "KVCATCH_VLLM": "pool,evict",
            "VLLM_PLUGINS": "kvcatch",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
        options = (
            f"--served-model-name model --host 127.0.0.1 --port {self.port} --max-model-len 512 "
            "--num-gpu-blocks-override 64 --block-size 32 --max-num-seqs 4 --enforce-eager "
            "--enable-prompt-tokens-details"
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*serve, *options.split()], env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"no server after {seconds} s: {self.log.read_text()[-2000:]}")

    def ask(self, tokens: list[int], extra: dict[str, Any] | None = None) -> int:
        """Serves a prompt; how many of its tokens were cached."""
        body = {"model": "model", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        if extra is not None:
            body["vllm_xargs"] = extra
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            usage = json.load(response)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not Path(MODEL, "config.json").is_file():
        pytest.skip("KVCATCH_TEST_MODEL names no model folder")
    made = Server(tmp_path_factory.mktemp("retention"))
    try:
        made.wait(600)
        yield made
    finally:
        made.stop()


def prompt(seed: int) -> list[int]:
    return [1000 + (seed * 331 + at * 7) % 30_000 for at in range(320)]


def serve_scan(server: Server, first: int) -> None:
    for seed in range(first, first + 10):
        for _ in range(2):
            server.ask(prompt(seed))


def test_over_http(server):
    kept, lost, brief = (prompt(seed) for seed in (1, 2, 3))
    server.ask(lost)
    server.ask(kept, {"kvcatch_priority": 50, "kvcatch_ttl": 3600})
    server.ask(brief, {"kvcatch_priority": 50, "kvcatch_ttl": 1})
    assert server.ask(lost) == 288
    time.sleep(1.1)
    serve_scan(server, 100)
    assert [server.ask(tokens) for tokens in (kept, lost, brief)] == [288, 0, 0]


def test_bad_values_over_http_are_one_line_and_the_server_serves_on(server):
    for extra in ({"kvcatch_priority": 101}, {"kvcatch_priority": "high"}, {"kvcatch_ttl": 5}):
        server.ask(prompt(50), extra)
    lines = [line for line in server.log.read_text().splitlines() if "kvcatch priority" in line]
    assert len(lines) == 1
    assert "101" in lines[0]
    assert "nothing is retained" in lines[0]
    assert server.ask(prompt(50)) == 288
