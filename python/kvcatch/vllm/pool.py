"""``pool``: vLLM's free queue replaced by the core's ``FreeBlocks``, which hands out runs.

``BlockPool`` calls the queue's methods straight in Rust. What it cannot know, which sequence asks and
where that sequence ends, is told just before by :func:`install`'s wrapper of
``SingleTypeKVCacheManager.allocate_new_blocks``. Managers that allocate by themselves (Mamba's states,
circular buffers) ask without a hint: no room is kept behind what they get and nothing is evicted early.
"""

from __future__ import annotations

import functools
import inspect
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcatch._core import BlockQueue
from kvcatch.vllm import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcatch.vllm.settings import Settings
    from kvcatch.vllm.versions import Shape

__all__ = ["Queue", "install"]


class Queue(BlockQueue):
    """The free queue of one ``BlockPool``, with the interface of ``FreeKVCacheBlockQueue``.

    Walkers (host offload) see the eviction order. As soon as one walks, nothing is evicted early any
    more: what it saw first goes first.

    Attributes:
        num_free_blocks: Blocks in the queue; the core sets it at each change.
        walked: Somebody walked.
    """

    num_free_blocks: int
    walked: bool = False

    def __init__(self, blocks: list[Any], **options: Any) -> None:
        del options  # taken by the core before this is called
        self.num_free_blocks = len(blocks)

    def _walk(self) -> None:
        if not self.walked:
            self.walked = True
            self.set_early(False)

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in eviction order, from the start or from behind ``cursor``, as things stand now."""
        self._walk()
        blocks = iter(self.get_all_free_blocks())
        if cursor is not None:
            for block in blocks:
                if block is cursor:
                    break
        return blocks

    @property
    def fake_free_list_head(self) -> Any:
        """The list's end before its first block; its link is good until the queue changes."""
        self._walk()
        blocks = self.get_all_free_blocks()
        head = SimpleNamespace(block_id=-1, prev_free_block=None)
        self.link(head, blocks)
        return head

    @property
    def fake_free_list_tail(self) -> Any:
        """The list's end behind its last block."""
        return _TAIL

    def link(self, before: Any, blocks: list[Any]) -> None:
        """Link ``blocks`` behind ``before``, as vLLM's own list would be."""
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        before.next_free_block = _TAIL


# All that the known versions of ``SingleTypeKVCacheManager.allocate_new_blocks`` refer to.
_ALLOCATE_NAMES = frozenset(
    {
        *("req_to_blocks", "cdiv", "block_size", "len", "block_pool", "get_new_blocks", "extend"),
        *("type", "kv_cache_spec", "new_block_ids", "block_id", "_record_new_block_ids"),
        *("FullAttentionSpec", "TQFullAttentionSpec", "MLAAttentionSpec", "HiddenStateCacheSpec"),
        *("_partial_hit_reqs", "pop", "_apply_cow", "append"),
    }
)

EARLY_FROM = 8192
"""Blocks of the smallest pool in which cached blocks may be evicted early."""

_TAIL = SimpleNamespace(block_id=-1, prev_free_block=None, next_free_block=None, block_hash=None)


def install(shape: Shape, settings: Settings) -> None:
    """Make every ``BlockPool`` from now on use :class:`Queue`."""
    placement = settings.placement if settings.pool else "queue"
    eviction = settings.eviction if settings.evict else "lru"

    def make_queue(blocks: list[Any]) -> Queue:
        queue = Queue(blocks, placement=placement, eviction=eviction, prepends=shape.prepends)
        # A small pool has no blocks to spare: what is evicted early there is soon missed.
        queue.set_early(len(blocks) >= EARLY_FROM)
        return queue

    pool_init = patch.original(shape.pool, "__init__")

    @functools.wraps(pool_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pool_init(self, *args, **kwargs)
        queue, watchers = self.free_block_queue, getattr(self, "_reuse_watchers", None)
        if isinstance(queue, Queue) and isinstance(watchers, dict):
            queue.set_watchers(watchers)

    reset = patch.original(shape.pool, "reset_prefix_cache")

    def reset_prefix_cache(self: Any) -> Any:
        done = reset(self)
        if done and isinstance(self.free_block_queue, Queue):
            # No block has content any more; vLLM clears the hashes behind the queue's back.
            self.free_block_queue.clear()
        return done

    patch.replace(shape.block_pool, "FreeKVCacheBlockQueue", make_queue)
    patch.replace(shape.pool, "__init__", init)
    patch.replace(shape.pool, "reset_prefix_cache", reset_prefix_cache)
    if settings.pool:
        _install_hints(shape)
    if not shape.iterates:
        _install_links()


def _install_hints(shape: Shape) -> None:
    allocate = patch.original(shape.manager, "allocate_new_blocks")
    # Every decode token comes by here, and mostly needs no block. Where the function is known to do nothing
    # then, it is not called, which pays for this wrapper; any other is called.
    code = getattr(allocate, "__code__", None)
    known = code is not None and set(code.co_names) <= _ALLOCATE_NAMES
    redirects = code is not None and known and "_partial_hit_reqs" in code.co_names

    def hinted(self: Any, blocks: list[Any], request_id: str, num_tokens: int, *more: Any) -> Any:
        if num_tokens <= len(blocks) * self.block_size:
            return allocate(self, request_id, num_tokens, *more)
        queue = self.block_pool.free_block_queue
        last = blocks[-1] if blocks else None
        queue.growing = -1 if last is None or last.is_null else last.block_id
        try:
            new = allocate(self, request_id, num_tokens, *more)
        except BaseException:
            queue.growing = None
            raise
        if not known:  # else it has taken blocks, and with them the hint
            queue.growing = None
        return new

    # The very parameters of vLLM's own, which the interpreter calls faster than `*args`; and no call between.
    def with_main_model(
        self: Any, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Any:
        blocks = self.req_to_blocks[request_id]
        if not known or (redirects and self._partial_hit_reqs):
            return hinted(self, blocks, request_id, num_tokens, num_tokens_main_model)
        if num_tokens <= len(blocks) * self.block_size:
            return []
        queue = self.block_pool.free_block_queue
        queue.growing = -1 if not blocks or (last := blocks[-1]).is_null else last.block_id
        try:
            return allocate(self, request_id, num_tokens, num_tokens_main_model)
        except BaseException:
            queue.growing = None
            raise

    def without(self: Any, request_id: str, num_tokens: int) -> Any:
        blocks = self.req_to_blocks[request_id]
        if known and num_tokens <= len(blocks) * self.block_size:
            return []
        return hinted(self, blocks, request_id, num_tokens)

    takes_main = "num_tokens_main_model" in inspect.signature(allocate).parameters
    wrapper = with_main_model if takes_main else without
    patch.replace(shape.manager, "allocate_new_blocks", wrapper)


def _install_links() -> None:
    """0.20 to 0.24: the offload manager walks the links that vLLM's list keeps in the blocks."""
    try:
        from vllm.v1.simple_kv_offload import manager
    except ImportError:
        return
    name = "_prepare_lazy_store_specs"
    owner = getattr(manager, "SimpleCPUOffloadScheduler", None)
    prepare = getattr(owner, name, None)
    if prepare is None:
        return

    def prepare_lazy_store_specs(self: Any) -> Any:
        queue = getattr(self._gpu_block_pool, "free_block_queue", None)
        cursor = self._cursor
        if isinstance(queue, Queue) and cursor is not None and cursor.ref_cnt == 0:
            queue.link(cursor, list(islice(queue.iter_blocks_after(cursor), self._target_free + 1)))
        return prepare(self)

    patch.replace(owner, name, prepare_lazy_store_specs)
