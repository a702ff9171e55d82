"""The entry point: reads the settings, checks this vLLM's shape, installs what is asked for."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument, KvcatchError
from kvcatch.vllm import patch
from kvcatch.vllm.settings import PREFIX, Settings

if TYPE_CHECKING:
    from kvcatch.vllm.versions import Shape

__all__ = ["register", "unregister"]

# Below vLLM's own logger, so that its handlers and its format apply.
logger = logging.getLogger("vllm.kvcatch")

_installed: Settings | None = None


def register() -> None:
    """Install what ``KVCATCH_VLLM`` asks for; called by vLLM in each of its processes, maybe twice.

    Never raises: whatever is wrong becomes one line in vLLM's log, and vLLM is left as it was.
    """
    global _installed  # noqa: PLW0603 - one per process, as the classes it patches
    if _installed is not None or not os.environ.get(PREFIX, "").strip(" ,"):
        return
    try:
        settings = Settings.read()
    except InvalidArgument as error:
        logger.error("kvcatch: %s. vLLM runs without kvcatch.", error)
        return
    if not settings.any:
        return
    try:
        from kvcatch.vllm.versions import Shape

        shape = Shape.read()
        _install(shape, settings)
    except KvcatchError as error:
        patch.restore_all()
        logger.error("kvcatch: %s. vLLM runs without kvcatch.", error)
        return
    except Exception as error:
        patch.restore_all()
        logger.error("kvcatch: %s: %s. vLLM runs without kvcatch.", type(error).__name__, error)
        return
    _installed = settings
    logger.info("kvcatch: %s in vLLM %s", ", ".join(settings.switches), shape.version)


def _install(shape: Shape, settings: Settings) -> None:
    if settings.pool or settings.evict:
        from kvcatch.vllm import pool

        pool.install(shape, settings)
    if settings.evict:
        from kvcatch.vllm import evict

        evict.install(shape, settings)
    if settings.order:
        from kvcatch.vllm import order

        order.install(shape, settings)
    if settings.observe:
        # By name: the observer's extra may be missing, and only this switch needs it.
        importlib.import_module("kvcatch.vllm.observe").install(shape, settings)


def unregister() -> None:
    """Put vLLM's own classes back and stop publishing; engines made meanwhile keep what they have."""
    global _installed  # noqa: PLW0603
    patch.restore_all()
    if _installed is not None and _installed.observe:
        importlib.import_module("kvcatch.vllm.observe").uninstall()
    _installed = None
