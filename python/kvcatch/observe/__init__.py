"""Look at a running engine: its metrics, its log, a recording of either; and say what keeps requests out.

Never imports the engine. ``Reader`` turns a metrics body into ``EngineSample`` records,
``diagnose`` turns a window of them into a verdict.
"""

from kvcatch.observe.engines import FAMILIES
from kvcatch.observe.errors import MetricsError, RecordingError, ScrapeError
from kvcatch.observe.prometheus import Reader
from kvcatch.observe.sample import EngineSample

__all__ = [
    "FAMILIES",
    "EngineSample",
    "MetricsError",
    "Reader",
    "RecordingError",
    "ScrapeError",
]
