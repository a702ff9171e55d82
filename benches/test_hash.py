"""Hash prompts of 8,192 tokens and look them up, all blocks hit or none; sha256 and xxhash chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import operations
from baselines import sha256_hash, xxhash_hash

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.benchmark(group="hash")

PROMPTS = 10


def test_kvcatch_hits(benchmark: BenchmarkFixture) -> None:
    benchmark(operations.lookup_hits(PROMPTS))


def test_kvcatch_misses(benchmark: BenchmarkFixture) -> None:
    benchmark(operations.lookup_misses(PROMPTS))


def test_sha256_chain(benchmark: BenchmarkFixture) -> None:
    benchmark(operations.lookup_hits_python(PROMPTS, sha256_hash))


def test_xxhash_chain(benchmark: BenchmarkFixture) -> None:
    digest = xxhash_hash()
    if digest is None:
        pytest.skip("xxhash is not installed")
    benchmark(operations.lookup_hits_python(PROMPTS, digest))
