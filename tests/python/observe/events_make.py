"""Publishers of KV events for the tests: the wire formats of vLLM, over real ZMQ sockets."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import zmq


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Events as arrays, tag first: vLLM 0.10."""


class NewEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Events as maps: vLLM 0.32."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class OldCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class NewStored(NewEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    # Not vLLM's: what kvcatch reads where a publisher gives it.
    block_ids: list[int] | None = None


class NewRemoved(NewEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class NewCleared(NewEvent, tag="AllBlocksCleared"):
    pass


class Renamed(NewEvent, tag="BlockMigrated"):
    block_hashes: list[int]


def stored(
    hashes: list[int | bytes],
    parent: int | bytes | None = None,
    *,
    size: int = 16,
    medium: str | None = "GPU",
    lora_name: str | None = None,
    **more: Any,
) -> NewStored:
    tokens = list(range(len(hashes) * size))
    return NewStored(hashes, parent, tokens, size, None, medium, lora_name, **more)


class Publisher:
    """PUB and ROUTER sockets of one publisher, driven by hand: ``publish`` and ``serve_replay``."""

    END = (-1).to_bytes(8, "big", signed=True)

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str = "tcp://127.0.0.1:0",
        *,
        with_topic_in_replay: bool = True,
        buffer_steps: int = 10_000,
    ) -> None:
        self.pub = context.socket(zmq.PUB)
        self.pub.bind(endpoint)
        self.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:0")
        self.replay = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.with_topic = with_topic_in_replay
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.sequence = 0

    def publish(
        self,
        *events: Any,
        ts: float | None = None,
        rank: int | None = 0,
        lost: bool = False,
        topic: bytes = b"",
    ) -> None:
        batch = EventBatch(time.time() if ts is None else ts, list(events), rank)
        self.raw(msgspec.msgpack.encode(batch), lost=lost, topic=topic)

    def raw(self, payload: bytes, *, lost: bool = False, topic: bytes = b"") -> None:
        if not lost:
            self.pub.send_multipart((topic, self.sequence.to_bytes(8, "big"), payload))
        self.buffer.append((self.sequence, payload))
        self.sequence += 1

    def serve_replay(self) -> None:
        """Answer what was asked so far, as vLLM's thread does between two batches."""
        while self.router.poll(0):
            name, _, start = self.router.recv_multipart()
            topic = (b"",) if self.with_topic else ()
            for sequence, payload in self.buffer:
                if sequence >= int.from_bytes(start, "big"):
                    frames = (name, b"", *topic, sequence.to_bytes(8, "big"), payload)
                    self.router.send_multipart(frames)
            self.router.send_multipart((name, b"", *topic, self.END, b""))

    def close(self) -> None:
        self.pub.close(0)
        self.router.close(0)
