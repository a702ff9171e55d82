"""The gates on vLLM's own Scheduler, and that observing changes nothing it decides."""

from __future__ import annotations

import random
from typing import Any

import pytest
from real_scheduler import HAS_WATERMARK, RESERVES_BLOCKS, make_request, make_scheduler, step
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from kvcatch.laws import GATES
from kvcatch.vllm.observe.reasons import capacity


@pytest.mark.skipif(not HAS_WATERMARK, reason="no watermark before vLLM 0.24")
def test_watermark(observed: Any) -> None:
    made = observed(num_blocks=101, watermark=0.05)
    made.scheduler.add_request(make_request("first", 800))
    made.scheduler.add_request(make_request("second", 750, seed=1))
    step(made.scheduler)
    head = made.head
    assert (head["gate"], head["required_blocks"], head["available_blocks"]) == (
        "watermark",
        52,
        50,
    )
    assert head["detail"] == "ceil(750 / 16) = 47 blocks + watermark 5 = 52 > 50 free"


def test_hits_that_others_hold_cost_nothing(observed: Any) -> None:
    made = observed(num_blocks=51)
    scheduler = made.scheduler
    scheduler.add_request(make_request("first", 640, seed=4))
    step(scheduler)
    request = make_request("second", 1040, seed=4)
    scheduler.add_request(request)
    step(scheduler)
    head = made.head
    # 40 of its 65 blocks are the first one's: 25 more, and 9 are free.
    assert (head["gate"], head["required_blocks"]) == ("never_fits", 65)
    scheduler.finish_requests("second", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("third", 800, seed=4))
    step(scheduler)
    head = made.head
    assert (head["gate"], head["required_blocks"], head["available_blocks"]) == ("capacity", 10, 9)
    assert head["detail"] == (
        "ceil(800 / 16) = 50 blocks - 40 of its prefix that others hold = 10 > 9 free"
    )


