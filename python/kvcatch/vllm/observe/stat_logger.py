"""The stat logger that vLLM's front end loads: the entry point ``vllm.stat_logger_plugins``.

``StatLogger`` is made when it is asked for, since it is a subclass of vLLM's own base class. Where
``KVCATCH_VLLM`` does not name ``observe`` it does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcatch.errors import KvcatchError
from kvcatch.vllm.observe.address import socket_path
from kvcatch.vllm.observe.front_end import FrontEndPages, Totals
from kvcatch.vllm.observe.publish import Publisher
from kvcatch.vllm.settings import Settings

__all__ = ["close", "totals_of"]

_log = logging.getLogger("vllm.kvcatch.observe")

_pages: FrontEndPages | None = None
_publisher: Publisher | None = None
_class: type | None = None


def __getattr__(name: str) -> Any:
    if name == "StatLogger":
        return _stat_logger()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def totals_of(vllm_config: Any, rank: int) -> Totals | None:
    """Sums of one engine, published by this process; None where observing is off or fails.

    Never raises: what is wrong is one line in the log.
    """
    global _pages, _publisher  # noqa: PLW0603 - one per process
    try:
        settings = Settings.read()
        if not settings.observe:
            return None
        if _pages is None:
            model = getattr(vllm_config.model_config, "served_model_name", None)
            if isinstance(model, (list, tuple)):
                model = model[0] if model else ""
            pages = FrontEndPages(str(model or vllm_config.model_config.model))
            path = socket_path(settings.socket, f"frontend-{rank}")
            if path is not None:
                publisher = Publisher(pages)
                if publisher.serve_socket(path):
                    _publisher = publisher
            _pages = pages
        return _pages.engines.setdefault(rank, Totals(rank))
    except KvcatchError as error:
        _log.warning("kvcatch: the front end is not observed: %s", error)
    except Exception as error:
        _log.warning("kvcatch: the front end is not observed: %s: %s", type(error).__name__, error)
    return None


def close() -> None:
    """Stop publishing."""
    global _pages, _publisher  # noqa: PLW0603
    if _publisher is not None:
        _publisher.close()
    _pages = _publisher = None


def _stat_logger() -> type:
    global _class  # noqa: PLW0603
    if _class is not None:
        return _class
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StatLogger(StatLoggerBase):  # type: ignore[misc]
        """Adds up what the front end sees of one engine."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._totals = totals_of(vllm_config, int(engine_index))

        def record(
            self,
            scheduler_stats: Any = None,
            iteration_stats: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            """Take in one iteration."""
            del args, kwargs
            if self._totals is not None:
                self._totals.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    _class = StatLogger
    return _class
