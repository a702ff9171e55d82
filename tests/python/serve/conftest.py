"""Servers for the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from serving import Served, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def serve_toy() -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def make(**options: Any) -> Served:
        servers.append(start(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve_toy: Callable[..., Served]) -> Served:
    return serve_toy()