def test_capacity_and_head_of_line(observed: Any) -> None:
    made = observed(num_blocks=101)
    scheduler = made.scheduler
    for at, tokens in enumerate((700, 700, 900, 32, 48)):
        scheduler.add_request(make_request(f"r-{at}", tokens, seed=at, max_tokens=64))
    for steps in range(1, 4):
        step(scheduler)
        head, queue = made.head, made.pages.refusals()["queue"]
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert (head["request"], head["gate"], head["steps"]) == ("r-2", "capacity", steps)
        assert (head["required_blocks"], head["available_blocks"]) == (-(-900 // 16), free)
        assert head["detail"] == f"ceil(900 / 16) = 57 blocks > {free} free"
        assert (head["free_blocks"], head["running_requests"]) == (free, len(scheduler.running))
        assert head["behind_requests"] == 2
        assert queue["waiting_by_gate"] == {"capacity": 1, "head_of_line": 2}
        assert queue["waiting"] == len(scheduler.waiting)
    assert {made.waiting[name]["gate"] for name in ("r-3", "r-4")} == {"head_of_line"}
    assert "it needs at most 2 blocks" in made.waiting["r-3"]["detail"]
    assert made.waiting["r-3"]["detail"].endswith("it would fit")


def test_preempted(observed: Any) -> None:
    made = observed(num_blocks=11)
    scheduler = made.scheduler
    for at in range(2):
        scheduler.add_request(make_request(f"r-{at}", 76, seed=at, max_tokens=64))
    lost = 0
    for _ in range(30):
        before = len(scheduler.running)
        step(scheduler)
        if len(scheduler.running) < before:
            lost += before - len(scheduler.running)
            head = made.head
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            assert (head["gate"], head["required_requests"]) == ("capacity", 1)
            assert head["detail"] == (
                "1 running requests lost their blocks in this step, so nobody is let in; "
                f"{free} free"
            )
            assert head["request"] not in made.observer.admitted_s
    assert lost
    assert made.observer.preemptions == lost


@pytest.mark.skipif(not RESERVES_BLOCKS, reason="vLLM reserves no blocks before 0.24")
def test_reserved(observed: Any) -> None:
    made = observed(num_blocks=101)
    scheduler = made.scheduler
    allocate = scheduler.kv_cache_manager.allocate_slots

    def reserving(*args: Any, **kwargs: Any) -> Any:
        return allocate(*args, **{**kwargs, "reserved_blocks": 60})

    scheduler.kv_cache_manager.allocate_slots = reserving
    scheduler.add_request(make_request("first", 640))
    step(scheduler)
    assert not scheduler.waiting
    made.observer.scheduler.kv_cache_manager.allocate_slots = allocate
    request = make_request("second", 480, seed=1)
    request.num_computed_tokens = 0
    scheduler.add_request(request)
    made.observer.begin()
    scheduler.waiting.peek_request()
    refused = scheduler.kv_cache_manager.allocate_slots(
        request, 480, full_sequence_must_fit=True, reserved_blocks=31
    )
    assert refused is None
    compared = made.observer._refused
    assert compared is not None
    assert (compared.free, compared.reserved, compared.needs) == (60, 31, [30, 30])
    head = capacity(scheduler, compared, made.observer.block_sizes)
    assert (head.gate, head.required, head.available) == ("capacity", 30, 29)
    assert (
        head.detail == "ceil(480 / 16) = 30 blocks > 60 free - 31 reserved for loads in flight = 29"
    )


def test_slots_and_token_budget(observed: Any) -> None:
    made = observed(num_blocks=1001, max_num_seqs=2)
    for at in range(4):
        made.scheduler.add_request(make_request(f"r-{at}", 40, seed=at))
    step(made.scheduler)
    assert (made.head["request"], made.head["detail"]) == ("r-2", "running 2 = max_num_seqs 2")
    made = observed(num_blocks=1001, max_num_batched_tokens=128)
    for at in range(4):
        made.scheduler.add_request(make_request(f"r-{at}", 100, seed=at))
    step(made.scheduler)
    assert (made.head["request"], made.head["gate"]) == ("r-2", "token_budget")
    assert made.head["detail"] == "budget 128 - scheduled 128 = 0 tokens left in this step"


def test_adapters(observed: Any) -> None:
    made = observed(num_blocks=1001)
    made.scheduler.lora_config = type("LoRAConfig", (), {"max_loras": 1})()
    for at, name in enumerate(("sql", "chat")):
        request = make_request(f"acme-{at}", 40, seed=at)
        request.lora_request = LoRARequest(name, at + 1, f"/adapters/{name}")
        made.scheduler.add_request(request)
    step(made.scheduler)
    assert (made.head["request"], made.head["gate"]) == ("acme-1", "deferred")
    assert (
        made.head["detail"] == "adapter chat is not among the 1 that run (sql) and max_loras is 1"
    )
    assert made.pages.holdings()["by_tag"]["lora"] == [{"value": "sql", "requests": 1, "blocks": 3}]


def drive(scheduler: Any, seed: int, look: Any) -> list[Any]:
    """A random load; what was scheduled, step by step."""
    chance, decisions = random.Random(seed), []
    for number in range(250):
        if chance.random() < 0.35:
            prefix = chance.randint(0, 3)
            scheduler.add_request(
                make_request(
                    f"t-{number}",
                    chance.randint(5, 400),
                    seed=prefix,
                    max_tokens=chance.randint(1, 60),
                )
            )
        if scheduler.requests and chance.random() < 0.05:
            name = chance.choice(sorted(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        output = step(scheduler)
        decisions.append(
            (output.num_scheduled_tokens, sorted(getattr(output, "preempted_req_ids", None) or ()))
        )
        look()
    return decisions


@pytest.mark.parametrize("seed", range(6))
def test_random_loads(observed: Any, tmp_path: Any, seed: int) -> None:
    chance = random.Random(100 + seed)
    options: dict[str, Any] = {
        "num_blocks": chance.randint(40, 90),
        "max_num_seqs": chance.randint(3, 8),
        "max_num_batched_tokens": chance.choice([64, 512]),
        "watermark": chance.choice([0.0, 0.05]),
    }
    made = observed(**options)
    plain = make_scheduler(tmp_path, **options)
    del plain.__dict__["_kvcatch_observer"]  # this one decides alone
    ledger = made.observer.ledger

    def look() -> None:
        shares = dict(ledger.shares)
        assert set(shares) <= set(GATES)
        assert sum(shares.values()) >= len(made.scheduler.waiting)
        page = made.pages.snapshot(is_whole=True)
        assert page["blocks"]["unaccounted"] == 0
        assert not page["conservation"]["zombies"]

    with_hooks = drive(made.scheduler, seed, look)
    assert made.observer.faults == 0
    assert ledger.steps
    assert drive(plain, seed, lambda: None) == with_hooks
    for name in list(made.scheduler.requests):
        made.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    page = made.pages.snapshot()
    assert page["conservation"]["is_idle"]
    assert page["conservation"]["holds"]
