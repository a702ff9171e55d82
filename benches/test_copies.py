"""Block moves on the CPU, and one copy of as many bytes in the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="the CPU backend needs torch: pip install 'kvcatch[engine]'")

from paged import copy_calls

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PIECES = {8 << 10: 2048, 64 << 10: 512, 512 << 10: 64, 2 << 20: 16}


@pytest.mark.parametrize("form", ["kvcatch", "memcpy", "torch copy_"])
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece >> 10} KiB")
def test_move(benchmark: BenchmarkFixture, piece: int, form: str) -> None:
    benchmark.group = f"move blocks of {piece >> 10} KiB"
    benchmark(copy_calls(piece, PIECES[piece])[form])
