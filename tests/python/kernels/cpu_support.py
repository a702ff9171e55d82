"""A paged batch with known contents, everything no token owns poisoned, and attention over it in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.kernels import KVLayout, get_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvcatch.kernels import KVCache

E4M3 = "float8_e4m3"
# Relative to the largest output: rounding of the output's type, and of f32 sums.
TOLERANCE = {"float32": 4e-6, "float16": 1.5e-3, "bfloat16": 1e-2}


def torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, {E4M3: "float8_e4m3fn"}.get(name, name))


@dataclass
class Batch:
    """Sequences of given lengths in a pool of which every byte that no token owns is 0xFF or 0x7F: NaN in all types."""

    layout: KVLayout
    lens: list[int]
    seed: int = 0
    identity: bool = False
    cache: KVCache = field(init=False)
    tables: Any = field(init=False)
    keys: list[NDArray[np.float64]] = field(init=False)
    values: list[NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        import torch

        layout, backend = self.layout, get_backend("cpu")
        self.rng = np.random.default_rng(self.seed)
        size = layout.block_size
        counts = [-(-n // size) for n in self.lens]
        num_blocks = sum(counts) + 3
        self.width = max([*counts, 1]) + 1
        scales = None
        if layout.scale == "head":
            shape = (layout.num_layers, 2, layout.num_kv_heads)
            scales = torch.from_numpy(self.rng.uniform(0.004, 0.02, shape).astype(np.float32))
        self.cache = backend.allocate(layout, num_blocks, scales)
        self.cache.buffer.fill_(0x7F if layout.dtype == E4M3 else 0xFF)
        # The same tokens whatever the placement: contents have a generator of their own.
        contents = np.random.default_rng(self.seed + 1)
        order = np.arange(num_blocks) if self.identity else self.rng.permutation(num_blocks)
        tables = np.full((len(self.lens), self.width), 10**6, np.int32)
        self.keys, self.values, used = [], [], 0
        for seq, (tokens, count) in enumerate(zip(self.lens, counts, strict=True)):
            tables[seq, :count] = order[used : used + count]
            used += count
            both = [
                contents.normal(
                    size=(layout.num_layers, tokens, layout.num_kv_heads, layout.head_dim)
                )
                for _ in range(2)
            ]
            stored = [self._write(kv, tables[seq], x) for kv, x in enumerate(both)]
            self.keys.append(stored[0])
            self.values.append(stored[1])
        self.tables = torch.from_numpy(tables)

    def _write(self, kv: int, row: NDArray[np.int32], x: NDArray[np.float64]) -> Any:
        """Store ``x`` [layers, tokens, heads, dim] by the layout's own arithmetic; returns what it became."""
        import torch

        layout, cache, s = self.layout, self.cache, self.cache.strides
        raw, became = cache.buffer.numpy(), np.empty_like(x)
        kind, size = torch_dtype(layout.dtype), layout.block_size
        for layer, head in np.ndindex(x.shape[0], x.shape[2]):
            for first in range(0, x.shape[1], size):
                rows = x[layer, first : first + size, head]
                block = int(row[first // size])
                scale = np.ones((len(rows), 1))
                if layout.scale == "head":
                    scale[:] = float(cache.head_scales[layer, kv, head])
                elif layout.scale != "none":
                    which = np.arange(len(rows))[:, None] if layout.scale == "token" else block
                    scale[:] = np.float32(0.01) + np.float32(0.002) * ((which * 7 + head) % 5)
                    scale = scale.astype(np.float32).astype(np.float64)
                    area = layout.offset(cache.num_blocks, block, layer, kv)
                    for token in range(len(rows)):
                        at = area + s.scale + head * s.scale_head + token * s.scale_token
                        raw[at : at + 4].view(np.float32)[0] = scale[token, 0]
                # Within 448 * 0.01: torch does not saturate.
                narrow = torch.from_numpy(rows / scale).float().to(kind)
                at = layout.offset(cache.num_blocks, block, layer, kv, head)
                raw[at : at + rows.size * layout.item_bytes] = (
                    narrow.view(torch.uint8).numpy().ravel()
                )
                became[layer, first : first + size, head] = narrow.double().numpy() * scale
        return became

    def query(self, rows: int, group: int, dtype: str | None = None, factor: float = 1.0) -> Any:
        import torch

        name = dtype or ("bfloat16" if self.layout.dtype == E4M3 else self.layout.dtype)
        rng = np.random.default_rng(self.seed + 2)
        shape = (rows, group * self.layout.num_kv_heads, self.layout.head_dim)
        return (torch.from_numpy(rng.normal(size=shape)) * factor).to(torch_dtype(name))

    @property
    def seq_lens(self) -> Any:
        import torch

        return torch.tensor(self.lens, dtype=torch.int32)

    def expected(
        self,
        layer: int,
        seq: int,
        query: Any,
        position: int,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        slopes: Sequence[float] | None = None,
    ) -> NDArray[np.float64]:
        """Attention of ``query`` [heads, dim] at ``position`` over the tokens up to it, in float64."""
        q = query.double().numpy()
        first = 0 if window is None else max(0, position + 1 - window)
        keys = self.keys[seq][layer, first : position + 1]
        values = self.values[seq][layer, first : position + 1]
        group = q.shape[0] // keys.shape[1]
        out = np.zeros_like(q)
        distance = np.arange(first, position + 1) - position
        for head in range(q.shape[0]):
            logits = keys[:, head // group] @ q[head] * scale
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if slopes is not None:
                logits = logits + float(slopes[head]) * distance
            weights = np.exp(logits - logits.max())
            out[head] = weights @ values[:, head // group] / weights.sum()
        return out


def error(found: Any, wanted: NDArray[np.float64]) -> float:
    """Largest error relative to the largest magnitude wanted; infinite where anything is not finite."""
    seen = found.double().numpy()
    if not np.isfinite(seen).all():
        return float("inf")
    return float(
        np.abs(seen - wanted).max(initial=0.0) / max(1e-3, np.abs(wanted).max(initial=0.0))
    )
