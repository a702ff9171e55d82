"""vLLM's own offload manager walks the free blocks in the order in which they are given up afterwards.

Needs a vLLM with ``simple_kv_offload`` (0.20 and later): 0.20 to 0.26 walk the list's links, later ones call
``iter_blocks_after``.
"""

from __future__ import annotations

import inspect
import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1.simple_kv_offload.manager")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

from kvcatch.vllm import plugin, register, unregister
from kvcatch.vllm.pool import Queue

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 65
TAKES = tuple(inspect.signature(BlockPool).parameters)
GROUPS = "tuple" in str(inspect.signature(BlockPool.touch))


@pytest.fixture(params=["pool", "pool,evict", "evict"])
def switches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("KVCATCH_VLLM", request.param)
    register()
    assert plugin._installed is not None
    yield request.param
    unregister()


def make_pool(blocks: int = BLOCKS) -> BlockPool:
    given = {"num_gpu_blocks": blocks, "enable_caching": True, "hash_block_size": 16}
    return BlockPool(**{name: value for name, value in given.items() if name in TAKES})


def cache(pool: BlockPool, blocks: list[Any], names: Iterator[int]) -> None:
    for block in blocks:
        key = make_block_hash_with_group_id(b"%032d" % next(names), 0)
        block._block_hash = key
        pool.cached_block_hash_to_block.insert(key, block)


def make_offload(pool: BlockPool, target: int, cpu_blocks: int) -> Any:
    """The offload manager, of which the lazy walk needs four attributes."""
    made = SimpleCPUOffloadScheduler.__new__(SimpleCPUOffloadScheduler)
    made.cpu_block_pool = make_pool(cpu_blocks + 1)
    made._gpu_block_pool = pool
    made._target_free = target
    made._cursor = None
    return made


def walk(offload: Any) -> list[int]:
    """The blocks that one walk stores; the manager holds them until the copies are done."""
    return list(offload._prepare_lazy_store_specs()[0])


def free_with_content(pool: BlockPool, seed: int) -> None:
    """All blocks cached and given back in a random order, some of them hit once more."""
    chance, names = random.Random(seed), iter(range(10_000))
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    cache(pool, blocks, names)
    chance.shuffle(blocks)
    while blocks:
        size = chance.randint(1, 5)
        pool.free_blocks(blocks[:size])
        blocks = blocks[size:]
    free = [block for block in pool.blocks if not block.is_null]
    for block in chance.sample(free, 12):
        pool.touch(([block],) if GROUPS else [block])
        pool.free_blocks([block])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_walked_first_is_given_up_first(switches: str, seed: int) -> None:
    pool = make_pool()
    free_with_content(pool, seed)
    assert isinstance(pool.free_block_queue, Queue)
    offload = make_offload(pool, BLOCKS - 1, BLOCKS)
    walked = walk(offload)
    assert sorted(walked) == list(range(1, BLOCKS))
    # The copies are done, in the order they were begun: as vLLM does, the blocks go back.
    pool.free_blocks([pool.blocks[at] for at in walked])
    again = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    given = [block.block_id for _ in range(BLOCKS - 1) for block in pool.get_new_blocks(1)]
    assert given == again
    if switches == "pool":
        assert given == walked


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_given_up_that_a_walk_has_not_seen(switches: str, seed: int) -> None:
    """Walk, store, evict as many as were covered: each evicted block has a copy on the host."""
    pool = make_pool()
    free_with_content(pool, seed)
    chance, names = random.Random(seed), iter(range(20_000, 40_000))
    target = 16
    offload = make_offload(pool, target, 512)
    stored: set[Any] = set()
    evicted = 0
    for _ in range(40):
        # Target blocks from the start must be safe before anybody takes them.
        offload._cursor = None
        while found := walk(offload):
            for at in found:
                key = pool.blocks[at].block_hash
                stored.add(key)
                block = offload.cpu_block_pool.blocks[len(stored)]
                offload.cpu_block_pool.cached_block_hash_to_block.insert(key, block)
            pool.free_blocks([pool.blocks[at] for at in found])
            offload._cursor = None
        before = {
            block.block_id: block.block_hash
            for block in pool.blocks
            if block.block_hash is not None
        }
        blocks = pool.get_new_blocks(chance.randint(1, target))
        for block in blocks:
            if (key := before.get(block.block_id)) is not None:
                evicted += 1
                assert key in stored, (switches, block.block_id)
        cache(pool, blocks, names)
        chance.shuffle(blocks)
        pool.free_blocks(blocks)
    assert evicted > 60


def test_the_cursor_goes_on_where_it_stopped(switches: str) -> None:
    pool = make_pool()
    free_with_content(pool, 1)
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    offload = make_offload(pool, 8, BLOCKS)
    # Blocks that have a copy are covered and stay where they are: the cursor stays valid.
    for at in order[:20]:
        offload.cpu_block_pool.cached_block_hash_to_block.insert(
            pool.blocks[at].block_hash, offload.cpu_block_pool.blocks[at]
        )
    assert walk(offload) == []
    assert offload._cursor.block_id == order[7]
    assert walk(offload) == []
    assert offload._cursor.block_id == order[15]
    assert walk(offload) == order[20:24]
    # Its cursor is now a block that the copy holds: the next walk begins at the start.
    assert offload._cursor.block_id == order[23]
    assert walk(offload) == []
    assert offload._cursor.block_id == order[7]
