"""Text to tokens and back, from the same source as the weights.

A GGUF file carries vocabulary and merges and names its pre-tokenizer; a folder has ``tokenizer.json``. Both become a
``tokenizers.Tokenizer``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import ConfigError, InvalidArgument
from kvcatch.geometry.fields import Fields
from kvcatch.models.chat import ChatTemplate
from kvcatch.models.detokenise import Detokeniser
from kvcatch.models.errors import ModelError
from kvcatch.models.extras import need

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvcatch.models.gguf import GGUFFile

__all__ = ["PRE_TOKENIZERS", "Tokenizer", "tokenizer_from_folder", "tokenizer_from_gguf"]

CONTROL = 3
USER_DEFINED = 4
"""Values of ``tokenizer.ggml.token_type`` (llama.h): special tokens, and those matched before merging."""

END_OF_TURN = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
     "<|endofturn|>", "<end_of_turn>", "</s>", "<|eos|>"}
)  # fmt: skip
"""Special tokens that end a generation wherever they occur, whatever the one eos id of a GGUF file is."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "default": "gpt-2", "gpt-2": "gpt-2", "smollm": "smollm", "llama-bpe": "llama3",
    "llama3": "llama3", "llama-v3": "llama3",
}  # fmt: skip
"""Values of ``tokenizer.ggml.pre`` that are read, and the rule each stands for."""


