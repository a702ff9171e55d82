"""Swaps: which copies are made, and how they are ordered against the caller's stream."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu import FakeNvrtc, Operation, SimulatedGpu

from kvcatch.errors import KernelError
from kvcatch.kernels import KVCache, KVLayout
from kvcatch.kernels.cuda_runtime import CudaRuntime
from kvcatch.kernels.cuda_swap import COPY_THREAD_BLOCKS, DMA_BYTES, CudaTransfer, Swaps, merge_runs
from kvcatch.kernels.modules import KernelCompiler

SEEDS = range(25)
LARGE = KVLayout(num_layers=2, num_kv_heads=4, head_dim=128, block_size=32)  # 128 KiB a block
SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64)  # 8 KiB a block
assert LARGE.block_bytes >= DMA_BYTES > SMALL.block_bytes


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


@dataclass
class Bench:
    """A simulated GPU with its swaps; kernels that copy are one operation on the runtime's stream."""

    gpu: SimulatedGpu
    runtime: CudaRuntime
    swaps: Swaps
    by_kernel: list[tuple[list[int], list[int], int]]

    def cache(self, layout: KVLayout, num_blocks: int, fill: int | None = None) -> KVCache:
        buffer = self.gpu.zeros(layout.pool_bytes(num_blocks))
        cache = KVCache(layout, num_blocks, buffer, device="cpu")
        if fill is not None:
            blocks(cache)[:] = fill
        return cache

    def write(self, cache: KVCache, block: int, value: int) -> None:
        """Compute of the caller: fills a block on the current stream."""

        def fill() -> None:
            blocks(cache)[block] = value

        self.gpu.submit(self.runtime.stream(), Operation(fill))


def blocks(cache: KVCache) -> Any:
    """The bytes of a cache, one row a block, whichever its order."""
    layout = cache.layout
    if layout.order == "block":
        return cache.buffer.reshape(cache.num_blocks, -1)
    shape = (layout.num_layers, cache.num_blocks, layout.region_bytes)
    return cache.buffer.reshape(shape).transpose(1, 0, 2)


def values(cache: KVCache) -> list[int]:
    """The one value that fills each block; -1 for a block of several."""
    rows = [np.unique(row) for row in blocks(cache)]
    return [int(row[0]) if len(row) == 1 else -1 for row in rows]


@pytest.fixture
def make(tmp_path: Any) -> Any:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "empty.cu").write_text("")

    def bench(seed: int = 0, **options: Any) -> Bench:
        gpu = SimulatedGpu(seed, **options)
        runtime = CudaRuntime(gpu, KernelCompiler(tmp_path / "cuda", tmp_path, nvrtc=FakeNvrtc()))
        made: list[tuple[list[int], list[int], int]] = []

        def copy(source: KVCache, target: KVCache, src: Any, dst: Any, thread_blocks: int) -> None:
            made.append((src.tolist(), dst.tolist(), thread_blocks))

            def run() -> None:
                order = np.random.default_rng(seed).permutation(len(src))
                for s, d in zip(src[order], dst[order], strict=True):
                    one = blocks(source)[s].reshape(-1)
                    blocks(target)[d] = one.reshape(blocks(target)[d].shape)

            gpu.submit(runtime.stream(), Operation(run))

        return Bench(gpu, runtime, Swaps(gpu, runtime, copy), made)

    return bench


# --- which copies -------------------------------------------------------------------------------


def test_neighbours_at_both_ends_are_one_run() -> None:
    src, dst, length = merge_runs(ids(5, 3, 4, 9, 10, 20), ids(12, 10, 11, 0, 5, 6))
    assert list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)) == [
        (3, 10, 3),
        (9, 0, 1),
        (10, 5, 1),
        (20, 6, 1),
    ]


def test_no_moves_are_no_runs() -> None:
    assert [part.tolist() for part in merge_runs(ids(), ids())] == [[], [], []]


