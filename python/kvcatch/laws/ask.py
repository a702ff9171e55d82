"""Reads a question for ``kvcatch admit``: a state and a queue, from flags or from JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvcatch.errors import InvalidArgument
from kvcatch.geometry.strict_json import parse_json
from kvcatch.laws.engines import find_law, null_blocks, settings_of
from kvcatch.laws.own import promised_blocks
from kvcatch.laws.queue import admit
from kvcatch.laws.state import QueuedRequest, RunningRequest, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcatch.laws.decision import Decision
    from kvcatch.laws.engines import Law
    from kvcatch.ledger.engines import Engine

_T = TypeVar("_T")

MAX_REQUESTS = 100_000
"""Most requests of one queue."""

_REQUEST = re.compile(r"([0-9]{1,15})(?::([0-9]{1,15}))?(?:[x*]([0-9]{1,9}))?")
_RUNNING = re.compile(r"([0-9]{1,15})(?::([0-9]{1,15})(?::([0-9]{1,15}))?)?(?:[x*]([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Question:
    """Who would enter?

    Attributes:
        law: Under which law.
        engine: Whose; None for kvcatch's own.
        state: The pool and its limits.
        queue: Who waits, in order.
    """

    law: Law
    engine: Engine | None
    state: State
    queue: tuple[QueuedRequest, ...]

    def __post_init__(self) -> None:
        if not self.queue:
            raise InvalidArgument("the queue is empty: give at least one request")
        if self.state.watermark and not self.law.has_watermark:
            raise InvalidArgument(
                f"watermark = {self.state.watermark}: law {self.law.name} does not look at it"
            )
        if self.state.watermark and self.engine and settings_of(self.engine).watermark is None:
            raise InvalidArgument(
                f"watermark = {self.state.watermark}: {self.engine} has no such setting"
                + (" (vLLM has it from 0.24.0 on)" if self.engine.is_vllm else "")
            )

    @property
    def reserved(self) -> int:
        """Blocks promised to those that run: as given, or as this law counts them from ``running``."""
        if self.law.name in ("worst_case", "guaranteed_no_evict"):
            return promised_blocks(self.state, self.law.name)
        return self.state.reserved or 0

    def answer(self) -> list[Decision]:
        """One decision per request, in order."""
        return admit(self.law, self.state, self.queue)

    def to_dict(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """Question and answer with units in the names, for JSON."""
        state = self.state
        statuses = [decision.status for decision in decisions]
        first = next((item for item in decisions if item.refusal is not None), None)
        return {
            "law": self.law.name,
            "engine": None if self.engine is None else str(self.engine),
            "admits_iff": self.law.text,
            "source": self.law.source,
            "state": {
                "num_blocks": state.num_blocks,
                "block_size_tokens": state.block_size,
                "usable_blocks": state.usable,
                "free_blocks": state.free,
                "cached_blocks": state.cached,
                "pinned_blocks": state.pinned,
                "reserved_blocks": self.reserved,
                "available_blocks": state.unclaimed - self.reserved,
                "watermark_blocks": state.watermark_blocks,
                "running": state.count_running,
                "max_num_seqs": state.max_num_seqs,
                "token_budget": state.token_budget,
            },
            "enter": statuses.count("enters"),
            "wait": statuses.count("waits"),
            "rejected": statuses.count("rejected"),
            "first_refusal": first and {"request": decisions.index(first) + 1, **first.to_dict()},
            "not_checked": self.not_checked(),
            "requests": [
                {"request": index, **decision.to_dict()}
                for index, decision in enumerate(decisions, start=1)
            ],
        }

    def not_checked(self) -> list[str]:
        """Limits whose value was not given, so that their gate stayed open."""
        return [
            name for name in ("max_num_seqs", "token_budget") if getattr(self.state, name) is None
        ]


def parse_requests(texts: Iterable[str]) -> tuple[QueuedRequest, ...]:
    """Read ``PROMPT``, ``PROMPT:MAX_TOKENS`` or either followed by ``xCOUNT``.

    Raises:
        InvalidArgument: A text is of another form, or the queue is too long.
    """
    queue: list[QueuedRequest] = []
    for text in texts:
        match = _REQUEST.fullmatch(text.strip())
        if match is None:
            raise InvalidArgument(
                f"request = {text!r}: must be PROMPT, PROMPT:MAX_TOKENS or PROMPT:MAX_TOKENSxCOUNT"
            )
        prompt, output, count = match.groups()
        request = QueuedRequest(int(prompt), None if output is None else int(output))
        _extend(queue, request, 1 if count is None else int(count), text)
    return tuple(queue)


def parse_running(texts: Iterable[str]) -> tuple[RunningRequest, ...]:
    """Read ``PROMPT[:GENERATED[:MAX_TOKENS]]``, each may be followed by ``xCOUNT``.

    Raises:
        InvalidArgument: A text is of another form, or there are too many.
    """
    running: list[RunningRequest] = []
    for text in texts:
        match = _RUNNING.fullmatch(text.strip())
        if match is None:
            raise InvalidArgument(
                f"running request = {text!r}: must be PROMPT[:GENERATED[:MAX_TOKENS]][xCOUNT]"
            )
        prompt, generated, limit, count = match.groups()
        item = RunningRequest(
            int(prompt), int(generated or 0), None if limit is None else int(limit)
        )
        _extend(running, item, 1 if count is None else int(count), text)
    return tuple(running)


def read_question(text: str, engine: Engine | None, law: str | None) -> Question:
    """Read ``{"state": {...}, "queue": [...]}``; an item of the queue may have a ``count``.

    Raises:
        InvalidArgument: It is not JSON, a field is unknown or missing, or a value is impossible.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    if not isinstance(data, dict):
        raise InvalidArgument("must be a JSON object with state and queue")
    for name in data:
        if name not in ("state", "queue"):
            raise InvalidArgument(f"unknown field {name!r}; there are state and queue")
    for name, kind in (("state", dict), ("queue", list)):
        if not isinstance(data.get(name), kind):
            raise InvalidArgument(f"{name}: missing, or not a JSON {_KINDS[kind]}")
    fields = dict(data["state"])
    if engine is not None:
        fields.setdefault("null_blocks", null_blocks(engine))
    queue: list[QueuedRequest] = []
    for item in data["queue"]:
        if not isinstance(item, dict):
            raise InvalidArgument(f"queue: {item!r:.60} is not a JSON object")
        rest = {name: value for name, value in item.items() if name != "count"}
        _extend(queue, QueuedRequest.from_dict(rest), item.get("count", 1), "queue")
    return Question(find_law(engine, law), engine, State.from_dict(fields), tuple(queue))


_KINDS = {dict: "object", list: "list"}


def _extend(items: list[_T], item: _T, count: object, where: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"{where}: count = {count!r}: must be 1 or more")
    if len(items) + count > MAX_REQUESTS:
        raise InvalidArgument(f"{where}: more than {MAX_REQUESTS} requests")
    items.extend([item] * count)
