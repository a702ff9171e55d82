"""A real vLLM server under load: the plugin explains every second of waiting, and nothing is left at idle.

Needs a model as a Hugging Face folder in ``KVCATCH_TEST_MODEL`` (SmolLM2). ``SOAK_SECONDS`` shortens the soak.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
MODEL = os.environ.get("KVCATCH_TEST_MODEL", "")
SOAK_S = float(os.environ.get("SOAK_SECONDS", "120"))
WORDS = [
    "cache",
    "block",
    "token",
    "queue",
    "memory",
    "page",
    "table",
    "prefix",
    "hash",
    "decode",
    "prefill",
    "batch",
    "model",
    "layer",
]

REPORTED = "as_vllm_reports_by_gate"

pytestmark = pytest.mark.skipif(
    not Path(MODEL, "config.json").is_file(), reason="no KVCATCH_TEST_MODEL"
)


def say(text: str) -> None:
    """For whoever runs pytest with -s."""
    sys.stdout.write(f"{text}\n")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    def __init__(self, folder: Path, switches: str, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        # The entry points, as an installed kvcatch has them.
        info = folder / "site" / "kvcatch-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcatch\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvcatch = kvcatch_vllm:register\n\n"
            "[vllm.stat_logger_plugins]\nkvcatch = kvcatch_vllm:StatLogger\n"
        )
        (folder / "sockets").mkdir(mode=0o700)
        env = {
            **os.environ,
            "PYTHONPATH": f"{info.parent}:{ROOT / 'python'}",
            "KVCATCH_VLLM": switches,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            **settings,
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL,
            "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(self.port),
            "--max-model-len", "1024", "--num-gpu-blocks-override", "41", "--block-size", "32",
            "--max-num-seqs", "6", "--max-num-batched-tokens", "1024", "--enforce-eager",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float = 400.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(1.0)
        raise AssertionError(self.log.read_text()[-4000:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)

    def sockets(self, kind: str) -> list[Path]:
        return sorted((self.folder / "sockets").glob(f"*{kind}*.sock"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made = Server(
        folder,
        "observe",
        KVCATCH_VLLM_SOCKET=str(folder / "sockets"),
        KVCATCH_VLLM_TAG_PATTERN="(?P<tenant>acme|zeta)",
        KVCATCH_VLLM_LISTEN=f"127.0.0.1:{free_port()}",
    )
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def prompt(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


async def ask(client: httpx.AsyncClient, url: str, words: int, seed: int, most: int) -> int:
    tenant = ("acme", "zeta")[seed % 2]
    body = {
        "model": "smollm2", "prompt": prompt(words, seed), "max_tokens": most, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    headers = {"X-Request-Id": f"{tenant}-{seed}"}
    answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def waiting_of(text: str) -> float:
    """vLLM's own count: capacity and deferred."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:num_requests_waiting_by_reason{")
    )


async def watch(
    server: Server, path: Path, rows: list[dict[str, Any]], stop: asyncio.Event, every: float
) -> None:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with (
        httpx.AsyncClient(timeout=30) as own,
        httpx.AsyncClient(transport=transport, timeout=30) as plugin,
    ):
        while not stop.is_set():
            start = time.monotonic()
            theirs = waiting_of((await own.get(f"{server.url}/metrics")).text)
            ours = (await plugin.get("http://localhost/refusals")).json()
            rows.append({"t": start, "vllm": theirs, "plugin": ours})
            await asyncio.sleep(max(0.0, start + every - time.monotonic()))


