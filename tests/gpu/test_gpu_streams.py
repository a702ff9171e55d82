"""Streams, swaps, graphs and memory of a real GPU; on a simulated one the same is in tests/python/kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from busy_step import LAYOUT, a_busy_step
from cuda_host.emulated import EmulatedBackend

from kvcatch.errors import KernelError, OutOfMemory
from kvcatch.kernels import KVLayout, get_backend

torch = pytest.importorskip("torch", reason="the GPU tests need torch with CUDA")

LARGE = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128)  # 512 KiB a block


def close(found: list[Any], expected: list[Any]) -> None:
    """Bytes of pools equal, outputs of attention within 2 units in the last place of fp16."""
    for one, wanted in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(one, wanted)
    for one, wanted in zip(found[4:], expected[4:], strict=True):
        difference = np.abs(one.astype(np.float32) - wanted.astype(np.float32))
        spacing = np.spacing(np.maximum(np.abs(wanted), np.float16(2**-10))).astype(np.float32)
        assert (difference <= 2 * spacing).all()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return a_busy_step(EmulatedBackend(), torch.from_numpy, lambda t: t.numpy())


@pytest.mark.parametrize("check_ids", [False, True])
def test_a_busy_step_with_torch(expected: list[Any], check_ids: bool) -> None:
    backend = get_backend("cuda", library="torch", check_ids=check_ids)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found = a_busy_step(
                backend, lambda a: torch.from_numpy(a).cuda(), lambda t: t.cpu().numpy()
            )
        close(found, expected)


def test_a_busy_step_with_cupy(expected: list[Any]) -> None:
    import cupy

    backend = get_backend("cuda", library="cupy")
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            close(a_busy_step(backend, cupy.asarray, cupy.asnumpy), expected)


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_swaps_while_the_current_stream_works(order: str, neighbours: bool) -> None:
    backend = get_backend("cuda", library="torch")
    cache = backend.allocate(replace(LARGE, order=order), 64)
    host = backend.allocate_host(LARGE, 64)
    cache.buffer.copy_(torch.randint(0, 256, cache.buffer.shape, dtype=torch.uint8, device="cuda"))
    before = cache.buffer.clone()
    ids = np.arange(64) if neighbours else np.random.default_rng(0).permutation(64)
    src, dst = ids[:32], np.arange(32)[:: 1 if neighbours else -1]
    for _ in range(20):
        backend.swap_out(cache, host, src, dst).wait()
        cache.buffer.zero_()
        backend.swap_in(host, cache, dst, src).wait()
        copy = cache.buffer.clone()
    backend.synchronise()
    shape = (64, -1) if order == "block" else (LARGE.num_layers, 64, -1)
    axis = 0 if order == "block" else 1
    wanted = torch.zeros_like(before).view(shape)
    kept = torch.from_numpy(np.ascontiguousarray(src)).cuda()
    wanted.index_copy_(axis, kept, before.view(shape).index_select(axis, kept))
    assert torch.equal(copy, wanted.view(-1))


def test_a_decode_is_recorded_and_replayed() -> None:
    backend = get_backend("cuda", library="torch")
    cache = backend.allocate(LAYOUT, 8)
    cache.buffer.view(torch.float16).normal_()
    tables = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    lens = torch.tensor([64, 50], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 4, 64, dtype=torch.float16, device="cuda")
    out = torch.empty_like(query)
    plan = backend.plan_decode(LAYOUT, [64, 50], 4)

    def decode() -> Any:
        backend.decode_attention(cache, 0, query, tables, lens, scale=0.1, plan=plan, out=out)

    def prefill() -> Any:
        backend.prefill_attention(cache, 0, query, [0, 1, 2], tables, [64, 50], scale=0.1)

    decode()
    prefill()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(KernelError, match="graph"):
        backend.move_blocks(cache, [0], [1])
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(KernelError, match="graph"):
        prefill()
    query.normal_()
    graph.replay()
    replayed = out.clone()
    decode()
    assert torch.equal(out, replayed)


def test_more_memory_than_there_is() -> None:
    for library in ("torch", "cupy"):
        backend = get_backend("cuda", library=library)
        with pytest.raises(OutOfMemory, match=f"{LARGE.pool_bytes(1 << 22)} bytes on cuda:0"):
            backend.allocate(LARGE, 1 << 22)  # 2 TiB
        assert backend.allocate(LARGE, 1).num_blocks == 1


def test_build_ahead_leaves_nothing_to_build(tmp_path: Any) -> None:
    backend = get_backend("cuda", cache_dir=tmp_path)
    count = backend.build(LARGE, 64)
    assert len(list(tmp_path.glob("*.cubin"))) <= count
    assert backend.build(LARGE, 64) == count
