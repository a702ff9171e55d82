from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument
from kvcatch.laws import (
    GATES,
    LAWS,
    OWN_LAWS,
    QueuedRequest,
    Refusal,
    RunningRequest,
    State,
    Step,
    admit,
    find_law,
    used_up,
)
from kvcatch.ledger.engines import Engine

IDLE = State(num_blocks=100, block_size=16, free=100)


def one(law: str, state: State, request: QueuedRequest) -> Any:
    return admit(LAWS[law], state, [request])[0]


def gate(law: str, state: State, request: QueuedRequest) -> str:
    decision = one(law, state, request)
    return decision.refusal.gate if decision.refusal else "enters"


class TestWatermark:
    @pytest.mark.parametrize("law", ["full_prompt", "vllm_full_prompt", "first_chunk"])
    def test_it_counts_only_while_something_runs(self, law: str) -> None:
        state = replace(IDLE, watermark=0.10)
        request = QueuedRequest(16 * 95)
        assert gate(law, state, request) == "enters"
        busy = replace(state, num_running=1)
        assert gate(law, busy, request) == "watermark"
        assert gate(law, busy, QueuedRequest(16 * 90)) == "enters"
        decision = one(law, busy, QueuedRequest(16 * 90 + 1))
        assert (decision.refusal.required, decision.refusal.available) == (101, 100)

    def test_an_admission_of_this_step_counts_as_running(self) -> None:
        queue = [QueuedRequest(16 * 50), QueuedRequest(16 * 45)]
        decisions = admit(LAWS["full_prompt"], replace(IDLE, watermark=0.10), queue)
        assert decisions[0].enters
        assert decisions[1].refusal is not None
        assert decisions[1].refusal.gate == "watermark"

    def test_without_it_the_gate_is_capacity(self) -> None:
        busy = replace(IDLE, free=50, num_running=1, watermark=0.10)
        assert gate("full_prompt", busy, QueuedRequest(16 * 51)) == "capacity"


class TestChunks:
    def test_first_chunk_compares_the_chunk(self) -> None:
        state = replace(IDLE, free=40, token_budget=512)
        assert gate("first_chunk", state, QueuedRequest(16 * 60)) == "enters"
        assert gate("full_prompt", state, QueuedRequest(16 * 60)) == "capacity"

    def test_full_prompt_hands_out_the_chunk_alone(self) -> None:
        decision = one("full_prompt", replace(IDLE, token_budget=160), QueuedRequest(16 * 60))
        assert (decision.required, decision.takes, decision.step_tokens) == (60, 10, 160)

    def test_the_budget_is_shared_with_those_that_run(self) -> None:
        running = (RunningRequest(100, 5), RunningRequest(300, computed_tokens=100))
        state = replace(IDLE, free=60, running=running, token_budget=256)
        decision = one("full_prompt", state, QueuedRequest(400))
        assert decision.step_tokens == 256 - 1 - 200
        empty = replace(state, token_budget=201)
        assert gate("full_prompt", empty, QueuedRequest(400)) == "token_budget"

    def test_a_long_prompt_takes_a_part_of_the_step(self) -> None:
        state = replace(IDLE, token_budget=2048, long_prefill_threshold=128)
        assert one("vllm_full_prompt", state, QueuedRequest(1000)).step_tokens == 128

    def test_without_chunks_the_whole_prompt_has_to_fit_the_step(self) -> None:
        state = replace(IDLE, token_budget=512, chunked_prefill=False)
        assert gate("full_prompt", state, QueuedRequest(512)) == "enters"
        decision = one("full_prompt", state, QueuedRequest(513))
        assert decision.refusal.gate == "token_budget"
        assert (decision.refusal.required, decision.refusal.available) == (513, 512)


