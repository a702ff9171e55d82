"""LMCache: a cache beside an engine; pinned objects and failed evictions tell of a pin leak."""

from __future__ import annotations

from kvcatch.observe.engines.table import Family, Metric

__all__ = ["LMCACHE"]

_P = "lmcache:"

LMCACHE = Family(
    engine="lmcache",
    prefixes=(_P, "lmcache_"),
    identity=("model_name", "worker_id", "role"),
    usage_of="unknown: LMCache exports bytes, not a share",
    metrics=(
        Metric(_P + "pinned_memory_objs_count", "pinned_objects"),
        Metric(_P + "local_cpu_evict_failed_count", "failed_allocations_total", "sum"),
        Metric(_P + "forced_unpin_count", "forced_unpins_total", "sum"),
        Metric(_P + "active_memory_objs_count", "active_objects"),
        Metric(_P + "local_cache_usage", "cache_bytes"),
        Metric(_P + "num_hit_tokens", "prefix_hit_tokens_total", "sum"),
        Metric(_P + "num_requested_tokens", "prefix_query_tokens_total", "sum"),
        Metric(_P + "lookup_hit_rate", "hit_share", optional=True),
    ),
)