def test_every_second_of_waiting_is_explained(server: Server) -> None:
    (path,) = server.sockets("engine")
    assert path.stat().st_mode & 0o777 == 0o600
    rows: list[dict[str, Any]] = []

    async def drive() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(watch(server, path, rows, stop, 0.5))
        async with httpx.AsyncClient(timeout=600) as client:
            jobs = [(150, at, 40) for at in range(6)]  # blocks
            jobs += [(20, 100 + at, 30) for at in range(14)]  # slots
            jobs += [(380, 200 + at, 4) for at in range(6)]  # token budget
            await asyncio.gather(*(ask(client, server.url, *job) for job in jobs))
        await asyncio.sleep(1.5)
        stop.set()
        await task

    asyncio.run(drive())
    waited = [row for row in rows if row["vllm"] > 0]
    assert len(waited) >= 4, [row["vllm"] for row in rows]
    gates: set[str] = set()
    for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
        if row["vllm"] <= 0:
            continue
        # The two pages are read one after the other: a queue may end between the two.
        told = [part["plugin"]["queue"][REPORTED] for part in (before, row, after)]
        assert any(told), (row["t"], row["vllm"])
        gates |= set(told[1]) | set(row["plugin"]["queue"]["waiting_by_gate"])
        if row["plugin"]["queue"]["waiting"]:
            listed = row["plugin"]["waiting"]
            assert len(listed) == row["plugin"]["queue"]["waiting"]
            assert all(item["gate"] and item["detail"] for item in listed)
    assert "unexplained" not in gates
    last = rows[-1]["plugin"]
    assert last["observer"]["faults"] == 0
    assert "unexplained" not in last["waiting_request_seconds"]
    assert set(last["waiting_request_seconds"]) & {"capacity", "max_num_seqs", "token_budget"}
    # vLLM's count is that of the end of its last step, so the plugin says how that one is explained; its
    # own is of this moment, and sums up to no less.
    same = sum(
        row["vllm"]
        in [sum(part["plugin"]["queue"][REPORTED].values()) for part in (before, row, after)]
        for before, row, after in zip(rows, rows[1:], rows[2:], strict=False)
    )
    theirs = sum(
        (row["vllm"] + after["vllm"]) / 2 * (after["t"] - row["t"])
        for row, after in itertools.pairwise(rows)
    )
    ours = sum(last["waiting_request_seconds"].values())
    say(f"waiting request-seconds: vLLM {theirs:.1f}, plugin {ours:.1f}; {sorted(gates)}")
    say(f"the same count in {same} of {len(rows) - 2} looks")
    assert same >= 0.9 * (len(rows) - 2)
    assert ours >= 0.8 * theirs
    for refused in last["recent"]:
        say(
            f"{refused['request']} {refused['gate']}: {refused['detail']}; {refused['steps']} steps"
        )
        required = next(value for name, value in refused.items() if name.startswith("required_"))
        available = next(value for name, value in refused.items() if name.startswith("available_"))
        assert required > available


def test_the_front_end_has_a_page_of_its_own(server: Server) -> None:
    (path,) = server.sockets("frontend")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        text = client.get("http://localhost/metrics").text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    own = '{engine="0",model_name="smollm2"}'
    assert float(rows[f"kvcatch_vllm_time_to_first_token_seconds_count{own}"]) >= 26
    assert float(rows[f"kvcatch_vllm_generation_tokens_total{own}"]) >= 6 * 40 + 14 * 30
    vllm = httpx.get(f"{server.url}/metrics").text
    theirs = next(
        float(line.rpartition(" ")[2])
        for line in vllm.splitlines()
        if line.startswith("vllm:time_to_first_token_seconds_sum")
    )
    ours = float(rows[f"kvcatch_vllm_time_to_first_token_seconds_sum{own}"])
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_after_a_soak_with_aborts_nothing_is_held(server: Server) -> None:
    (path,) = server.sockets("engine")
    end = time.monotonic() + SOAK_S

    async def drive() -> tuple[int, int]:
        done = aborted = 0
        async with httpx.AsyncClient(timeout=600) as client:

            async def worker(number: int) -> None:
                nonlocal done, aborted
                chance = random.Random(number)
                while time.monotonic() < end:
                    work = ask(
                        client, server.url, chance.randint(5, 250), chance.randint(0, 40),
                        chance.randint(1, 80),
                    )  # fmt: skip
                    patience = chance.uniform(0.05, 3.0) if chance.random() < 0.4 else 300.0
                    try:
                        await asyncio.wait_for(work, patience)
                        done += 1
                    except TimeoutError:
                        aborted += 1

            await asyncio.gather(*(worker(number) for number in range(12)))
        return done, aborted

    done, aborted = asyncio.run(drive())
    assert done > 5
    assert aborted > 5
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=30) as client:
        for _ in range(60):
            page = client.get("http://localhost/snapshot?all=1").json()
            if page["conservation"]["is_idle"]:
                break
            time.sleep(0.5)
    say(f"{done} done, {aborted} aborted; {page['conservation']['law']}; {page['refused_steps']}")
    assert page["conservation"] == {
        "is_idle": True,
        "law": "40 usable = 40 free + 0 held + 0 retired + 0 unaccounted",
        "holds": True,
        "zombies": [],
        "unowned_block_ids": [],
    }
    assert page["holdings"] == []
    assert page["observer"]["faults"] == 0
    assert "unexplained" not in page["waiting_request_seconds"]
    say(json.dumps(page["waiting_request_seconds"]))
