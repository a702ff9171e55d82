from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.laws import LAWS, QueuedRequest, RunningRequest
from kvcatch.laws.ask import parse_requests, parse_running, read_question

STATE = {"num_blocks": 100, "block_size": 16, "free": 60}
VALUES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from([2**48, 2**70, 0.5, -0.0, 1e308, "5", "", [], {}, [1], {"a": 1}])
)
STATE_NAMES = (
    "num_blocks", "block_size", "free", "cached", "pinned", "reserved", "running", "num_running",
    "num_deferred", "null_blocks", "max_num_seqs", "token_budget", "chunked_prefill",
    "long_prefill_threshold", "watermark", "max_model_len", "new_token_ratio", "spec_tokens",
    "largest_run", "other",
)  # fmt: skip
REQUEST_NAMES = (
    "prompt_tokens", "max_tokens", "generated", "hit_tokens", "active_hit_tokens", "held_blocks",
    "computed_tokens", "loading", "deferred", "name", "count", "other",
)  # fmt: skip


def test_requests_are_read() -> None:
    assert parse_requests(["512:4096x2", "7", "3*2"]) == (
        QueuedRequest(512, 4096),
        QueuedRequest(512, 4096),
        QueuedRequest(7),
        QueuedRequest(3),
        QueuedRequest(3),
    )
    assert parse_running(["100:20:300x2", "5"]) == (
        RunningRequest(100, 20, 300),
        RunningRequest(100, 20, 300),
        RunningRequest(5),
    )


def test_an_item_counts() -> None:
    text = json.dumps({"state": STATE, "queue": [{"prompt_tokens": 5, "count": 3}]})
    assert len(read_question(text, None, None).queue) == 3


@pytest.mark.parametrize("text", ["", "x", "5:", ":5", "5x", "-5", "5:-5", "5 5", "5.0", "1e3"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="request = "):
        parse_requests([text])
    with pytest.raises(InvalidArgument, match="running request = "):
        parse_running([text])


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_requests, parse_running):
        refused = ""
        try:
            parse([text])
        except InvalidArgument as error:
            refused = str(error)
        assert "\n" not in refused


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(STATE_NAMES), VALUES, max_size=5),
    st.lists(st.dictionaries(st.sampled_from(REQUEST_NAMES), VALUES, max_size=4), max_size=4),
    st.sampled_from(sorted(LAWS)),
)
def test_any_question_is_answered_or_refused(
    state: dict[str, Any], queue: list[dict[str, Any]], law: str
) -> None:
    items = [{"prompt_tokens": 100, "max_tokens": 50, **item} for item in queue]
    text = json.dumps({"state": {**STATE, **state}, "queue": items})
    refused = ""
    try:
        question = read_question(text, None, law)
        decisions = question.answer()
    except InvalidArgument as error:
        refused = str(error)
    assert "\n" not in refused
    if refused:
        return
    data = question.to_dict(decisions)
    assert data["enter"] + data["wait"] + data["rejected"] == len(question.queue)
    json.dumps(data, allow_nan=False)
