from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.geometry.strict_json import parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_what_json_writes_is_read_back(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40))
def test_anything_else_is_one_line(data: bytes | str) -> None:
    message = "read"
    try:
        parse_json(data)
    except ValueError as error:
        message = str(error)
    assert message.strip()
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": {"b": 1, "b": 1}}', "'b' is there twice in one object"),
        ("[Infinity]", "Infinity is not a number"),
        ("1" * 41, "a number of 41 digits"),
        ("{" * 50_000, "not JSON"),
        ("[" * 50_000, "nested too deeply"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_forty_digits_are_a_number() -> None:
    assert parse_json("9" * 40) == 10**40 - 1
