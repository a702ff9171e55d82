"""Fixtures of all Python tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and children inherit it: their Ctrl-C is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class RunKvcatch(Protocol):
    def __call__(
        self, *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


def _trace(name: str) -> Path:
    path = SHARED / "traces" / name
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    return path


@pytest.fixture(scope="session")
def mooncake_trace() -> Path:
    return _trace("mooncake_conversation.jsonl")


@pytest.fixture(scope="session")
def azure_trace() -> Path:
    return _trace("azure_conv_2023.csv")


@pytest.fixture(scope="session")
def kvcatch_command() -> list[str]:
    return [sys.executable, "-m", "kvcatch.cli"]


@pytest.fixture(scope="session")
def run_kvcatch(kvcatch_command: list[str]) -> RunKvcatch:
    def run(
        *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*kvcatch_command, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "NO_COLOR": "1", **(env or {})},
        )

    return run
