"""The wire formats of KV events, and the index they feed."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest
from events_make import (
    EventBatch,
    NewCleared,
    NewRemoved,
    OldCleared,
    OldRemoved,
    OldStored,
    Renamed,
    stored,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.observe.events import Batch, BlockIndex, Cleared, EventError, Removed, Stored, decode


def pack(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    return bytes(msgspec.msgpack.encode(EventBatch(ts, list(events), rank)))


class TestWire:
    def test_arrays_of_0_10(self) -> None:
        payload = pack(
            OldStored([11, 12], None, [1] * 32, 16, 3),
            OldStored([b"\x01" * 32], 12, [1] * 16, 16, None, "CPU"),
            OldRemoved([11]),
            OldRemoved([b"\x01" * 32], "CPU"),
            OldCleared(),
            rank=None,
        )
        assert decode(payload) == Batch(
            1.0,
            None,
            [
                Stored((11, 12), None, 16, 32, lora="3"),
                Stored((b"\x01" * 32,), 12, 16, 16, medium="CPU"),
                Removed((11,)),
                Removed((b"\x01" * 32,), "CPU"),
                Cleared(),
            ],
        )

    def test_maps_of_0_32(self) -> None:
        payload = pack(
            stored([7], 6, size=32, lora_name="adapter", group_idx=1, session_id="chat-9"),
            NewRemoved([7], "GPU", group_idx=1),
            NewCleared(),
            rank=2,
        )
        assert decode(payload) == Batch(
            1.0,
            2,
            [
                Stored((7,), 6, 32, 32, "GPU", 1, "adapter", "chat-9"),
                Removed((7,), "GPU", 1),
                Cleared(),
            ],
        )

    def test_arrays_with_every_field_to_the_session(self) -> None:
        more = [9, "GPU", "name", None, 2, "full", 4096, "LOCAL", "tier", "chat-1", "one more"]
        event = ["BlockStored", [5], 4, [0] * 16, 16, *more]
        (found,) = decode(msgspec.msgpack.encode([1.5, [event]])).events
        assert found == Stored((5,), 4, 16, 16, "GPU", 2, "name", "chat-1")

    def test_a_type_that_is_not_known_is_counted_and_the_others_are_read(self) -> None:
        batch = decode(pack(Renamed([1]), stored([1]), Renamed([2])))
        assert len(batch.events) == 1
        assert batch.unknown == {"BlockMigrated": 2}

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (b"", "0 bytes is not msgpack"),
            (b"\xc1garbage", "8 bytes is not msgpack"),
            (b"<html>", "not msgpack"),
            (pack(stored([1]))[:-3], "not msgpack"),
            (b"\x91" * 5000 + b"\xc0", "not msgpack"),
            (b"\x81\x80\x01", "malformed|not a batch"),
            ({"ts": 1}, "not a batch"),
            ([1.0], "not a batch"),
            ([1.0, {}], "not a batch"),
            (["noon", []], "time is 'noon'"),
            ([float("nan"), []], "time is nan"),
            ([1.0, [], "zero"], "data_parallel_rank is 'zero'"),
            ([1.0, [], -1], "data_parallel_rank is -1"),
            ([1.0, [7]], "an event is 7"),
            ([1.0, [[]]], "an event is"),
            ([1.0, [{"kind": "BlockStored"}]], "type is None"),
            ([1.0, [["BlockRemoved", 7]]], "block_hashes is 7"),
            ([1.0, [["BlockRemoved", ["a"]]]], "a block hash is 'a'"),
            ([1.0, [["BlockRemoved", [True]]]], "a block hash is True"),
            ([1.0, [["BlockRemoved", [[1]]]]], "a block hash is"),
            ([1.0, [["BlockStored", [1]]]], "without block_size"),
            ([1.0, [["BlockStored", [1], None, [], 0]]], "block_size is 0"),
            ([1.0, [["BlockStored", [1], [2], [], 16]]], "parent_block_hash is"),
            ([1.0, [["BlockStored", [1], None, 3, 16]]], "token_ids is 3"),
            ([1.0, [["BlockStored", [1], None, [], 16, None, 5]]], "medium is 5"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, value: Any, said: str) -> None:
        payload = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
        with pytest.raises(EventError, match=said) as raised:
            decode(payload)
        assert isinstance(raised.value, InvalidArgument)
        assert len(str(raised.value)) < 300

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
    def test_any_bytes_are_read_or_refused(self, noise: bytes, place: int, value: int) -> None:
        payload = bytearray(pack(stored([1, 2], 9), NewRemoved([1], "GPU"), Renamed([3])))
        payload[place % len(payload)] = value
        for candidate in (noise, bytes(payload)):
            with contextlib.suppress(EventError):
                BlockIndex().apply(decode(candidate))


def batch(at: float, *events: Stored | Removed | Cleared) -> Batch:
    return Batch(at, 0, list(events))


class TestIndex:
    def test_two_chains_share_a_prefix(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1, 2, 3), None, 16, 48)))  # a prompt
        index.apply(batch(1.0, Stored((4,), 3, 16, 16)))  # its answer fills a block
        index.apply(batch(2.0, Stored((5, 6), 2, 16, 32)))  # another prompt shares two blocks
        assert len(index) == 6
        assert index.resident_blocks == {"unstated": 6}
        assert index.resident_tokens == {"unstated": 96}
        assert index.structure() == {
            "roots": 1,
            "leaves": 2,
            "branch_points": 1,
            "shared_blocks": 2,
            "deepest_blocks": 4,
        }
        (shared,) = index.shared_prefixes()
        assert shared.to_dict() == {
            "tokens": 32,
            "branches": 2,
            "resident_branches": 2,
            "lora": None,
            "is_rooted": True,
        }
        assert index.counts["new_chains"] == 1
        assert index.counts["extended_chains"] == 1
        assert index.counts["branched_chains"] == 1
        assert index.counts["orphaned_chains"] == 0

    def test_lifetimes_and_blocks_that_come_back(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1, 2), None, 16, 32)))
        index.apply(batch(10.0, Removed((2,))))
        index.apply(batch(30.0, Removed((1,))))
        index.apply(batch(35.0, Stored((1, 2), None, 16, 32)))
        facts = index.to_dict()
        assert facts["lifetime_seconds"] == {"p50": 20.0, "p90": 30.0}
        assert facts["restored_after_seconds"] == {"p50": 15.0, "p90": 25.0}
        assert index.counts["restored_blocks"] == 2
        assert index.counts["removed_unextended_blocks"] == 1
        assert facts["seconds"] == 35.0

    def test_media_and_groups_are_kept_apart(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1,), None, 16, 16, "GPU", 0)))
        index.apply(batch(0.0, Stored((1,), None, 64, 64, "GPU", 1)))
        index.apply(batch(1.0, Stored((1,), None, 16, 16, "CPU", 0)))
        assert len(index) == 2
        assert index.resident_blocks == {"CPU": 1, "GPU": 2}
        assert index.resident_tokens == {"CPU": 16, "GPU": 80}
        index.apply(batch(2.0, Removed((1,), "GPU", 0)))
        assert len(index) == 2
        assert index.resident_blocks == {"CPU": 1, "GPU": 1}
        index.apply(batch(3.0, Removed((1,), "CPU", 0)))
        assert (0, 1) not in index
        assert (1, 1) in index

    def test_a_removal_must_name_what_is_there(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1,), None, 16, 16, "GPU")))
        index.apply(batch(0.0, Removed((1,), "CPU"), Removed((2,), "GPU"), Removed((1,), "GPU", 1)))
        assert index.counts["unmatched_blocks"] == 3
        assert 1 in index
        index.apply(batch(1.0, Removed((1,))))  # an older version names no medium
        assert 1 not in index

    def test_reports_of_reuse_store_nothing(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1, 2), None, 16, 32, "GPU")))
        index.apply(batch(1.0, Stored((1, 2), None, 16, 32, "GPU")))
        assert index.counts["stored_blocks"] == 2
        assert index.counts["reused_blocks"] == 2
        assert index.counts["new_chains"] == 1
        assert index.shared_prefixes() == []

    def test_requests_and_their_runs(self) -> None:
        index = BlockIndex()
        assert index.requests() is None
        index.apply(batch(0.0, Stored((1, 2, 3), None, 16, request="a")))
        assert index.requests() == {
            "requests": 1,
            "blocks_per_request": 3.0,
            "runs_per_request": None,
        }
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1, 2, 3), None, 16, request="a", block_ids=(4, 5, 9))))
        index.apply(batch(1.0, Stored((4,), 3, 16, request="a", block_ids=(10,))))
        index.apply(batch(1.0, Stored((5,), None, 16, request="b", block_ids=(0,))))
        facts = index.requests()
        assert facts is not None
        assert facts["runs_per_request"] == 1.5

    def test_clearing_forgets_what_is_resident_and_keeps_the_counts(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1, 2), None, 16, 32), Cleared()))
        assert len(index) == 0
        assert index.resident_blocks == {}
        assert index.counts["stored_blocks"] == 2
        index.apply(batch(1.0, Stored((1,), None, 16, 16)))
        assert index.counts["restored_blocks"] == 0  # cleared on purpose, not evicted early
        assert index.structure()["roots"] == 1

    def test_a_chain_whose_beginning_was_not_seen(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((5,), 4, 16, 16), Stored((6,), 5, 16), Stored((7,), 5, 16)))
        assert index.counts["orphaned_chains"] == 1
        (shared,) = index.shared_prefixes()
        assert not shared.is_rooted

    def test_parents_in_a_ring_end(self) -> None:
        index = BlockIndex()
        index.apply(batch(0.0, Stored((1,), 2, 16), Stored((2,), 1, 16), Stored((3,), 1, 16)))
        assert index.structure()["shared_blocks"] == 2

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**32))
    def test_against_a_plain_model(self, seed: int) -> None:
        """A set of (group, hash, medium) and a map of parents say the same."""
        rng = random.Random(seed)
        index, places, parents = BlockIndex(), set(), {}
        for step in range(120):
            group, medium = rng.randrange(2), rng.choice(["GPU", "CPU"])
            if rng.random() < 0.6:
                chain = tuple(rng.sample(range(30), rng.randint(1, 4)))
                parent = rng.choice([None, *range(30)])
                index.apply(batch(step, Stored(chain, parent, 4, 0, medium, group)))
                above = parent
                for value in chain:
                    if not any((group, value, m) in places for m in ("GPU", "CPU")):
                        parents[group, value] = above
                    places.add((group, value, medium))
                    above = value
            elif rng.random() < 0.95:
                value = rng.randrange(30)
                index.apply(batch(step, Removed((value,), medium, group)))
                places.discard((group, value, medium))
            else:
                index.apply(batch(step, Cleared()))
                places.clear()
            nodes = {(g, v) for g, v, _ in places}
            assert len(index) == len(nodes)
            for name in ("GPU", "CPU"):
                count = sum(m == name for *_, m in places)
                assert index.resident_blocks.get(name, 0) == count
                assert index.resident_tokens.get(name, 0) == 4 * count
            children: dict[tuple[int, int], int] = {}
            for g, v in nodes:
                if parents[g, v] is not None:
                    above_key = (g, parents[g, v])
                    children[above_key] = children.get(above_key, 0) + 1
            shape = index.structure()
            assert shape["branch_points"] == sum(children.get(key, 0) >= 2 for key in nodes)
            assert shape["leaves"] == sum(not children.get(key, 0) for key in nodes)
            assert shape["roots"] == sum(
                parents[g, v] is None or (g, parents[g, v]) not in nodes for g, v in nodes
            )
