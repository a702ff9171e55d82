"""Needs vLLM 0.32: run with the Python of an environment made for ``tests/vllm``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
sys.path.insert(0, str(Path(__file__).parent))

from kvcatch.vllm import patch
from kvcatch.vllm.observe.hooks import observer_of, watch
from kvcatch.vllm.observe.pages import EnginePages, Names
from kvcatch.vllm.observe.tags import Tagger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcatch.vllm.observe.observer import Observer


class Observed:
    """A scheduler under observation and what is published of it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        observer = observer_of(scheduler)
        assert observer is not None
        self.observer: Observer = observer
        self.pages = EnginePages(observer, Names("model", 0, "0.32.0", "test"), 10, 16)

    @property
    def head(self) -> dict[str, Any]:
        head = self.pages.refusals()["head"]
        assert head is not None, self.pages.refusals()
        assert self.observer.faults == 0
        return head

    @property
    def waiting(self) -> dict[str, dict[str, Any]]:
        return {item["request"]: item for item in self.pages.refusals()["waiting"]}


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[Any]:
    """Makes observed schedulers; vLLM's own methods are back afterwards."""
    from real_scheduler import Scheduler, make_scheduler

    watch(Scheduler, Tagger.parse(r"^(?P<tenant>[a-z]+)-"), 64, lambda observer: None)
    try:
        yield lambda **options: Observed(make_scheduler(tmp_path, **options))
    finally:
        patch.restore_all()
