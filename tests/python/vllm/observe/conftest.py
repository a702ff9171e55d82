"""Observed schedulers of vLLM's shape; vLLM itself is not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch.vllm import patch
from kvcatch.vllm.observe.hooks import observer_of, watch
from kvcatch.vllm.observe.pages import EnginePages, Names
from kvcatch.vllm.observe.tags import Tagger

sys.path.insert(0, str(Path(__file__).parent))
from fake_vllm import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Observed:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        observer = observer_of(scheduler)
        assert observer is not None
        self.observer = observer
        self.pages = EnginePages(observer, Names("model", 0, "0.32.0", "test"), 3, 16)

    @property
    def head(self) -> dict[str, Any]:
        head: dict[str, Any] | None = self.pages.refusals()["head"]
        assert self.observer.faults == 0
        assert head is not None
        return head


@pytest.fixture
def observed() -> Iterator[Any]:
    """Makes observed schedulers, of which the tag ``tenant`` is what stands before the first dash."""
    own = {name: getattr(Scheduler, name) for name in ("__init__", "schedule")}
    watch(Scheduler, Tagger.parse(r"^(?P<tenant>[a-z]+)-"), 16, lambda observer: None)
    try:
        yield lambda **options: Observed(Scheduler(**options))
    finally:
        patch.restore_all()
        assert {name: getattr(Scheduler, name) for name in own} == own
