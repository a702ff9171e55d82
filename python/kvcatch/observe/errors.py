"""What is refused while looking at an engine: an endpoint, a metrics body, a recording, a log."""

from __future__ import annotations

from kvcatch.errors import InvalidArgument, KvcatchError

__all__ = ["MetricsError", "RecordingError", "ScrapeError"]


class MetricsError(InvalidArgument):
    """A metrics body that cannot be believed: HTML, cut off, a series twice, NaN. Names the endpoint."""


class RecordingError(InvalidArgument):
    """A recording or log that cannot be read. The message names the file and the line."""


class ScrapeError(KvcatchError):
    """An endpoint that did not answer with a metrics body. Names the endpoint."""
