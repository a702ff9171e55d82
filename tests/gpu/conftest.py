"""What only a GPU can show. Without one ``test_gpu.py`` alone is collected, and says why the rest is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
KERNELS = TESTS / "python" / "kernels"
sys.path[:0] = [
    str(TESTS),
    str(KERNELS),
]  # the package cuda_host; the suites that all backends share

collect_ignore_glob: list[str] = []


def why_not() -> str:
    """Why there is no GPU to test on; empty where there is."""
    from kvcatch.errors import KernelError, MissingExtra
    from kvcatch.kernels import get_backend

    try:
        get_backend("cuda")
    except (KernelError, MissingExtra) as why:
        return str(why)
    return ""


WHY_NOT = why_not()
if WHY_NOT:
    collect_ignore_glob.append("test_gpu_*.py")

_spec = importlib.util.spec_from_file_location("kernels_conftest", KERNELS / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
shared: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)


@pytest.fixture(scope="session")
def no_gpu() -> str:
    """Why there is none; empty where there is."""
    return WHY_NOT


@pytest.fixture
def machine() -> Any:
    """The GPU, in the place of all backends."""
    return shared._machine("cuda")


@pytest.fixture
def backend(machine: Any) -> Any:
    """The GPU's backend."""
    return machine.backend


@pytest.fixture
def checking() -> Any:
    """The GPU with the check of ids on it."""
    return shared._machine("cuda", check_ids=True)
