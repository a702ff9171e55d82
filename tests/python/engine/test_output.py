"""Stop texts and endings: what is certain is released, what may become a stop text is held back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import GREEDY, make, run

from kvcatch.engine.output import OutputText
from kvcatch.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.engine.engine import Engine


class Letters:
    """Token t is a letter; token 0 ends."""

    eos_ids = (0,)

    def detokeniser(self) -> Letters:
        return self

    def push(self, tokens: Iterable[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    def finish(self) -> str:
        return ""


def release(text: str, *stop: str) -> tuple[str, bool]:
    output, out = OutputText(Letters(), stop), ""
    for letter in text:
        more, met = output.add(ord(letter) - ord("a"))
        out += more
        if met:
            return out, True
    return out + output.end(), False


@pytest.mark.parametrize(
    ("text", "stop", "left", "met"),
    [
        ("abcdef", ("cd",), "ab", True),
        ("abcxcd", ("cd",), "abcx", True),
        ("abc", ("cd",), "abc", False),
        ("aab", ("ab",), "a", True),
        ("aaaab", ("aab",), "aa", True),
        ("abcd", ("bc", "abcd"), "a", True),
        ("xyz", (), "xyz", False),
    ],
)
def test_a_stop_text_is_cut_off(text: str, stop: tuple[str, ...], left: str, met: bool) -> None:
    assert release(text, *stop) == (left, met)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_released_is_the_text_before_the_first_stop_text_completed(
    text: str, stop: list[str]
) -> None:
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if ends:
        end = min(ends)
        starts = [text[:end].find(s) for s in stop if s in text[:end]]
        assert release(text, *stop) == (text[: min(starts)], True)
    else:
        assert release(text, *stop) == (text, False)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_released_early_has_to_be_taken_back(text: str, stop: list[str]) -> None:
    final, _ = release(text, *stop)
    output, out = OutputText(Letters(), tuple(stop)), ""
    for letter in text:
        more, met = output.add(ord(letter) - ord("a"))
        out += more
        assert final.startswith(out)
        if met:
            break


def texts(engine: Engine) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    while not engine.is_idle:
        for delta in engine.step():
            text, _ = found.get(delta.request_id, ("", ""))
            found[delta.request_id] = (
                text + delta.text,
                delta.finish.value if delta.finish else "",
            )
    engine.check_idle()
    return found


def test_the_engine_ends_at_stop_texts_stop_tokens_and_lengths() -> None:
    plain = make()
    plain.text = Letters()
    plain.add(
        [5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), request_id="a"
    )
    text, reason = texts(plain)["a"]
    assert (len(text), reason) == (20, "length")
    engine = make()
    engine.text = Letters()
    stop = text[6:9]
    at = text.find(stop)
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    engine.add([5, 6, 7], SamplingParams(stop=(stop,), **common), request_id="s")
    late = SamplingParams(stop=(stop,), min_tokens=15, **common)
    engine.add([5, 6, 7], late, request_id="m")
    short = SamplingParams(temperature=0, max_tokens=3)
    engine.add([5, 6, 7], short, request_id="l")
    found = texts(engine)
    assert found["s"] == (text[:at], "stop")
    assert found["m"][1] in ("length", "stop")
    assert found["l"] == (text[:3], "length")


def test_stop_tokens_end_the_output_and_are_not_text() -> None:
    engine = make()
    engine.text = Letters()
    engine.add([5, 6, 7], GREEDY, request_id="x")
    tokens = run(engine)[("x", 0)]
    again = make()
    again.text = Letters()
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[4],))
    again.add([5, 6, 7], params, request_id="x")
    first = tokens.index(tokens[4])
    text, reason = texts(again)["x"]
    assert (len(text), reason) == (first, "stop")


def test_min_tokens_forbids_the_end_tokens() -> None:
    engine = make()
    engine.add([5, 6, 7], GREEDY, request_id="x")
    tokens = run(engine)[("x", 0)]
    held = make()
    params = SamplingParams(
        temperature=0, max_tokens=12, stop_token_ids=tuple(set(tokens)), min_tokens=6
    )
    held.add([5, 6, 7], params, request_id="x")
    got = run(held)[("x", 0)]
    assert len(got) >= 6
    assert not set(got[:6]) & set(tokens)
