"""The CPU backend beside attention: levels, threads, copies, writes, conversions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_support import E4M3, Batch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch import _core
from kvcatch.errors import InvalidArgument, InvalidType, OutOfMemory
from kvcatch.kernels import Backend, KVCache, KVLayout, get_backend
from kvcatch.kernels.cpu import LEVEL_VARIABLE, CpuBackend

torch = pytest.importorskip(
    "torch", reason="the CPU backend needs torch: pip install 'kvcatch[engine]'"
)


def filled(layout: KVLayout, num_blocks: int, seed: int = 0) -> KVCache:
    scales = None
    if layout.scale == "head":
        scales = torch.full((layout.num_layers, 2, layout.num_kv_heads), 0.01)
    cache = get_backend("cpu").allocate(layout, num_blocks, scales)
    rng = np.random.default_rng(seed)
    cache.buffer[:] = torch.from_numpy(rng.integers(0, 256, cache.num_bytes, dtype=np.uint8))
    return cache


def blocks_of(cache: KVCache) -> Any:
    """A pool's bytes as [num_blocks, layers, bytes], whatever its order."""
    layout = cache.layout
    area = 2 * layout.area_bytes
    if layout.order == "block":
        return cache.buffer.view(cache.num_blocks, layout.num_layers, area).clone()
    return cache.buffer.view(layout.num_layers, cache.num_blocks, area).transpose(0, 1).clone()


# --- making one -------------------------------------------------------------------------------------


def test_it_is_a_backend() -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, Backend)
    assert (backend.name, backend.device) == ("cpu", "cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.level == _core.cpu_levels()[-1]
    assert backend.level in repr(backend)
    backend.synchronise()


def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "portable")
    assert CpuBackend().level == "portable"
    assert CpuBackend(level=_core.cpu_levels()[-1]).level == _core.cpu_levels()[-1]
    monkeypatch.setenv(LEVEL_VARIABLE, "sse9")
    with pytest.raises(InvalidArgument, match=r"sse9.*portable"):
        CpuBackend()
    with pytest.raises(InvalidArgument, match="threads"):
        CpuBackend(level="portable", threads=0)


def test_out_of_memory_states_the_bytes() -> None:
    layout = KVLayout(64, 64, 256, dtype="float32")
    num_blocks = (1 << 45) // layout.block_bytes
    with pytest.raises(OutOfMemory, match=str(layout.pool_bytes(num_blocks))):
        get_backend("cpu").allocate(layout, num_blocks)


def test_torchs_default_device_is_not_asked() -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [20])
    backend = get_backend("cpu")
    rest = (0, batch.query(1, 1), batch.tables, batch.seq_lens)
    wanted = backend.decode_attention(batch.cache, *rest, scale=0.1)
    torch.set_default_device("meta")
    try:
        assert backend.allocate(batch.layout, 2).buffer.is_cpu
        assert backend.allocate_host(batch.layout, 2).buffer.is_cpu
        found = backend.decode_attention(batch.cache, *rest, scale=0.1)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, wanted)


def test_numpy_arrays_pass_for_tensors() -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [20])
    backend = get_backend("cpu")
    query = batch.query(1, 1)
    wanted = backend.decode_attention(
        batch.cache, 0, query, batch.tables, batch.seq_lens, scale=0.1
    )
    cache = replace(batch.cache, buffer=batch.cache.buffer.numpy())
    arrays = (query.numpy(), batch.tables.numpy(), batch.seq_lens.numpy())
    found = backend.decode_attention(cache, 0, *arrays, scale=0.1)
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("blocks", [1, 3, "2"])
def test_a_cache_that_says_what_it_is_not(blocks: Any) -> None:
    batch = Batch(KVLayout(1, 1, 64, dtype="float32"), [20])
    cache = replace(batch.cache, num_blocks=blocks)
    with pytest.raises(InvalidArgument, match=r"cache.buffer has shape|num_blocks"):
        get_backend("cpu").decode_attention(
            cache, 0, batch.query(1, 1), batch.tables, batch.seq_lens, scale=0.1
        )


def test_host_pools_are_block_major() -> None:
    host = get_backend("cpu").allocate_host(KVLayout(2, 1, 64, order="layer"), 3)
    assert host.layout.order == "block"
    assert not host.buffer.any()


