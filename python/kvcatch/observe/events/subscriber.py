"""Receives KV events over ZMQ: every batch has a sequence number, so what is lost is noticed.

A gap is filled from the publisher's replay endpoint where there is one, else counted and said. A number that
went back is a publisher that was restarted: what was resident is forgotten.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument, MissingExtra
from kvcatch.observe.events.index import BlockIndex
from kvcatch.observe.events.wire import EventError, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Subscriber", "check_endpoint"]

MAX_PAYLOAD_BYTES = 64 * 2**20
"""A longer message is not taken: no batch comes near it."""

QUEUE_MESSAGES = 100_000
"""Batches that may wait to be read; what comes beyond is lost, and noticed as a gap."""

MAX_RANKS = 1_024
MAX_UNKNOWN = 64
"""Of each so many are told apart: what comes beyond is malformed, or one of the rest."""

REPLAY_ANSWER_S = 2.0
REPLAY_TOTAL_S = 30.0

_KNOWN_PAYLOADS = 16_384
_END = (-1).to_bytes(8, "big", signed=True)
_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d{1,5})")


def check_endpoint(endpoint: str) -> str:
    """An endpoint one can connect to.

    Raises:
        InvalidArgument: It is none.
    """
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise InvalidArgument(
            f"endpoint {endpoint!r}: must be tcp://HOST:PORT or ipc://PATH, as in --kv-events-config"
        )
    if match[1] == "*":
        raise InvalidArgument(
            f"endpoint {endpoint!r} is where the engine listens: name its host, tcp://127.0.0.1:{match[2]}"
        )
    if not 0 < int(match[2]) < 65536:
        raise InvalidArgument(f"endpoint {endpoint!r}: no port {match[2]}")
    return endpoint


def _zmq() -> Any:
    try:
        import zmq
    except ModuleNotFoundError as error:
        raise MissingExtra("pyzmq is not installed: pip install 'kvcatch[observe]'") from error
    return zmq


class Subscriber:
    """Reads one publisher; use it with ``with``.

    Args:
        endpoint: Where the engine publishes.
        replay: Where it repeats what was missed; None for no such place.
        topic: Only messages whose topic begins so.
        replay_answer_s: Seconds to wait for each message of a replay.

    Attributes:
        indices: One per data-parallel rank met (None where the version does not say).
        counts: ``batches``, ``malformed`` (messages that could not be read), ``gaps``, ``missed_batches``
            (of those, not repeated), ``replayed_batches``, ``duplicates``, ``restarts``, ``replay_failures``.
        unknown: Types of events that are not known here.
        last_error: What was wrong with the last message that could not be read.
        joined_at: Sequence number of the first batch seen; what was stored before is not known unless it is 0.

    Raises:
        InvalidArgument: An endpoint is none.
        MissingExtra: pyzmq or msgspec is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        replay_answer_s: float = REPLAY_ANSWER_S,
    ) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._replay_endpoint = None if replay is None else check_endpoint(replay)
        self._answer_s = replay_answer_s
        self._topic = topic.encode()
        self.indices: dict[int | None, BlockIndex] = {}
        self.counts: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.last_error = ""
        self.joined_at: int | None = None
        self._last: int | None = None
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._zmq = _zmq()
        decode(
            b"\x92\xcb" + bytes(8) + b"\x90"
        )  # an empty batch: says now whether msgspec is there
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.set_hwm(QUEUE_MESSAGES)
        self._socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._socket.setsockopt(self._zmq.LINGER, 0)
        self._socket.setsockopt(self._zmq.SUBSCRIBE, self._topic)
        try:
            self._socket.connect(self.endpoint)
        except self._zmq.ZMQError as error:
            self.close()
            raise InvalidArgument(f"endpoint {endpoint!r}: {error}") from None

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the sockets."""
        self._context.destroy(linger=0)

    @property
    def last_sequence(self) -> int | None:
        """Number of the last batch; None before the first."""
        return self._last

    @property
    def is_complete(self) -> bool:
        """Whether the index holds all that the publisher stored: nothing was missed and it was there from 0."""
        lost = self.counts["missed_batches"] or self.counts["malformed"]
        return self.joined_at == 0 and not lost

    def catch_up(self) -> int:
        """Ask the replay endpoint for what is not known yet; how many batches came."""
        if self._replay_endpoint is None:
            return 0
        return self._replay(0 if self._last is None else self._last + 1, None)

    def poll(self, timeout_s: float) -> int:
        """Take in what arrives, waiting at most so long for the first; how many messages came."""
        taken = 0
        if not self._socket.poll(max(0, int(timeout_s * 1e3))):
            return 0
        while taken < QUEUE_MESSAGES:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            taken += 1
            self._take(frames)
        return taken

    def run(self, seconds: float) -> None:
        """Take in what arrives for so long, with a catch-up before and after."""
        end = time.monotonic() + seconds
        self.catch_up()
        while (left := end - time.monotonic()) > 0:
            self.poll(min(left, 0.5))
        self.catch_up()

    # --- one message --------------------------------------------------------------------------------

    def _take(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            sizes = ", ".join(str(len(frame)) for frame in frames[:8])
            self._malformed(
                f"a message of {len(frames)} frames of {sizes} bytes: not topic, number, batch"
            )
            return
        sequence = int.from_bytes(frames[1], "big")
        payload = frames[2]
        last = self._last
        if last is not None and sequence <= last:
            if self._recent.get(sequence) == hash(payload):
                self.counts["duplicates"] += 1
                return
            self._restart()
            last = None
        if last is None:
            if sequence and self._replay_endpoint is not None:
                self._replay(0, sequence)
        elif sequence > last + 1:
            missing = sequence - last - 1
            self.counts["gaps"] += 1
            if self._replay_endpoint is not None:
                missing = max(0, missing - self._replay(last + 1, sequence))
            self.counts["missed_batches"] += missing
        self._apply(sequence, payload)

    def _restart(self) -> None:
        self.counts["restarts"] += 1
        self._last = None
        self._recent.clear()
        self.joined_at = None
        for index in self.indices.values():
            index.clear()

    def _apply(self, sequence: int, payload: bytes) -> None:
        if self.joined_at is None:
            self.joined_at = sequence
        self._last = sequence
        self._recent[sequence] = hash(payload)
        if len(self._recent) > _KNOWN_PAYLOADS:
            self._recent.popitem(last=False)
        self.counts["batches"] += 1
        try:
            batch = decode(payload)
        except EventError as error:
            self._malformed(f"batch {sequence}: {error}")
            return
        for name, count in batch.unknown.items():
            known = name in self.unknown or len(self.unknown) < MAX_UNKNOWN
            self.unknown[name if known else "others"] += count
        index = self.indices.get(batch.rank)
        if index is None:
            if len(self.indices) >= MAX_RANKS:
                self._malformed(f"batch {sequence}: rank {batch.rank} is one too many")
                return
            index = self.indices[batch.rank] = BlockIndex()
        index.apply(batch)

    def _malformed(self, error: str) -> None:
        self.counts["malformed"] += 1
        self.last_error = error

    # --- what was missed ----------------------------------------------------------------------------

    def _replay(self, start: int, end: int | None) -> int:
        """Apply batches ``start`` up to and without ``end`` from the replay endpoint; how many came.

        The last batch known is asked for again: if it is another one now, the publisher was restarted unnoticed.
        """
        zmq, applied, known = self._zmq, 0, self._last
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)
        limit = time.monotonic() + REPLAY_TOTAL_S
        try:
            socket.connect(self._replay_endpoint)
            first = start if known is None else min(start, known)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while time.monotonic() < limit:
                if not socket.poll(int(self._answer_s * 1e3)):
                    break
                frames = socket.recv_multipart()
                # An empty frame, then topic, number and batch; older versions leave the topic out.
                frames = frames[1:] if frames and not frames[0] else frames
                if len(frames) < 2 or len(frames[-2]) != 8:
                    self._malformed(f"a replay message of {len(frames)} frames")
                    continue
                if frames[-2] == _END:
                    return applied
                sequence = int.from_bytes(frames[-2], "big")
                if sequence == known and self._recent.get(known) != hash(frames[-1]):
                    self._restart()
                    return self._replay(0, end)
                if sequence >= start and (end is None or sequence < end):
                    start = sequence + 1
                    self._apply(sequence, frames[-1])
                    applied += 1
        except zmq.ZMQError as error:
            self.last_error = f"replay {self._replay_endpoint}: {error}"
        else:
            self.last_error = f"replay {self._replay_endpoint}: no end within {self._answer_s:g} s"
        finally:
            socket.close(0)
            self.counts["replayed_batches"] += applied
        self.counts["replay_failures"] += 1
        return applied

    def to_dict(self, most: int = 10) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "endpoint": self.endpoint,
            "joined_at_sequence": self.joined_at,
            "last_sequence": self._last,
            "is_complete": self.is_complete,
            "counts": dict(sorted(self.counts.items())),
            "unknown_events": dict(sorted(self.unknown.items())),
            "last_error": self.last_error or None,
            "ranks": [
                {"rank": rank, **index.to_dict(most)} for rank, index in self.indices.items()
            ],
        }
