"""Why vLLM's scheduler let nobody in: the rules of its waiting loop, looked at after the step.

The loop ends at the first rule that does not hold, in this order: requests were preempted in this
step (then it does not run at all), the scheduler is paused, no token of the budget is left, no slot
is free, the request is set aside, its chunk is empty, its blocks are not there. Blocks are told by
``capacity`` with the numbers that vLLM itself compared; the rest follows from the scheduler's state,
which does not change between the end of the loop and the end of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcatch.vllm.observe.records import UNEXPLAINED, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Compared", "capacity", "deferral", "is_deferred", "passed_by", "queues", "slots"]

_BLOCKED = {
    "WAITING_FOR_REMOTE_KVS": "its KV is still being loaded",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "its grammar is still being compiled",
    "WAITING_FOR_FSM": "its grammar is still being compiled",
    "WAITING_FOR_STREAMING_REQ": "its session waits for more input and keeps its blocks",
}


class Compared:
    """What vLLM compared for one request before it said no.

    Attributes:
        request: vLLM's request.
        needs: What ``get_num_blocks_to_allocate`` answered, in order: whole sequence, then this step.
        is_whole: The whole sequence had to fit.
        free: Blocks that could be handed out.
        watermark: Blocks of the watermark, where it was applied.
        reserved: Blocks kept for loads in flight.
        held: Blocks it holds already.
        hits: Blocks of its prefix that others reference: they cost it nothing.
        hit_tokens: Tokens found in the prefix cache.
        tokens: Tokens of this step.
    """

    __slots__ = (
        "free",
        "held",
        "hit_tokens",
        "hits",
        "is_whole",
        "needs",
        "request",
        "reserved",
        "tokens",
        "watermark",
    )

    def __init__(self, request: Any, needs: list[int], *, is_whole: bool, free: int) -> None:
        self.request = request
        self.needs = needs
        self.is_whole = is_whole
        self.free = free
        self.watermark = 0
        self.reserved = 0
        self.held = 0
        self.hits = 0
        self.hit_tokens = 0
        self.tokens = 0


def queues(scheduler: Any) -> Iterator[Any]:
    """Queues of waiting requests, the one looked at first in front."""
    for name in ("kv_holding_waiting", "skipped_waiting", "waiting"):
        queue = getattr(scheduler, name, None)
        if queue is not None:
            yield queue


def slots(scheduler: Any, *, counts_sessions: bool) -> tuple[int, int, int]:
    """Running requests, paused streaming sessions that keep a slot, and slots."""
    sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0) if counts_sessions else 0
    most = getattr(scheduler, "max_num_active_reqs", None)
    return len(scheduler.running), sessions, most or scheduler.max_num_running_reqs


def is_deferred(scheduler: Any, request: Any) -> bool:
    """Whether the scheduler set the request aside instead of refusing it."""
    deferred = getattr(scheduler, "deferred_waiting", None)
    if deferred is not None:
        return request in deferred
    return request.status.name in _BLOCKED or bool(_lora(scheduler, request))


def deferral(scheduler: Any, request: Any) -> str:
    """Why a request was set aside, in words."""
    held = _held(scheduler, request.request_id)
    holds = f" ({held:,} blocks)" if held else ""
    if (reason := _BLOCKED.get(request.status.name)) is not None:
        return reason + holds
    if reason := _lora(scheduler, request):
        return reason
    if getattr(request, "num_stale_output_tokens", 0):
        return "output of its run before the preemption is still in flight"
    if getattr(request, "mm_features", None):
        return "its encoder outputs are still being fetched"
    if getattr(scheduler, "connector", None) is not None:
        return "the KV connector has not said yet what it holds of it"
    return "the scheduler set it aside"


def _lora(scheduler: Any, request: Any) -> str:
    config = getattr(scheduler, "lora_config", None)
    wanted = getattr(request, "lora_request", None)
    if not config or not wanted:
        return ""
    names = {
        running.lora_request.lora_int_id: running.lora_request.lora_name
        for running in scheduler.running
        if running.lora_request
    }
    if len(names) < config.max_loras or wanted.lora_int_id in names:
        return ""
    return (
        f"adapter {wanted.lora_name} is not among the {len(names)} that run "
        f"({', '.join(sorted(map(str, names.values()))[:4])}) and max_loras is {config.max_loras}"
    )


def _held(scheduler: Any, request_id: str) -> int:
    coordinator = scheduler.kv_cache_manager.coordinator
    return sum(
        len(manager.req_to_blocks.get(request_id, ()))
        for manager in coordinator.single_type_managers
    )


def _head(scheduler: Any) -> tuple[Any, bool]:
    """The first waiting request that is not set aside, else the first; and whether it is set aside."""
    first, skipped = None, getattr(scheduler, "skipped_waiting", None)
    for queue in queues(scheduler):
        for at, request in enumerate(_front(queue)):
            if queue is not skipped and not is_deferred(scheduler, request):
                return request, False
            first = first or request
            if at >= 256:
                break
    return first, True


def _front(queue: Any) -> Iterator[Any]:
    # Iterating a priority queue copies it: the heap's own list is near enough behind its head.
    heap = getattr(queue, "_heap", None)
    return iter(queue if heap is None else heap)


def capacity(scheduler: Any, compared: Compared, block_sizes: Sequence[int]) -> Refused:
    """The refusal of a request whose blocks are not there, with the numbers that vLLM compared."""
    request, need = compared.request, compared.needs[-1] if compared.needs else 0
    usable = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    tokens = request.num_tokens if compared.is_whole else compared.tokens
    what = "the whole sequence" if compared.is_whole else "this step"
    parts = [f"{what} of {tokens:,} tokens needs {need:,} blocks"]
    covered = tokens if compared.is_whole else tokens + request.num_computed_tokens
    size = block_sizes[0] if len(block_sizes) == 1 else 0
    whole = need + compared.hits + compared.held
    if size and -(-covered // size) == whole:
        parts[0] = f"ceil({covered:,} / {size}) = {whole:,} blocks"
        if compared.hits:
            parts.append(f"- {compared.hits:,} of its prefix that others hold")
        if compared.held:
            parts.append(f"- {compared.held:,} held")
        if compared.hits or compared.held:
            parts.append(f"= {need:,}")
    elif len(block_sizes) > 1:
        parts.append(f"in {len(block_sizes)} groups of {'/'.join(map(str, block_sizes))} tokens")
    available = compared.free - compared.reserved
    there = f"{compared.free:,} free"
    if compared.reserved:
        there += f" - {compared.reserved:,} reserved for loads in flight = {available:,}"
    gate, required = "capacity", need
    if whole > usable:
        gate, required, available = "never_fits", whole, usable
        text = f"{' '.join(parts)} > {usable:,} usable, even in an idle pool"
        text += f" (now {there})"
    elif need > available:
        text = f"{' '.join(parts)} > {there}"
    else:
        gate, required = "watermark", need + compared.watermark
        parts.append(f"+ watermark {compared.watermark:,} = {required:,}")
        text = f"{' '.join(parts)} > {there}"
    if not scheduler.running and gate != "never_fits":
        text += f"; nothing runs, {usable - compared.free:,} blocks are held by requests that wait"
    warning = ""
    most = request.num_prompt_tokens + (getattr(request, "max_tokens", 0) or 0)
    if size and gate != "never_fits" and not compared.hits and -(-most // size) > usable:
        warning = f"cannot finish: ceil({most:,} / {size}) = {-(-most // size):,} blocks > {usable:,} usable"
    return Refused(
        request.request_id,
        gate,
        required,
        available,
        text,
        free=compared.free,
        watermark=compared.watermark,
        reserved=compared.reserved,
        warning=warning,
    )


def passed_by(
    scheduler: Any,
    *,
    budget_left: int,
    preempted: int,
    has_peeked: bool,
    counts_sessions: bool,
) -> Refused | None:
    """Why the head of the queue was not even asked for its blocks; None when nobody waits."""
    request, deferred = _head(scheduler)
    if request is None:
        return None
    name = request.request_id
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    if preempted and not has_peeked:
        text = f"{preempted:,} running requests lost their blocks in this step, so nobody is let in; {free:,} free"
        return Refused(name, "capacity", preempted, 0, text, "requests")
    pause = getattr(getattr(scheduler, "_pause_state", None), "name", "UNPAUSED")
    if pause != "UNPAUSED":
        return Refused(name, "deferred", 1, 0, f"the scheduler is paused ({pause})", "requests")
    budget = scheduler.max_num_scheduled_tokens
    if budget_left <= 0:
        text = f"budget {budget:,} - scheduled {budget - budget_left:,} = {budget_left:,} tokens left in this step"
        return Refused(name, "token_budget", 1, 0, text, "tokens")
    running, sessions, most = slots(scheduler, counts_sessions=counts_sessions)
    if running + sessions >= most:
        text = f"running {running:,}"
        if sessions:
            text += f" + paused streaming sessions {sessions:,} = {running + sessions:,}"
        limit = "max_num_seqs" if most == scheduler.max_num_running_reqs else "max_num_active_seqs"
        text += f" {'=' if running + sessions == most else '>'} {limit} {most:,}"
        return Refused(name, "max_num_seqs", 1, most - running - sessions, text, "sequences")
    if deferred:
        return Refused(name, "deferred", 1, 0, deferral(scheduler, request), "requests")
    return _empty_chunk(scheduler, request, budget_left)


def _empty_chunk(scheduler: Any, request: Any, budget_left: int) -> Refused:
    """The head was looked at and no token of it may be computed in this step."""
    name = request.request_id
    left = budget_left
    spec = getattr(scheduler.vllm_config, "speculative_config", None)
    draft = getattr(spec, "max_num_new_slots_for_drafting", 0) or 0 if spec is not None else 0
    inputs = scheduler.scheduler_config.max_num_batched_tokens
    used = scheduler.max_num_scheduled_tokens - budget_left
    note = ""
    if draft:
        left = min(left, inputs - used - draft * (len(scheduler.running) + 1))
        note = f" (of {inputs:,} batched tokens, {draft:,} kept for drafts per request)"
    wanted = request.num_tokens - request.num_computed_tokens
    if left <= 0:
        text = f"{left:,} tokens of the step are left{note}"
        return Refused(name, "token_budget", 1, max(0, left), text, "tokens")
    if not scheduler.scheduler_config.enable_chunked_prefill and wanted > left:
        text = f"{wanted:,} tokens in one step > {left:,} left{note}; chunked prefill is off"
        return Refused(name, "token_budget", wanted, left, text, "tokens")
    size = scheduler.cache_config.block_size
    if getattr(scheduler, "need_mamba_block_aligned_split", False) and left < min(wanted, size):
        text = (
            f"a chunk must end on a block of the Mamba state: {size:,} tokens > {left:,} left{note}, "
            "so it is 0 tokens"
        )
        if not scheduler.running:
            text += "; nothing runs, so no later step has more"
        return Refused(name, "token_budget", size, left, text, "tokens")
    if getattr(request, "has_encoder_inputs", False):
        most = getattr(scheduler, "max_num_encoder_input_tokens", 0)
        text = f"no room for its encoder inputs: the encoder budget is {most:,} per step"
        return Refused(name, "token_budget", 1, 0, text, "tokens")
    lookahead = getattr(scheduler, "num_prefill_lookahead", 0)
    if lookahead and wanted > left:
        text = f"a chunk may not end within {lookahead:,} tokens of the prompt's end; {left:,} left"
        return Refused(name, "token_budget", lookahead, left, text, "tokens")
    if any(not getattr(other, "is_prefill_chunk", True) for other in scheduler.running):
        text = f"its prompt may be deferred to a later step (data-parallel balancing); {left:,} tokens left"
        if getattr(scheduler, "prefill_capacity_bound", None) is False:
            return Refused(name, "deferred", 1, 0, text, "requests")
    return Refused(
        name,
        UNEXPLAINED,
        wanted,
        left,
        f"{wanted:,} tokens to compute, {left:,} left{note}, a slot is free and no block was refused",
        "tokens",
    )
