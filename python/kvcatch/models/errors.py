"""What is refused about a model: its file, or getting it."""

from __future__ import annotations

from kvcatch.errors import InvalidArgument, KvcatchError

__all__ = ["ModelError", "PullError"]


class ModelError(InvalidArgument):
    """A model that cannot be used: missing, truncated, damaged, or of a kind that is not read. Names the file."""


class PullError(KvcatchError):
    """The embedded default model is neither cached nor to be had; the message says why and what to do."""