class TestHits:
    def test_active_hits_are_free_and_evictable_ones_are_not(self) -> None:
        state = replace(IDLE, free=10, cached=20)
        cold = one("vllm_full_prompt", state, QueuedRequest(640))
        evictable = one("vllm_full_prompt", state, QueuedRequest(640, hit_tokens=320))
        active = QueuedRequest(640, hit_tokens=320, active_hit_tokens=320)
        assert (cold.required, evictable.required) == (40, 40)
        assert not evictable.enters
        assert one("vllm_full_prompt", state, active).required == 20
        assert one("vllm_full_prompt", state, active).enters

    def test_hits_shorten_the_chunk(self) -> None:
        decision = one("full_prompt", IDLE, QueuedRequest(640, hit_tokens=320))
        assert decision.step_tokens == 320


class TestNeverFits:
    @pytest.mark.parametrize("law", OWN_LAWS)
    def test_kvcatch_turns_it_away_and_goes_on(self, law: str) -> None:
        queue = [QueuedRequest(1601, 10), QueuedRequest(16, 10)]
        decisions = admit(LAWS[law], IDLE, queue)
        assert decisions[0].status == "rejected"
        assert decisions[0].refusal is not None
        assert decisions[0].refusal.gate == "never_fits"
        assert "101 blocks > 100 usable" in decisions[0].refusal.detail
        assert decisions[1].enters

    def test_vllm_leaves_it_at_the_head(self) -> None:
        queue = [QueuedRequest(1601), QueuedRequest(16)]
        decisions = admit(LAWS["vllm_full_prompt"], IDLE, queue)
        assert decisions[0].status == "waits"
        assert [item.refusal.gate for item in decisions if item.refusal] == [
            "never_fits",
            "head_of_line",
        ]

    def test_the_null_block_is_not_usable(self) -> None:
        state = State(num_blocks=100, block_size=16, free=99, null_blocks=1)
        assert gate("vllm_full_prompt", state, QueuedRequest(1584)) == "enters"
        assert gate("vllm_full_prompt", state, QueuedRequest(1585)) == "never_fits"

    def test_old_vllm_lets_it_in_with_a_warning(self) -> None:
        state = replace(IDLE, token_budget=512)
        decision = one("vllm_first_chunk", state, QueuedRequest(1601))
        assert decision.enters
        assert "cannot finish its prompt: ceil(1601 / 16) = 101 blocks > 100" in decision.warning

    def test_an_output_that_outgrows_the_pool_is_warned_of(self) -> None:
        decision = one("full_prompt", IDLE, QueuedRequest(1500, 200))
        assert decision.enters
        assert "ceil(1700 / 16) = 107 blocks > 100 usable" in decision.warning
        assert "output token 101" in decision.warning

    @pytest.mark.parametrize("law", sorted(set(LAWS) - {"sglang_estimate"}))
    def test_over_long_is_refused_at_the_door(self, law: str) -> None:
        state = replace(IDLE, max_model_len=1000)
        decision = one(law, state, QueuedRequest(900, 101))
        assert decision.status == "rejected"
        assert decision.refusal.unit == "tokens"
        assert (decision.refusal.required, decision.refusal.available) == (1001, 1000)


class TestEstimate:
    def test_sglang_by_hand(self) -> None:
        """In tokens: 500 + min(9000, 4096) + 16 < 3000 * 16 - 0.5 * (1000 + 4096)."""
        running = (RunningRequest(100, 0, 1000), RunningRequest(100, 100, 9000))
        state = State(
            num_blocks=3000, block_size=16, free=2500, cached=400, running=running,
            new_token_ratio=0.5,
        )  # fmt: skip
        decision = one("sglang_estimate", state, QueuedRequest(500, 9000))
        assert decision.enters
        assert decision.required == 500 + 4096 + 16
        assert decision.available == 2900 * 16 - 2548

    def test_sglang_needs_strictly_less(self) -> None:
        state = State(num_blocks=400, block_size=1, free=201)
        assert gate("sglang_estimate", state, QueuedRequest(100, 99)) == "enters"
        assert gate("sglang_estimate", state, QueuedRequest(100, 100)) == "capacity"

    def test_what_is_expected_grows_with_the_ratio(self) -> None:
        running = tuple([RunningRequest(64, 0, 160)] * 4)
        state = replace(IDLE, free=60, running=running, new_token_ratio=0.0)
        request = QueuedRequest(16 * 30, 16 * 30)
        assert one("estimate", state, request).available == 60
        assert one("estimate", replace(state, new_token_ratio=0.5), request).available == 40
        assert gate("estimate", replace(state, new_token_ratio=0.5), request) == "capacity"


