"""Tokens and chat text as the reference has them; streaming text never breaks a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from golden_texts import CHATS, MESSAGES, PLAIN, STRINGS
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs kvcatch[engine]")

from kvcatch import InvalidArgument
from kvcatch.models.chat import ChatTemplate
from kvcatch.models.detokenise import MAX_WINDOW, Detokeniser
from kvcatch.models.gguf import GGUFFile
from kvcatch.models.tokenizer import (
    Tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDENS = np.load(Path(__file__).with_name("goldens.npz"))


@pytest.fixture(scope="module")
def tokenizer(default_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(default_path))


@pytest.mark.parametrize("index", range(len(STRINGS)))
def test_ids_equal_the_reference(tokenizer: Tokenizer, index: int) -> None:
    wanted = json.loads(str(GOLDENS["strings"]))[index]
    assert tokenizer.encode(STRINGS[index]) == wanted
    assert tokenizer.decode(wanted, skip_special_tokens=False) == STRINGS[index]


def test_prompts_equal_the_reference(tokenizer: Tokenizer) -> None:
    got = [tokenizer.encode_chat([{"role": "user", "content": chat}]) for chat in CHATS]
    got += [tokenizer.encode(text) for text in PLAIN]
    assert got == json.loads(str(GOLDENS["prompts"]))


def test_chat_text_equals_the_reference(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    got = [tokenizer.chat_template.render(messages) for messages in MESSAGES]
    assert got == json.loads(str(GOLDENS["rendered"]))


def test_digits_are_split_off_before_spaces_are(tokenizer: Tokenizer) -> None:
    two_spaces = tokenizer.encode("  ")
    assert len(two_spaces) == 1
    assert tokenizer.encode("  9") == two_spaces + tokenizer.encode("9")


def test_what_ends_a_generation(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""


def test_folder_gives_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.chat_template is not None
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|im_end|>"},
                "chat_template": [
                    {"name": "rag", "template": "no"},
                    {"name": "default", "template": tokenizer.chat_template.source},
                ],
            }
        )
    )
    one = tokenizer_from_folder(tmp_path)
    assert one.eos_ids == {2}
    for text in STRINGS:
        assert one.encode(text) == tokenizer.encode(text)
    assert one.encode_chat(MESSAGES[1]) == tokenizer.encode_chat(MESSAGES[1])
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer_from_folder(tmp_path).eos_ids == {5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    both = tokenizer_from_folder(tmp_path)
    assert both.eos_ids == {0, 2}
    assert both.decode(both.encode_chat(MESSAGES[0])) == "Hi!"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="cannot be encoded: character"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("text", [*STRINGS, "👩‍👩‍👧‍👦" * 40, "日本語" * 60])
def test_streamed_text_is_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    stream, pieces = tokenizer.detokeniser(), []
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace("<|endoftext|>", "")
    for token in tokenizer.encode(text):
        pieces.append(stream.push([token]))
        assert plain.startswith("".join(pieces))
    assert "".join(pieces) + stream.finish() == plain
    if "\ufffd" not in text:
        assert "".join(pieces) == plain


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_tokens_of_any_kind_join_to_the_whole_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Also bytes that are no text: half characters, lone continuation bytes, many of them."""
    single = [tokenizer._tokenizer.token_to_id(c) for c in "âðĿĻŁĢĤ¬A"]  # leads and continuations
    assert None not in single
    tokens = data.draw(
        st.lists(
            st.sampled_from(single) | st.integers(0, tokenizer.vocab_size - 1), max_size=3 * 64
        )
    )
    stream, text, at = tokenizer.detokeniser(), "", 0
    while at < len(tokens):
        count = data.draw(st.integers(1, 3))
        text += stream.push(tokens[at : at + count])
        at += count
    assert text + stream.finish() == tokenizer.decode(tokens)


def test_a_long_run_without_a_character_decodes_a_bounded_window(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return tokenizer.decode(tokens)

    lead = tokenizer._tokenizer.token_to_id("ð")
    stream = Detokeniser(decode)
    text = "".join(stream.push([lead]) for _ in range(1000))
    assert text + stream.finish() == "\ufffd" * 1000
    assert max(lengths) <= MAX_WINDOW + 1


def test_pushing_nothing_and_finishing_twice(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokeniser()
    assert stream.push([]) == ""
    assert stream.push(tokenizer.encode("Hi")) == "Hi"
    assert stream.finish() == ""
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "must alternate"),
        ("{{ messages[3].content }}", [{"role": "user"}], "refuses"),
        ("{{ messages[0]['content'] + 1 }}", [{"role": "user", "content": "x"}], "refuses"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user"}], "refuses"),
        ("x", [{"content": "x"}], r"messages\[0\] has no role"),
        ("x", [{"role": "user", "content": 3}], r"messages\[0\].content"),
    ],
)
def test_messages_a_template_refuses(
    source: str, messages: list[dict[str, object]], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        ChatTemplate(source, {}).render(messages)


def test_templates_have_what_transformers_gives_them() -> None:
    template = ChatTemplate(
        "{%- for m in messages -%}\n"
        "    {%- if m.role == 'stop' -%}{%- break -%}{%- endif -%}\n"
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ extra }}\n"
        "{%- endfor -%}\n"
        "{% if add_generation_prompt %}\ngo{% endif %}",
        {"bos_token": "<s>"},
    )
    messages = [{"role": "user"}, {"role": "stop"}, {"role": "user"}]
    assert template.render(messages, extra=1) == '<s>{"a": "<é>"}1go'
    assert template.render(messages, add_generation_prompt=False) == '<s>{"a": "<é>"}'
    with pytest.raises(InvalidArgument, match="damaged"):
        ChatTemplate("{% if %}", {})
