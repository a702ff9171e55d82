"""Small launches of every kernel of ``cuda/``: what runs under the sanitizers, and what mutated kernels are tried on.

Each is a function of a backend and a variant; it returns what the kernels wrote, as bytes. Every byte of a pool that
holds no token is NaN, so that whatever reads it shows.

Run as a program (``python -m cuda_host.scenarios [--all] [NAME...]``) it runs them in the build for the sanitizer that
``KVCATCH_SANITIZER`` names and ends with the names of those that the sanitizer did not like.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS
from kvcatch.kernels import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvcatch.kernels import KVCache

    Bytes = NDArray[np.uint8]

__all__ = ["SCENARIOS", "Scenario", "run"]

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Scenario:
    """One call of the backend.

    Attributes:
        call: the function below that makes it.
        layout: arguments of :class:`KVLayout`; two layers and two kv heads where they do not say.
        options: arguments of the function.
        small: part of the selection that runs always.
    """

    call: Callable[..., Bytes]
    layout: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    small: bool = False


def layout_of(**options: Any) -> KVLayout:
    """A layout; ``scale`` makes it an e4m3 one."""
    if "scale" in options:
        options["dtype"] = "float8_e4m3"
    return KVLayout(**{"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, **options})


def random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Normal numbers."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values).to(TORCH[dtype])


def pool(backend: EmulatedBackend, layout: KVLayout, num_blocks: int) -> KVCache:
    """A cache of NaN, with scales per head where it takes them."""
    head_scales = None
    if layout.scale == "head":
        shape = (layout.num_layers, 2, layout.num_kv_heads)
        head_scales = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.005
    cache = backend.allocate(layout, num_blocks, head_scales)
    cache.buffer.fill_(0xFF)
    return cache


def contents(cache: KVCache) -> Bytes:
    """A copy of a cache's bytes."""
    return np.array(cache.buffer.numpy())


def _random_pool(backend: EmulatedBackend, layout: KVLayout, num_blocks: int) -> KVCache:
    cache = pool(backend, layout, num_blocks)
    rng = np.random.default_rng(1)
    cache.buffer.numpy()[...] = rng.integers(0, 256, cache.num_bytes, dtype=np.uint8)
    return cache


def move(backend: EmulatedBackend, layout: KVLayout) -> Bytes:
    """Copies within a pool, one source twice."""
    cache = _random_pool(backend, layout, 8)
    backend.move_blocks(cache, [7, 6, 7], [0, 3, 2])
    return contents(cache)


def assign(backend: EmulatedBackend, layout: KVLayout) -> Bytes:
    """A cycle, a chain and a fan-out at once."""
    cache = _random_pool(backend, layout, 8)
    backend.assign_blocks(cache, [1, 2, 0, 4, 5, 5], [0, 1, 2, 3, 4, 6])
    return contents(cache)


def swap(backend: EmulatedBackend, layout: KVLayout) -> Bytes:
    """Out to a host pool, back to other blocks."""
    cache = _random_pool(backend, layout, 6)
    host = backend.allocate_host(layout, 3)
    backend.swap_out(cache, host, [5, 1], [0, 2]).synchronise()
    backend.swap_in(host, cache, [2, 0], [3, 0]).synchronise()
    return contents(cache)


def write(backend: EmulatedBackend, layout: KVLayout, io: str = "") -> Bytes:
    """New tokens, one of them padding."""
    cache = pool(backend, layout, 3)
    dtype = io or ("bfloat16" if layout.dtype == "float8_e4m3" else layout.dtype)
    shape = (5, layout.num_kv_heads, layout.head_dim)
    slots = torch.tensor(
        [layout.block_size + 1, -1, 0, 2 * layout.block_size, 3], dtype=torch.int64
    )
    backend.write_kv(cache, 1, random(shape, dtype, 2), random(shape, dtype, 3), slots)
    return contents(cache)