# --- whole blocks -----------------------------------------------------------------------------------

LAYOUTS = [
    KVLayout(3, 2, 64, dtype="bfloat16"),
    KVLayout(3, 2, 64, dtype="bfloat16", order="layer"),
    KVLayout(1, 1, 16, 1, dtype="float16"),
    KVLayout(2, 3, 80, dtype=E4M3, scale="token"),
    KVLayout(2, 3, 80, dtype=E4M3, scale="head", order="layer"),
    KVLayout(30, 8, 128, dtype="float32"),  # pieces of megabytes, cut among threads
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_moves_copy_and_touch_nothing_else(layout: KVLayout, threads: int) -> None:
    cache = filled(layout, 9)
    before = blocks_of(cache)
    get_backend("cpu", threads=threads).move_blocks(cache, [8, 0, 0, 3], [1, 2, 5, 7])
    wanted = before.clone()
    wanted[[1, 2, 5, 7]] = before[[8, 0, 0, 3]]
    assert torch.equal(blocks_of(cache), wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_assignment_of_chains_cycles_and_fan_out(layout: KVLayout, threads: int) -> None:
    cache = filled(layout, 9)
    before = blocks_of(cache)
    src, dst = [1, 0, 2, 3, 3, 6, 7, 8], [0, 1, 3, 4, 5, 7, 8, 6]
    get_backend("cpu", threads=threads).assign_blocks(cache, src, dst)
    wanted = before.clone()
    wanted[dst] = before[src]
    assert torch.equal(blocks_of(cache), wanted)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_assignment(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS[:5]))
    n = data.draw(st.integers(1, 12))
    dst = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n))
    src = data.draw(st.lists(st.integers(0, n - 1), min_size=len(dst), max_size=len(dst)))
    cache = filled(layout, n, seed=n)
    before = blocks_of(cache)
    get_backend("cpu").assign_blocks(cache, src, dst)
    wanted = before.clone()
    if dst:
        wanted[dst] = before[src]
    assert torch.equal(blocks_of(cache), wanted)


@pytest.mark.parametrize("order", ["block", "layer"])
def test_swaps_and_staging_between_orders(order: Any) -> None:
    backend = get_backend("cpu")
    cache = filled(KVLayout(3, 2, 64, order=order), 6)
    before = blocks_of(cache)
    host = backend.allocate_host(cache.layout, 4)
    transfer = backend.swap_out(cache, host, [5, 0, 0], [3, 1, 0])
    transfer.wait()
    transfer.synchronise()
    assert transfer.done()
    assert torch.equal(blocks_of(host)[[3, 1, 0]], before[[5, 0, 0]])
    assert not blocks_of(host)[2].any()
    backend.swap_in(host, cache, [3, 2], [1, 5]).synchronise()
    after = blocks_of(cache)
    assert torch.equal(after[1], before[5])
    assert not after[5].any()
    staging = backend.allocate(KVLayout(3, 2, 64), 3)
    backend.gather_blocks(cache, [4, 1, 4], staging)
    assert torch.equal(blocks_of(staging), after[[4, 1, 4]])
    backend.scatter_blocks(staging, cache, [2, 0])
    wanted = after.clone()
    wanted[[2, 0]] = after[[4, 1]]
    assert torch.equal(blocks_of(cache), wanted)


def test_refused_copies_change_nothing() -> None:
    backend = get_backend("cpu")
    cache, other = filled(KVLayout(2, 2, 64), 6), filled(KVLayout(2, 2, 80), 6)
    host = backend.allocate_host(cache.layout, 2)
    alias = KVCache(cache.layout, 2, cache.buffer[: 2 * cache.layout.block_bytes])
    before = cache.buffer.clone()
    for call in (
        lambda: backend.move_blocks(cache, [0], [6]),
        lambda: backend.move_blocks(cache, [-1], [5]),
        lambda: backend.move_blocks(cache, [0, 1], [1, 2]),
        lambda: backend.move_blocks(cache, [0, 1], [5, 5]),
        lambda: backend.move_blocks(cache, [0, 1], [5]),
        lambda: backend.assign_blocks(cache, [0, 1], [5, 5]),
        lambda: backend.assign_blocks(cache, [0, 6], [5, 4]),
        lambda: backend.swap_in(host, cache, [2], [0]),
        lambda: backend.swap_in(other, cache, [0], [0]),
        lambda: backend.swap_in(alias, cache, [0], [4]),
        lambda: backend.scatter_blocks(host, cache, [0, 1, 2]),
        lambda: backend.scatter_blocks(host, cache, [1, 1]),
        lambda: backend.gather_blocks(cache, [0, 1, 2], host),
    ):
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(InvalidType):
        backend.move_blocks(cache, [0.5], [5])
    with pytest.raises(InvalidType):
        backend.move_blocks(cache.buffer, [0], [5])
    assert torch.equal(cache.buffer, before)


