"""The server through the official client: answers, streams, errors, limits, clients that go away."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from toy import expected

from kvcatch.engine.governor import GovernorConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving import Served


def text_of(tokens: list[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


def encode(text: str) -> list[int]:
    return [ord(letter) % 96 for letter in text]


def answer(prompt: str, count: int) -> str:
    return text_of(expected(encode(prompt), count))


OPTIONS: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 8}
GO_ON = {"ignore_eos": True}


def test_a_completion(served: Served) -> None:
    client = served.client()
    got = client.completions.create(prompt="hello there", extra_body=GO_ON, **OPTIONS)
    assert got.object == "text_completion"
    assert got.choices[0].text == answer("hello there", 8)
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (11, 8)
    again = client.completions.create(prompt="hello there", extra_body=GO_ON, **OPTIONS)
    assert again.usage.prompt_tokens_details.cached_tokens == 8
    assert again.choices[0].text == got.choices[0].text


def test_prompts_in_every_form(served: Served) -> None:
    client = served.client()
    forms: list[Any] = ["abc", ["abc", "defg"], encode("abc"), [encode("abc"), encode("defg")]]
    for form in forms:
        got = client.completions.create(prompt=form, extra_body=GO_ON, n=2, **OPTIONS)
        texts = [choice.text for choice in got.choices]
        wanted = [answer("abc", 8)] * 2 + [answer("defg", 8)] * 2
        assert texts == wanted[: len(texts)]
        assert [choice.index for choice in got.choices] == list(range(len(texts)))


def test_a_streamed_completion_is_the_whole_one_in_pieces(served: Served) -> None:
    client = served.client()
    chunks = list(
        client.completions.create(
            prompt="hello",
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GO_ON,
            logprobs=2,
            **OPTIONS,
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer("hello", 8)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8
    offsets = [c.choices[0].logprobs.text_offset[0] for c in chunks if c.choices]
    assert offsets == list(range(8))


def test_chat_whole_and_streamed(served: Served) -> None:
    client = served.client()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(messages=messages, extra_body=GO_ON, **OPTIONS)
    wanted = answer("<system>be kind<user>hi", 8)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(messages=messages, stream=True, extra_body=GO_ON, **OPTIONS)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    ]
    split = client.chat.completions.create(messages=parts, extra_body=GO_ON, **OPTIONS)  # type: ignore[arg-type]
    assert split.choices[0].message.content == answer("<user>hi", 8)


def test_chat_logprobs(served: Served) -> None:
    got = served.client().chat.completions.create(
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=3,
        extra_body=GO_ON,
        **OPTIONS,
    )
    content = got.choices[0].logprobs.content
    assert len(content) == 8
    assert "".join(one.token for one in content) == got.choices[0].message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob)
        assert bytes(one.bytes).decode() == one.token


def test_n_and_seed(served: Served) -> None:
    client = served.client()

    def ask() -> list[str]:
        got = client.completions.create(
            model="toy", prompt="abc", n=3, seed=5, temperature=1.5, max_tokens=12, extra_body=GO_ON
        )
        return [choice.text for choice in got.choices]

    first = ask()
    assert ask() == first
    assert len(set(first)) == 3


def test_stop_text(served: Served) -> None:
    whole = answer("hello", 8)
    got = served.client().completions.create(
        prompt="hello", stop=[whole[3:5]], extra_body=GO_ON, **OPTIONS
    )
    assert got.choices[0].text == whole[: whole.find(whole[3:5])]
    assert got.choices[0].finish_reason == "stop"


def test_models_health_version_and_metrics(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/version").json()["engine"] == "kvcatch"
    client.completions.create(prompt="hello", extra_body=GO_ON, **OPTIONS)
    parser = pytest.importorskip("prometheus_client.parser")
    text = httpx.get(f"{served.url}/metrics").text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    blocks = [samples[("kvcatch_blocks", "toy", state)] for state in ("free", "cached", "active")]
    assert sum(blocks) == samples[("kvcatch_num_blocks", "toy")] == 100
    assert samples[("kvcatch_generated_tokens_total", "toy")] == 8


BAD: list[tuple[str, Any, int, str]] = [
    ("completions", {"model": "toy"}, 400, "prompt"),
    ("completions", {"model": "toy", "prompt": "x", "max_tokens": "8"}, 400, "max_tokens"),
    ("completions", {"model": "toy", "prompt": "x", "max_tokens": -1}, 400, "max_tokens = -1"),
    ("completions", {"model": "toy", "prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ("completions", {"model": "toy", "prompt": "x", "n": 1000}, 400, "n = 1000"),
    ("completions", {"model": "toy", "prompt": "x", "nonsense": 1}, 400, "nonsense"),
    ("completions", {"model": "toy", "prompt": "x", "echo": True}, 400, "echo is not served"),
    ("completions", {"model": "toy", "prompt": []}, 400, "0 prompts"),
    ("completions", {"model": "toy", "prompt": ["x"] * 300}, 400, "300 prompts"),
    ("completions", {"model": "toy", "prompt": ""}, 400, "no token"),
    ("completions", {"model": "toy", "prompt": [1, 5000]}, 400, "token 5000"),
    ("completions", {"model": "toy", "prompt": [1.5]}, 400, "prompt"),
    ("completions", {"model": "toy", "prompt": "x" * 500}, 400, "never_fits"),
    ("completions", {"model": "gpt", "prompt": "x"}, 404, "'gpt'"),
    ("completions", {"model": "toy", "prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("completions", {"model": "toy", "prompt": "x", "stop": [""]}, 400, "stop"),
    ("completions", [1, 2], 400, "JSON object"),
    ("chat/completions", {"model": "toy", "messages": []}, 400, "messages"),
    (
        "chat/completions",
        {"model": "toy", "messages": [{"role": "king", "content": "x"}]},
        400,
        "role",
    ),
    ("chat/completions", {"model": "toy", "messages": [{"role": "user"}]}, 400, "content"),
    (
        "chat/completions",
        {"model": "toy", "messages": [{"role": "user", "content": ""}]},
        400,
        "empty",
    ),
    (
        "chat/completions",
        {"model": "toy", "messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        400,
        "tools is not served",
    ),
    (
        "chat/completions",
        {"model": "toy", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        400,
        "top_logprobs needs",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), BAD)
def test_bad_bodies(served: Served, path: str, body: Any, status: int, message: str) -> None:
    got = httpx.post(f"{served.url}/v1/{path}", json=body)
    error = got.json()["error"]
    assert got.status_code == status
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_two_hundred_malformed_bodies_are_each_a_4xx_with_a_message(served: Served) -> None:
    import random

    rng = random.Random(3)
    good = json.dumps(
        {"model": "toy", "prompt": "abc", "max_tokens": 2, "temperature": 0, "stop": ["q"]}
    ).encode()
    junk: list[Any] = [None, True, -1, 1e400, "x" * 50, [], {}, [[]], {"a": 1}, "\ud800", 1 << 80]
    bodies: list[bytes] = [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 20_000, b'{"model":NaN}']
    while len(bodies) < 200:
        kind = rng.randrange(3)
        if kind == 0:  # cut short
            bodies.append(good[: rng.randrange(len(good))])
        elif kind == 1:  # a byte destroyed outside of texts
            at = rng.choice([i for i, byte in enumerate(good) if byte in b'{}:,["]'])
            bodies.append(good[:at] + b"\x00" + good[at + 1 :])
        else:  # a field of another kind
            data = json.loads(good)
            field = rng.choice(["model", "prompt", "max_tokens", "temperature"])
            value = rng.choice([v for v in junk if v is not None])
            if field == "prompt" and isinstance(value, str):
                value = {"x": value}
            if field == "temperature" and value in (-1, 1 << 80):
                value = "x"
            data[field] = value
            bodies.append(json.dumps(data).encode())
    with httpx.Client() as client:
        for body in bodies:
            for path in ("completions", "chat/completions"):
                got = client.post(f"{served.url}/v1/{path}", content=body)
                assert 400 <= got.status_code < 500, (path, body[:100], got.text)
                assert got.json()["error"]["message"]
    assert served.client().completions.create(prompt="abc", extra_body=GO_ON, **OPTIONS)


def test_unknown_paths_and_methods(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/nothing").status_code == 404
    got = httpx.get(f"{served.url}/v1/completions")
    assert got.status_code == 405
    assert "GET /v1/completions" in got.json()["error"]["message"]


def test_a_body_too_long_is_refused_while_it_comes(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(settings={"max_body_bytes": 1000})

    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 500

    got = httpx.post(f"{served.url}/v1/completions", content=pieces())
    assert got.status_code == 413


def test_the_key(serve_toy: Callable[..., Served]) -> None:
    import openai

    served = serve_toy(settings={"api_key": "s3cret"})
    assert served.client(api_key="s3cret").models.list().data
    for wrong in ("s3cre", "s3cret2", ""):
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key=wrong or "x").models.list()
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    assert httpx.get(f"{served.url}/metrics").status_code == 401
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_full_queue_is_429_with_a_reason(serve_toy: Callable[..., Served]) -> None:
    import openai

    served = serve_toy(governor=GovernorConfig(max_queued=1), max_num_seqs=1)
    served.runner.pause = 0.02
    client = served.client()
    options = {**OPTIONS, "max_tokens": 60}

    def ask(number: int) -> str:
        try:
            client.completions.create(prompt=f"{number}", extra_body=GO_ON, **options)
        except openai.RateLimitError as error:
            return str(error)
        return "answered"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(ask, range(6)))
    assert 2 <= results.count("answered") < 6
    assert all(r == "answered" or "max_queued is 1" in r for r in results)
    served.engine.check_idle()


def idle_within(served: Served, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if served.engine.is_idle:
            return True
        time.sleep(0.01)
    return False


def test_a_client_that_goes_away_frees_its_blocks(served: Served) -> None:
    served.runner.pause = 0.02
    body = {"model": "toy", "prompt": "abc", "max_tokens": 190, "temperature": 0, **GO_ON}
    for stream in (True, False):
        raw = json.dumps({**body, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            while not served.engine.scheduler.running:
                time.sleep(0.005)
            if stream:
                connection.recv(100)
        assert idle_within(served, 1.0), f"stream={stream}: still {served.engine!r}"
        served.engine.check_idle()
    assert served.engine.counters.finished == {"abort": 2}


def test_many_clients_at_once(served: Served) -> None:
    client = served.client()

    def ask(number: int) -> bool:
        prompt = f"number {number} " + "x" * (number % 7)
        got = client.completions.create(
            prompt=prompt, extra_body=GO_ON, stream=number % 2 == 0, **OPTIONS
        )
        text = "".join(c.choices[0].text for c in got) if number % 2 == 0 else got.choices[0].text
        return text == answer(prompt, 8)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(60)))
    assert idle_within(served, 2)
    served.engine.check_idle()


def test_an_engine_that_dies_is_503_and_unhealthy(served: Served) -> None:
    import openai

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    served.runner.forward = fail  # type: ignore[method-assign]
    client = served.client()
    with pytest.raises(openai.InternalServerError, match="broken"):
        client.completions.create(prompt="x", **OPTIONS)
    assert httpx.get(f"{served.url}/health").status_code == 503