class TestReservations:
    def test_worst_case_counts_what_those_that_run_still_need(self) -> None:
        running = (RunningRequest(160, 16, 320), RunningRequest(32, 0, 16))
        state = replace(IDLE, free=87, running=running)
        decision = one("worst_case", state, QueuedRequest(16, 16))
        # 30 - 11 = 19 and 3 - 2 = 1 blocks are outstanding.
        assert decision.available == 67
        assert one("worst_case", replace(state, reserved=40), QueuedRequest(16, 16)).available == 47

    def test_vllm_keeps_reserved_blocks_from_loads_alone(self) -> None:
        state = replace(IDLE, free=30, reserved=10)
        assert gate("vllm_full_prompt", state, QueuedRequest(16 * 25)) == "enters"
        assert gate("vllm_full_prompt", state, QueuedRequest(16 * 25, loading=True)) == "capacity"
        assert gate("full_prompt", state, QueuedRequest(16 * 25)) == "capacity"

    def test_pinned_blocks_are_not_available(self) -> None:
        state = replace(IDLE, free=10, cached=30, pinned=20)
        assert one("full_prompt", state, QueuedRequest(16)).available == 20

    def test_static_batch_waits_for_all(self) -> None:
        state = replace(IDLE, free=90, num_running=1)
        assert gate("static_batch", state, QueuedRequest(16, 16)) == "max_num_seqs"
        assert gate("static_batch", IDLE, QueuedRequest(16, 16)) == "enters"

    def test_tgi_by_hand(self) -> None:
        state = State(num_blocks=100, block_size=16, free=99, null_blocks=1, spec_tokens=2)
        assert one("tgi_worst_case", state, QueuedRequest(100, 60)).required == 11
        budget = replace(state, token_budget=100)
        queue = [QueuedRequest(100, 10), QueuedRequest(13, 10)]
        decisions = admit(LAWS["tgi_worst_case"], budget, queue)
        # The budget of 100 is rounded up to 112.
        assert decisions[0].enters
        assert decisions[1].refusal is not None
        assert decisions[1].refusal.gate == "token_budget"


class TestContiguity:
    def test_strict_contiguity_refuses_although_there_is_room(self) -> None:
        state = replace(IDLE, free=60, largest_run=20)
        assert gate("full_prompt", state, QueuedRequest(16 * 20)) == "enters"
        decision = one("full_prompt", state, QueuedRequest(16 * 21))
        assert decision.refusal.gate == "contiguity"
        assert (decision.refusal.required, decision.refusal.available) == (21, 20)


def test_deferred_requests_are_passed_over() -> None:
    queue = [QueuedRequest(16, deferred="grammar is compiling"), QueuedRequest(16)]
    decisions = admit(LAWS["vllm_full_prompt"], IDLE, queue)
    assert [item.status for item in decisions] == ["waits", "enters"]


def test_deferred_requests_count_against_max_num_seqs() -> None:
    state = replace(IDLE, num_running=2, num_deferred=2, max_num_seqs=4)
    assert gate("vllm_full_prompt", state, QueuedRequest(16)) == "max_num_seqs"


def test_a_refusal_is_one_line() -> None:
    refusal = Refusal("worst_case", 288, 164, "ceil((512 + 4096) / 16) = 288 > 164")
    assert str(refusal) == (
        "worst_case: 288 blocks required, 164 available (ceil((512 + 4096) / 16) = 288 > 164)"
    )
    assert refusal.to_dict()["required_blocks"] == 288


