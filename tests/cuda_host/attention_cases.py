"""Variants of the attention kernels to try under emulation, and calls of them on cases of ``attention_oracle``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_host import oracle
from cuda_host.attention_oracle import NO_BLOCK, STALE
from kvcatch import _core
from kvcatch.kernels import KVLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cuda_host.attention_oracle import Case, Options
    from cuda_host.emulated import EmulatedBackend
    from kvcatch.kernels.device_attention import DevicePlan

__all__ = [
    "VARIANTS",
    "array",
    "decode",
    "forget",
    "layout_of",
    "load",
    "pieces",
    "prefill",
    "random_query",
    "tensor",
]

# name: layout, dtype of queries, query heads per kv head
VARIANTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "bf16 d64 b16 g1": ({"head_dim": 64}, "bfloat16", 1),
    "bf16 d64 b32 g3": ({"head_dim": 64, "block_size": 32}, "bfloat16", 3),
    "bf16 d80 b16 g2": ({"head_dim": 80}, "bfloat16", 2),
    "bf16 d96 b32 g12": ({"head_dim": 96, "block_size": 32}, "bfloat16", 12),
    "bf16 d128 b16 g8": ({"head_dim": 128}, "bfloat16", 8),
    "bf16 d128 b64 g7 layer-major": (
        {"head_dim": 128, "block_size": 64, "order": "layer"},
        "bfloat16",
        7,
    ),
    "bf16 d128 b16 g16": ({"head_dim": 128}, "bfloat16", 16),
    "bf16 d256 b16 g4": ({"head_dim": 256}, "bfloat16", 4),
    "bf16 d256 b16 g12": ({"head_dim": 256}, "bfloat16", 12),
    "fp16 d64 b64 g5": ({"head_dim": 64, "block_size": 64, "dtype": "float16"}, "float16", 5),
    "fp16 d80 b32 g16": ({"head_dim": 80, "block_size": 32, "dtype": "float16"}, "float16", 16),
    "fp16 d128 b16 g4": ({"head_dim": 128, "dtype": "float16"}, "float16", 4),
    "e4m3 token d64 b32 g4": ({"head_dim": 64, "block_size": 32, "scale": "token"}, "float16", 4),
    "e4m3 token d80 b16 g3": ({"head_dim": 80, "scale": "token"}, "bfloat16", 3),
    "e4m3 token d128 b16 g8": ({"head_dim": 128, "scale": "token"}, "bfloat16", 8),
    "e4m3 head d96 b16 g7": ({"head_dim": 96, "scale": "head"}, "bfloat16", 7),
    "e4m3 head d128 b64 g16": ({"head_dim": 128, "block_size": 64, "scale": "head"}, "float16", 16),
    "e4m3 block d128 b16 g2": (
        {"head_dim": 128, "scale": "block", "order": "layer"},
        "float16",
        2,
    ),
    "e4m3 token d256 b16 g12": ({"head_dim": 256, "scale": "token"}, "bfloat16", 12),
}


def layout_of(num_kv_heads: int = 2, **options: Any) -> KVLayout:
    """Two layers; e4m3 where there are scales."""
    if "scale" in options:
        options["dtype"] = "float8_e4m3"
    return KVLayout(num_layers=2, num_kv_heads=num_kv_heads, **options)


def tensor(array: NDArray[Any]) -> Any:
    """A torch tensor of an array's elements."""
    import torch

    array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(result: Any) -> NDArray[Any]:
    """The elements of a torch tensor."""
    import torch

    if result.dtype == torch.bfloat16:
        return np.asarray(result.view(torch.int16).numpy().view(oracle.DTYPES["bfloat16"]))
    return np.asarray(result.numpy())


def load(backend: EmulatedBackend, case: Case) -> Any:
    """The case's pool as a cache."""
    scales = None if case.head_scales is None else tensor(case.head_scales)
    cache = backend.allocate(case.layout, case.num_blocks, scales)
    cache.buffer[:] = tensor(case.pool)
    return cache


def forget(case: Case, before: Sequence[int]) -> Case:
    """The case with all tokens before ``before[s]`` of each sequence gone, and with them the ids of whole blocks."""
    layout = case.layout
    gone = replace(case, pool=case.pool.copy(), tables=case.tables.copy())
    places: list[tuple[NDArray[Any], Any]] = [(oracle.elements(gone.pool, layout), np.nan)]
    if layout.dtype == "float8_e4m3":
        places = [(oracle.elements(gone.pool, layout), STALE)]
    if layout.scale == "token":
        places.append((oracle.scales(gone.pool, layout), np.nan))
    for s, count in enumerate(before):
        for t in range(count):
            block = case.tables[s, t // layout.block_size]
            for place, stale in places:
                place[block, case.layer, :, :, t % layout.block_size] = stale
        gone.tables[s, : count // layout.block_size] = NO_BLOCK
    return gone


def pieces(
    backend: EmulatedBackend, case: Case, num_q_heads: int, num_slots: int, window: int = 0
) -> DevicePlan:
    """A plan of many small pieces."""
    made = backend.plan_decode(case.layout, case.seq_lens, num_q_heads, window or None)
    work, merges, partials = _core.decode_work(
        case.seq_lens, num_slots, min_tokens=16, window=window
    )
    return replace(
        made,
        num_partials=partials,
        pieces=backend.runtime.upload(work) if len(work) else None,
        merges=backend.runtime.upload(merges) if len(merges) else None,
    )


def decode(
    backend: EmulatedBackend,
    case: Case,
    query: NDArray[Any],
    options: Options,
    plan: DevicePlan | None = None,
) -> NDArray[Any]:
    """``decode_attention`` of a case."""
    slopes = None if options.alibi_slopes is None else tensor(options.alibi_slopes)
    out = backend.decode_attention(
        load(backend, case),
        case.layer,
        tensor(query),
        tensor(case.tables),
        tensor(case.seq_lens),
        scale=options.scale,
        plan=plan,
        window=options.window,
        soft_cap=options.soft_cap,
        alibi_slopes=slopes,
    )
    return array(out)


def prefill(
    backend: EmulatedBackend,
    case: Case,
    query: NDArray[Any],
    starts: Sequence[int],
    options: Options,
) -> NDArray[Any]:
    """``prefill_attention`` of a case."""
    slopes = None if options.alibi_slopes is None else tensor(options.alibi_slopes)
    out = backend.prefill_attention(
        load(backend, case),
        case.layer,
        tensor(query),
        starts,
        tensor(case.tables),
        case.seq_lens,
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        alibi_slopes=slopes,
    )
    return array(out)


def random_query(
    rng: np.random.Generator, case: Case, group: int, dtype: str, factor: float = 1.0
) -> NDArray[Any]:
    """Gaussian queries, one token a sequence."""
    shape = (len(case.seq_lens), case.layout.num_kv_heads * group, case.layout.head_dim)
    return (rng.standard_normal(shape) * factor).astype(oracle.DTYPES[dtype])
