"""What of vLLM the plugin touches, and whether this vLLM looks as the known ones do.

Known shapes: 0.10.2 to 0.33.0, read in each release's ``vllm/v1/core``. The version number decides
nothing; names and signatures do, so that a patched build is judged by what it is.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from kvcatch.errors import KvcatchError

__all__ = ["Shape", "UnknownShape"]

QUEUE_METHODS = frozenset(
    {
        "popleft",
        "popleft_n",
        "remove",
        "append",
        "append_n",
        "prepend_n",
        "get_all_free_blocks",
        "iter_blocks_after",
    }
)
QUEUE_REQUIRED = frozenset({"popleft", "popleft_n", "remove", "append", "append_n"})
POOL_PARAMETERS = frozenset(
    {
        "self",
        "num_gpu_blocks",
        "enable_caching",
        "hash_block_size",
        "enable_kv_cache_events",
        "metrics_collector",
        "medium",
        "num_hash_lookahead_tokens",
    }
)
POOL_METHODS = ("get_new_blocks", "free_blocks", "touch", "reset_prefix_cache")
ALLOCATE = (
    ("self", "request_id", "num_tokens"),
    ("self", "request_id", "num_tokens", "num_tokens_main_model"),
)


class UnknownShape(KvcatchError):
    """This vLLM differs from the known ones; the message says in which name."""


@dataclass(frozen=True)
class Shape:
    """The classes and modules of this vLLM that the plugin patches, all found and checked.

    Attributes:
        version: What vLLM calls itself; for messages only.
        block_pool: Module of ``BlockPool``; it makes the free queues by a global name.
        pool: Class ``BlockPool``.
        queue: Class ``FreeKVCacheBlockQueue``.
        manager: Class ``SingleTypeKVCacheManager``.
        kv_cache_manager: Class ``KVCacheManager``.
        scheduler: Class ``Scheduler``.
        fcfs: Class ``FCFSRequestQueue``, a deque.
        prepends: The pool gives blocks without a hash back by ``prepend_n`` (since 0.24).
        iterates: Walkers use ``iter_blocks_after`` (since 0.27), not the list's links.
    """

    version: str
    block_pool: Any
    pool: Any
    queue: Any
    manager: Any
    kv_cache_manager: Any
    scheduler: Any
    fcfs: Any
    prepends: bool
    iterates: bool

    @classmethod
    def read(cls) -> Shape:
        """Import what is patched and check it.

        Raises:
            UnknownShape: Something is missing or differs; the message names it.
        """
        block_pool = _module("vllm.v1.core.block_pool")
        utils = _module("vllm.v1.core.kv_cache_utils")
        managers = _module("vllm.v1.core.single_type_kv_cache_manager")
        kv_cache_manager = _module("vllm.v1.core.kv_cache_manager")
        scheduler = _module("vllm.v1.core.sched.scheduler")
        queues = _module("vllm.v1.core.sched.request_queue")
        queue = _attribute(utils, "FreeKVCacheBlockQueue")
        if _attribute(block_pool, "FreeKVCacheBlockQueue") is not queue:
            raise UnknownShape("block_pool.FreeKVCacheBlockQueue is not kv_cache_utils's")
        shape = cls(
            version=str(getattr(_module("vllm"), "__version__", "unknown")),
            block_pool=block_pool,
            pool=_attribute(block_pool, "BlockPool"),
            queue=queue,
            manager=_attribute(managers, "SingleTypeKVCacheManager"),
            kv_cache_manager=_attribute(kv_cache_manager, "KVCacheManager"),
            scheduler=_attribute(scheduler, "Scheduler"),
            fcfs=_attribute(queues, "FCFSRequestQueue"),
            prepends=hasattr(queue, "prepend_n"),
            iterates=hasattr(queue, "iter_blocks_after"),
        )
        shape._check(_attribute(utils, "KVCacheBlock"))
        return shape

    def _check(self, block: Any) -> None:
        methods = {name for name, _ in inspect.getmembers(self.queue, inspect.isfunction)}
        methods = {name for name in methods if not name.startswith("_")}
        if unknown := sorted(methods - QUEUE_METHODS):
            raise UnknownShape(
                f"FreeKVCacheBlockQueue has {unknown[0]}, which no known version has"
            )
        if missing := sorted(QUEUE_REQUIRED - methods):
            raise UnknownShape(f"FreeKVCacheBlockQueue has no {missing[0]}")
        parameters = _parameters(self.pool, "__init__")
        if unknown := [name for name in parameters if name not in POOL_PARAMETERS]:
            raise UnknownShape(
                f"BlockPool.__init__ takes {unknown[0]}, which no known version does"
            )
        if parameters[:3] != ("self", "num_gpu_blocks", "enable_caching"):
            raise UnknownShape(f"BlockPool.__init__ takes {parameters[:3]} first")
        for name in POOL_METHODS:
            _attribute(self.pool, name)
        fields = getattr(block, "__dataclass_fields__", {})
        for name in ("block_id", "ref_cnt", "_block_hash", "is_null"):
            if name not in fields:
                raise UnknownShape(f"KVCacheBlock has no {name}")
        if (parameters := _parameters(self.manager, "allocate_new_blocks")) not in ALLOCATE:
            raise UnknownShape(f"SingleTypeKVCacheManager.allocate_new_blocks takes {parameters}")
        if _parameters(self.kv_cache_manager, "free")[:2] != ("self", "request"):
            raise UnknownShape("KVCacheManager.free does not take a request")
        _attribute(self.kv_cache_manager, "allocate_slots")
        _attribute(self.scheduler, "schedule")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnknownShape(f"{name} cannot be imported: {error}") from error


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UnknownShape(f"{getattr(owner, '__name__', owner)} has no {name}") from None


def _parameters(owner: Any, name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(_attribute(owner, name)).parameters)
