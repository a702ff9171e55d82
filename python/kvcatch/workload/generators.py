"""Seeded workloads that need no file: ``chat``, ``agent`` and ``documents``.

Contexts are spans of tokens; a reply that was generated is part of the next prompt by the very same
token ids, as in a real conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcatch.errors import InvalidArgument
from kvcatch.workload.request import TOKEN_LIMIT, Request, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

Span = tuple[int, int]
"""First token id and length (tokens)."""

MAX_CONTEXT = 32_768
"""A conversation or task ends before its prompt grows beyond this many tokens."""


@dataclass(frozen=True, slots=True)
class _Draft:
    arrival: float
    spans: tuple[Span, ...]
    output: Span
    owner: str
    tags: dict[str, str]


@dataclass(slots=True)
class _Stream:
    """Hands out token ids that nobody else has, and random sizes."""

    rng: np.random.Generator
    next_token: int = 0
    drafts: list[_Draft] = field(default_factory=list)

    def span(self, length: int) -> Span:
        start = self.next_token
        self.next_token += length
        return start, length

    def size(self, median: float, sigma: float, low: int, high: int) -> int:
        """A log-normal number of tokens between ``low`` and ``high``."""
        return int(np.clip(self.rng.lognormal(np.log(median), sigma), low, high))

    def ask(
        self, arrival: float, spans: tuple[Span, ...], output: int, owner: str, tags: dict[str, str]
    ) -> Span:
        """Add a request; returns the span of its output."""
        reply = self.span(output)
        self.drafts.append(_Draft(arrival, spans, reply, owner, tags))
        return reply


def _tokens(spans: tuple[Span, ...]) -> int:
    return sum(length for _, length in spans)


def _chat(stream: _Stream, requests: int) -> None:
    """Conversations of several turns under a few system prompts; people think between turns."""
    rng = stream.rng
    prompts = [stream.span(stream.size(600, 0.8, 64, 4_000)) for _ in range(8)]
    start = 0.0
    conversation = 0
    while len(stream.drafts) < 2 * requests:
        start += rng.exponential(0.5)
        tenant = min(int(rng.zipf(1.6)) - 1, len(prompts) - 1)
        context: tuple[Span, ...] = (prompts[tenant],)
        arrival = start
        for _ in range(1 + int(rng.geometric(0.22))):
            context = (*context, stream.span(stream.size(90, 1.1, 4, 8_000)))
            if _tokens(context) > MAX_CONTEXT:
                break
            reply = stream.ask(
                arrival,
                context,
                stream.size(220, 0.8, 8, 1_500),
                f"conversation-{conversation}",
                {"tenant": f"tenant-{tenant}"},
            )
            context = (*context, reply)
            arrival += reply[1] * 0.03 + rng.exponential(20.0)
        conversation += 1


def _agent(stream: _Stream, requests: int) -> None:
    """Tool loops under long shared instructions; a task may fork its context into sub-agents."""
    rng = stream.rng
    kinds = [stream.span(stream.size(4_000, 0.5, 1_000, 12_000)) for _ in range(4)]
    start = 0.0
    task = 0
    while len(stream.drafts) < 2 * requests:
        start += rng.exponential(2.0)
        kind = int(rng.integers(len(kinds)))
        context: tuple[Span, ...] = (kinds[kind], stream.span(stream.size(300, 0.8, 20, 4_000)))
        tags = {"agent": f"agent-{kind}"}
        arrival = start
        for step in range(2 + int(rng.geometric(0.15))):
            if _tokens(context) > MAX_CONTEXT:
                break
            owner = f"task-{task}"
            reply = stream.ask(arrival, context, stream.size(110, 0.6, 8, 800), owner, tags)
            arrival += reply[1] * 0.03
            context = (*context, reply)
            if rng.random() < 0.12:
                for branch in range(int(rng.integers(2, 5))):
                    _branch(stream, arrival, context, f"{owner}/{step}.{branch}", tags)
            context = (*context, stream.span(stream.size(500, 1.0, 10, 6_000)))
            arrival += rng.exponential(1.5)
        task += 1


def _branch(
    stream: _Stream, arrival: float, context: tuple[Span, ...], owner: str, tags: dict[str, str]
) -> None:
    """A sub-agent: a few steps of its own from the parent's context."""
    context = (*context, stream.span(stream.size(60, 0.5, 8, 400)))
    for _ in range(int(stream.rng.integers(1, 4))):
        if _tokens(context) > MAX_CONTEXT:
            return
        reply = stream.ask(arrival, context, stream.size(110, 0.6, 8, 800), owner, tags)
        context = (*context, reply, stream.span(stream.size(400, 0.8, 10, 4_000)))
        arrival += reply[1] * 0.03 + stream.rng.exponential(1.5)


def _documents(stream: _Stream, requests: int) -> None:
    """Long documents, each asked several independent questions by different people."""
    rng = stream.rng
    system = stream.span(200)
    start = 0.0
    document = 0
    while len(stream.drafts) < 2 * requests:
        start += rng.exponential(4.0)
        text = stream.span(stream.size(14_000, 0.7, 2_000, 100_000))
        arrival = start
        for question in range(int(rng.geometric(0.25))):
            spans = (system, text, stream.span(stream.size(50, 0.6, 8, 400)))
            output = stream.size(250, 0.7, 16, 1_500)
            owner = f"document-{document}/question-{question}"
            stream.ask(arrival, spans, output, owner, {"document": str(document)})
            arrival += rng.exponential(30.0)
        document += 1


_GENERATORS: dict[str, Callable[[_Stream, int], None]] = {
    "chat": _chat,
    "agent": _agent,
    "documents": _documents,
}

WORKLOADS = tuple(_GENERATORS)
"""Names that ``generate`` knows."""


def generate(name: str, requests: int = 300, seed: int = 0) -> Workload:
    """Make the first ``requests`` requests, by arrival, of a built-in workload.

    Args:
        name: ``chat``, ``agent`` or ``documents``.
        requests: How many requests.
        seed: Equal seeds give equal workloads.

    Raises:
        InvalidArgument: The name is unknown, or a number is out of range.
    """
    if name not in _GENERATORS:
        raise InvalidArgument(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")
    if requests < 1:
        raise InvalidArgument(f"requests = {requests}: must be 1 or more")
    if seed < 0:
        raise InvalidArgument(f"seed = {seed}: must be 0 or more")
    stream = _Stream(np.random.default_rng(seed))
    _GENERATORS[name](stream, requests)
    if stream.next_token > TOKEN_LIMIT:
        raise InvalidArgument(f"requests = {requests}: more than {TOKEN_LIMIT} distinct tokens")
    drafts = sorted(stream.drafts, key=lambda draft: draft.arrival)[:requests]
    begin = drafts[0].arrival
    made = tuple(
        Request(
            index,
            draft.arrival - begin,
            np.array([start for start, _ in draft.spans], dtype=np.int64),
            np.array([length for _, length in draft.spans], dtype=np.int64),
            _tokens(draft.spans),
            draft.output[1],
            draft.output[0],
            draft.owner,
            draft.tags,
        )
        for index, draft in enumerate(drafts)
    )
    return Workload(name, "generated", made)
