"""One step that calls everything a backend has, each call depending on those before it.

Run on the emulated backend it says what must come out; run on a simulated GPU it tries the order on streams; run on a
real one it is what compute-sanitizer watches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.kernels import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16")
QUANTISED = replace(LAYOUT, dtype="float8_e4m3", scale="token")


def same(x: Any) -> Any:
    return x


def filled(
    backend: Any,
    layout: KVLayout,
    num_blocks: int,
    seed: int,
    tensor: Callable[[Any], Any] = same,
) -> Any:
    """A pool of small random halves."""
    cache = backend.allocate(layout, num_blocks)
    rng = np.random.default_rng(seed)
    data = rng.normal(size=cache.num_bytes // 2).astype(np.float16).view(np.uint8)
    cache.buffer[:] = tensor(data)
    return cache


def a_busy_step(
    backend: Any,
    tensor: Callable[[Any], Any] = same,
    array: Callable[[Any], Any] = np.asarray,
) -> list[Any]:
    """The bytes of all pools and the outputs of all attention calls, after ``synchronise``.

    Args:
        backend: any backend that swaps.
        tensor: a numpy array as a tensor of the backend.
        array: a tensor of the backend or the host as a numpy array.
    """
    rng = np.random.default_rng(3)
    cache = filled(backend, LAYOUT, 24, seed=1, tensor=tensor)
    codes = backend.allocate(QUANTISED, 24)
    staging = backend.allocate(LAYOUT, 6)
    host = backend.allocate_host(LAYOUT, 8)
    keys, values = (tensor(x) for x in rng.normal(size=(2, 5, 2, 64)).astype(np.float16))
    slots = tensor(np.array([3, 40, -1, 95, 160], np.int64))
    backend.write_kv(cache, 1, keys, values, slots)
    backend.move_blocks(cache, [0, 2, 10, 10], [20, 21, 22, 23])
    backend.assign_blocks(cache, [1, 2, 3, 5, 6], [2, 3, 1, 6, 7])
    swapped = backend.swap_out(cache, host, [20, 1, 2, 22], [7, 0, 1, 3])
    swapped.wait()
    backend.gather_blocks(cache, [4, 3, 9], staging)
    backend.move_blocks(cache, [11, 12, 13], [20, 1, 2])
    backend.scatter_blocks(staging, cache, [14, 15])
    backend.swap_in(host, cache, [7, 3], [16, 17]).wait()
    backend.quantise_blocks(cache, codes, [16, 17, 14, 3], [0, 1, 2, 3])
    backend.write_kv(codes, 0, keys, values, tensor(np.array([0, 16, 33, -1, 63], np.int64)))
    backend.dequantise_blocks(codes, staging, [0, 3], [4, 5])
    tables = tensor(np.array([[16, 17, 14], [15, 6, 7], [20, 0, 0], [0, 0, 0]], np.int32))
    lens = np.array([48, 33, 5, 0], np.int32)
    query = tensor(rng.normal(size=(4, 4, 64)).astype(np.float16))
    plan = backend.plan_decode(LAYOUT, lens, 4)
    one = backend.decode_attention(
        cache, 1, query, tables, tensor(lens), scale=0.125, plan=plan, soft_cap=30.0
    )
    del plan
    first = tensor(np.array([[0, 1, 2]], np.int32))
    other = backend.decode_attention(codes, 0, query[:1], first, tensor(lens[:1]), scale=0.1)
    rows = tensor(rng.normal(size=(9, 4, 64)).astype(np.float16))
    chunk = backend.prefill_attention(
        cache, 0, rows, [0, 4, 4, 9], tables[:3], [48, 33, 5], scale=0.125, window=20
    )
    backend.synchronise()
    pools = (cache.buffer, codes.buffer, staging.buffer, host.buffer)
    return [array(x).copy() for x in (*pools, one, other, chunk)]
