"""``order`` on vLLM's own Scheduler: who enters first, how long others are passed over, and what stays as it was.

No model and no server: the scheduler is stepped with made-up output.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")
sys.path.insert(0, str(Path(__file__).parent / "observe"))

from real_scheduler import make_request, make_scheduler, step
from vllm.v1.request import RequestStatus

from kvcatch.vllm import plugin, register, unregister

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 16
LONG, SHORT, COLD = 1, 2, 100
"""Seeds of prompts: two that :func:`warm` has in the cache, and the first of those that are like no other."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KVCATCH_VLLM", raising=False)
    yield
    unregister()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def installed(switches: str, **settings: str) -> None:
        unregister()
        monkeypatch.setenv("KVCATCH_VLLM", switches)
        for name, value in settings.items():
            monkeypatch.setenv(f"KVCATCH_VLLM_{name}", value)
        register()
        assert (plugin._installed is not None) == bool(switches)

    return installed


def run(scheduler: Any, steps: int = 2000) -> list[str]:
    """Steps until all is done; names in the order in which they first ran."""
    entered: list[str] = []
    for _ in range(steps):
        output = step(scheduler)
        entered += [name for name in output.num_scheduled_tokens if name not in entered]
        if not scheduler.requests:
            return entered
    raise AssertionError(f"not done after {steps} steps: {sorted(scheduler.requests)}")


def warm(scheduler: Any) -> None:
    """Leaves a prompt of 320 tokens and one of 160 in the cache, and an idle scheduler."""
    for name, tokens, seed in (("first", 320, LONG), ("second", 160, SHORT)):
        scheduler.add_request(make_request(name, tokens, seed=seed, max_tokens=1))
        run(scheduler)


def add(scheduler: Any, *names: str) -> None:
    """Adds requests: ``l...`` has 320 cached tokens, ``s...`` 160, any other none."""
    for at, name in enumerate(names):
        seed = {"l": LONG, "s": SHORT}.get(name[0], COLD + at)
        tokens = {"l": 330, "s": 170}.get(name[0], 40)
        scheduler.add_request(make_request(name, tokens, seed=seed, max_tokens=2))


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ("", ["cold", "short", "cold2", "long", "short2"]),
        ("order", ["long", "short", "short2", "cold", "cold2"]),
        ("pool,evict,order", ["long", "short", "short2", "cold", "cold2"]),
    ],
)
def test_longest_cached_prefix_enters_first(tmp_path, install, switches, expected):
    install(switches)
    scheduler = make_scheduler(tmp_path, num_blocks=200, max_num_seqs=1)
    warm(scheduler)
    add(scheduler, "cold", "short", "cold2", "long", "short2")
    assert run(scheduler) == expected


def test_only_the_window_is_looked_at(tmp_path, install):
    install("order", ORDER_WINDOW="2")
    scheduler = make_scheduler(tmp_path, num_blocks=200, max_num_seqs=1)
    warm(scheduler)
    add(scheduler, "cold", "cold2", "short", "long")
    assert run(scheduler) == ["cold", "short", "long", "cold2"]


@pytest.mark.parametrize("passes", [1, 3, 7])
def test_nobody_is_passed_over_more_often_than_the_bound(tmp_path, install, passes):
    install("order", ORDER_PASSES=str(passes))
    scheduler = make_scheduler(tmp_path, num_blocks=200, max_num_seqs=1)
    warm(scheduler)
    add(scheduler, "cold")
    entered: list[str] = []
    for at in range(200):
        # A request with a longer cached prefix is always there.
        if sum(name.startswith("l") for name in scheduler.requests) < 3:
            add(scheduler, f"l{at}")
        output = step(scheduler)
        entered += [name for name in output.num_scheduled_tokens if name not in entered]
        if "cold" in entered:
            break
    assert entered.index("cold") == passes


def test_it_is_off_under_the_priority_policy(tmp_path, install):
    entered = []
    for switches in ("", "order"):
        install(switches)
        folder = tmp_path / (switches or "plain")
        folder.mkdir()
        scheduler = make_scheduler(folder, num_blocks=200, max_num_seqs=1, policy="priority")
        warm(scheduler)
        add(scheduler, "cold", "short", "long")
        scheduler.add_request(make_request("urgent", 40, seed=COLD + 50, max_tokens=2, priority=-1))
        entered.append(run(scheduler))
    assert entered[0] == entered[1] == ["urgent", "cold", "short", "long"]