@given(st.lists(st.integers(0, 30), max_size=30), st.randoms(use_true_random=False))
def test_runs_are_the_moves_and_no_two_could_be_joined(src: list[int], random: Any) -> None:
    dst = random.sample(range(40), len(src))
    runs = [part.tolist() for part in merge_runs(ids(*src), ids(*dst))]
    unfolded = [(s + i, d + i) for s, d, n in zip(*runs, strict=True) for i in range(n)]
    assert sorted(unfolded) == sorted(zip(src, dst, strict=True))
    heads = {(s, d) for s, d, _ in zip(*runs, strict=True)}
    ends = [(s + n, d + n) for s, d, n in zip(*runs, strict=True)]
    if len(set(src)) == len(src):  # a source read twice is in two runs wherever it stands
        assert not heads & set(ends)


@pytest.mark.parametrize(
    ("layout", "src", "dst", "copies"),
    [
        (LARGE, (0, 1, 2, 3), (4, 5, 6, 7), [4]),
        (LARGE, (3, 2, 1, 0), (7, 6, 5, 4), [4]),
        (LARGE, (0, 1, 4, 5), (0, 1, 2, 3), [2, 2]),
        (LARGE, (0, 2, 4, 6), (0, 1, 2, 3), [1, 1, 1, 1]),
        (SMALL, tuple(range(8)), tuple(range(8)), [8]),  # 64 KiB in one piece
    ],
)
def test_block_major_pools_are_copied_run_by_run(
    make: Any, layout: KVLayout, src: Any, dst: Any, copies: list[int]
) -> None:
    bench = make()
    device, host = bench.cache(layout, 16), bench.cache(layout, 16)
    blocks(device)[:] = np.arange(1, 17)[:, None]
    bench.swaps.start(device, host, ids(*src), ids(*dst)).synchronise()
    assert bench.gpu.batches == [len(copies)]
    assert sorted(size for _, _, size in bench.gpu.copies) == sorted(
        n * layout.block_bytes for n in copies
    )
    expected = np.zeros(16, int)
    expected[list(dst)] = np.array(src) + 1
    assert values(host) == expected.tolist()


@pytest.mark.parametrize(
    "layout",
    [SMALL, KVLayout(num_layers=2, num_kv_heads=4, head_dim=128, block_size=32, order="layer")],
    ids=["small blocks", "layer-major"],
)
@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
def test_what_a_dma_is_bad_at_is_copied_by_a_kernel(make: Any, layout: KVLayout, out: bool) -> None:
    bench = make()
    host_layout = KVLayout(
        layout.num_layers, layout.num_kv_heads, 64 if layout is SMALL else 128, layout.block_size
    )
    device, host = bench.cache(layout, 8), bench.cache(host_layout, 8)
    source, target = (device, host) if out else (host, device)
    blocks(source)[:] = np.arange(1, 9).reshape(-1, *[1] * (blocks(source).ndim - 1))
    bench.swaps.start(source, target, ids(6, 1, 3), ids(0, 5, 2)).synchronise()
    assert bench.by_kernel == [([6, 1, 3], [0, 5, 2], COPY_THREAD_BLOCKS)]
    assert not bench.gpu.copies
    assert values(target) == [7, 0, 4, 0, 0, 2, 0, 0]


def test_a_swap_of_nothing_is_done_when_the_stream_gets_there(make: Any) -> None:
    bench = make()
    device, host = bench.cache(LARGE, 4), bench.cache(LARGE, 4)
    transfer = bench.swaps.start(device, host, ids(), ids())
    transfer.synchronise()
    assert transfer.done()
    assert not bench.gpu.copies
    assert not bench.by_kernel


# --- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LARGE, SMALL], ids=["dma", "kernel"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_swap_out_reads_what_was_computed_and_not_what_comes_after_the_wait(
    make: Any, layout: KVLayout, seed: int
) -> None:
    assert out_and_overwrite(make, layout, seed) == [9, 9]


def out_and_overwrite(make: Any, layout: KVLayout, seed: int) -> list[int]:
    bench = make(seed)
    device, host = bench.cache(layout, 4, fill=1), bench.cache(layout, 4)
    bench.write(device, 0, 9)
    bench.write(device, 2, 9)
    transfer = bench.swaps.start(device, host, ids(0, 2), ids(3, 1))
    transfer.wait()
    bench.write(device, 0, 5)  # the block has a new owner
    bench.write(device, 2, 5)
    bench.gpu.finish()
    return [values(host)[3], values(host)[1]]


