"""The admission law of each engine and version, as pure functions whose answers carry arithmetic.

``admit(law, state, queue)`` answers for a queue, ``law.rule(state, request, step)`` for one
request. Imports nothing of kvcatch but its errors.

>>> from kvcatch.laws import LAWS, QueuedRequest, State, admit
>>> state = State(num_blocks=1000, block_size=16, free=740)
>>> queue = [QueuedRequest(512, max_tokens=4096)] * 3
>>> [decision.status for decision in admit(LAWS["worst_case"], state, queue)]
['enters', 'enters', 'waits']
"""

from kvcatch.laws.decision import NO_STEP, Decision, Step
from kvcatch.laws.engines import (
    LAWS,
    OWN_LAWS,
    Law,
    Settings,
    block_sizes,
    find_law,
    law_of,
    null_blocks,
    settings_of,
)
from kvcatch.laws.own import ESTIMATE_CLIP, estimate, first_chunk, full_prompt, worst_case
from kvcatch.laws.queue import admit, used_up
from kvcatch.laws.refusal import GATES, Gate, Refusal
from kvcatch.laws.state import (
    QueuedRequest,
    RunningRequest,
    State,
    blocks_for,
    prefill_steps,
)

__all__ = [
    "ESTIMATE_CLIP",
    "GATES",
    "LAWS",
    "NO_STEP",
    "OWN_LAWS",
    "Decision",
    "Gate",
    "Law",
    "QueuedRequest",
    "Refusal",
    "RunningRequest",
    "Settings",
    "State",
    "Step",
    "admit",
    "block_sizes",
    "blocks_for",
    "estimate",
    "find_law",
    "first_chunk",
    "full_prompt",
    "law_of",
    "null_blocks",
    "prefill_steps",
    "settings_of",
    "used_up",
    "worst_case",
]