def test_aborted_while_passed_over_is_gone_and_the_others_keep_their_order(tmp_path, install):
    install("order")
    scheduler = make_scheduler(tmp_path, num_blocks=200, max_num_seqs=1)
    warm(scheduler)
    add(scheduler, "cold", "cold2", "cold3", "long", "long2")
    step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == [
        "cold",
        "cold2",
        "cold3",
        "long2",
    ]
    scheduler.finish_requests("cold2", RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests("long2", RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in scheduler.waiting] == ["cold", "cold3"]
    assert run(scheduler) == ["long", "cold", "cold3"]


def test_a_preempted_request_stays_in_front_of_a_longer_cached_prefix(tmp_path, install):
    install("order")
    # Two cold requests that outgrow the pool together; what waits behind them is cached.
    scheduler = make_scheduler(tmp_path, num_blocks=41, max_num_seqs=2)
    scheduler.add_request(make_request("first", 96, seed=LONG, max_tokens=1))
    run(scheduler)
    for at in range(2):
        scheduler.add_request(make_request(f"cold{at}", 160, seed=COLD + at, max_tokens=300))
    step(scheduler)
    scheduler.add_request(make_request("long", 100, seed=LONG, max_tokens=2))
    entered: list[str] = []
    was_preempted: set[str] = set()
    while scheduler.requests:
        was_preempted |= {
            name
            for name, request in scheduler.requests.items()
            if request.status is RequestStatus.PREEMPTED
        }
        for name in step(scheduler).num_scheduled_tokens:
            if name not in entered and (name == "long" or name in was_preempted):
                entered.append(name)
    assert entered == ["cold1", "long"]


def load(scheduler: Any, seed: int) -> dict[str, tuple[int, Any]]:
    """A crowded random load with aborts; tokens and how it ended, by request."""
    rng = random.Random(seed)
    prompts = [(rng.randint(1, 5), rng.randint(10, 200)) for _ in range(60)]
    lengths = [rng.randint(1, 60) for _ in prompts]
    aborted = {i: rng.randint(1, 30) for i in rng.sample(range(len(prompts)), 8)}
    requests: dict[str, Any] = {}
    for at in range(20_000):
        if len(requests) < len(prompts) and at % 3 == 0:
            i = len(requests)
            prefix, tokens = prompts[i]
            request = make_request(str(i), tokens, seed=prefix, max_tokens=lengths[i])
            requests[str(i)] = request
            scheduler.add_request(request)
        for i, after in aborted.items():
            if at == 3 * i + after and str(i) in scheduler.requests:
                scheduler.finish_requests(str(i), RequestStatus.FINISHED_ABORTED)
        waiting = [request.request_id for request in scheduler.waiting]
        assert len(set(waiting)) == len(waiting)
        assert set(waiting) <= set(scheduler.requests)
        step(scheduler)
        if len(requests) == len(prompts) and not scheduler.requests:
            break
    assert len(requests) == len(prompts)
    assert all(request.is_finished() for request in requests.values())
    return {
        name: (request.num_output_tokens, request.status)
        for name, request in requests.items()
        if int(name) not in aborted
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_same_requests_end_with_the_same_tokens(tmp_path, install, seed):
    results = []
    for switches in ("", "order", "pool,evict,order"):
        install(switches)
        folder = tmp_path / (switches.replace(",", "") or "plain")
        folder.mkdir()
        scheduler = make_scheduler(folder, num_blocks=41, max_num_seqs=6)
        results.append(load(scheduler, seed))
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == 40
        assert not scheduler.waiting
        assert not scheduler.running
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 52


def test_a_fault_in_it_is_said_once_and_vllm_goes_on(tmp_path, install, monkeypatch):
    from kvcatch.vllm import order

    install("order")
    said: list[str] = []
    monkeypatch.setattr(order.logger, "error", lambda text, *args: said.append(text % args))
    scheduler = make_scheduler(tmp_path, num_blocks=200, max_num_seqs=1)
    warm(scheduler)

    def broken(*args: Any) -> Any:
        raise AttributeError("block_hashes")

    monkeypatch.setattr(order, "_cached_blocks", broken)
    add(scheduler, "cold", "short", "long")
    assert run(scheduler) == ["cold", "short", "long"]
    assert said == ["kvcatch: order is off: AttributeError: block_hashes"]
