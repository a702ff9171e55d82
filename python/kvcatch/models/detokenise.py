"""From tokens to text as they come, without ever showing half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Detokeniser"]

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

MAX_PARTIAL = 3
"""A UTF-8 character has at most 4 bytes, so at most 3 wait for the rest."""

MAX_WINDOW = 64
KEPT = 8
"""Tokens of output without a whole character after which the window is cut, and what is kept of it."""


class Detokeniser:
    """Turns one sequence's output tokens into text, a piece at a time.

    The pieces joined are the text of all tokens decoded at once. What may still become a character is kept back.
    Each token decodes a short window again, for what a token reads like may depend on those before it.

    Args:
        decode: tokens to text, special tokens left out (:meth:`Tokenizer.decode`).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were given out."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain now and was not before; may be empty."""
        before = len(self._window)
        self._window += tokens
        if len(self._window) == before:
            return ""
        text = self._decode(self._window)
        held = _partial(text)
        piece = text[self._shown : len(text) - held]
        self._shown = max(self._shown, len(text) - held)
        if not held and piece:
            self._restart(len(self._window) - 1)
        elif len(self._window) > MAX_WINDOW:
            self._restart(len(self._window) - KEPT)
        return piece

    def finish(self) -> str:
        """The rest: bytes that were kept back and now stay without their character."""
        piece = self._decode(self._window)[self._shown :] if self._window else ""
        self._window, self._shown = [], 0
        return piece

    def _restart(self, start: int) -> None:
        """Keep the window's tokens from ``start`` on, with the same characters still to be shown."""
        held = len(self._decode(self._window)) - self._shown
        self._window = self._window[start:]
        self._shown = len(self._decode(self._window)) - held


def _partial(text: str) -> int:
    """Characters at the end that may be the beginning of one still incomplete."""
    return min(MAX_PARTIAL, len(text) - len(text.rstrip(REPLACEMENT)))
