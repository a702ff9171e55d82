"""Engines that are watched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from watch_make import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED = Path(__file__).resolve().parents[3].parent / "shared"


@pytest.fixture
def make_engine() -> Iterator[Callable[..., FakeEngine]]:
    """Makes endpoints that go away with the test."""
    made: list[FakeEngine] = []

    def make(mode: str = "ok", **options: Any) -> FakeEngine:
        made.append(FakeEngine(mode, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder of recordings beside the checkout."""
    path = SHARED / "recordings" / "vllm-0.32.0"
    if not path.is_dir():
        pytest.skip(f"no recordings in {path}")
    return path