# --- tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_written_tokens_lie_in_their_slots(dtype: Any, threads: int) -> None:
    layout = KVLayout(2, 3, 64, dtype=dtype)
    cache = filled(layout, 40)
    tokens = 600
    fused = torch.randn(tokens, 12, 64).to(getattr(torch, dtype))
    key, value = fused[:, 3:6], fused[:, 6:9]
    slots = torch.randperm(40 * 16)[:tokens]
    slots[::7] = -1
    wanted = cache.buffer.clone()
    pool = wanted.view(fused.dtype).view(40, 2, 2, 3, 16, 64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pool[slot // 16, 1, 0, :, slot % 16] = key[token]
            pool[slot // 16, 1, 1, :, slot % 16] = value[token]
    get_backend("cpu", threads=threads).write_kv(cache, 1, key, value, slots)
    assert torch.equal(cache.buffer, wanted)


def test_a_slot_written_twice_keeps_the_last() -> None:
    layout = KVLayout(1, 2, 64, dtype="float32")
    for threads in (1, 4):
        cache = get_backend("cpu").allocate(layout, 2)
        key = torch.arange(2000.0)[:, None, None].expand(2000, 2, 64).contiguous()
        slots = torch.zeros(2000, dtype=torch.int64)
        get_backend("cpu", threads=threads).write_kv(cache, 0, key, key, slots)
        assert (
            cache.buffer.view(torch.float32).view(2, 1, 2, 2, 16, 64)[0, 0, :, :, 0] == 1999
        ).all()


def test_refused_writes_change_nothing() -> None:
    backend = get_backend("cpu")
    cache = filled(KVLayout(2, 3, 64, dtype="float32"), 4)
    before = cache.buffer.clone()
    good, slots = torch.ones(2, 3, 64), torch.tensor([0, 1])
    inside = cache.buffer.view(torch.float32)[: 2 * 3 * 64].view(2, 3, 64)
    for kind, arguments in (
        (InvalidArgument, (0, good, good, torch.tensor([0, 64]))),
        (InvalidArgument, (2, good, good, slots)),
        (InvalidArgument, (0, good[:1], good, slots)),
        (InvalidArgument, (0, good[:, :2], good[:, :2], slots)),
        (InvalidArgument, (0, good, good, slots[:1])),
        (InvalidArgument, (0, inside, good, slots)),
        (InvalidType, (0, good.bfloat16(), good.bfloat16(), slots)),
        (InvalidType, (0, good, good, slots.int())),
    ):
        with pytest.raises(kind):
            backend.write_kv(cache, *arguments)
    assert torch.equal(cache.buffer, before)


@pytest.mark.parametrize("scale", ["token", "head", "block"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_converted_blocks_come_back_within_the_format(scale: Any, wide: Any) -> None:
    batch = Batch(KVLayout(2, 2, 64, dtype=wide), [96], identity=True)
    backend = get_backend("cpu", threads=2)
    codes = filled(KVLayout(2, 2, 64, dtype=E4M3, scale=scale, order="layer"), 8)
    back = backend.allocate(KVLayout(2, 2, 64, dtype=wide), 6)
    backend.quantise_blocks(batch.cache, codes, range(6), [7, 1, 2, 3, 4, 0])
    backend.dequantise_blocks(codes, back, [7, 1, 2, 3, 4, 0], range(6))
    kind = getattr(torch, wide)
    size = 6 * batch.layout.block_bytes
    one = batch.cache.buffer[:size].view(kind).double()
    two = back.buffer.view(kind).double()
    # Half a step of 3 bits of mantissa, or of the smallest numbers (those relative to the largest).
    assert ((one - two).abs() <= one.abs() / 15 + one.abs().max() / 448 / 2**8).all()
    assert (one != two).any()


# --- threads ----------------------------------------------------------------------------------------


def test_many_callers_at_once() -> None:
    batch = Batch(KVLayout(1, 3, 64, dtype="float32"), [500, 300, 700])
    query = batch.query(3, 3)
    for own in (False, True):
        backend = get_backend("cpu", threads=3, own_threads=own)
        first = backend.decode_attention(
            batch.cache, 0, query, batch.tables, batch.seq_lens, scale=0.1
        )
        wrong = []

        def work(backend: Any = backend, first: Any = first, wrong: list[int] = wrong) -> None:
            for i in range(30):
                out = backend.decode_attention(
                    batch.cache, 0, query, batch.tables, batch.seq_lens, scale=0.1
                )
                if not torch.equal(out, first):
                    wrong.append(i)

        callers = [threading.Thread(target=work) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
        assert not wrong


FORKED = """
import os, sys
import torch
from kvcatch import _core
from kvcatch.kernels import KVLayout, get_backend

backend = get_backend("cpu", threads=3, own_threads=sys.argv[1] == "own")
layout = KVLayout(1, 3, 64, dtype="float32")
cache = backend.allocate(layout, 200)
cache.buffer.view(torch.float32).normal_()
tables = torch.arange(200, dtype=torch.int32).view(2, 100)
lens = torch.tensor([1600, 1500], dtype=torch.int32)
query = torch.randn(2, 9, 64)
call = lambda: backend.decode_attention(cache, 0, query, tables, lens, scale=0.1)
before = call()
child = os.fork()
if child == 0:
    team = _core.cpu_team()
    os._exit(0 if torch.equal(call(), before) and torch.equal(call(), before) and team == "own" else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(call(), before)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("team", ["joined", "own"])
def test_a_forked_child_computes_the_same(team: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, team],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_core_checks_what_python_would_let_through() -> None:
    """The extension is memory-safe by itself."""
    layout = KVLayout(1, 1, 16, dtype="float32")
    s = layout.strides(2)
    strides = (s.block, s.layer, s.kv, s.head, s.token, s.scale, s.scale_head, s.scale_token)
    good = _core.CpuLayout(2, 1, 1, 16, 16, "float32", "none", strides)
    pool, small = np.zeros(layout.pool_bytes(2), np.uint8), np.zeros(100, np.uint8)
    with pytest.raises(InvalidArgument, match="bytes are needed"):
        _core.cpu_copy_blocks(small, good, pool, good, [0], [1], threads=1)
    with pytest.raises(InvalidArgument, match="src"):
        _core.cpu_copy_blocks(pool, good, pool, good, [2], [1], threads=1)
    with pytest.raises(InvalidArgument, match="dst"):
        _core.cpu_assign_blocks(pool, good, [0, 1], [1, 1], threads=1)
    read_only = pool.copy()
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        _core.cpu_assign_blocks(read_only, good, [0, 1], [1, 0], threads=1)
    for at, stride in enumerate(strides[:5]):
        shorter = list(strides)
        shorter[at] = stride - 4
        if at == 1:
            continue  # one layer: its distance is never used
        with pytest.raises(InvalidArgument, match="strides"):
            _core.CpuLayout(2, 1, 1, 16, 16, "float32", "none", tuple(shorter))
    with pytest.raises(InvalidArgument, match="head_dim"):
        _core.CpuLayout(2, 1, 1, 4096, 16, "float32", "none", strides)
    with pytest.raises(InvalidArgument, match="dtype"):
        _core.CpuLayout(2, 1, 1, 16, 16, "int4", "none", strides)
    with pytest.raises(InvalidArgument, match="level"):
        _core.cpu_attention(
            pool, good, 0, np.zeros((1, 1, 16), np.float32), np.zeros((1, 1), np.int32), np.ones(1, np.int32),
            np.zeros((1, 1, 16), np.float32), dtype="float32", scale=1.0, window=0, threads=1, level="mmx",
        )  # fmt: skip
