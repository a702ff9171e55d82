"""Replaced attributes of vLLM's classes and modules, each with its original, so that all can go back."""

from __future__ import annotations

from typing import Any

__all__ = ["original", "replace", "restore_all"]

_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name`` and remember what it was."""
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def original(owner: Any, name: str) -> Any:
    """What ``owner.name`` is now: to be called by what replaces it."""
    return getattr(owner, name)


def restore_all() -> None:
    """Put every original back, last replaced first."""
    while _replaced:
        owner, name, value = _replaced.pop()
        setattr(owner, name, value)
