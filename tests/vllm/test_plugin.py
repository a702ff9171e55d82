"""The plugin in a real vLLM (no model, no server): install, refuse, restore, hints, order, retention.

Run with a Python that has vLLM, kvcatch and pytest: ``pytest -c /dev/null tests/vllm/test_plugin.py``.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

from vllm.v1.request import RequestStatus

from kvcatch.errors import InvalidArgument
from kvcatch.vllm import order, plugin, register, unregister
from kvcatch.vllm.evict import wanted
from kvcatch.vllm.pool import Queue
from kvcatch.vllm.versions import Shape, UnknownShape

OBSERVE = Path(__file__).with_name("observe")


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.delenv("KVCATCH_VLLM", raising=False)
    yield
    unregister()


def make_pool(blocks: int = 32, caching: bool = True):
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(blocks, caching, 16)


def install(monkeypatch, switches: str) -> None:
    monkeypatch.setenv("KVCATCH_VLLM", switches)
    register()
    assert plugin._installed is not None


def test_nothing_happens_unasked(monkeypatch):
    shape = Shape.read()
    before = (
        shape.block_pool.FreeKVCacheBlockQueue,
        shape.pool.__init__,
        shape.manager.allocate_new_blocks,
    )
    register()
    monkeypatch.setenv("KVCATCH_VLLM", " , ")
    register()
    after = (
        shape.block_pool.FreeKVCacheBlockQueue,
        shape.pool.__init__,
        shape.manager.allocate_new_blocks,
    )
    assert before == after


def test_register_twice_installs_once_and_unregister_restores(monkeypatch):
    shape = Shape.read()
    allocate = shape.manager.allocate_new_blocks
    install(monkeypatch, "pool,evict,order")
    wrapped = shape.manager.allocate_new_blocks
    register()
    assert shape.manager.allocate_new_blocks is wrapped is not allocate
    assert isinstance(make_pool().free_block_queue, Queue)
    unregister()
    assert shape.manager.allocate_new_blocks is allocate
    assert not isinstance(make_pool().free_block_queue, Queue)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVCATCH_VLLM", "pol", "'pol'"),
        ("KVCATCH_VLLM_ORDER_WINDOW", "many", "'many'"),
        ("KVCATCH_VLLM_EVICTION", "clairvoyant", "clairvoyant"),
        ("KVCATCH_VLLM_WINDOW", "4", "KVCATCH_VLLM_WINDOW"),
    ],
)
def test_bad_settings_are_one_line_and_vllm_is_untouched(monkeypatch, name, value, said):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(plugin.logger, "handlers", [handler])
    monkeypatch.setenv("KVCATCH_VLLM", "pool")
    monkeypatch.setenv(name, value)
    register()
    assert plugin._installed is None
    assert len(lines) == 1
    assert said in lines[0]
    assert not isinstance(make_pool().free_block_queue, Queue)


def test_an_unknown_method_of_the_queue_is_named_and_vllm_is_untouched(monkeypatch):
    shape = Shape.read()
    monkeypatch.setattr(shape.queue, "popright", lambda self: None, raising=False)
    with pytest.raises(UnknownShape, match="popright"):
        Shape.read()
    monkeypatch.setenv("KVCATCH_VLLM", "pool")
    register()
    assert plugin._installed is None
    assert not isinstance(make_pool().free_block_queue, Queue)


def test_the_pool_counts_and_orders_as_vllms(monkeypatch):
    plain = make_pool()
    install(monkeypatch, "pool")
    ours = make_pool()
    for pool in (plain, ours):
        assert pool.null_block.block_id == 0
        first = pool.get_new_blocks(10)
        for i, block in enumerate(first[:6]):
            block.set_block_hash(b"%d" % i)
        pool.free_blocks(reversed(first))
        assert pool.get_num_free_blocks() == 31
        cached = [
            b.block_id
            for b in pool.free_block_queue.get_all_free_blocks()
            if b.block_hash is not None
        ]
        assert cached == [6, 5, 4, 3, 2, 1]
        assert [b.block_id for b in pool.free_block_queue.iter_blocks_after(first[3])] == [3, 2, 1]
        pool.touch([first[4]])
        assert pool.get_num_free_blocks() == 30
        with pytest.raises(ValueError, match="Cannot get 31"):
            pool.get_new_blocks(31)
        # The oldest cached block goes first once the others are gone.
        pool.get_new_blocks(25)
        assert [block.block_id for block in pool.get_new_blocks(1)] == [6]


def test_reset_makes_all_blocks_clean(monkeypatch):
    install(monkeypatch, "pool")
    pool = make_pool()
    blocks = pool.get_new_blocks(4)
    for i, block in enumerate(blocks):
        block.set_block_hash(b"%d" % i)
    pool.free_blocks(blocks)
    assert pool.free_block_queue.num_clean == 27
    assert pool.reset_prefix_cache()
    assert pool.free_block_queue.num_clean == 31


@pytest.mark.parametrize(
    ("extra", "result"),
    [
        (None, None),
        ({"other": 1}, None),
        ({"kvcatch_priority": 5}, (5, None)),
        ({"kvcatch_priority": 5, "kvcatch_ttl": 2}, (5, 2.0)),
        ({"kvcatch": {"priority": 100, "ttl": 0.5}}, (100, 0.5)),
    ],
)
def test_what_a_request_asks_for(extra, result):
    assert wanted(extra) == result


@pytest.mark.parametrize(
    "extra",
    [
        {"kvcatch_priority": 0},
        {"kvcatch_priority": 101},
        {"kvcatch_priority": True},
        {"kvcatch_priority": "5"},
        {"kvcatch_ttl": 5},
        {"kvcatch_priority": 5, "kvcatch_ttl": float("nan")},
        {"kvcatch_priority": 5, "kvcatch_ttl": 0},
        {"kvcatch": 5},
        {"kvcatch": {"priorities": 5}},
    ],
)
def test_what_a_request_cannot_ask_for(extra):
    with pytest.raises(InvalidArgument):
        wanted(extra)


class Waiting:
    """As much of a request as the order looks at."""

    def __init__(self, name: str, cached: int) -> None:
        self.name, self.status, self.num_computed_tokens = name, RequestStatus.WAITING, 0
        self.block_hashes = [i < cached for i in range(10)]


class Manager:
    enable_caching = True

    class coordinator:  # noqa: N801
        single_type_managers = ()

    class block_pool:  # noqa: N801
        @staticmethod
        def get_cached_block(cached, groups):
            del groups
            return cached


def test_rank_takes_preempted_then_passed_over_then_longest_cached():
    a, b, c, d, e = (
        Waiting(name, cached) for name, cached in zip("abcde", (0, 3, 9, 3, 0), strict=True)
    )
    e.status = RequestStatus.PREEMPTED
    d._kvcatch_passes = 8
    assert "".join(r.name for r in order.rank(Manager, [a, b, c, d, e], 8)) == "edcba"
    assert "".join(r.name for r in order.rank(Manager, [a, b, c, d, e], 9)) == "ecbda"


def test_nobody_is_passed_over_more_often_than_the_bound():
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    bound, waiting = 5, FCFSRequestQueue([Waiting("old", 0)])
    for step in range(20):
        waiting.append(Waiting(str(step), 9))
        first = list(waiting)
        order._put(waiting, order.rank(Manager, first, bound))
        admitted = waiting.popleft()
        order._put_back(waiting, first)
        if admitted.name == "old":
            break
    assert step == bound
    assert [r.name for r in waiting] == ["5"]


OBSERVED = """
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1]]
from real_scheduler import make_request, make_scheduler, step

