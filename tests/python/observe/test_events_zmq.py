"""Receiving KV events over real sockets: gaps, replay, restarts, garbage; and the command."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from events_make import NewRemoved, OldStored, Publisher, Renamed, stored

from kvcatch.errors import InvalidArgument
from kvcatch.observe.events import Subscriber, check_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import RunKvcatch


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def publisher(context: zmq.Context[Any]) -> Iterator[Publisher]:
    made = Publisher(context)
    yield made
    made.close()


def join(subscriber: Subscriber, publisher: Publisher, topic: bytes = b"") -> None:
    """Wait until what is published arrives: until then PUB drops it."""
    end = time.monotonic() + 10
    while not subscriber.counts["batches"]:
        assert time.monotonic() < end, "the subscriber never joined"
        publisher.sequence = 0
        publisher.buffer.clear()
        publisher.publish(topic=topic)
        subscriber.poll(0.05)


def take(subscriber: Subscriber, until: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, subscriber.to_dict()
        subscriber.poll(0.05)


class Server:
    """Answers replays from a thread, as vLLM does."""

    def __init__(self, *publishers: Publisher) -> None:
        self.publishers = publishers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for publisher in self.publishers:
                publisher.serve_replay()


def test_batches_feed_the_index(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1, 2, 3]), OldStored([4], 3, [0] * 16, 16, None, "GPU"))
        publisher.publish(NewRemoved([4], "GPU"), Renamed([1]))
        take(subscriber, lambda: subscriber.last_sequence == 2)
        index = subscriber.indices[0]
        assert index.resident_blocks == {"GPU": 3}
        assert subscriber.unknown == {"BlockMigrated": 1}
        assert subscriber.is_complete
        assert subscriber.counts["malformed"] == 0


def test_ranks_are_kept_apart(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1]), rank=0)
        publisher.publish(stored([1, 2]), rank=1)
        publisher.publish(stored([1]), rank=None)
        take(subscriber, lambda: subscriber.last_sequence == 3)
        blocks = {rank: len(index) for rank, index in subscriber.indices.items()}
        assert blocks == {0: 1, 1: 2, None: 1}


def test_a_gap_is_noticed_and_said(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1]), lost=True)
        publisher.publish(stored([2]), lost=True)
        publisher.publish(stored([3]))
        take(subscriber, lambda: subscriber.last_sequence == 3)
        assert subscriber.counts["gaps"] == 1
        assert subscriber.counts["missed_batches"] == 2
        assert not subscriber.is_complete
        assert len(subscriber.indices[0]) == 1


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_gap_is_filled_by_replay(context: zmq.Context[Any], with_topic: bool) -> None:
    publisher = Publisher(context, with_topic_in_replay=with_topic)
    with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1]), lost=True)
        publisher.publish(stored([2], 1), lost=True)
        publisher.publish(stored([3], 2))
        publisher.publish(stored([4], 3))
        with Server(publisher):
            take(subscriber, lambda: subscriber.last_sequence == 4)
        assert subscriber.counts["gaps"] == 1
        assert subscriber.counts["missed_batches"] == 0
        assert subscriber.counts["replayed_batches"] == 2
        assert subscriber.is_complete
        assert subscriber.indices[0].structure()["deepest_blocks"] == 4
        assert subscriber.indices[0].counts["orphaned_chains"] == 0
    publisher.close()


def test_who_comes_late_asks_for_what_was(context: zmq.Context[Any]) -> None:
    publisher = Publisher(context)
    for value in range(20):
        publisher.publish(stored([value], value - 1 if value else None))
    with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
        with Server(publisher):
            assert subscriber.catch_up() == 20
        assert subscriber.joined_at == 0
        assert subscriber.indices[0].structure()["deepest_blocks"] == 20
        # Asking again brings nothing twice.
        with Server(publisher):
            assert subscriber.catch_up() == 0
        assert subscriber.indices[0].counts["stored_blocks"] == 20
    publisher.close()


def test_a_buffer_that_forgot_the_beginning_is_said(context: zmq.Context[Any]) -> None:
    publisher = Publisher(context, buffer_steps=5)
    for value in range(20):
        publisher.publish(stored([value], value - 1 if value else None))
    with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
        with Server(publisher):
            assert subscriber.catch_up() == 5
        assert subscriber.joined_at == 15
        assert not subscriber.is_complete
        assert subscriber.indices[0].counts["orphaned_chains"] == 1
    publisher.close()


def test_a_replay_that_never_answers_is_bounded(publisher: Publisher) -> None:
    with Subscriber(
        publisher.endpoint, replay="tcp://127.0.0.1:9", replay_answer_s=0.2
    ) as subscriber:
        before = time.monotonic()
        assert subscriber.catch_up() == 0
        assert time.monotonic() - before < 3
        assert subscriber.counts["replay_failures"] == 1
        assert "no end within 0.2 s" in subscriber.last_error


def test_a_restart_empties_the_index(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1, 2]))
        take(subscriber, lambda: subscriber.last_sequence == 1)
        publisher.sequence = 0
        publisher.publish(stored([9]))
        take(subscriber, lambda: subscriber.counts["restarts"] == 1)
        assert 1 not in subscriber.indices[0]
        assert 9 in subscriber.indices[0]
        assert subscriber.is_complete


def test_a_batch_that_comes_twice_counts_once(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1]))
        sequence, payload = publisher.buffer[-1]
        publisher.pub.send_multipart((b"", sequence.to_bytes(8, "big"), payload))
        publisher.publish(stored([2]))
        take(subscriber, lambda: subscriber.last_sequence == 2)
        assert subscriber.counts["duplicates"] == 1
        assert subscriber.counts["restarts"] == 0
        assert subscriber.indices[0].counts["reused_blocks"] == 0


def test_a_restart_that_hides_behind_a_gap_shows_in_the_replay(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint, replay=publisher.replay) as subscriber:
        join(subscriber, publisher)
        publisher.publish(stored([1, 2]))
        take(subscriber, lambda: subscriber.last_sequence == 1)
        publisher.sequence = 0
        publisher.buffer.clear()
        for value in (5, 6, 7):  # of the new process, while nobody listened
            publisher.publish(stored([value]), lost=True)
        publisher.publish(stored([8]))
        with Server(publisher):
            take(subscriber, lambda: subscriber.last_sequence == 3)
        assert subscriber.counts["restarts"] == 1
        assert subscriber.counts["missed_batches"] == 0
        assert 1 not in subscriber.indices[0]
        assert all(value in subscriber.indices[0] for value in (5, 6, 7, 8))


def test_garbage_is_counted_and_the_rest_goes_on(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        publisher.raw(b"\xc1 not msgpack")
        publisher.pub.send_multipart((b"", b"short", b"x"))
        publisher.pub.send_multipart((b"one frame",))
        publisher.pub.send_multipart((b"", bytes(8), b"x", b"a fourth"))
        publisher.publish(stored([1]))
        take(subscriber, lambda: subscriber.last_sequence == 2)
        assert subscriber.counts["malformed"] == 4
        assert subscriber.counts["gaps"] == 0
        assert 1 in subscriber.indices[0]
        assert not subscriber.is_complete
        assert "frames" in subscriber.last_error


def test_types_and_ranks_without_end_are_bounded(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint) as subscriber:
        join(subscriber, publisher)
        for number in range(1100):
            event = {"type": f"Invented{number}"}
            publisher.raw(msgspec.msgpack.encode([1.0, [event], number]))
        take(subscriber, lambda: subscriber.last_sequence == 1100)
        assert len(subscriber.indices) == 1024
        assert len(subscriber.unknown) == 65
        assert subscriber.unknown.total() == 1100
        assert subscriber.counts["malformed"] == 1100 - 1024
        assert "is one too many" in subscriber.last_error


def test_only_the_topic_that_was_asked_for(publisher: Publisher) -> None:
    with Subscriber(publisher.endpoint, topic="kv@mine") as subscriber:
        join(subscriber, publisher, b"kv@mine@model")
        publisher.sequence = 5
        publisher.publish(stored([1]), topic=b"kv@other")
        publisher.sequence = 1
        publisher.publish(stored([2]), topic=b"kv@mine@model")
        take(subscriber, lambda: subscriber.last_sequence == 1)
        assert len(subscriber.indices[0]) == 1
        assert 2 in subscriber.indices[0]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("", "must be tcp://HOST:PORT"),
        ("127.0.0.1:5557", "must be tcp://HOST:PORT"),
        ("http://127.0.0.1:5557", "must be tcp://HOST:PORT"),
        ("tcp://*:5557", "name its host, tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:99999", "no port 99999"),
        ("tcp://127.0.0.1", "must be tcp://HOST:PORT"),
        ("ipc://", "must be tcp://HOST:PORT"),
    ],
)
def test_an_endpoint_that_is_none(endpoint: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_endpoint(endpoint)
    assert said in str(raised.value)


def test_ipc_and_ipv6_are_endpoints() -> None:
    assert check_endpoint("ipc:///run/kv.sock") == "ipc:///run/kv.sock"
    assert check_endpoint("tcp://[::1]:5557") == "tcp://[::1]:5557"


@pytest.mark.parametrize("command", ["events", "leaks", "knee", "compare"])
def test_help_has_an_example(run_kvcatch: RunKvcatch, command: str) -> None:
    done = run_kvcatch(command, "--help")
    assert done.returncode == 0
    assert f"Example: kvcatch {command} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


class TestCommand:
    def test_table_and_json(self, kvcatch_command: list[str], context: zmq.Context[Any]) -> None:
        publisher = Publisher(context)
        publisher.publish(stored([1, 2, 3]))
        publisher.publish(stored([4], 2), stored([5], 3))
        publisher.publish(NewRemoved([4], "GPU"), Renamed([1]))
        command = [
            *kvcatch_command, "events", publisher.endpoint, "--replay", publisher.replay,
            "--seconds", "1",
        ]  # fmt: skip
        with Server(publisher):
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            data = subprocess.run(
                [*command, "--json"], capture_output=True, text=True, timeout=60, check=False
            )
        publisher.close()
        assert text.returncode == 0, text.stderr
        assert "3 batches" in text.stdout
        assert "on GPU" in text.stdout
        assert "4 blocks, 64 tokens" in text.stdout
        assert "unknown events left out: BlockMigrated (1)" in text.stdout
        assert max(map(len, text.stdout.splitlines())) <= 100
        (facts,) = json.loads(data.stdout)
        assert facts["is_complete"] is True
        assert facts["ranks"][0]["resident_blocks"] == {"GPU": 4}
        assert facts["ranks"][0]["shared_prefixes"][0]["tokens"] == 32

    def test_nothing_comes(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch("events", "tcp://127.0.0.1:9", "--seconds", 0.3)
        assert done.returncode == 1
        assert "nothing came in 0.3 s" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("tcp://*:5557",), "name its host"),
            (("nowhere",), "must be tcp"),
            (("tcp://a:1", "--replay", "tcp://a:2", "--replay", "tcp://a:3"), "one for each"),
            (("tcp://a:1", "--seconds", 0), "seconds"),
        ],
    )
    def test_bad_input(
        self, run_kvcatch: RunKvcatch, arguments: tuple[object, ...], said: str
    ) -> None:
        done = run_kvcatch("events", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("kvcatch: ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert said in done.stderr