@pytest.mark.parametrize("left_out", ["wait for the caller", "wait of the caller"])
def test_the_simulated_gpu_finds_a_wait_left_out(
    make: Any, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    if left_out == "wait of the caller":
        monkeypatch.setattr(CudaTransfer, "wait", lambda self: None)
    else:
        wait = SimulatedGpu.wait
        monkeypatch.setattr(
            SimulatedGpu,
            "wait",
            lambda self, stream, event: stream is self.current and wait(self, stream, event),
        )
    assert any(out_and_overwrite(make, LARGE, seed) != [9, 9] for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_swap_in_overwrites_after_the_last_reader_and_before_the_next(
    make: Any, seed: int
) -> None:
    bench = make(seed)
    device, host = bench.cache(LARGE, 4, fill=1), bench.cache(LARGE, 4, fill=7)
    seen: list[int] = []
    read = Operation(lambda: seen.append(values(device)[2]))
    bench.gpu.submit(bench.runtime.stream(), read)
    transfer = bench.swaps.start(host, device, ids(0), ids(2))
    transfer.wait()
    bench.gpu.submit(bench.runtime.stream(), read)
    bench.gpu.finish()
    assert seen == [1, 7]


@pytest.mark.parametrize("seed", SEEDS)
def test_out_and_in_again_without_the_host_waiting(make: Any, seed: int) -> None:
    bench = make(seed)
    device, host = bench.cache(LARGE, 4, fill=1), bench.cache(LARGE, 2)
    bench.write(device, 0, 42)
    bench.swaps.start(device, host, ids(0), ids(1)).wait()
    bench.write(device, 0, 3)
    bench.swaps.start(host, device, ids(1), ids(2)).wait()
    bench.write(device, 3, 4)
    bench.gpu.finish()
    assert values(device) == [3, 1, 42, 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_transfer_is_done_only_when_its_bytes_are_there(make: Any, seed: int) -> None:
    bench = make(seed)
    device, host = bench.cache(LARGE, 4, fill=6), bench.cache(LARGE, 4)
    transfer = bench.swaps.start(device, host, ids(0, 2), ids(0, 2))
    for _ in range(1000):
        if transfer.done():
            break
    assert values(host) == [6, 0, 6, 0]


def test_pools_live_until_their_swap_has_run(make: Any) -> None:
    bench = make(pace=0.0)
    device, host = bench.cache(LARGE, 4), bench.cache(LARGE, 4)
    alive = weakref.ref(host.buffer)
    bench.swaps.start(device, host, ids(0), ids(0))
    del host
    gc.collect()
    assert alive() is not None
    bench.swaps.synchronise()
    gc.collect()
    assert alive() is None
    del device


def test_swaps_that_have_run_are_forgotten_by_the_next(make: Any) -> None:
    bench = make()
    device, host = bench.cache(LARGE, 4), bench.cache(LARGE, 4)
    for _ in range(50):
        bench.swaps.start(device, host, ids(0), ids(0))
        bench.gpu.finish()
    assert len(bench.swaps._under_way) == 1


def test_no_swap_while_a_graph_is_recorded(make: Any) -> None:
    bench = make()
    device, host = bench.cache(LARGE, 4), bench.cache(LARGE, 4, fill=3)
    bench.gpu.capture.add(bench.gpu.current.ptr)
    with pytest.raises(KernelError, match="while a CUDA graph is recorded"):
        bench.swaps.start(device, host, ids(0), ids(0))
    bench.gpu.finish()
    assert values(host) == [3] * 4


def test_a_refused_copy_raises_and_the_next_swap_works(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    device, host = bench.cache(LARGE, 4, fill=8), bench.cache(LARGE, 4)

    def refuse(*_: object) -> None:
        raise KernelError("copies on cuda:0: refused")

    with monkeypatch.context() as patched:
        patched.setattr(bench.gpu, "copy_many", refuse)
        with pytest.raises(KernelError, match="refused"):
            bench.swaps.start(device, host, ids(0), ids(0))
    bench.swaps.start(device, host, ids(0), ids(0)).synchronise()
    assert values(host) == [8, 0, 0, 0]
