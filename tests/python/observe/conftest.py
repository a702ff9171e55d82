"""Recordings of a real vLLM, where they are there."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3].parent / "shared"


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder of recordings beside the checkout."""
    path = SHARED / "recordings" / "vllm-0.32.0"
    if not path.is_dir():
        pytest.skip(f"no recordings in {path}")
    return path
