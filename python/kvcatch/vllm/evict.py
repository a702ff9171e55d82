"""``evict``: the core's eviction in place of LRU, and retention where a request asks for it.

The policy itself lives in the queue (``pool.install`` makes it with ``settings.eviction``): a block taken out
of the queue by its id was hit. Here it is told what the queue cannot see: hits of blocks in use, and what a
request wants kept. A request asks through ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``)::

    {"kvcatch_priority": 50, "kvcatch_ttl": 600}     or     {"kvcatch": {"priority": 50, "ttl": 600}}

Priority 1 to 100: given up only after every block of a lower one. Seconds to live: from the moment the request
ends (or is preempted); without them there is no end.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.vllm import patch
from kvcatch.vllm.pool import Queue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcatch.vllm.settings import Settings
    from kvcatch.vllm.versions import Shape

__all__ = ["install", "wanted"]

logger = logging.getLogger("vllm.kvcatch")


def wanted(extra_args: Mapping[str, Any] | None) -> tuple[int, float | None] | None:
    """The priority and the seconds to live that a request asks for; ``None`` when it asks for nothing.

    Raises:
        InvalidArgument: It asks for what cannot be; the message names the value.
    """
    if not extra_args:
        return None
    nested = extra_args.get("kvcatch")
    if nested is None:
        asked = {
            name: extra_args[f"kvcatch_{name}"]
            for name in ("priority", "ttl")
            if f"kvcatch_{name}" in extra_args
        }
    elif isinstance(nested, dict):
        asked = nested
    else:
        raise InvalidArgument(f"kvcatch = {nested!r}: must be a mapping of priority and ttl")
    if not asked:
        return None
    for name in asked:
        if name not in {"priority", "ttl"}:
            raise InvalidArgument(f"kvcatch has {name!r}: must be priority or ttl")
    priority, ttl = asked.get("priority"), asked.get("ttl")
    if isinstance(priority, bool) or not isinstance(priority, int) or not 1 <= priority <= 100:
        raise InvalidArgument(f"kvcatch priority = {priority!r}: must be an integer from 1 to 100")
    if ttl is None:
        return priority, None
    if (
        isinstance(ttl, bool)
        or not isinstance(ttl, int | float)
        or not math.isfinite(ttl)
        or not 0 < ttl <= 1e9
    ):
        raise InvalidArgument(f"kvcatch ttl = {ttl!r}: must be seconds, above 0 and at most 1e9")
    return priority, float(ttl)


def install(shape: Shape, settings: Settings) -> None:
    """Tell the queue of hits in use, and retain what ending requests ask for."""
    del settings
    touch, free = (
        patch.original(shape.pool, "touch"),
        patch.original(shape.kv_cache_manager, "free"),
    )
    warned = False

    def touched(self: Any, blocks: Any, *args: Any) -> None:
        # Before 0.12 a tuple of groups comes, later one group's list.
        queue = self.free_block_queue
        if isinstance(queue, Queue):
            groups = blocks if isinstance(blocks, tuple) else (blocks,)
            for group in groups:
                if isinstance(group, list) and (
                    used := [block for block in group if block.ref_cnt > 0 and not block.is_null]
                ):
                    queue.touch(used)
        touch(self, blocks, *args)

    def freed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        params = getattr(request, "sampling_params", None)
        extra_args = getattr(params, "extra_args", None)
        if extra_args:
            try:
                _retain(self, request, extra_args)
            except InvalidArgument as error:
                if not warned:
                    warned = True
                    logger.warning(
                        "kvcatch: request %s: %s; nothing is retained. Said once.",
                        request.request_id,
                        error,
                    )
        return free(self, request, *args, **kwargs)

    patch.replace(shape.pool, "touch", touched)
    patch.replace(shape.kv_cache_manager, "free", freed)


def _retain(manager: Any, request: Any, extra_args: Mapping[str, Any]) -> None:
    asked = wanted(extra_args)
    if asked is None:
        return
    priority, ttl = asked
    for group in manager.coordinator.single_type_managers:
        queue = group.block_pool.free_block_queue
        blocks = group.req_to_blocks.get(request.request_id, ())
        hashed = [block for block in blocks if block.block_hash is not None and not block.is_null]
        if isinstance(queue, Queue) and hashed:
            queue.retain(hashed, priority, ttl)
