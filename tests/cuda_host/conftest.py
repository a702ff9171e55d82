"""Tests of the CUDA kernels on the CPU: skipped, with the reason, where there is nothing to build them with."""

from __future__ import annotations

import pytest

from cuda_host.build import prune, unavailable


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitizer: runs kernels in the build for a sanitizer; takes a minute or so"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := unavailable():
        for item in items:
            if "cuda_host" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_sessionfinish() -> None:
    prune()
