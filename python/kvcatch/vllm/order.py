"""``order``: among the first waiting requests, those with a longer cached prefix enter earlier.

Only while ``Scheduler.schedule`` runs is the waiting queue in another order than that of arrival; what is left
is put back. So it is known exactly how often a request was passed over by later ones, and after
``order_passes`` times it goes before all that were not. Preempted requests stay in front. Off where vLLM's
priority policy is on: its queue is no FCFS queue.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcatch.vllm import patch

if TYPE_CHECKING:
    from kvcatch.vllm.settings import Settings
    from kvcatch.vllm.versions import Shape

__all__ = ["install", "rank"]

logger = logging.getLogger("vllm.kvcatch")

_PASSES = "_kvcatch_passes"


def install(shape: Shape, settings: Settings) -> None:
    """Reorder the waiting queue around every ``Scheduler.schedule``."""
    schedule = patch.original(shape.scheduler, "schedule")
    fcfs, window, passes = shape.fcfs, settings.order_window, settings.order_passes
    failed = False

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        waiting = self.waiting
        if failed or len(waiting) < 2 or type(waiting) is not fcfs or not _has_room(self):
            return schedule(self, *args, **kwargs)
        first = [waiting[i] for i in range(min(window, len(waiting)))]
        try:
            ranked = rank(self.kv_cache_manager, first, passes)
        except Exception as error:
            failed = True
            logger.error("kvcatch: order is off: %s: %s", type(error).__name__, error)
            return schedule(self, *args, **kwargs)
        _put(waiting, ranked)
        try:
            return schedule(self, *args, **kwargs)
        finally:
            _put_back(waiting, first)

    patch.replace(shape.scheduler, "schedule", scheduled)


def _has_room(scheduler: Any) -> bool:
    """Whether a waiting request could enter at all: else there is nothing to order."""
    return bool(len(scheduler.running) < scheduler.max_num_running_reqs)


def rank(manager: Any, requests: list[Any], passes: int) -> list[Any]:
    """Requests in the order they should enter: preempted ones, those passed over too often, longest cached first.

    Args:
        manager: The ``KVCacheManager`` whose prefix cache is asked; nothing in it changes.
        requests: Waiting requests in order of arrival.
        passes: How often one may be passed over.
    """
    pool = manager.block_pool
    groups = [group.kv_cache_group_id for group in manager.coordinator.single_type_managers]
    if not manager.enable_caching:
        return requests

    def key(request: Any) -> tuple[int, int]:
        # 0.10.2 does not count a request's preemptions.
        preempted = request.status.name == "PREEMPTED" or getattr(request, "num_preemptions", 0)
        if preempted or request.num_computed_tokens:
            return 0, 0
        if getattr(request, _PASSES, 0) >= passes:
            return 1, 0
        return 2, -_cached_blocks(pool, groups, request)

    return sorted(requests, key=key)


def _cached_blocks(pool: Any, groups: list[int], request: Any) -> int:
    """About how many of the prompt's hash blocks are cached, by bisection: a chain is cached from its start on."""
    hashes = request.block_hashes
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if pool.get_cached_block(hashes[middle], groups):
            low = middle + 1
        else:
            high = middle
    return low


def _put(waiting: Any, ranked: list[Any]) -> None:
    for i, request in enumerate(ranked):
        waiting[i] = request


def _put_back(waiting: Any, first: list[Any]) -> None:
    """What is left of ``first`` goes back into order of arrival, at the places it is left in."""
    index = {id(request): i for i, request in enumerate(first)}
    places, left = [], []
    for place, request in enumerate(waiting):
        if id(request) in index:
            places.append(place)
            left.append(request)
            if len(left) == len(first):
                break
    gone = set(index) - {id(request) for request in left}
    if not gone:
        for place, request in zip(places, first, strict=True):
            waiting[place] = request
        return
    left.sort(key=lambda request: index[id(request)])
    later = sorted(index[key] for key in gone)
    for place, request in zip(places, left, strict=True):
        waiting[place] = request
        overtakers = sum(i > index[id(request)] for i in later)
        if overtakers:
            setattr(request, _PASSES, getattr(request, _PASSES, 0) + overtakers)
