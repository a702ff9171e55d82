"""What clients, proxies and scripts do besides the plain calls: combinations, odd HTTP, answers cut short."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import math
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ToyTokenizer
from test_api import GO_ON, OPTIONS, answer, encode, text_of
from toy import expected

from kvcatch.engine.request import FinishReason
from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument
from kvcatch.serve.app import ServeSettings
from kvcatch.serve.server import bind, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving import Served

CHAT = [{"role": "user", "content": "hi"}]
BODY = {"model": "toy", "prompt": "abc", "temperature": 0, "max_tokens": 3, **GO_ON}


def test_n_streamed_for_several_prompts(served: Served) -> None:
    chunks = served.client().completions.create(
        prompt=["abc", "defg"], n=2, stream=True, extra_body=GO_ON, **OPTIONS
    )
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in ends, "a piece after the end"
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {i: answer("abc" if i < 2 else "defg", 8) for i in range(4)}
    assert ends == dict.fromkeys(range(4), "length")


def test_chat_logprobs_streamed_are_those_of_the_whole_answer(served: Served) -> None:
    client = served.client()
    options = {
        **OPTIONS,
        "messages": CHAT,
        "extra_body": GO_ON,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(n=2, **options)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(stream=True, n=2, **options):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            found[choice.index] += choice.logprobs.content
    for choice in whole.choices:
        assert [one.token for one in found[choice.index]] == [
            one.token for one in choice.logprobs.content
        ]
        assert all(len(one.top_logprobs) == 2 for one in found[choice.index])


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stop_text_streamed_never_shows(served: Served, logprobs: int | None) -> None:
    whole = answer("hello", 8)
    stop = whole[3:6]
    chunks = list(
        served.client().completions.create(
            prompt="hello",
            stop=["\u4e00" * 5, stop],
            stream=True,
            logprobs=logprobs,
            extra_body=GO_ON,
            **OPTIONS,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("chat", [False, True])
def test_usage_is_streamed_only_where_it_is_asked_for(served: Served, chat: bool) -> None:
    path = "chat/completions" if chat else "completions"
    body: dict[str, Any] = {**BODY, "stream": True}
    if chat:
        del body["prompt"]
        body["messages"] = CHAT
    for options in (None, {"include_usage": False}, {"include_usage": True}):
        got = httpx.post(f"{served.url}/v1/{path}", json={**body, "stream_options": options})
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in got.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        if options and options["include_usage"]:
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 3
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
        else:
            assert all("usage" not in chunk for chunk in chunks)
            assert chunks[-1]["choices"]


def test_an_engine_that_dies_in_the_middle_of_a_stream_is_an_error_of_the_client(
    served: Served,
) -> None:
    import openai

    served.runner.pause = 0.05
    stream = served.client().completions.create(
        prompt="abc", stream=True, extra_body=GO_ON, **{**OPTIONS, "max_tokens": 150}
    )
    next(stream)

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    served.runner.forward = fail  # type: ignore[method-assign]
    with pytest.raises(openai.APIError, match="broken"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ended_by_the_server_does_not_look_complete(served: Served, stream: bool) -> None:
    import threading

    import openai

    served.runner.pause = 0.02
    engine = served.engine

    def end() -> None:
        while not engine.scheduler.running:
            time.sleep(0.01)
        step = engine.step

        def last_step() -> Any:
            engine.step = step  # type: ignore[method-assign]
            (name,) = engine.requests
            deltas = engine.abort(name)
            assert [delta.finish for delta in deltas] == [FinishReason.ABORT]
            return deltas

        engine.step = last_step  # type: ignore[method-assign]

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(openai.APIError, match="did not wait"):
        list(
            served.client().completions.create(
                prompt="abc", stream=stream, extra_body=GO_ON, **{**OPTIONS, "max_tokens": 150}
            )
        )
    thread.join()


def test_long_prompts_of_every_kind_of_character(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(num_blocks=30_000, max_model_len=110_000, max_num_batched_tokens=50_000)
    prompt = "日本語🙂é\u0301\u200d\u202e\x00" * 10_000
    got = served.client().completions.create(prompt=prompt, extra_body=GO_ON, **OPTIONS)
    assert got.usage.prompt_tokens == len(prompt)
    assert got.choices[0].text == text_of(expected(encode(prompt), 8))
    too_long = httpx.post(f"{served.url}/v1/completions", json={**BODY, "prompt": prompt * 2})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_one_connection_serves_many_calls(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    headers = {"Content-Type": "application/json"}
    ports = set()
    for extra in ({}, {"stream": True}, {"temperature": "x"}, {}):
        raw = json.dumps({**BODY, **extra})
        connection.request("POST", "/v1/completions", raw, headers)
        got = connection.getresponse()
        assert got.read()
        assert got.status == (400 if "temperature" in extra else 200)
        assert connection.sock is not None, "closed"
        ports.add(connection.sock.getsockname()[1])
    assert len(ports) == 1
    connection.close()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_other_methods_say_what_is_allowed(served: Served, method: str) -> None:
    for path, allowed in (("/v1/completions", "POST"), ("/v1/models", "GET")):
        got = httpx.request(method, served.url + path)
        assert got.status_code == 405
        assert got.headers["allow"] == allowed
        if method != "HEAD":
            assert method in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
def test_content_types(served: Served, kind: str | None, status: int) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    got = httpx.post(
        f"{served.url}/v1/completions", content=json.dumps(BODY).encode(), headers=headers
    )
    assert got.status_code == status
    if status == 415:
        assert "must be application/json" in got.json()["error"]["message"]


def test_a_compressed_body_is_415(served: Served) -> None:
    for encoding, body in (("gzip", gzip.compress(json.dumps(BODY).encode())), ("br", b"x")):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        got = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
        assert got.status_code == 415
        assert encoding in got.json()["error"]["message"]


def test_of_duplicate_keys_the_last_counts(served: Served) -> None:
    raw = json.dumps(BODY)[:-1] + ', "max_tokens": 5}'
    got = httpx.post(f"{served.url}/v1/completions", content=raw.encode())
    assert got.json()["usage"]["completion_tokens"] == 5


def test_two_servers_do_not_know_each_other(serve_toy: Callable[..., Served]) -> None:
    one, two = serve_toy(), serve_toy(settings={"api_key": "k"})
    assert one.client().completions.create(prompt="a", **OPTIONS).choices
    assert httpx.get(f"{two.url}/v1/models").status_code == 401
    assert two.engine.counters.steps == 0
    one.stop()
    assert two.client(api_key="k").completions.create(prompt="a", **OPTIONS).choices


def test_an_unexpected_error_is_json_without_its_insides(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("kvcatch.serve.app.usage_of", fail)
    got = httpx.post(f"{served.url}/v1/completions", json=BODY)
    assert got.status_code == 500
    assert got.json()["error"]["message"] == "internal error: ZeroDivisionError"


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key"):
        ServeSettings("toy", key)


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"temperature": 1e-320}, 200),
        ({"temperature": 1e-40, "top_k": 3}, 200),
        ({"top_p": 1e-320}, 200),
        ({"top_p": 1e-46, "top_k": 5}, 200),
        ({"stop_token_ids": [99_999], "min_tokens": 2}, 400),
        ({"stop_token_ids": list(range(97)), "min_tokens": 2}, 400),
        ({"stop": ["x"] * 65}, 400),
        ({"priority": -(10**400)}, 200),
    ],
)
def test_no_body_ends_the_engine(served: Served, extra: dict[str, Any], status: int) -> None:
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 3, **extra}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == status, answer.text
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_model_name_that_no_answer_could_hold_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="model_name"):
        ServeSettings("\udcff")


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_drain_of_no_length_is_refused(served: Served, seconds: float) -> None:
    bound = bind("127.0.0.1", 0)
    with pytest.raises(InvalidArgument, match="drain_seconds"):
        asyncio.run(
            serve(served.engine, ToyTokenizer(), ServeSettings("toy"), bound, drain_seconds=seconds)  # type: ignore[arg-type]
        )
    assert bound.fileno() == -1


def test_names_with_quotes_and_line_breaks_leave_the_page_whole(
    serve_toy: Callable[..., Served],
) -> None:
    name = 'a"b\\c\nd{e="f"} é漢'
    served = serve_toy(settings={"model_name": name})
    served.runner.pause = 0.02
    adding = served.run(
        lambda: served.engine.add(
            [1, 2, 3],
            SamplingParams(max_tokens=150, ignore_eos=True),
            request_id=name,
            tags={"tenant": name, "route": "x" * 1000},
        )
    )
    assert adding is not None
    text = httpx.get(f"{served.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    ours = [one for one in samples if one.name.startswith("kvcatch_")]
    assert ours
    assert {one.labels["model_name"] for one in ours} == {name}
    held = {
        (one.labels["by"], one.labels["name"]): one.value
        for one in ours
        if one.name == "kvcatch_holdings_sequences"
    }
    assert held == {("owner", name): 1, ("tenant", name): 1, ("route", "x" * 128): 1}


def test_names_on_the_page_are_bounded(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=256)
    served.runner.pause = 0.02
    for number in range(300):
        served.run(
            lambda number=number: served.engine.add(
                [1, number % 97], SamplingParams(max_tokens=20), tags={"tenant": f"t{number}"}
            )
        )
        if number % 20 == 0:
            text = httpx.get(f"{served.url}/metrics").text
            series = [
                line for line in text.splitlines() if line.startswith("kvcatch_holdings_blocks{")
            ]
            assert len(series) <= 3 * 11
    while not served.engine.is_idle:
        time.sleep(0.01)
    text = httpx.get(f"{served.url}/metrics").text
    assert not [line for line in text.splitlines() if line.startswith("kvcatch_holdings_")]
    served.run(served.engine.check_idle)


def begun_body(served: Served) -> socket.socket:
    """A connection over which the head of a call has come, and the first byte of its body."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    return connection


def test_a_body_that_does_not_come_is_408(serve_toy: Callable[..., Served]) -> None:
    served = serve_toy(settings={"body_seconds": 0.2})
    with begun_body(served) as connection:
        got = connection.recv(4096).decode()
        assert got.startswith("HTTP/1.1 408 "), got
        while piece := connection.recv(4096):
            got += piece.decode()
    assert "1 bytes of the body came within 0.2 s" in got


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server(
    serve_toy: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_toy()
    for _ in range(5):
        begun_body(served).close()
    assert httpx.get(f"{served.url}/health").status_code == 200
    time.sleep(0.3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