from kvcatch.vllm import register

register()
scheduler = make_scheduler(Path(sys.argv[2]), num_blocks=21)
scheduler.add_request(make_request("a", 40, max_tokens=2))
while scheduler.requests:
    step(scheduler)
print("served", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def observed(tmp_path):
    """Starts engine cores (vLLM's own Scheduler in a process each) that publish; returns process and its log."""
    made = []

    def start(socket_setting: str) -> tuple[subprocess.Popen, Path]:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        environ = os.environ | {
            "KVCATCH_VLLM": "observe",
            "KVCATCH_VLLM_SOCKET": socket_setting,
            "VLLM_NO_USAGE_STATS": "1",
        }
        log = folder / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", OBSERVED, str(OBSERVE), str(folder)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        made.append(process)
        # vLLM's log may be on stdout.
        lines = []
        for line in process.stdout:
            if line == "served\n":
                break
            lines.append(line)
        else:
            raise AssertionError(log.read_text()[-2000:])
        log.write_text(log.read_text() + "".join(lines))
        return process, log

    yield start
    for process in made:
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def wrong(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "is not published" in line]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(30)
        try:
            reader.connect(str(path))
        except OSError:
            return False
        reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b" 200 " in reader.recv(64)


def test_of_two_engine_cores_with_one_socket_the_second_says_so_and_serves_on(observed, tmp_path):
    path = tmp_path / "one.sock"
    _, first = observed(str(path))
    assert answers(path)
    assert wrong(first) == []
    _, second = observed(str(path))
    assert len(wrong(second)) == 1
    assert str(path) in wrong(second)[0]
    assert answers(path)


def test_the_socket_of_a_crashed_core_is_taken_over(observed, tmp_path):
    path = tmp_path / "one.sock"
    process, _ = observed(str(path))
    process.kill()
    process.wait(30)
    assert path.exists()
    assert not answers(path)
    _, second = observed(str(path))
    assert wrong(second) == []
    assert answers(path)


def test_a_socket_that_cannot_be_made_is_one_line_and_vllm_serves_on(observed, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "one.sock", tmp_path / "absent" / "one.sock"):
        _, log = observed(str(path))
        assert len(wrong(log)) == 1
        assert str(path) in wrong(log)[0]
