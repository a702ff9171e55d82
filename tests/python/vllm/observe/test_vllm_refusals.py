"""Which gate, which request, which arithmetic; and that every waiting request is accounted for."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import Request, step

from kvcatch.laws import GATES, Refusal
from kvcatch.vllm.observe.records import Ledger, Refused


def test_capacity_with_those_behind_it(observed: Any) -> None:
    made = observed(num_blocks=101)
    for at in range(4):
        made.scheduler.add_request(Request(f"acme-{at}", 600))
    for _ in range(3):
        step(made.scheduler)
    head = made.head
    assert (head["request"], head["gate"]) == ("acme-2", "capacity")
    assert (head["required_blocks"], head["available_blocks"]) == (38, 24)
    assert head["detail"] == "ceil(600 / 16) = 38 blocks > 24 free"
    assert (head["steps"], head["behind_requests"], head["running_requests"]) == (3, 1, 2)
    waiting = made.pages.refusals()["waiting"]
    assert [(item["request"], item["gate"]) for item in waiting] == [
        ("acme-2", "capacity"),
        ("acme-3", "head_of_line"),
    ]
    assert made.pages.refusals()["queue"]["waiting_by_gate"] == {"capacity": 1, "head_of_line": 1}


def test_the_refusal_of_the_laws(observed: Any) -> None:
    made = observed(num_blocks=21)
    made.scheduler.add_request(Request("a", 160))
    made.scheduler.add_request(Request("b", 320))
    step(made.scheduler)
    current = made.observer.ledger.current
    assert current.refusal() == Refusal(
        "capacity", 20, 10, "ceil(320 / 16) = 20 blocks > 10 free", "blocks"
    )


def test_watermark_only_beside_others(observed: Any) -> None:
    made = observed(num_blocks=101, watermark=5)
    made.scheduler.add_request(Request("alone", 1600))
    step(made.scheduler)  # with nothing running the watermark is not applied
    assert not made.scheduler.waiting
    made = observed(num_blocks=101, watermark=5)
    made.scheduler.add_request(Request("first", 800))
    made.scheduler.add_request(Request("second", 750))
    step(made.scheduler)
    head = made.head
    assert (head["gate"], head["required_blocks"], head["available_blocks"]) == (
        "watermark",
        52,
        50,
    )
    assert head["detail"] == "ceil(750 / 16) = 47 blocks + watermark 5 = 52 > 50 free"
    assert head["watermark_blocks"] == 5


def test_never_fits(observed: Any) -> None:
    made = observed(num_blocks=11)
    made.scheduler.add_request(Request("huge", 161))
    step(made.scheduler)
    head = made.head
    assert (head["gate"], head["required_blocks"], head["available_blocks"]) == (
        "never_fits",
        11,
        10,
    )
    assert "10 usable, even in an idle pool" in head["detail"]


def test_cannot_finish_is_a_warning(observed: Any) -> None:
    made = observed(num_blocks=11)
    made.scheduler.add_request(Request("first", 32))
    made.scheduler.add_request(Request("second", 150, max_tokens=100))
    step(made.scheduler)
    assert made.head["warning"] == "cannot finish: ceil(250 / 16) = 16 blocks > 10 usable"


def test_slots_and_budget(observed: Any) -> None:
    made = observed(max_num_seqs=2)
    for at in range(3):
        made.scheduler.add_request(Request(f"r{at}", 16))
    step(made.scheduler)
    head = made.head
    assert (head["request"], head["gate"]) == ("r2", "max_num_seqs")
    assert head["detail"] == "running 2 = max_num_seqs 2"
    made = observed(budget=100)
    for at in range(3):
        made.scheduler.add_request(Request(f"r{at}", 60))
    step(made.scheduler)
    head = made.head
    assert (head["request"], head["gate"], head["token_budget_left"]) == ("r2", "token_budget", 0)
    assert head["detail"] == "budget 100 - scheduled 100 = 0 tokens left in this step"
    assert made.pages.refusals()["queue"]["waiting_by_gate"] == {"token_budget": 1}


def test_set_aside_and_paused(observed: Any) -> None:
    made = observed()
    request = Request("remote", 40)
    request.status = SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    made.scheduler.add_request(request)
    step(made.scheduler)
    assert (made.head["gate"], made.head["detail"]) == ("deferred", "its KV is still being loaded")
    made.scheduler.add_request(Request("plain", 40))
    made.scheduler.pause = True
    step(made.scheduler)
    assert (made.head["request"], made.head["gate"]) == ("plain", "deferred")
    assert made.head["detail"] == "the scheduler is paused (PAUSED_NEW)"


def test_preempted_in_this_step(observed: Any) -> None:
    made = observed(num_blocks=11, max_num_seqs=4)
    made.scheduler.add_request(Request("a", 80, max_tokens=64))
    made.scheduler.add_request(Request("b", 80, max_tokens=64))
    output = step(made.scheduler)
    while not output.preempted_req_ids:
        output = step(made.scheduler)
    assert (made.head["request"], made.head["gate"]) == ("b", "capacity")
    assert made.head["detail"].startswith("1 running requests lost their blocks in this step")
    assert made.observer.preemptions == 1


def test_an_arrival_is_looked_at_by_the_next_step(observed: Any) -> None:
    made = observed()
    step(made.scheduler)
    made.scheduler.add_request(Request("new", 16))
    page = made.pages.refusals()
    assert page["head"] is None
    assert page["queue"]["waiting_by_gate"] == {"next_step": 1}
    assert page["waiting"][0]["gate"] == "next_step"
    step(made.scheduler)
    assert made.pages.refusals()["queue"]["waiting_by_gate"] == {}


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_are_explained_in_every_step(observed: Any, seed: int) -> None:
    chance = random.Random(seed)
    made = observed(
        num_blocks=chance.randint(20, 60),
        max_num_seqs=chance.randint(2, 6),
        budget=chance.choice([64, 256, 2048]),
        watermark=chance.choice([0, 0, 3]),
    )
    scheduler, ledger = made.scheduler, made.observer.ledger
    for number in range(300):
        if chance.random() < 0.3:
            scheduler.add_request(
                Request(f"t{number}", chance.randint(1, 280), chance.randint(1, 60))
            )
        if scheduler.requests and chance.random() < 0.05:
            scheduler.finish_requests(chance.choice(sorted(scheduler.requests)))
        step(scheduler)
        shares = dict(ledger.shares)
        waiting = len(scheduler.waiting)
        # A request that ended in the second half of the step no longer waits.
        assert sum(shares.values()) >= waiting
        assert set(shares) <= set(GATES)
        if ledger.current is not None and shares:
            current = ledger.current
            assert current.required > current.available
            if current.gate in ("capacity", "watermark") and current.unit == "blocks":
                assert current.free == current.available
        page = made.pages.snapshot(is_whole=True)
        assert page["blocks"]["unaccounted"] == 0
        assert page["blocks"]["held"] == sum(item["blocks"] for item in page["holdings"])
    assert made.observer.faults == 0
    assert sum(ledger.steps.values()) > 20
    assert len(ledger.recent) <= 16


def test_a_fault_is_counted_told_once_and_stays_inside(
    observed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = observed()
    made.observer.pool = None  # every look at the pool fails from now on
    made.scheduler.add_request(Request("huge", 100_000))
    for _ in range(5):
        assert step(made.scheduler).total_num_scheduled_tokens == 0
    assert made.observer.faults >= 5
    assert [record.message for record in caplog.records] == [
        "kvcatch: observing failed once; vLLM is not affected and this is not logged again"
    ]
    # Nothing of the hooks is left on vLLM's objects between two steps.
    assert "allocate_slots" not in vars(made.scheduler.kv_cache_manager)


def test_a_broken_step_leaves_nothing_behind(observed: Any) -> None:
    made = observed(num_blocks=3)
    made.scheduler.add_request(Request("a", 16))
    made.scheduler.update_from_output(made.scheduler.schedule())
    made.scheduler.add_request(Request("b", 160))
    peek = made.scheduler.waiting.peek_request

    def broken() -> Any:
        peek()
        raise RuntimeError("vLLM's own")

    made.scheduler.waiting.peek_request = broken
    with pytest.raises(RuntimeError, match="vLLM's own"):
        made.scheduler.schedule()
    made.scheduler.waiting.peek_request = peek
    step(made.scheduler)
    assert made.head["request"] == "b"
    assert "allocate_slots" not in vars(made.scheduler.kv_cache_manager)
    made.observer.unbind()
    assert "peek_request" not in vars(made.scheduler.waiting)


def test_the_ledger_charges_the_time_between_steps() -> None:
    ledger = Ledger(keep=3)
    ledger.settle(10.0, [("capacity", 1), ("head_of_line", 4)])
    ledger.settle(12.5, [("token_budget", 2)])
    assert ledger.seconds == {"capacity": 2.5, "head_of_line": 10.0}
    assert ledger.seconds_until(13.0) == {
        "capacity": 2.5,
        "head_of_line": 10.0,
        "token_budget": 1.0,
    }
    for at in range(10):
        ledger.note(Refused(f"r{at}", "capacity", 2, 1, "x"), float(at))
    assert [refused.request_id for refused in ledger.recent] == ["r7", "r8", "r9"]
    ledger.note(Refused("r9", "capacity", 3, 1, "y"), 20.0)
    assert (ledger.recent[-1].first_s, ledger.recent[-1].steps) == (9.0, 2)
    assert ledger.steps == {"capacity": 11}
