"""``BlockQueue``: the free queue's interface over block objects, against a model in plain Python."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass

import pytest

from kvcatch._core import BlockQueue
from kvcatch.errors import DoubleFree, InvalidArgument


@dataclass(slots=True, weakref_slot=True)
class Block:
    block_id: int
    _block_hash: bytes | None = None


def make(n: int = 64, **options: object) -> tuple[list[Block], BlockQueue]:
    blocks = [Block(i) for i in range(n)]
    return blocks, BlockQueue(blocks, **options)


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_popleft_gives_the_first_block_and_keeps_no_room_behind_it():
    _, queue = make(16)
    assert queue.popleft().block_id == 0
    assert ids(queue.popleft_n(15)) == list(range(1, 16))


def test_an_empty_queue_refuses_as_vllm_does():
    _, queue = make(2)
    with pytest.raises(AssertionError, match="3 blocks asked of a free queue of 2"):
        queue.popleft_n(3)
    assert len(queue.popleft_n(2)) == 2
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    assert queue.popleft_n(0) == []


def test_a_growing_sequence_goes_on_behind_its_last_block():
    _, queue = make(256)
    queue.popleft()
    queue.growing = -1
    first = ids(queue.popleft_n(5))
    queue.growing = -1
    second = ids(queue.popleft_n(5))
    for sequence in (first, second):
        for _ in range(4):
            queue.growing = sequence[-1]
            sequence.extend(ids(queue.popleft_n(1)))
        assert sequence == list(range(sequence[0], sequence[0] + 9))


@pytest.mark.parametrize("hint", [5, 63, 64, 1 << 31])
def test_a_hint_that_is_no_block_in_use_is_ignored(hint):
    _, queue = make(64)
    queue.growing = hint
    assert len(queue.popleft_n(3)) == 3
    queue.validate()


def test_cached_blocks_go_last_and_oldest_first():
    blocks, queue = make(12)
    queue.popleft_n(12)
    queue.append_n([blocks[i] for i in (9, 8, 7)])
    queue.append_n([blocks[2]])
    queue.prepend_n([blocks[4]])
    assert ids(queue.get_all_free_blocks()) == [4, 9, 8, 7, 2]
    assert ids(queue.popleft_n(2)) == [4, 9]
    assert len(queue) == 3


def test_early_candidates_stay_in_the_order_of_age():
    blocks, queue = make(8192)
    queue.popleft_n(8192)
    aged = random.Random(3).sample(range(8192), 4000)
    for i in aged:
        queue.append(blocks[i])
    queue.growing = -1
    gone = set(ids(queue.popleft_n(10)))
    assert queue.order() == [i for i in aged if i not in gone]


def test_without_early_eviction_the_oldest_go_first_to_the_block():
    blocks, queue = make(8192)
    queue.popleft_n(8192)
    aged = random.Random(4).sample(range(8192), 1000)
    queue.append_n([blocks[i] for i in aged])
    queue.set_early(False)
    queue.growing = -1
    assert set(ids(queue.popleft_n(10))) == set(aged[:10])
    assert queue.order() == aged[10:]


def test_watched_blocks_are_never_evicted_early():
    blocks, queue = make(8192)
    watchers: dict[int, object] = {}
    queue.set_watchers(watchers)
    queue.popleft_n(8192)
    old, watched, new = range(0, 40, 2), range(100, 140, 2), range(200, 240, 2)
    queue.append_n([blocks[i] for i in old])
    watchers.update(dict.fromkeys(watched))
    queue.append_n([blocks[i] for i in watched])
    queue.append_n([blocks[i] for i in new])
    queue.growing = -1
    assert set(ids(queue.popleft_n(20))) == set(old)
    assert set(ids(queue.popleft_n(5))) <= set(watched)


def test_a_hit_block_leaves_and_cannot_leave_twice():
    blocks, queue = make(8)
    queue.remove(blocks[3])
    assert blocks[3] not in queue
    assert len(queue) == 7
    with pytest.raises(RuntimeError, match=r"remove\(\) called on an invalid block"):
        queue.remove(blocks[3])


def test_a_block_given_back_twice_is_refused_and_nothing_changes():
    blocks, queue = make(8)
    queue.popleft_n(8)
    queue.append_n([blocks[1]])
    with pytest.raises(DoubleFree):
        queue.append_n([blocks[2], blocks[1]])
    with pytest.raises(DoubleFree):
        queue.prepend_n([blocks[2], blocks[1]])
    assert ids(queue.get_all_free_blocks()) == [1]
    queue.validate()


def test_an_engine_that_never_prepends_is_told_by_the_hash():
    blocks, queue = make(8, prepends=False)
    queue.popleft_n(8)
    blocks[1]._block_hash = b"x"
    queue.append_n([blocks[1], blocks[5]])
    assert queue.num_clean == 1
    assert ids(queue.get_all_free_blocks()) == [5, 1]


def test_retained_blocks_go_after_all_others_and_by_priority():
    blocks, queue = make(8)
    queue.popleft_n(8)
    queue.retain([blocks[1]], 90)
    queue.retain([blocks[2]], 10)
    queue.append_n([blocks[i] for i in (1, 2, 3, 4)])
    assert queue.order() == [3, 4, 2, 1]
    with pytest.raises(InvalidArgument, match="101"):
        queue.retain([blocks[1]], 101)


def test_clear_voids_all_content():
    blocks, queue = make(8)
    queue.popleft_n(8)
    queue.append_n(blocks[2:5])
    queue.clear()
    assert (queue.num_clean, len(queue)) == (3, 3)
    assert queue.num_evictions == 0


def test_blocks_in_a_wrong_order_are_refused():
    with pytest.raises(InvalidArgument, match="at index 0"):
        BlockQueue([Block(1), Block(0)])


def test_a_cycle_through_the_queue_is_collected():
    class Owner:
        pass

    owner = Owner()
    owner.blocks, owner.queue = make(4)
    owner.blocks[0]._block_hash = owner
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("placement", ["queue", "sorted", "bitmap", "buddy"])
@pytest.mark.parametrize("eviction", ["lru", "slru"])
def test_no_block_is_lost_or_given_twice(placement, eviction):
    rng = random.Random(f"{placement}{eviction}")
    _, queue = make(300, placement=placement, eviction=eviction)
    used: list[list[Block]] = []
    for _ in range(1500):
        action = rng.random()
        if action < 0.4 and len(queue) > 20:
            queue.growing = -1 if rng.random() < 0.7 else None
            used.append(queue.popleft_n(rng.randint(1, 20)))
        elif action < 0.6 and used and len(queue):
            sequence = rng.choice(used)
            queue.growing = sequence[-1].block_id
            sequence += queue.popleft_n(1)
        elif action < 0.8 and used:
            sequence = used.pop(rng.randrange(len(used)))
            cut = rng.randint(0, len(sequence))
            queue.prepend_n(sequence[cut:][::-1])
            queue.append_n(sequence[:cut][::-1])
        elif len(queue):
            block = rng.choice(queue.get_all_free_blocks())
            queue.remove(block)
            used.append([block])
        queue.validate()
        held = ids([block for sequence in used for block in sequence])
        assert sorted(held + queue.order()) == list(range(300))


def test_a_subclass_has_the_number_of_free_blocks_as_an_attribute():
    class Queue(BlockQueue):
        num_free_blocks = 64

    blocks = [Block(i) for i in range(64)]
    queue = Queue(blocks)
    assert queue.popleft().block_id == 0
    assert queue.num_free_blocks == 63
    taken = queue.popleft_n(10)
    assert queue.num_free_blocks == 53
    with pytest.raises(AssertionError, match="54 blocks asked of a free queue of 53"):
        queue.popleft_n(54)
    assert queue.num_free_blocks == 53
    queue.append(taken[0])
    queue.append_n(taken[1:3])
    queue.append_n(iter(taken[3:5]))
    queue.prepend_n(taken[5:9])
    assert queue.num_free_blocks == 62
    with pytest.raises(DoubleFree):
        queue.append_n([taken[9], taken[9]])
    assert queue.num_free_blocks == len(queue) == 62
    queue.remove(taken[0])
    assert queue.num_free_blocks == 61
    queue.clear()
    assert queue.num_free_blocks == len(queue) == 61
    assert not hasattr(BlockQueue(blocks), "num_free_blocks")


def test_a_hint_is_good_for_one_taking():
    _, queue = make(256)
    queue.growing = -1
    queue.popleft_n(4)
    assert queue.growing is None
    queue.growing = 3
    with pytest.raises(AssertionError):
        queue.popleft_n(1000)
    assert queue.growing is None
