"""Sampling: distributions, seeds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvcatch.engine.sampling import SamplingParams, sample
from kvcatch.errors import InvalidArgument


def draw(logits: list[float], count: int = 4000, **options: Any) -> dict[int, float]:
    params = SamplingParams(**options)
    generator = torch.Generator().manual_seed(7)
    rows = torch.tensor([logits] * count)
    tokens, _ = sample(rows, [params] * count, [generator] * count)
    return {token: tokens.count(token) / count for token in set(tokens)}


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw([1.0, 3.0, 2.0], 3, temperature=0.0) == {1: 1.0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0]
    weights = [math.exp(x / temperature) for x in logits]
    found = draw(logits, temperature=temperature)
    for token, weight in enumerate(weights):
        assert found.get(token, 0.0) == pytest.approx(weight / sum(weights), abs=0.03)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draw(logits, top_k=2)) == {0, 1}
    assert set(draw(logits, top_k=1)) == {0}
    assert set(draw(logits, top_k=10)) == {0, 1, 2, 3}
    assert set(draw(logits, top_p=0.7)) == {0, 1}
    assert set(draw(logits, top_p=0.71)) == {0, 1, 2}
    assert set(draw(logits, top_p=1e-6)) == {0}
    # What is reached exactly is enough.
    assert len(set(draw([0.0, 0.0], top_p=0.5))) == 1
    # After top-k = 3 the probabilities are 4/9, 3/9, 2/9: 0.7 takes two of them.
    assert set(draw(logits, top_k=3, top_p=0.7)) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-10, 1e-29, 1e-31, 1e-38, 1e-45, 5e-324])
def test_the_coldest_temperatures_take_the_likeliest(temperature: float) -> None:
    logits = [11.0, 30.0, 29.5, -40.0]
    assert draw(logits, 20, temperature=temperature) == {1: 1.0}
    assert draw(logits, 20, temperature=temperature, top_k=2, top_p=0.9) == {1: 1.0}


@pytest.mark.parametrize("top_p", [1e-30, 1e-46, 1e-320, 5e-324])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_smallest_top_p_takes_the_likeliest(top_p: float, top_k: int) -> None:
    assert draw([1.0, 2.0, 1.5, 0.0], 20, top_p=top_p, top_k=top_k) == {1: 1.0}


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    params = [SamplingParams(seed=s, temperature=0.9) for s in range(5)]

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(p.seed or 0) for p in params]

    together, _ = sample(logits, params, generators())
    alone = [
        sample(logits[i : i + 1], [params[i]], [generators()[i]])[0][0] for i in range(len(params))
    ]
    assert together == alone


def test_logprobs_are_of_the_model_and_sorted() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    params = [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0)]
    tokens, found = sample(logits, params, [None, None])
    first = found[0]
    assert first is not None
    assert found[1] is None
    expected = torch.log_softmax(logits[0], -1).tolist()
    assert first.token == tokens[0] == 1
    assert first.logprob == pytest.approx(expected[1])
    assert [token for token, _ in first.top] == [1, 2]
    assert [value for _, value in first.top] == pytest.approx([expected[1], expected[2]])


def test_forbidden_tokens_are_never_chosen_and_the_logits_stay() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    before = logits.clone()
    tokens, _ = sample(logits, [SamplingParams(temperature=0)], [None], [(0,)])
    assert tokens == [1]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"n": 0},
        {"n": 129},
        {"seed": 1 << 70},
        {"stop": ""},
        {"stop": ("a", "")},
        {"stop": (1,)},
        {"stop": 5},
        {"stop": None},
        {"stop": [f"{i}." for i in range(65)]},
        {"stop": "x" * 1025},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": 5},
        {"stop_token_ids": range(1025)},
        {"min_tokens": 20},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
)
def test_what_cannot_be_is_refused_with_its_value(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        SamplingParams(**options)


def test_the_limits_of_stop_are_within_reach() -> None:
    params = SamplingParams(stop=["x" * 1024] * 64, stop_token_ids=range(1024))
    assert len(params.stop) == 64
    assert len(params.stop_token_ids) == 1024
