"""What the engine tells the exporter of metrics, in blocks, tokens and requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import kvcatch
from kvcatch.engine.request import FinishReason
from kvcatch.kernels.cache import KVCache
from kvcatch.laws import GATES
from kvcatch.observe.exporter.source import Glance, Numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcatch.engine.engine import Engine

__all__ = ["EngineSource"]

ALL_GATES: tuple[str, ...] = GATES
NOT_LOOKED_AT = "not_looked_at"
REASONS = tuple(reason.value for reason in FinishReason)
DOOR_GATES = ("never_fits", "queue_full")


class EngineSource:
    """An engine as a source of the exporter."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self.model_name = model_name
        config = engine.config
        self.limits: Mapping[str, float] = {
            "num_blocks": config.num_blocks,
            "block_size_tokens": config.block_size,
            "max_num_seqs": config.max_num_seqs,
            "token_budget_tokens": config.max_num_batched_tokens,
            "max_model_len_tokens": config.max_model_len,
            "watermark_blocks": int(config.watermark * config.num_blocks),
        }
        self.info: Mapping[str, str] = {
            "version": kvcatch.__version__,
            "law": config.law,
            "order": config.order,
            "preemption": config.preemption,
            "placement": config.placement,
            "eviction": config.eviction,
            "compaction": config.compaction,
        }
        cache = getattr(engine.runner, "cache", None)
        # A runner of one's own may keep keys and values as it likes: how many bytes is unknown then.
        self.device = cache.device if isinstance(cache, KVCache) else "cpu"
        self.kv_cache_bytes = cache.num_bytes if isinstance(cache, KVCache) else None

    def numbers(self) -> Numbers:
        """The engine between two steps."""
        engine = self._engine
        pool, scheduler, counters = engine.pool, engine.scheduler, engine.counters
        waiting = dict.fromkeys((*ALL_GATES, NOT_LOOKED_AT), 0)
        oldest: float | None = None
        for branch in scheduler.waiting:
            gate = NOT_LOOKED_AT if branch.refusal is None else branch.refusal.gate
            waiting[gate] += 1
            arrived = branch.request.arrived
            oldest = arrived if oldest is None else min(oldest, arrived)
        head, config = scheduler.refusal, engine.config
        used_on_host = config.host_blocks - scheduler.host_free
        return Numbers(
            taken_at=time.monotonic(),
            blocks={"free": pool.num_free, "cached": pool.num_cached, "active": pool.num_active},
            reserved_blocks=pool.num_reserved,
            pinned_blocks=pool.num_pinned,
            available_blocks=pool.available,
            largest_run_blocks=pool.largest_run,
            host_blocks=(
                {"free": scheduler.host_free, "used": used_on_host} if config.host_blocks else {}
            ),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            waiting_by_gate=waiting,
            head=(
                None
                if head is None
                else (head.gate, head.required, max(0, head.available), head.unit)
            ),
            oldest_waiting_seconds=None if oldest is None else max(0.0, engine.clock() - oldest),
            # What did not happen yet is 0, not absent: rates begin with the first of each.
            finished=dict.fromkeys(REASONS, 0) | counters.finished,
            rejected=dict.fromkeys(DOOR_GATES, 0) | counters.rejected,
            refused_steps=dict.fromkeys(ALL_GATES, 0) | counters.refused_steps,
            preemptions=dict(scheduler.preemptions),
            steps=counters.steps,
            step_tokens=counters.step_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            looked_up_tokens=counters.looked_up_tokens,
            hit_tokens={"device": counters.hit_tokens, "host": counters.host_hit_tokens},
            compactions=counters.compactions,
            blocks_moved=counters.blocks_moved,
            step_seconds=dict(counters.seconds),
            histograms=engine.times.values(),
        )

    def glance(self) -> Glance:
        """What changes with every step, read while the engine goes on."""
        engine = self._engine
        pool, scheduler = engine.pool, engine.scheduler
        used = pool.num_active + pool.num_reserved
        return Glance(used / pool.num_blocks, len(scheduler.running), len(scheduler.waiting))

    def pool_stats(self) -> Mapping[str, Any]:
        """Figures of the pool."""
        return self._engine.pool.stats()

    def holdings(self, by: str) -> Sequence[Mapping[str, Any]]:
        """Who holds what."""
        return self._engine.pool.holdings(by)
