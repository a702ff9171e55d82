"""OpenAI's answers, whole and streamed, for both calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcatch.engine.output import Delta
    from kvcatch.engine.request import FinishReason, Request
    from kvcatch.engine.sampling import TokenLogprobs

__all__ = ["Answer", "ChatAnswer", "Choice", "CompletionAnswer", "usage_of"]


@dataclass(slots=True)
class Choice:
    """One continuation as it grows."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    num_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Take in what a step added."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.num_tokens += len(delta.tokens)
        self.finish = _reason(delta.finish) or self.finish


def _reason(finish: FinishReason | None) -> str | None:
    """OpenAI knows ``stop`` and ``length``."""
    if finish is None:
        return None
    return "length" if finish.value == "length" else "stop"


def usage_of(requests: Sequence[Request], generated: int) -> dict[str, Any]:
    """Tokens of prompts and outputs; ``cached_tokens`` were found in the prefix cache."""
    prompt = sum(len(request.prompt) for request in requests)
    cached = sum(request.hit_tokens or 0 for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answer:
    """What the two calls share.

    Args:
        name: id of the answer.
        created: seconds since the epoch.
        model: name of the model.
        token_text: a token as text, special ones written out.
    """

    kind = ""
    chunk_kind = ""

    def __init__(
        self, name: str, created: int, model: str, token_text: Callable[[int], str]
    ) -> None:
        self._head = {"id": name, "created": created, "model": model}
        self._token_text = token_text

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""
        return {
            **self._head,
            "object": self.kind,
            "choices": [self.choice(choice) for choice in choices],
            "usage": usage,
        }

    def chunk(
        self, choices: list[dict[str, Any]], **usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One piece of a streamed answer; ``usage`` is there, ``None`` until the last, where it was asked for."""
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One continuation of a whole answer."""
        raise NotImplementedError

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Pieces that come before any text."""
        raise NotImplementedError

    def piece(self, index: int, offset: int, delta: Delta) -> dict[str, Any]:
        """What a step added to one continuation; ``offset``: characters of it before."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    """Answers of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One continuation of a whole answer."""
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish,
        }

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def piece(self, index: int, offset: int, delta: Delta) -> dict[str, Any]:
        """What a step added to one continuation."""
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.logprobs, offset),
            "finish_reason": _reason(delta.finish),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if not found:
            return None
        texts = [self._token_text(one.token) for one in found]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [
                {self._token_text(token): value for token, value in one.top} for one in found
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """Answers of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One continuation of a whole answer."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish,
        }

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Each continuation's role."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": None}
            for index in range(count)
        ]

    def piece(self, index: int, offset: int, delta: Delta) -> dict[str, Any]:
        """What a step added to one continuation."""
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.finish is None else {},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": _reason(delta.finish),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not found:
            return None
        return {
            "content": [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in one.top],
                }
                for one in found
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
