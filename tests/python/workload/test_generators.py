from __future__ import annotations

import numpy as np
import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.workload import WORKLOADS, Workload, generate


def shared_share(workload: Workload) -> float:
    """Share of prompt tokens that an earlier prompt had at the same place."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    shared = 0
    for request in workload.requests:
        spans = tuple(zip(request.starts.tolist(), request.lengths.tolist(), strict=True))
        for end in range(len(spans), 0, -1):
            if spans[:end] in seen:
                shared += sum(length for _, length in spans[:end])
                break
        seen.update(spans[:end] for end in range(1, len(spans) + 1))
    return shared / workload.prompt_tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_workloads(name: str) -> None:
    first, second, other = generate(name, 50, 3), generate(name, 50, 3), generate(name, 50, 4)
    for a, b in zip(first.requests, second.requests, strict=True):
        assert a.arrival == b.arrival
        np.testing.assert_array_equal(a.tokens(a.output_tokens), b.tokens(b.output_tokens))
    assert [r.num_tokens for r in first.requests] != [r.num_tokens for r in other.requests]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_whole(name: str) -> None:
    workload = generate(name, 200)
    arrivals = [request.arrival for request in workload.requests]
    assert len(workload) == 200
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    for index, request in enumerate(workload.requests):
        tokens = request.tokens(request.output_tokens)
        assert request.index == index
        assert request.num_tokens >= 1
        assert request.output_tokens >= 1
        assert len(tokens) == request.num_tokens + request.output_tokens
        assert len(np.unique(tokens)) == len(tokens)


@pytest.mark.parametrize(("name", "least"), [("chat", 0.6), ("agent", 0.8), ("documents", 0.5)])
def test_prompts_share_prefixes(name: str, least: float) -> None:
    assert shared_share(generate(name, 500)) > least


def test_a_reply_is_part_of_the_next_turn() -> None:
    requests = generate("chat", 300).requests
    turns = [request for request in requests if request.owner == requests[0].owner]
    first, second = turns[:2]
    told = first.tokens(first.output_tokens)
    np.testing.assert_array_equal(second.tokens()[: len(told)], told)


@pytest.mark.parametrize(
    ("name", "requests", "seed"), [("poker", 10, 0), ("chat", 0, 0), ("chat", 10, -1)]
)
def test_nonsense_is_refused(name: str, requests: int, seed: int) -> None:
    with pytest.raises(InvalidArgument):
        generate(name, requests, seed)