class Tokenizer:
    """Text to tokens and back.

    Attributes:
        vocab_size: Ids are below it.
        bos_id: Token that begins a text; None where there is none.
        eos_ids: Tokens that end a generation.
        chat_template: None where the model has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        chat_template: str | None,
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        for token in self.eos_ids | ({bos_id} if bos_id is not None else set()):
            if not 0 <= token < self.vocab_size:
                raise ModelError(f"token id {token}: the vocabulary has {self.vocab_size}")
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            names = {"bos_token": bos_id, "eos_token": min(self.eos_ids, default=None)}
            texts = {k: tokenizer.id_to_token(v) for k, v in names.items() if v is not None}
            self.chat_template = ChatTemplate(chat_template, texts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text. Special tokens written out in it are recognised.

        Args:
            text: any text.
            add_special_tokens: begin with BOS where the model wants one; not for a rendered chat template, which
                has it.

        Raises:
            InvalidArgument: the text has a lone surrogate, which is no character.
        """
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidArgument(f"text cannot be encoded: {_reason(text, error)}") from error
        return list(encoded.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Tokens of a conversation, ending with the opening of the assistant's turn.

        Raises:
            InvalidArgument: the model has no chat template, or its template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidArgument("the model has no chat template: give it plain text")
        return self.encode(
            self.chat_template.render(messages, **variables), add_special_tokens=False
        )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def detokeniser(self) -> Detokeniser:
        """A streaming decoder for one sequence."""
        return Detokeniser(self.decode)

    def token_text(self, token: int) -> str:
        """One token as text, special ones written out."""
        return self.decode([token], skip_special_tokens=False)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size:,} tokens, ends with {sorted(self.eos_ids)}>"


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
        ConfigError: a kind of tokenizer that is not built here, by name; a field missing.
        ModelError: vocabulary, merges and types do not fit each other.
    """
    fields = Fields(file.metadata, str(file.path))
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        fields.fail(f"tokenizer model {kind!r} is not read: only gpt2 (byte-level BPE) is")
    pre = fields.text("tokenizer.ggml.pre") or "default"
    if pre not in PRE_TOKENIZERS:
        fields.reject("tokenizer.ggml.pre", f"only {', '.join(PRE_TOKENIZERS)} are read")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    merges = _strings(fields, "tokenizer.ggml.merges")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        fields.fail("tokenizer.ggml.token_type does not have one entry per token: damaged")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        fields.fail("a token of the vocabulary is there twice: damaged")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2:
            fields.fail(f"merge {merge!r} is not two tokens: damaged")
    bpe = _build_bpe(vocab, pairs, PRE_TOKENIZERS[pre], str(file.path))
    library = need("tokenizers")
    control = [tokens[index] for index in np.flatnonzero(types == CONTROL)]
    bpe.add_special_tokens([library.AddedToken(t, normalized=False, special=True) for t in control])
    defined = [tokens[index] for index in np.flatnonzero(types == USER_DEFINED)]
    bpe.add_tokens([library.AddedToken(t, normalized=False) for t in defined])
    bos = fields.optional_count("tokenizer.ggml.bos_token_id", minimum=0)
    if fields.flag("tokenizer.ggml.add_bos_token", False) and bos is not None:
        if bos >= len(tokens):
            fields.reject("tokenizer.ggml.bos_token_id", f"the vocabulary has {len(tokens)}")
        bpe.post_processor = library.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [fields.optional_count(f"tokenizer.ggml.{name}", minimum=0) for name in names]
    return Tokenizer(
        bpe,
        bos_id=bos,
        eos_ids={end for end in ends if end is not None}
        | {vocab[token] for token in control if token in END_OF_TURN},
        chat_template=fields.text("tokenizer.chat_template"),
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with ``tokenizer.json``, and what ends a generation.

    The ends are those of ``generation_config.json``, else of ``config.json``, else the eos token of
    ``tokenizer_config.json``. The chat template is ``chat_template.jinja`` or in ``tokenizer_config.json``.

    Raises:
        ModelError: a file is missing or damaged.
        ConfigError: a field of an impossible value.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        tokenizer = need("tokenizers").Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{path}: damaged: {_line(error)}") from error
    config = _read_json(folder / "tokenizer_config.json")
    ends: list[int] = []
    bos: int | None = None
    for name in ("generation_config.json", "config.json"):
        fields = _read_json(folder / name)
        value = fields.get("eos_token_id")
        ends = ends or (
            [fields.count("eos_token_id", minimum=0)]
            if isinstance(value, int)
            else fields.counts("eos_token_id") or []
        )
        bos = fields.optional_count("bos_token_id", minimum=0) if bos is None else bos
    if not ends:
        eos = tokenizer.token_to_id(_token_text(config, "eos_token") or "")
        ends = [] if eos is None else [eos]
    template = folder / "chat_template.jinja"
    return Tokenizer(
        tokenizer,
        bos_id=bos,
        eos_ids=ends,
        chat_template=template.read_text(encoding="utf-8")
        if template.is_file()
        else _default_template(config),
    )


def _build_bpe(vocab: dict[str, int], merges: list[Any], rule: str, where: str) -> Any:
    library = need("tokenizers")
    before = library.pre_tokenizers
    try:
        model = library.models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama3")
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{where}: vocabulary and merges do not fit: {_line(error)}") from error
    tokenizer = library.Tokenizer(model)
    if rule == "llama3":
        split = before.Split(library.Regex(_LLAMA3), "isolated")
        steps = [split, before.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        # Digits first, each alone: "a  12" keeps both spaces in one token. GPT-2's rule would split them.
        steps = [before.Digits(individual_digits=True)] if rule == "smollm" else []
        steps.append(before.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = before.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _line(error: Exception) -> str:
    """The first line of what a library says."""
    return str(error).partition("\n")[0]


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.names(name)
    if not value:
        fields.missing(name)
    return value


def _read_json(path: Path) -> Fields:
    if not path.is_file():
        return Fields({}, str(path))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return Fields(data, str(path))


def _token_text(fields: Fields, name: str) -> str | None:
    """A token written as text, or as an object with ``content``."""
    value = fields.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(fields: Fields) -> str | None:
    """The template; where there are several by name, the one called ``default``."""
    value = fields.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _reason(text: Any, error: Exception) -> str:
    """Why a text has no tokens: the tokenizer itself says no more of a lone surrogate than that it is no text."""
    if not isinstance(text, str):
        return str(error)
    at = next((i for i, one in enumerate(text) if "\ud800" <= one <= "\udfff"), None)
    if at is None:
        return str(error)
    return f"character {at} is {text[at]!r}, a lone surrogate: input that is not UTF-8?"
