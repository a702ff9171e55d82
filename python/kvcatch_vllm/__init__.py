"""The entry points that vLLM loads in each of its processes: ``vllm.general_plugins``, ``vllm.stat_logger_plugins``.

A package of its own, so that nothing of ``kvcatch`` is imported unless ``KVCATCH_VLLM`` asks, and a ``kvcatch`` that
cannot be imported (built for another Python, half installed) is one line in vLLM's log. The plugin is ``kvcatch.vllm``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

__all__ = ["register"]

_VARIABLE = "KVCATCH_VLLM"
# Below vLLM's own logger, so that its handlers and its format apply.
_log = logging.getLogger("vllm.kvcatch")


def register() -> None:
    """Install what ``KVCATCH_VLLM`` asks for; never raises."""
    if not _is_asked():
        return
    try:
        from kvcatch.vllm import register as install
    except Exception as error:
        _log.error("kvcatch: cannot be imported: %s. vLLM runs without kvcatch.", _line(error))
        return
    install()


def __getattr__(name: str) -> Any:
    if name != "StatLogger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _is_asked():
        try:
            from kvcatch.vllm.observe.stat_logger import StatLogger
        except Exception as error:
            _log.error("kvcatch: the front end is not observed: %s", _line(error))
        else:
            return StatLogger
    return _silent()


def _is_asked() -> bool:
    return bool(os.environ.get(_VARIABLE, "").strip(" ,"))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _silent() -> type:
    """A stat logger that does nothing: vLLM wants a class of whatever entry point it finds."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Silent(StatLoggerBase):  # type: ignore[misc]
        """Does nothing."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to add up."""

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Silent