def test_gates_are_those_of_the_design() -> None:
    assert GATES == (
        "worst_case", "capacity", "watermark", "max_num_seqs", "token_budget", "head_of_line",
        "deferred", "contiguity", "never_fits",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"num_blocks": 0, "free": 0}, "num_blocks = 0"),
        ({"block_size": -1}, "block_size = -1"),
        ({"free": -1}, "free = -1"),
        ({"free": 101}, "more than the 100 usable"),
        ({"free": 60, "cached": 41}, "60 + 41 = 101"),
        ({"free": 1, "pinned": 1}, "pinned = 1"),
        ({"free": 5, "reserved": 6}, "reserved = 6"),
        ({"null_blocks": 100}, "null_blocks = 100"),
        ({"watermark": float("nan")}, "watermark = nan"),
        ({"watermark": 1.0}, "watermark = 1.0"),
        ({"new_token_ratio": 1.5}, "new_token_ratio = 1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"token_budget": 0}, "token_budget = 0"),
        ({"free": True}, "free = True"),
        ({"free": 1.5}, "free = 1.5"),
        ({"num_running": 0, "running": [{"prompt_tokens": 5}]}, "num_running = 0"),
        ({"running": [{"prompt": 5}]}, "unknown field 'prompt'"),
        ({"running": [{}]}, "missing 'prompt_tokens'"),
        ({"free": 5, "largest_run": 6}, "largest_run = 6"),
        ({"chunked_prefill": "no"}, "chunked_prefill"),
    ],
)
def test_an_impossible_state_is_refused(fields: dict[str, Any], word: str) -> None:
    good: dict[str, Any] = {"num_blocks": 100, "block_size": 16, "free": 100}
    with pytest.raises(InvalidArgument, match=word.replace("+", r"\+")):
        State.from_dict({**good, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": 0},
        {"prompt_tokens": 5, "max_tokens": 0},
        {"prompt_tokens": 5, "hit_tokens": 5},
        {"prompt_tokens": 5, "hit_tokens": 2, "active_hit_tokens": 3},
        {"prompt_tokens": 5, "computed_tokens": 5},
        {"prompt_tokens": 5, "generated": 3, "max_tokens": 3},
        {"prompt_tokens": "5"},
        {"prompt_tokens": 5, "deferred": 1},
    ],
)
def test_an_impossible_request_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        QueuedRequest.from_dict(fields)


@pytest.mark.parametrize("law", ["worst_case", "guaranteed_no_evict", "tgi_worst_case", "estimate"])
def test_a_law_that_reserves_asks_for_the_output(law: str) -> None:
    with pytest.raises(InvalidArgument, match="max_model_len"):
        admit(LAWS[law], IDLE, [QueuedRequest(16)])


def test_a_law_of_another_engine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="is vllm's; trtllm follows guaranteed_no_evict"):
        find_law(Engine.parse("trtllm@1.2"), "vllm_full_prompt")
    with pytest.raises(InvalidArgument, match="unknown; there are"):
        find_law(None, "fcfs")
    assert find_law(Engine.parse("trtllm@1.2"), "max_utilization").name == "max_utilization"


@st.composite
def states(draw: st.DrawFn) -> State:
    usable = draw(st.integers(1, 200))
    nulls = draw(st.integers(0, 1))
    free = draw(st.integers(0, usable))
    cached = draw(st.integers(0, usable - free))
    pinned = draw(st.integers(0, cached))
    unclaimed = free + cached - pinned
    running = tuple(
        RunningRequest(prompt, generated, generated + more)
        for prompt, generated, more in draw(
            st.lists(
                st.tuples(st.integers(1, 500), st.integers(0, 50), st.integers(0, 500)), max_size=4
            )
        )
    )
    return State(
        num_blocks=usable + nulls,
        block_size=draw(st.sampled_from([1, 7, 16])),
        free=free,
        cached=cached,
        pinned=pinned,
        reserved=draw(st.none() | st.integers(0, unclaimed)),
        running=running,
        num_running=draw(st.none() | st.integers(len(running), 8)),
        num_deferred=draw(st.integers(0, 2)),
        null_blocks=nulls,
        max_num_seqs=draw(st.none() | st.integers(1, 12)),
        token_budget=draw(st.none() | st.integers(1, 600)),
        chunked_prefill=draw(st.booleans()),
        long_prefill_threshold=draw(st.sampled_from([0, 64])),
        watermark=draw(st.sampled_from([0.0, 0.02, 0.5])),
        max_model_len=draw(st.integers(2, 3000)),
        new_token_ratio=draw(st.floats(0, 1)),
        spec_tokens=draw(st.integers(0, 3)),
        largest_run=draw(st.none() | st.integers(0, unclaimed)),
    )


