"""Carries out a schedule on a real model: arrays for the kernels, one forward pass, logits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.engine.compaction import CompactionRule
from kvcatch.errors import InvalidArgument
from kvcatch.kernels.layout import KVLayout
from kvcatch.models.extras import need
from kvcatch.models.step import DecodePart, PrefillPart, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch import BlockPool
    from kvcatch.engine.config import EngineConfig
    from kvcatch.engine.schedule import Schedule, Scheduled
    from kvcatch.kernels import Backend
    from kvcatch.kernels.layout import KVDtype, ScaleKind
    from kvcatch.models.llama import LlamaModel

__all__ = ["ModelRunner", "layout_of"]


def layout_of(model: LlamaModel, block_size: int, kv_dtype: KVDtype | None = None) -> KVLayout:
    """How a model's keys and values lie in blocks; ``kv_dtype`` ``None`` is that of the weights."""
    shape = model.config
    dtype: KVDtype = kv_dtype or model.precision.weights
    scale: ScaleKind = "token" if dtype == "float8_e4m3" else "none"
    return KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype, scale)


class ModelRunner:
    """A model with its KV cache on one device.

    Args:
        model: the weights.
        backend: the device's.
        config: limits; the cache has ``num_blocks`` blocks, the host pool ``host_blocks``.
        kv_dtype: of the cache; ``None`` for that of the weights.

    Raises:
        InvalidArgument: ``max_model_len`` is more than the model's own.
        OutOfMemory: the cache does not fit.
    """

    def __init__(
        self,
        model: LlamaModel,
        backend: Backend,
        config: EngineConfig,
        kv_dtype: KVDtype | None = None,
    ) -> None:
        torch = need("torch")
        shape = model.config
        if config.max_model_len > shape.max_model_len:
            raise InvalidArgument(
                f"max_model_len = {config.max_model_len}: the model was trained for {shape.max_model_len}"
            )
        self.layout = layout_of(model, config.block_size, kv_dtype)
        self.model, self.backend, self.config = model, backend, config
        self.vocab_size = shape.vocab_size
        self.cache = backend.allocate(self.layout, config.num_blocks)
        self.host = (
            backend.allocate_host(self.layout, config.host_blocks) if config.host_blocks else None
        )
        self.compaction: CompactionRule | None = None
        if config.compaction != "off":
            self.compaction = CompactionRule(
                config.compaction, self.layout.block_bytes, self._bandwidth()
            )
        self._steps = 0
        self._torch = torch
        self._width = -(-config.max_model_len // config.block_size)

    def move(self, schedule: Schedule) -> None:
        """Swaps out, copies on write, swaps in, each ordered before what follows it."""
        for copy in schedule.swap_out:
            assert self.host is not None
            self.backend.swap_out(self.cache, self.host, copy.src, copy.dst).wait()
        if schedule.copies:
            src, dst = zip(*schedule.copies, strict=True)
            self.backend.move_blocks(self.cache, src, dst)
        for copy in schedule.swap_in:
            assert self.host is not None
            self.backend.swap_in(self.host, self.cache, copy.src, copy.dst).wait()

    def forward(self, items: Sequence[Scheduled], pool: BlockPool) -> Any:
        """Logits [n, vocab] of the items that sample, in order; all keys and values are written."""
        return self.model.forward(self.step_of(items, pool), self.cache, self.backend)

    def step_of(self, items: Sequence[Scheduled], pool: BlockPool) -> Step:
        """The arrays of one forward pass; decodes (one token each) come first in ``items``."""
        counts = np.array([item.count for item in items], np.int64)
        starts = np.array([item.start for item in items], np.int64)
        ends = (starts + counts).astype(np.int32)
        sequences = [item.branch.sequence for item in items]
        total = int(counts.sum())
        slots = np.empty(total, np.int64)
        pool.slot_mapping(sequences, counts, starts=starts, out=slots)  # type: ignore[arg-type]
        width = min(self._width, -(-int(ends.max()) // self.config.block_size))
        tables = np.empty((len(items), width), np.int32)
        pool.block_tables(sequences, tables, pad=0)  # type: ignore[arg-type]
        tokens = np.empty(total, np.int64)
        positions = np.empty(total, np.int64)
        at, rows = 0, []
        for item in items:
            end = at + item.count
            tokens[at:end] = item.branch.tokens[item.start : item.start + item.count]
            positions[at:end] = np.arange(item.start, item.start + item.count)
            if item.samples:
                rows.append(end - 1)
            at = end
        decodes = int((counts == 1).sum())
        tensor = self._tensor
        decode = prefill = None
        if decodes:
            plan = self.backend.plan_decode(
                self.layout, ends[:decodes], self.model.config.num_q_heads
            )
            decode = DecodePart(tensor(tables[:decodes]), tensor(ends[:decodes]), plan)
        if decodes < len(items):
            query_starts = np.concatenate(([0], counts[decodes:].cumsum())).astype(np.int32)
            prefill = PrefillPart(query_starts, tensor(tables[decodes:]), ends[decodes:])
        return Step(
            tensor(tokens),
            tensor(positions),
            tensor(slots),
            tensor(np.array(rows, np.int64)),
            decode,
            prefill,
        )

    def compact(self, pool: BlockPool, objective: str) -> int:
        """Apply a plan that pays; returns how many blocks moved."""
        rule = self.compaction
        self._steps += 1
        if rule is None or self._steps % rule.every:
            return 0
        paid = rule.plan(pool)
        if paid is None:
            return 0
        paid.plan.apply(self.cache, self.backend)
        return len(paid.plan)

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array).to(self.model.device)

    def _bandwidth(self) -> float:
        """Bytes per second that moving blocks reads and writes, from copying up to 16 of them.

        Before anything is in the cache: the copies change nothing that counts.
        """
        blocks = min(16, self.config.num_blocks // 2)
        if not blocks:
            return 1e9
        src, dst = range(blocks), range(blocks, 2 * blocks)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            self.backend.move_blocks(self.cache, src, dst)
            self.backend.synchronise()
            best = min(best, time.perf_counter() - start)
        return 2 * blocks * self.layout.block_bytes / best
