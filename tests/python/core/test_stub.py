"""The hand-written stub says what the extension is, and the package type-checks."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcatch
from kvcatch import _core

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_stub_matches_the_extension() -> None:
    run("mypy.stubtest", "kvcatch._core")


@pytest.mark.slow
def test_the_package_is_typed() -> None:
    run("mypy", "--strict", "python/kvcatch")


def test_defaults_that_the_extension_spells_none() -> None:
    """The defaults that the stub and the signatures state are what happens."""
    pool = kvcatch.BlockPool(256, manual_clock=True)
    assert (pool.block_size, pool.blocks_per_page) == (16, 128)
    a = pool.create([1, 2])
    assert (pool.num_tokens(a), pool.num_reserved) == (2, 0)
    pool.append(a)
    assert pool.num_tokens(a) == 3
    out = np.zeros((1, 2), np.int32)
    pool.block_tables(a, out)
    assert out[0, 1] == -1
    assert kvcatch.Prefix(range(32)).num_full_blocks == 2
    for made in (kvcatch.BlockPool, kvcatch.FreeBlocks):
        orders = []
        for seed in ({}, {"seed": 0}):
            thing = made(8, eviction="slru", **seed)
            orders.append(repr(thing))
        assert orders[0] == orders[1]


def test_every_public_name_is_exported() -> None:
    # What kvcatch.kernels or kvcatch.vllm alone calls is no part of the package's face; anything else is.
    root = Path(kvcatch.__file__).parent
    inside = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("kernels", "vllm")
        for path in (root / folder).glob("*.py")
    )
    hidden = set(_core.__all__) - set(kvcatch.__all__)
    called = re.compile(r"\b_core(?:\.| import )(\w+)")
    assert hidden - set(called.findall(inside)) == set()
    for name in kvcatch.__all__:
        thing = getattr(kvcatch, name)
        if inspect.isclass(thing):
            assert thing.__module__ in {"kvcatch", "kvcatch.errors"}
            assert thing.__doc__
    assert (Path(kvcatch.__file__).parent / "py.typed").is_file()


def test_results_have_the_types_of_the_stub() -> None:
    pool = kvcatch.BlockPool(64, 4, manual_clock=True)
    a = pool.create(range(6), owner="o", commit=True)
    pin = pool.pin(a)
    miss = pool.explain_miss([0, 1, 2, 9])
    runs = pool.plan_compaction("runs", bytes_per_block=1, bandwidth=1)
    pages = pool.plan_compaction("pages")
    free = kvcatch.FreeBlocks(4)
    for thing, kind in (
        (a.id, int),
        (a.hit_tokens, int),
        (a.owner, str),
        (pin.id, int),
        (pin.blocks, np.ndarray),
        (miss.reason, str),
        (miss.diverges_at, int),
        (miss.neighbour_block, int),
        (runs.rounds, list),
        (runs.runs_bound, int),
        (runs.bytes_moved, int),
        (runs.seconds, float),
        (pages.runs_bound, type(None)),
        (pages.seconds, type(None)),
        (pool.append([a]), list),
        (pool.commit([a], [6]), int),
        (pool.commit(pool.fork(a)), int),
        (pool.truncate(a, 5), type(None)),
        (pool.retain([0, 1, 2, 3]), int),
        (pool.lookup_many([]), np.ndarray),
        (pool.now, float),
        (pool.stats(), dict),
        (pool.holdings(), list),
        (pool.audit([]), dict),
        (pool.validate(), type(None)),
        (free.take(1), np.ndarray),
        (free.take(1, out=np.zeros(1, np.int32)), int),
        (len(free), int),
        (free.is_clean(0), bool),
        (0 in free, bool),
        (kvcatch.__version__, str),
        (kvcatch.build_profile, str),
    ):
        assert type(thing) is kind
