"""The socket and the port: who may read, what a crash leaves, what cannot be served."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.vllm.observe import address
from kvcatch.vllm.observe.address import Listen, socket_path
from kvcatch.vllm.observe.publish import Publisher, clear_stale
from kvcatch.vllm.observe.tags import Tagger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a-token-of-some-length"


class Pages:
    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.gate: threading.Event | None = None

    def page(self, path: str, *, is_whole: bool = False) -> tuple[str, bytes] | None:
        self.asked.append((path, is_whole))
        if self.gate is not None:
            self.gate.wait(10)
        if path == "/broken":
            raise ValueError("broken page")
        return ("text/plain", b"hello\n") if path == "/metrics" else None


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(Pages())
    yield made
    made.close()


def get(path: Path, page: str = "/metrics") -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=5) as client:
        return client.get(f"http://localhost{page}")


def test_socket_is_for_its_owner_alone_and_goes_when_closed(
    publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    assert publisher.serve_socket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert get(path).text == "hello\n"
    assert get(path, "/metrics?all=1").status_code == 200
    assert publisher.pages.asked == [("/metrics", False), ("/metrics", True)]  # type: ignore[attr-defined]
    assert get(path, "/nothing").status_code == 404
    broken = get(path, "/broken")
    assert (broken.status_code, broken.text) == (500, "ValueError: broken page\n")
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_two_engine_cores_and_one_path(
    publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine.sock"
    assert publisher.serve_socket(path)
    second = Publisher(Pages())
    assert not second.serve_socket(path)
    (line,) = [record.message for record in caplog.records]
    assert "another running process serves on it" in line
    assert "{rank}" in line
    second.close()
    assert get(path).text == "hello\n"


def test_a_crashed_process_leaves_a_stale_socket_that_is_replaced(
    publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    code = (
        "import os, sys, pathlib\n"
        "from kvcatch.vllm.observe.publish import Publisher\n"
        "made = Publisher(None)\n"
        "assert made.serve_socket(pathlib.Path(sys.argv[1]))\n"
        "print('up', flush=True)\n"
        "sys.stdin.read(1)\n"
        "os._exit(9)\n"
    )
    crash = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert crash.stdout is not None
    assert crash.stdout.readline() == b"up\n"
    assert not publisher.serve_socket(path)  # it lives
    crash.communicate(b"x")
    assert path.is_socket()
    with pytest.raises(httpx.ConnectError):
        get(path)
    after = Publisher(Pages())
    assert after.serve_socket(path)
    assert get(path).text == "hello\n"
    after.close()


def test_stale_sockets_of_the_default_folder_are_cleared(tmp_path: Path) -> None:
    stale = tmp_path / "vllm-1-engine-0.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(stale))
    left.close()
    live = Publisher(Pages())
    assert live.serve_socket(tmp_path / "vllm-2-engine-0.sock")
    assert clear_stale(tmp_path) == 1
    assert not stale.exists()
    assert get(tmp_path / "vllm-2-engine-0.sock").text == "hello\n"
    live.close()


def test_what_is_no_socket_is_not_touched(
    publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    assert not publisher.serve_socket(path)
    assert path.read_text() == "mine"
    assert "is no socket: not touched" in caplog.text


@pytest.mark.parametrize("name", ["missing/engine.sock", "file/engine.sock"])
def test_a_path_that_cannot_be_written_is_one_line(
    publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").write_text("")
    assert not publisher.serve_socket(tmp_path / name)
    (line,) = [record.message for record in caplog.records]
    assert str(tmp_path / name) in line
    assert "\n" not in line


def test_default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = socket_path("", "engine-3")
    assert path == tmp_path / "kvcatch" / f"vllm-{os.getpid()}-engine-3.sock"
    made = Publisher(Pages())
    assert made.serve_socket(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    made.close()
    path.parent.chmod(0o755)
    made = Publisher(Pages())
    assert not made.serve_socket(path)  # others could put a socket of theirs there
    made.close()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert address.default_folder().name == f"kvcatch-{os.getuid()}"


def test_paths_from_the_operator(tmp_path: Path) -> None:
    assert socket_path("off", "engine-0") is None
    assert socket_path("/run/e-{rank}.sock", "engine-2").name == "e-2.sock"  # type: ignore[union-attr]
    assert socket_path(str(tmp_path), "engine-1") == tmp_path / f"vllm-{os.getpid()}-engine-1.sock"
    # One path for both sides: the front end's is another.
    assert socket_path("/run/e.sock", "frontend-0").name == "e.sock.frontend-0"  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match="are filled in"):
        socket_path("/run/{user}.sock", "engine-0")
    with pytest.raises(InvalidArgument, match="103 at most"):
        socket_path("/" + "x" * 110, "engine-0")


def test_port_on_loopback_answers_to_its_own_name_only(publisher: Publisher) -> None:
    assert publisher.serve_port(Listen.parse("127.0.0.1:0", None))
    url = f"http://127.0.0.1:{publisher.port}/metrics"
    assert httpx.get(url).text == "hello\n"
    assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(url, headers={"Host": f"localhost:{publisher.port}"}).status_code == 200


def test_token(publisher: Publisher) -> None:
    assert publisher.serve_port(Listen.parse("127.0.0.1:0", TOKEN))
    url = f"http://127.0.0.1:{publisher.port}/metrics"
    assert httpx.get(url).status_code == 401
    for wrong in ("x", TOKEN[:-1], TOKEN + "x", "\xff" * 20):
        headers = {"Authorization": f"Bearer {wrong}".encode("latin-1")}
        assert httpx.get(url, headers=headers).status_code == 401  # type: ignore[arg-type]
    right = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}", "Host": "pod.example"})
    assert right.text == "hello\n"


@pytest.mark.parametrize(
    ("text", "token", "why"),
    [
        ("0.0.0.0:9000", None, "needs a token"),
        ("0.0.0.0:9000", "short", "16 at least"),
        ("engine.example:9000", None, "needs a token"),
        ("127.0.0.1", None, "HOST:PORT"),
        ("127.0.0.1:99999", None, "HOST:PORT"),
        ("127.0.0.1:http", None, "HOST:PORT"),
    ],
)
def test_addresses_that_are_refused(text: str, token: str | None, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Listen.parse(text, token)


def test_addresses() -> None:
    assert Listen.parse("9000", None) == Listen("127.0.0.1", 9000)
    assert Listen.parse("[::1]:9000", None, rank=2) == Listen("::1", 9002)
    assert Listen.parse("0.0.0.0:9000", TOKEN) == Listen("0.0.0.0", 9000, TOKEN)


def test_a_port_in_use_is_one_line(publisher: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not publisher.serve_port(Listen("127.0.0.1", other.getsockname()[1]))
    assert len(caplog.records) == 1
    assert "is not published on 127.0.0.1" in caplog.text


def test_slow_and_many_readers(tmp_path: Path) -> None:
    pages = Pages()
    pages.gate = threading.Event()
    made = Publisher(pages)
    path = tmp_path / "engine.sock"
    assert made.serve_socket(path)
    answers: list[int] = []
    readers = [
        threading.Thread(target=lambda: answers.append(get(path).status_code)) for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 5
    while len(pages.asked) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert get(path).status_code == 503  # the ninth is sent away instead of kept
    # One that says nothing does not keep the others out.
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(path))
    pages.gate.set()
    for reader in readers:
        reader.join(5)
    assert answers == [200] * 8
    assert get(path).status_code == 200
    silent.close()
    made.close()


def test_a_leak_at_idle_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvcatch.vllm.observe.publish._IDLE_S", 0.02)
    calls: list[int] = []

    def check() -> str | None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("changed while it was copied")
        return "idle, and 3 blocks are not free"

    made = Publisher(Pages(), check)
    assert made.serve_socket(tmp_path / "engine.sock")
    end = time.monotonic() + 5
    while len(calls) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    made.close()
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["kvcatch: idle, and 3 blocks are not free"]


def test_close_in_a_forked_child_leaves_the_parent_alone(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.sock"
    assert publisher.serve_socket(path)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        publisher.close()
    assert get(path).text == "hello\n"


@pytest.mark.parametrize(
    ("pattern", "name", "tags"),
    [
        ("", "cmpl-acme-1", {}),
        (r"cmpl-(\w+)-", "cmpl-acme-1", {"source": "acme"}),
        (r"acme|zeta", "cmpl-zeta-1", {"source": "zeta"}),
        (r"(?P<tenant>\w+):(?P<route>\w+)?", "acme:-1", {"tenant": "acme"}),
        (r"x" * 5, "acme", {}),
    ],
)
def test_tags_of_a_pattern(pattern: str, name: str, tags: dict[str, Any]) -> None:
    assert Tagger.parse(pattern).tags(name, None, 0) == tags


def test_tags_of_adapter_and_priority() -> None:
    assert Tagger().tags("x", "sql", -2) == {"lora": "sql", "priority": "-2"}
    with pytest.raises(InvalidArgument, match="not a regular expression"):
        Tagger.parse("(")
    with contextlib.suppress(InvalidArgument):
        Tagger.parse("(" * 5000)
