"""Public stalls of vLLM, rebuilt on its own Scheduler: the observer names gate, request and arithmetic."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_scheduler import WHOLE_MUST_FIT, make_request, step
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import RequestStatus

STEPS = 200


def hold(scheduler: Any, name: str, tokens: int, *, computed: int) -> Any:
    """A request in WAITING_FOR_REMOTE_KVS that holds the blocks of ``computed`` tokens."""
    request = make_request(name, tokens)
    scheduler.requests[name] = request
    manager = scheduler.kv_cache_manager
    blocks = manager.allocate_slots(
        request, 0, num_external_computed_tokens=computed, delay_cache_blocks=True
    )
    assert blocks is not None
    request.num_computed_tokens = computed
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler._enqueue_waiting_request(request)
    return request


@pytest.mark.skipif(not WHOLE_MUST_FIT, reason="before 0.19 the first chunk enters")
def test_57841_a_head_that_does_not_fit_while_a_load_holds_the_pool(observed: Any) -> None:
    """Pool of 270, 20 free: H needs 100, W 10 and L (which holds 250) 5; 200 steps schedule nothing."""
    made = observed(num_blocks=271)
    scheduler = made.scheduler
    hold(scheduler, "L", 4080, computed=4000)
    scheduler.add_request(make_request("H", 1600, seed=1))
    scheduler.add_request(make_request("W", 160, seed=2))
    for _ in range(STEPS):
        assert step(scheduler).total_num_scheduled_tokens == 0
    head = made.head
    assert (head["request"], head["gate"]) == ("H", "capacity")
    assert (head["required_blocks"], head["available_blocks"]) == (100, 20)
    assert head["detail"] == (
        "ceil(1,600 / 16) = 100 blocks > 20 free; nothing runs, 250 blocks are held by requests that wait"
    )
    assert head["steps"] == STEPS
    assert head["running_requests"] == 0
    assert head["deferred_requests"] == 1
    assert head["behind_requests"] == 1
    waiting = made.waiting
    assert waiting["L"]["gate"] == "deferred"
    assert waiting["L"]["detail"] == "its KV is still being loaded (250 blocks)"
    assert waiting["W"]["gate"] == "head_of_line"
    assert waiting["W"]["detail"] == (
        "behind H, which nothing passes; it needs at most 10 blocks, 20 are free: it would fit"
    )
    page = made.pages.snapshot()
    assert [(item["request"], item["blocks"]) for item in page["holdings"]] == [("L", 250)]
    assert page["blocks"]["unaccounted"] == 0
    seconds = page["waiting_request_seconds"]
    assert seconds["capacity"] == pytest.approx(seconds["head_of_line"], abs=0.002)
    assert set(seconds) == {"capacity", "head_of_line", "deferred"}


@pytest.mark.skipif(not WHOLE_MUST_FIT, reason="before 0.19 the first chunk enters")
def test_39734_a_request_that_no_pool_of_this_size_can_hold(observed: Any) -> None:
    """37,392 tokens of KV, max_model_len 262,144: what is longer waits for ever, and all behind it."""
    made = observed(num_blocks=37_392 // 16 + 1, max_model_len=262_144)
    scheduler = made.scheduler
    scheduler.add_request(make_request("long", 40_000))
    scheduler.add_request(make_request("short", 100, seed=1))
    for _ in range(STEPS):
        assert step(scheduler).total_num_scheduled_tokens == 0
    head = made.head
    assert (head["request"], head["gate"]) == ("long", "never_fits")
    assert (head["required_blocks"], head["available_blocks"]) == (2_500, 2_337)
    assert head["detail"] == (
        "ceil(40,000 / 16) = 2,500 blocks > 2,337 usable, even in an idle pool (now 2,337 free)"
    )
    assert made.waiting["short"]["gate"] == "head_of_line"
    # The one that fits goes in as soon as the other is gone.
    scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler).num_scheduled_tokens == {"short": 100}
    assert made.pages.refusals()["head"] is None


@pytest.mark.skipif(
    "num_waiting_for_streaming_input" not in inspect.getsource(Scheduler.schedule),
    reason="before 0.27 paused sessions keep no slot",
)
def test_53130_paused_sessions_keep_every_slot(observed: Any) -> None:
    """Nothing runs and the pool is nearly empty, yet running + paused sessions = max_num_seqs."""
    made = observed(num_blocks=1001, max_num_seqs=4)
    scheduler = made.scheduler
    for at in range(4):
        scheduler.add_request(
            make_request(f"session-{at}", 40, seed=at, max_tokens=2, resumable=True)
        )
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_waiting_for_streaming_input == 4
    assert not scheduler.running
    scheduler.add_request(make_request("plain", 40, seed=9))
    for _ in range(STEPS):
        assert step(scheduler).total_num_scheduled_tokens == 0
    head = made.head
    assert (head["request"], head["gate"]) == ("plain", "max_num_seqs")
    assert (head["required_sequences"], head["available_sequences"]) == (1, 0)
    assert head["detail"] == "running 0 + paused streaming sessions 4 = 4 = max_num_seqs 4"
    assert head["free_blocks"] > 980
    holders = {item["request"] for item in made.pages.holdings()["holdings"]}
    assert holders == {f"session-{at}" for at in range(4)}
    sessions = [item for name, item in made.waiting.items() if name.startswith("session")]
    assert {item["gate"] for item in sessions} == {"deferred"}
    assert "waits for more input" in sessions[0]["detail"]


@pytest.mark.skipif(
    "max_num_new_slots_for_drafting" not in inspect.getsource(Scheduler),
    reason="before 0.28 drafts take nothing from the step's tokens",
)
def test_45414_a_chunk_of_mamba_blocks_that_never_fits_the_step(observed: Any) -> None:
    """Running 0, Waiting 6, KV 0 %: the split to whole Mamba blocks gives the head no token.

    A block of the Mamba state as long as the whole budget, of which drafts keep a few tokens: the rest is
    less than a block, for ever.
    """
    size = 2048
    attention = FullAttentionSpec(
        block_size=size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    mamba = MambaSpec(
        block_size=size,
        shapes=((1024, 64),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    made = observed(
        num_blocks=65,
        block_size=size,
        max_num_batched_tokens=size,
        groups=[KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["mamba"], mamba)],
        cache={"mamba_cache_mode": "align", "enable_prefix_caching": True},
    )
    scheduler = made.scheduler
    assert scheduler.need_mamba_block_aligned_split
    scheduler.vllm_config.speculative_config = SimpleNamespace(max_num_new_slots_for_drafting=4)
    for at in range(6):
        scheduler.add_request(make_request(f"request-{at}", 5000, seed=at, block_size=size))
    for _ in range(STEPS):
        assert scheduler.schedule().total_num_scheduled_tokens == 0
    head = made.head
    assert (head["request"], head["gate"]) == ("request-0", "token_budget")
    assert (head["required_tokens"], head["available_tokens"]) == (2048, 2044)
    assert head["detail"] == (
        "a chunk must end on a block of the Mamba state: 2,048 tokens > 2,044 left (of 2,048 batched "
        "tokens, 4 kept for drafts per request), so it is 0 tokens; nothing runs, so no later step has more"
    )
    assert head["running_requests"] == 0
    assert made.scheduler.kv_cache_manager.usage == 0.0
    assert made.pages.refusals()["queue"]["waiting_by_gate"] == {"token_budget": 6}
