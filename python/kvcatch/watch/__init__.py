"""Watch running engines, or look through recordings of them: in a terminal, or as one page.

``Fleet`` looks at many endpoints side by side, ``view`` says what to show of them at a moment; ``screen``
draws that in a terminal, ``web`` serves it as a page.
"""

from kvcatch.watch.fleet import Endpoint, Fleet, read_recordings
from kvcatch.watch.replica import Replica, Rules
from kvcatch.watch.view import Row, rows, state

__all__ = ["Endpoint", "Fleet", "Replica", "Row", "Rules", "read_recordings", "rows", "state"]
