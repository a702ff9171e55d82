"""The engine loop on a toy model: every policy gives the same tokens, and nothing is left over."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import GREEDY, VOCAB, expected, make, run

from kvcatch.engine.engine import Engine, Rejected
from kvcatch.engine.request import Status
from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument, InvalidType

POLICIES: list[dict[str, Any]] = [
    {},
    {"preemption": "swap", "host_blocks": 60},
    {"preemption": "swap", "host_blocks": 6},
    {"victim": "cheapest"},
    {"victim": "lowest_priority", "order": "priority"},
    {"order": "cache_aware", "window": 8, "max_passed_over": 3},
    {"prefix_cache": False},
    {"law": "first_chunk"},
    {"law": "worst_case"},
    {"law": "estimate"},
    {"watermark": 0.1},
    {"compaction": "runs"},
    {"compaction": "pages"},
    {"max_num_batched_tokens": 8},
    {"long_prefill_threshold": 5},
    {"placement": "queue"},
    {"placement": "buddy", "eviction": "slru"},
    {
        "preemption": "swap",
        "host_blocks": 30,
        "compaction": "runs",
        "order": "cache_aware",
        "law": "first_chunk",
        "victim": "cheapest",
    },
]


def prompts(count: int = 14, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(97) for _ in range(17)]
    return [
        [
            *shared[: rng.choice([0, 9, 17])],
            *(rng.randrange(97) for _ in range(rng.randrange(1, 30))),
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: "-".join(map(str, p.values())) or "plain"
)
def test_every_policy_gives_the_same_tokens(policy: dict[str, Any]) -> None:
    engine = make(num_blocks=32, **policy)
    wanted = {}
    for number, prompt in enumerate(prompts()):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=25), priority=number % 3)
        wanted[(f"req-{number}", 0)] = expected(prompt, 25)
    assert run(engine) == wanted


def test_pressure_does_preempt_both_ways() -> None:
    kinds = {}
    for policy in ({}, {"preemption": "swap", "host_blocks": 200}):
        engine = make(num_blocks=30, law="first_chunk", **policy)
        for prompt in prompts():
            engine.add(prompt, SamplingParams(temperature=0, max_tokens=40))
        run(engine)
        kinds[policy.get("preemption", "recompute")] = engine.scheduler.preemptions
    assert kinds["recompute"]["recompute"] > 3
    assert kinds["swap"] == {"recompute": 0, "swap": kinds["swap"]["swap"]}
    assert kinds["swap"]["swap"] > 3


def test_a_shared_prefix_is_computed_once() -> None:
    engine = make(num_blocks=60)
    prompt = list(range(40))
    engine.add([*prompt, 1], GREEDY)
    run(engine)
    before = engine.counters.prompt_tokens
    request = engine.add([*prompt, 2], GREEDY)
    run(engine)
    assert request.hit_tokens == 40
    assert engine.counters.prompt_tokens - before == 1


def test_forks_share_the_prompt_and_copy_on_write() -> None:
    engine = make(num_blocks=40)
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=10)
    engine.add(list(range(10)), params)
    first = {(delta.request_id, delta.index): list(delta.tokens) for delta in engine.step()}
    assert engine.pool.num_active == 3  # 10 tokens, shared by four
    outputs = {key: first[key] + tokens for key, tokens in run(engine).items()}
    assert sorted(index for _, index in outputs) == [0, 1, 2, 3]
    assert all(len(tokens) == 10 for tokens in outputs.values())
    # The same seed gives the same tokens, whatever else is in the batch and whatever is preempted.
    crowded = make(num_blocks=40, law="first_chunk", max_num_seqs=10)
    crowded.add(list(range(10)), params, request_id="req-x")
    for prompt in prompts(6):
        crowded.add(prompt, SamplingParams(temperature=0, max_tokens=30))
    again = run(crowded)
    for index in range(4):
        assert again[("req-x", index)] == outputs[("req-0", index)]


def test_n_counts_against_max_num_seqs_before_the_fork() -> None:
    engine = make(num_blocks=60, max_num_seqs=4)
    engine.add(list(range(50)), SamplingParams(temperature=0, max_tokens=5, n=3))
    late = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=5, n=2))
    engine.step()
    engine.step()
    refusal = late.branches[0].refusal
    assert refusal is not None
    assert (refusal.gate, refusal.required, refusal.available) == ("max_num_seqs", 2, 1)
    run(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "gate", "message"),
    [
        (
            list(range(50)) * 3,
            GREEDY,
            "never_fits",
            "prompt 150 \\+ output 12 = 162 > max_model_len 120",
        ),
        ([1], SamplingParams(max_tokens=120), "never_fits", "121 > max_model_len 120"),
        ([1], SamplingParams(n=9), "never_fits", "n 9 > max_num_seqs 8"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(
    prompt: list[int], params: SamplingParams, gate: str, message: str
) -> None:
    engine = make()
    with pytest.raises(Rejected, match=message) as caught:
        engine.add([token % 97 for token in prompt], params)
    assert caught.value.refusal.gate == gate
    assert engine.is_idle
    engine.check_idle()


def test_bad_prompts_are_refused() -> None:
    engine = make()
    for prompt, message in (([], "no token"), ([97], "token 97"), ([-1], "token -1")):
        with pytest.raises(InvalidArgument, match=message):
            engine.add(prompt)
    engine.add([1], GREEDY, request_id="a")
    with pytest.raises(InvalidArgument, match="'a'"):
        engine.add([1], GREEDY, request_id="a")
    with pytest.raises(InvalidArgument, match="tokenizer"):
        engine.add([1], SamplingParams(stop=("x",)))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"salt": "\ud800"}, InvalidType, "salt"),
        ({"salt": 5}, InvalidType, "salt"),
        ({"tags": {"tenant": 5}}, InvalidType, "tenant"),
        ({"tags": {3: "acme"}}, InvalidType, "tags has 3"),
        ({"tags": {"tenant": "\udfff"}}, InvalidType, "tenant"),
        ({"tags": {"owner": "me"}}, InvalidArgument, "owner"),
        ({"request_id": 5}, InvalidType, "request_id = 5"),
        ({"request_id": "\ud800"}, InvalidType, "request_id"),
        ({"priority": "high"}, InvalidType, "priority = 'high'"),
        ({"priority": None}, InvalidType, "priority = None"),
        ({"prompt": "abc"}, InvalidType, "prompt"),
        ({"prompt": [1.5]}, InvalidType, "float"),
        ({"prompt": 5}, InvalidType, "prompt"),
        (
            {"params": SamplingParams(min_tokens=2, stop_token_ids=(VOCAB,))},
            InvalidArgument,
            f"stop_token_ids has {VOCAB}",
        ),
        (
            {"params": SamplingParams(min_tokens=2, stop_token_ids=tuple(range(VOCAB)))},
            InvalidArgument,
            "min_tokens = 2",
        ),
    ],
)
def test_what_would_end_a_step_by_an_error_is_refused_at_the_door(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    engine = make()
    prompt = options.pop("prompt", [1, 2, 3])
    with pytest.raises(error, match=said):
        engine.add(prompt, **options)
    assert engine.is_idle
    engine.check_idle()


def test_names_of_every_kind_of_text_run() -> None:
    engine = make()
    odd = 'a"b\\c\nd é漢\U0001f600 \0'
    request = engine.add(
        [1, 2], GREEDY, request_id=odd, salt=odd, tags={odd: odd}, priority=10**400
    )
    engine.step()
    assert [row["owner"] for row in engine.pool.holdings()] == [odd]
    while not engine.is_idle:
        engine.step()
    assert request.is_finished
    engine.check_idle()


def test_all_tokens_but_one_may_be_forbidden() -> None:
    engine = make()
    ends = tuple(token for token in range(VOCAB) if token != 7)
    params = SamplingParams(min_tokens=3, max_tokens=3, stop_token_ids=ends, temperature=1.0)
    request = engine.add([1, 2], params)
    while not engine.is_idle:
        engine.step()
    assert request.branches[0].tokens[2:] == [7, 7, 7]


def test_the_head_says_why_it_waits_and_those_behind_wait_for_it() -> None:
    engine = make(num_blocks=30, max_num_seqs=8)
    engine.add(list(range(80)), SamplingParams(temperature=0, max_tokens=30))
    other = [*range(20), *([90] * 80)]
    big = engine.add(other, SamplingParams(temperature=0, max_tokens=10))
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    for _ in range(4):
        engine.step()
    refusal = big.branches[0].refusal
    assert refusal is not None
    assert refusal.gate == "capacity"
    assert refusal.required == 25 - 5  # 20 tokens are hit in active blocks
    assert refusal.available == engine.pool.available
    gates = [decision.refusal.gate for decision in engine.scheduler.explain() if decision.refusal]
    assert gates == ["capacity", "head_of_line"]
    assert engine.counters.refused_steps["capacity"] >= 1
    run(engine)


def test_worst_case_never_preempts() -> None:
    engine = make(num_blocks=30, law="worst_case")
    for prompt in prompts(20):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=40))
    run(engine)
    assert engine.scheduler.preemptions == {"recompute": 0, "swap": 0}
    assert engine.counters.refused_steps["worst_case"] > 0


def test_cache_aware_passes_nobody_over_without_bound() -> None:
    engine = make(num_blocks=30, order="cache_aware", max_passed_over=4, max_num_seqs=2)
    hot = list(range(20))
    engine.add(hot, SamplingParams(temperature=0, max_tokens=2))
    run(engine)
    cold = engine.add([90] * 20, SamplingParams(temperature=0, max_tokens=2), request_id="cold")
    for number in range(40):
        engine.add([*hot, number], SamplingParams(temperature=0, max_tokens=2))
    order = []
    while not engine.is_idle:
        order += [delta.request_id for delta in engine.step() if delta.finish]
    assert 1 <= order.index("cold") <= 6
    assert cold.finished is not None


def test_priority_goes_first_and_is_preempted_last() -> None:
    engine = make(num_blocks=30, order="priority", victim="lowest_priority", max_num_seqs=3)
    for number, prompt in enumerate(prompts(9)):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=20), priority=9 - number)
    order = []
    while not engine.is_idle:
        order += [delta.request_id for delta in engine.step() if delta.finish]
    assert order[0] in {"req-8", "req-7", "req-6"}
    assert order[-1] in {"req-0", "req-1", "req-2"}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(POLICIES))
def test_random_traffic_ends_with_nothing_left(seed: int, policy: dict[str, Any]) -> None:
    rng = random.Random(seed)
    engine = make(num_blocks=rng.randrange(30, 60), **policy)
    wanted: dict[tuple[str, int], list[int]] = {}
    outputs: dict[tuple[str, int], list[int]] = {}
    aborted: set[str] = set()
    bases = prompts(4, seed)
    for number in itertools.count():
        assert number < 5_000, f"starved: {engine!r}"
        if number >= 25 and engine.is_idle:
            break
        if number < 25 and rng.random() < 0.6:
            prompt = [*rng.choice(bases), *(rng.randrange(97) for _ in range(rng.randrange(3)))]
            count = rng.randrange(1, 40)
            n = rng.choice([1, 1, 1, 2, 3])
            request = engine.add(
                prompt,
                SamplingParams(temperature=0, max_tokens=count, n=n),
                priority=rng.randrange(3),
                tags={"tenant": rng.choice("ab")},
            )
            wanted |= {(request.id, index): expected(prompt, count) for index in range(n)}
        if engine.requests and rng.random() < 0.08:
            victim = rng.choice(sorted(engine.requests))
            engine.abort(victim)
            aborted.add(victim)
        for delta in engine.step():
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        engine.pool.validate()
    engine.check_idle()
    for key, tokens in wanted.items():
        if key[0] not in aborted:
            assert outputs[key] == tokens


def test_an_abort_frees_the_blocks_at_once_in_every_state() -> None:
    engine = make(num_blocks=30, preemption="swap", host_blocks=60, law="first_chunk")
    requests = [
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=40)) for prompt in prompts(12)
    ]
    seen: set[Status] = set()
    for _ in range(200):
        engine.step()
        for status in (Status.WAITING, Status.RUNNING, Status.SWAPPED):
            of_status = [r for r in requests if r.branches[0].status is status]
            if of_status and status not in seen:
                seen.add(status)
                deltas = engine.abort(of_status[-1].id)
                assert [delta.finish.value for delta in deltas if delta.finish] == ["abort"]
                owners = {holding["owner"] for holding in engine.pool.holdings()}
                assert of_status[-1].id not in owners
        if len(seen) == 3:
            break
    assert len(seen) == 3
    for request in requests:
        engine.abort(request.id)
    assert engine.is_idle
    engine.check_idle()
    assert engine.abort("nobody") == []


def test_check_idle_names_what_is_left() -> None:
    from kvcatch import CorruptPool

    engine: Engine = make()
    engine.add([1, 2, 3], GREEDY, request_id="left-behind")
    engine.step()
    with pytest.raises(CorruptPool, match="left-behind"):
        engine.check_idle()


def test_a_count_beyond_what_block_tables_hold_is_refused_with_the_bounds() -> None:
    for value in (0, 1 << 31):
        with pytest.raises(InvalidArgument, match=f"num_blocks = {value}: .* from 1 to 2147483647"):
            make(num_blocks=value)
