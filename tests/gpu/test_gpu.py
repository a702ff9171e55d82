"""Whether there is a GPU: the one test of this folder that is collected without one."""

from __future__ import annotations

import pytest


def test_there_is_a_gpu(no_gpu: str) -> None:
    if no_gpu:
        pytest.skip(f"tests/gpu needs a GPU: {no_gpu}")
