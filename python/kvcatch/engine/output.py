"""Tokens to text as they come, and when an output ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcatch.engine.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvcatch.engine.request import Branch
    from kvcatch.engine.sampling import TokenLogprobs

__all__ = ["Delta", "Detokeniser", "OutputText", "TextSource"]


class Detokeniser(Protocol):
    """Turns tokens into text, one by one."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain now and was not before; empty while a character is unfinished."""

    def finish(self) -> str:
        """What is left unfinished at the end."""


class TextSource(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an output."""

    def detokeniser(self) -> Detokeniser:
        """A new detokeniser for one output."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one branch.

    Attributes:
        request_id: the request.
        index: which of its continuations.
        tokens: token ids chosen.
        text: text that became certain: what may still turn out to begin a stop text is held back.
        logprobs: of the tokens, where asked for.
        finish: why the branch ended, if it did.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


@dataclass(slots=True)
class OutputText:
    """The text of one branch: what is certain, and what may still become a stop text."""

    detokeniser: Detokeniser | None
    stop: tuple[str, ...] = ()
    held: str = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Text that became certain by this token, and whether a stop text was met."""
        if self.detokeniser is None:
            return "", False
        self.held += self.detokeniser.push((token,))
        return self._release()

    def end(self) -> str:
        """Text that becomes certain because the output ends here."""
        if self.detokeniser is None:
            return ""
        self.held += self.detokeniser.finish()
        certain, met = self._release()
        if not met:
            certain, self.held = certain + self.held, ""
        return certain

    def _release(self) -> tuple[str, bool]:
        found = [(at, stop) for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            at, _ = min(found)
            certain, self.held = self.held[:at], ""
            return certain, True
        keep = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        cut = len(self.held) - keep
        certain, self.held = self.held[:cut], self.held[cut:]
        return certain, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def ending(
    branch: Branch, token: int, eos_ids: Collection[int], *, stopped: bool
) -> FinishReason | None:
    """Why a branch ends after this token, its last; ``None`` when it goes on."""
    params = branch.request.params
    if branch.num_generated >= params.min_tokens:
        if stopped or token in params.stop_token_ids:
            return FinishReason.STOP
        if not params.ignore_eos and token in eos_ids:
            return FinishReason.STOP
    if branch.num_generated >= branch.request.max_tokens:
        return FinishReason.LENGTH
    return None