@st.composite
def requests(draw: st.DrawFn) -> QueuedRequest:
    prompt = draw(st.integers(1, 900))
    hit = draw(st.integers(0, prompt - 1))
    return QueuedRequest(
        prompt,
        draw(st.none() | st.integers(1, 900)),
        hit_tokens=hit,
        active_hit_tokens=draw(st.integers(0, hit)),
        loading=draw(st.booleans()),
        deferred=draw(st.sampled_from(["", "", "", "no adapter slot"])),
    )


@settings(max_examples=300, deadline=None)
@given(states(), st.lists(requests(), min_size=1, max_size=8), st.sampled_from(sorted(LAWS)))
def test_every_decision_keeps_the_law(state: State, queue: list[QueuedRequest], law: str) -> None:
    decisions = admit(LAWS[law], state, queue)
    total = used_up(decisions)
    assert len(decisions) == len(queue)
    assert total.taken <= state.unclaimed
    if state.max_num_seqs is not None:
        assert total.admitted <= max(0, state.max_num_seqs - state.count_running)
    if state.token_budget is not None and law not in {"tgi_worst_case", "sglang_estimate", "slot"}:
        assert total.tokens <= max(0, state.token_budget - state.running_tokens)
    waiting = False
    for decision in decisions:
        assert decision.takes >= 0
        assert decision.promises >= 0
        assert "\n" not in str(decision.refusal) + decision.arithmetic + decision.warning
        if decision.refusal is None:
            assert not waiting
            continue
        assert decision.refusal.gate in GATES
        assert decision.refusal.detail
        if decision.refusal.gate == "head_of_line":
            assert waiting
        elif decision.refusal.gate != "deferred":
            assert decision.refusal.required >= decision.refusal.available
        waiting |= decision.status == "waits" and decision.refusal.gate != "deferred"


@settings(max_examples=200, deadline=None)
@given(
    states(),
    st.lists(requests(), min_size=1, max_size=8),
    st.sampled_from(sorted(LAWS)),
    st.integers(1, 50),
)
def test_more_free_blocks_never_admit_fewer(
    state: State, queue: list[QueuedRequest], law: str, more: int
) -> None:
    state = replace(state, largest_run=None)
    richer = replace(state, free=min(state.free + more, state.usable - state.cached))
    before, after = (used_up(admit(LAWS[law], s, queue)).admitted for s in (state, richer))
    assert after >= before


@settings(max_examples=200, deadline=None)
@given(states(), requests())
def test_looser_laws_admit_what_stricter_ones_do(state: State, request: QueuedRequest) -> None:
    state = replace(state, watermark=0.0)
    strict, full, chunk = (
        LAWS[law].rule(state, request, Step())
        for law in ("worst_case", "full_prompt", "first_chunk")
    )
    if state.reserved is not None and strict.enters:
        assert full.enters
    if full.enters:
        assert chunk.enters


def test_laws_import_nothing_but_errors() -> None:
    """The engine, the observer and the plugin use them: no pool, no workload comes along."""
    code = (
        "import sys, kvcatch.laws\n"
        "loaded = sorted(m for m in sys.modules if m.startswith('kvcatch.'))\n"
        "print([m for m in loaded if not m.startswith(('kvcatch.laws', 'kvcatch.ledger',"
        " 'kvcatch.geometry', 'kvcatch.errors', 'kvcatch._core'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
