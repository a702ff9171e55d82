"""Patches vLLM's Scheduler: an observer per instance, and brackets around what moves blocks."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvcatch.vllm import patch
from kvcatch.vllm.observe.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.vllm.observe.tags import Tagger

__all__ = ["WANTED", "is_watched", "observer_of", "watch"]

_log = logging.getLogger("vllm.kvcatch.observe")
_KEY = (
    "_kvcatch_observer"  # read by getattr: asking for `__dict__` slows an object's other attributes
)

WANTED = ("__init__", "schedule", "update_from_output", "finish_requests")
"""Methods of the Scheduler that are patched."""


def observer_of(scheduler: Any) -> Observer | None:
    """The observer of a scheduler; None where there is none."""
    observer: Observer | None = getattr(scheduler, _KEY, None)
    return observer


def is_watched(scheduler_class: Any) -> bool:
    """Whether the class is patched already."""
    return getattr(scheduler_class.schedule, "kvcatch_observes", False) is True


def watch(
    scheduler_class: Any, tagger: Tagger, keep: int, started: Callable[[Observer], None]
) -> None:
    """Patch the class, so that each of its instances gets an observer; ``patch.restore_all`` undoes it.

    Args:
        scheduler_class: vLLM's Scheduler.
        tagger: Where requests come from.
        keep: Refusals kept per scheduler.
        started: Told of every observer; must not raise.
    """
    init, schedule = (patch.original(scheduler_class, name) for name in WANTED[:2])

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, *args, **kwargs)
        try:
            observer = Observer(self, schedule, tagger, keep)
            setattr(self, _KEY, observer)
        except Exception as error:
            _log.warning(
                "kvcatch: this scheduler is not observed: %s: %s", type(error).__name__, error
            )
            return
        started(observer)

    @functools.wraps(schedule)
    def observed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = getattr(self, _KEY, None)
        if observer is None:
            return schedule(self, *args, **kwargs)
        with observer.lock:
            observer.begin()
            output = schedule(self, *args, **kwargs)
            observer.end(output)
            return output

    observed_schedule.kvcatch_observes = True  # type: ignore[attr-defined]
    patch.replace(scheduler_class, "__init__", __init__)
    patch.replace(scheduler_class, "schedule", observed_schedule)
    for name in WANTED[2:]:
        patch.replace(scheduler_class, name, _locked(patch.original(scheduler_class, name)))
    if not callable(getattr(scheduler_class, "make_stats", None)):
        return
    make_stats = patch.original(scheduler_class, "make_stats")

    @functools.wraps(make_stats)
    def observed_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = getattr(self, _KEY, None)
        if observer is not None:
            observer.report()
        return make_stats(self, *args, **kwargs)

    patch.replace(scheduler_class, "make_stats", observed_stats)


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method under the observer's lock: a reader never copies blocks that are half given back."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = getattr(self, _KEY, None)
        if observer is None:
            return method(self, *args, **kwargs)
        with observer.lock:
            return method(self, *args, **kwargs)

    return locked