def convert(backend: EmulatedBackend, layout: KVLayout, io: str = "bfloat16") -> Bytes:
    """Blocks to e4m3 and back."""
    plain = layout_of(
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        dtype=io,
    )
    source, target = pool(backend, plain, 3), pool(backend, plain, 3)
    values = random((source.num_bytes // plain.item_bytes,), io, 4)
    source.buffer[:] = values.view(torch.uint8)
    cache = pool(backend, layout, 3)
    backend.quantise_blocks(source, cache, [0, 2], [1, 0])
    backend.dequantise_blocks(cache, target, [0, 1], [2, 1])
    return np.concatenate([contents(cache), contents(target)])


LENGTHS = (1, 16, 0, 41)


def _tokens(
    backend: EmulatedBackend, layout: KVLayout, io: str, lengths: tuple[int, ...]
) -> tuple[KVCache, torch.Tensor]:
    """A pool with sequences of these many tokens in layer 1, and their block tables."""
    per_seq = [-(-n // layout.block_size) for n in lengths]
    cache = pool(backend, layout, sum(per_seq) + 2)
    ids = np.random.default_rng(5).permutation(cache.num_blocks)
    tables = np.full((len(lengths), max(per_seq)), 10**6, np.int32)
    slots: list[int] = []
    for i, (length, count) in enumerate(zip(lengths, per_seq, strict=True)):
        tables[i, :count], ids = ids[:count], ids[count:]
        size = layout.block_size
        slots += [int(tables[i, t // size]) * size + t % size for t in range(length)]
    shape = (len(slots), layout.num_kv_heads, layout.head_dim)
    if layout.scale == "block":
        plain = layout_of(head_dim=layout.head_dim, block_size=layout.block_size, dtype=io)
        source = pool(backend, plain, cache.num_blocks)
        source.buffer.fill_(0)
        backend.write_kv(
            source,
            1,
            random(shape, io, 6),
            random(shape, io, 7),
            torch.tensor(slots, dtype=torch.int64),
        )
        every = list(range(cache.num_blocks))
        backend.quantise_blocks(source, cache, every, every)
    else:
        backend.write_kv(
            cache,
            1,
            random(shape, io, 6),
            random(shape, io, 7),
            torch.tensor(slots, dtype=torch.int64),
        )
    return cache, torch.from_numpy(tables)


def decode(
    backend: EmulatedBackend,
    layout: KVLayout,
    group: int = 4,
    io: str = "",
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: bool = False,
    lengths: tuple[int, ...] = LENGTHS,
) -> Bytes:
    """One new token of each sequence."""
    io = io or ("bfloat16" if layout.dtype == "float8_e4m3" else layout.dtype)
    cache, tables = _tokens(backend, layout, io, lengths)
    heads = group * layout.num_kv_heads
    query = random((len(lengths), heads, layout.head_dim), io, 8)
    out = backend.decode_attention(
        cache,
        1,
        query,
        tables,
        torch.tensor(lengths, dtype=torch.int32),
        scale=layout.head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=torch.linspace(0.1, 0.5, heads) if alibi else None,
    )
    return np.array(out.view(torch.uint8).numpy()).reshape(-1)


def prefill(
    backend: EmulatedBackend,
    layout: KVLayout,
    group: int = 4,
    io: str = "",
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: bool = False,
    lengths: tuple[int, ...] = LENGTHS,
) -> Bytes:
    """The last tokens of each sequence."""
    io = io or ("bfloat16" if layout.dtype == "float8_e4m3" else layout.dtype)
    cache, tables = _tokens(backend, layout, io, lengths)
    heads = group * layout.num_kv_heads
    chunks = [min(n, 19) for n in lengths]
    query = random((sum(chunks), heads, layout.head_dim), io, 9)
    out = backend.prefill_attention(
        cache,
        1,
        query,
        [sum(chunks[:i]) for i in range(len(chunks) + 1)],
        tables,
        lengths,
        scale=layout.head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=torch.linspace(0.1, 0.5, heads) if alibi else None,
    )
    return np.array(out.view(torch.uint8).numpy()).reshape(-1)


SCENARIOS: dict[str, Scenario] = {
    "move": Scenario(move, small=True),
    "move layer-major": Scenario(move, {"order": "layer", "head_dim": 80, "block_size": 32}),
    "move odd runs": Scenario(
        move, {"order": "layer", "num_kv_heads": 1, "head_dim": 24, "block_size": 50}, small=True
    ),
    "assign": Scenario(assign, small=True),
    "assign layer-major": Scenario(assign, {"order": "layer", "head_dim": 80}),
    "swap layer-major": Scenario(swap, {"order": "layer"}),
    "write bf16": Scenario(write, small=True),
    "write fp32 d80": Scenario(write, {"dtype": "float32", "head_dim": 80}),
    "write e4m3 token": Scenario(write, {"scale": "token"}, small=True),
    "write e4m3 token d80 from fp32": Scenario(
        write, {"scale": "token", "head_dim": 80}, {"io": "float32"}
    ),
    "write e4m3 head d96 from fp16": Scenario(
        write, {"scale": "head", "head_dim": 96}, {"io": "float16"}
    ),
    "convert e4m3 token": Scenario(convert, {"scale": "token"}, small=True),
    "convert e4m3 head d80": Scenario(
        convert, {"scale": "head", "head_dim": 80}, {"io": "float16"}
    ),
    "convert e4m3 block b64 from fp32": Scenario(
        convert, {"scale": "block", "block_size": 64}, {"io": "float32"}
    ),
    "decode bf16": Scenario(decode, small=True),
    "decode bf16 d80 b32 g12 alibi": Scenario(
        decode, {"head_dim": 80, "block_size": 32}, {"group": 12, "alibi": True}
    ),
    "decode fp16 d256 window": Scenario(
        decode, {"dtype": "float16", "head_dim": 256}, {"group": 2, "window": 20}
    ),
    "decode e4m3 token d128": Scenario(
        decode, {"scale": "token", "head_dim": 128}, {"group": 7}, small=True
    ),
    "decode e4m3 head fp16 soft cap": Scenario(
        decode, {"scale": "head"}, {"io": "float16", "soft_cap": 20.0}
    ),
    "decode e4m3 block layer-major": Scenario(
        decode, {"scale": "block", "order": "layer"}, {"group": 9}
    ),
    "decode long": Scenario(decode, {"num_kv_heads": 1}, {"lengths": (300,)}),
    "prefill bf16": Scenario(prefill, small=True),
    "prefill long": Scenario(prefill, {"num_kv_heads": 1}, {"lengths": (200,)}),
    "prefill bf16 d80 b32 g3 alibi": Scenario(
        prefill, {"head_dim": 80, "block_size": 32}, {"group": 3, "alibi": True}
    ),
    "prefill fp16 d256 window": Scenario(
        prefill, {"dtype": "float16", "head_dim": 256}, {"group": 2, "window": 20}
    ),
    "prefill e4m3 token d128": Scenario(prefill, {"scale": "token", "head_dim": 128}, {"group": 5}),
    "prefill e4m3 head fp16 soft cap": Scenario(
        prefill, {"scale": "head"}, {"io": "float16", "soft_cap": 20.0}
    ),
    "prefill e4m3 block": Scenario(prefill, {"scale": "block"}),
}


def run(name: str, backend: EmulatedBackend) -> Bytes:
    """Run a scenario by name; what the kernels wrote."""
    scenario = SCENARIOS[name]
    return scenario.call(backend, layout_of(**scenario.layout), **scenario.options)


def _in_children(names: list[str]) -> Iterator[tuple[str, bool, float]]:
    """Each scenario in a process of its own, so that a report ends one only."""
    for name in names:
        began = time.perf_counter()
        child = os.fork()
        if not child:
            try:
                run(name, EmulatedBackend(ORDERS))
            finally:
                sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        yield name, status == 0, time.perf_counter() - began


def main(arguments: list[str]) -> int:
    """Run scenarios and print a line each; the exit code says whether all were silent."""
    every = "--all" in arguments
    chosen = [a for a in arguments if not a.startswith("-")]
    names = chosen or [name for name, scenario in SCENARIOS.items() if every or scenario.small]
    torch.set_num_threads(1)
    found = []
    for name, silent, seconds in _in_children(names):
        sys.stdout.write(f"{'silent' if silent else 'FOUND ':6} {seconds:6.1f} s  {name}\n")
        sys.stdout.flush()
        if not silent:
            found.append(name)
    if found:
        sys.stdout.write(f"found something in: {', '.join(found)}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
