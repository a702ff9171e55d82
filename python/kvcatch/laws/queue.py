"""A law applied to a whole queue: who enters, who waits, and who only waits behind another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcatch.laws.decision import NO_STEP
from kvcatch.laws.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.laws.decision import Decision, Step
    from kvcatch.laws.engines import Law
    from kvcatch.laws.state import QueuedRequest, State


def admit(law: Law, state: State, queue: Sequence[QueuedRequest]) -> list[Decision]:
    """One decision per request of the queue, first come first served.

    The first request that has to wait stops the queue, as in every engine here: one behind it
    that could enter waits at the gate ``head_of_line``, taken in order as if that head were not
    there. A deferred request and one that is turned away are passed over.

    Raises:
        InvalidArgument: The law needs a number that was not given.
    """
    decisions: list[Decision] = []
    step = NO_STEP
    head: tuple[int, Decision] | None = None
    for index, request in enumerate(queue):
        decision = law.rule(state, request, step)
        if decision.refusal is None:
            step = step.after(decision)
            if head is not None:
                decision = _behind(decision, *head)
        elif head is None and not decision.is_final and decision.refusal.gate != "deferred":
            head = index, decision
        decisions.append(decision)
    return decisions


def _behind(decision: Decision, index: int, head: Decision) -> Decision:
    """Would enter, but waits behind the head of the queue."""
    assert head.refusal is not None
    name = head.request.name or f"request {index + 1}"
    detail = (
        f"could enter ({decision.arithmetic}), waits behind {name}: {head.refusal.gate}, "
        f"{head.refusal.required} > {max(0, head.refusal.available)} {head.refusal.unit}"
    )
    refusal = Refusal("head_of_line", decision.required, decision.available, detail)
    return replace(decision, refusal=refusal, takes=0, promises=0, step_tokens=0, warning="")


def used_up(decisions: Sequence[Decision]) -> Step:
    """What those that enter use up together."""
    step = NO_STEP
    for decision in decisions:
        if decision.enters:
            step = step.after(decision)
    return step
