"""Paged attention on the CPU, and torch on contiguous keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="the CPU backend needs torch: pip install 'kvcatch[engine]'")

from paged import SHAPES, Shape, decode_calls, prefill_calls

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

FORMS = ("kvcatch", "sdpa, enable_gqa", "sdpa, heads folded", "matmul, softmax")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(benchmark: BenchmarkFixture, shape: Shape, dtype: str, form: str) -> None:
    benchmark.group = f"decode {shape}, {dtype}"
    benchmark(decode_calls(shape, dtype)[form])


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill(benchmark: BenchmarkFixture, dtype: str, form: str) -> None:
    benchmark.group = f"prefill 256 after 1024, {dtype}"
    benchmark(prefill_calls(Shape(1, 1280), 256, dtype)[form])
