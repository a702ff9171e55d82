"""One scheduler's observer: a few numbers per step in the engine's thread, all else in the reader's.

The hooks are three: ``schedule`` is bracketed; ``peek_request`` of the queues tells that the waiting
loop has begun; from there to the end of the step ``allocate_slots`` and the count of blocks behind it
are watched. The loop over running requests is not touched, whatever their number.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvcatch.vllm.observe.reasons import Compared, capacity, is_deferred, passed_by, queues
from kvcatch.vllm.observe.records import ALL_BEHIND, NEXT_STEP, Ledger, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.vllm.observe.tags import Tagger

__all__ = ["Observer"]

_log = logging.getLogger("vllm.kvcatch.observe")


class Observer:
    """What one scheduler does, as its own thread tells it.

    Args:
        scheduler: vLLM's, complete.
        schedule: Its own ``schedule``, unpatched: the names in its code tell what it counts.
        tagger: Where requests come from.
        keep: Refusals kept.
        clock: Seconds, monotonic.

    Attributes:
        lock: Held by whoever changes the scheduler's blocks or copies them.
        ledger: Refusals, and what they cost.
        steps: Steps so far that computed something.
        empty_steps: Steps that computed nothing.
        step_tokens: Tokens over all steps.
        preemptions: Preempted requests; None where this vLLM does not tell.
        finished: Requests that ended.
        faults: Times a hook failed; vLLM did not notice.
        spent_s: Seconds spent in the hooks of ``schedule``.
        admitted_s: When each request got its blocks.
        grown_s: When each request last got a block.
        last_step_s: When the last step was scheduled.
        reported: Gate and number of those that waited when vLLM last counted them itself: until the
            next step has ended, its own metrics show that count.
    """

    def __init__(
        self,
        scheduler: Any,
        schedule: Callable[..., Any],
        tagger: Tagger,
        keep: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self.tagger = tagger
        self.ledger = Ledger(keep)
        self.steps = 0
        self.empty_steps = 0
        self.step_tokens = 0
        self.preemptions: int | None = None
        self.finished = 0
        self.faults = 0
        self.spent_s = 0.0
        self.admitted_s: dict[str, float] = {}
        self.grown_s: dict[str, float] = {}
        self.clock = clock
        self.last_step_s = clock()
        self.started_s = self.last_step_s
        self.counts_sessions = _names(schedule, "num_waiting_for_streaming_input")
        manager = scheduler.kv_cache_manager
        self.manager, self.coordinator = manager, manager.coordinator
        self.pool = manager.block_pool
        managers = self.coordinator.single_type_managers
        self.block_sizes = tuple(
            getattr(part, "block_size", scheduler.cache_config.block_size) for part in managers
        )
        self.watermark_blocks: int = getattr(manager, "watermark_blocks", 0)
        self.reported: tuple[tuple[str, int], ...] = ()
        self._told = False
        self._waited = 0
        self._is_inside = False
        self._peeked = False
        self._armed = False
        self._refused: Compared | None = None
        self._needs: list[int] = []
        self._asked: Any = None
        self._found: Any = ()
        self._bound: list[Any] = []
        self._saved: dict[tuple[int, str], Any] = {}
        self.bind()

    # -- hooks: none may raise ------------------------------------------------------------------

    def begin(self) -> None:
        """Before ``schedule``."""
        try:
            if self._armed:  # the step before was broken off
                self._disarm()
            self._peeked = False
            self._is_inside = True
            self._refused = None
            self._asked = None
            if self.scheduler.waiting is not self._bound[-1]:
                self.bind()
        except Exception:
            self._fault()

    def end(self, output: Any) -> None:
        """After ``schedule``, with what it returned."""
        start = self.clock()
        try:
            self._is_inside = False
            if self._armed:
                self._disarm()
            self._end(output, start)
        except Exception:
            self._fault()
        self.spent_s += self.clock() - start

    def report(self) -> None:
        """Before ``make_stats``: vLLM counts its waiting requests now."""
        try:
            waiting, shares = sum(map(len, self._bound)), self.ledger.shares
            new = waiting - self.ledger.assigned
            if new > 0:
                shares = (*shares, (NEXT_STEP, new))
            self.reported = shares if waiting else ()
        except Exception:
            self._fault()

    def _fault(self) -> None:
        self.faults += 1
        if not self._told:
            self._told = True
            _log.warning(
                "kvcatch: observing failed once; vLLM is not affected and this is not logged again",
                exc_info=True,
            )

    # -- the waiting loop -----------------------------------------------------------------------

    def bind(self) -> None:
        """Watch the queues' ``peek_request``; again when vLLM or another plugin has replaced one."""
        self._bound = list(queues(self.scheduler))
        for queue in self._bound:
            if getattr(vars(queue).get("peek_request"), "kvcatch", None) is not self:
                queue.peek_request = self._peek_of(queue)

    def unbind(self) -> None:
        """Leave vLLM's objects as they were."""
        with self.lock:
            if self._armed:
                self._disarm()
            for queue in self._bound:
                hook = vars(queue).get("peek_request")
                if getattr(hook, "kvcatch", None) is self:
                    del queue.peek_request

    def _peek_of(self, queue: Any) -> Callable[[], Any]:
        peek = queue.peek_request

        def peek_request() -> Any:
            request = peek()
            if self._is_inside and not self._peeked:
                self._peeked = True
                try:
                    self._arm()
                except Exception:
                    self._fault()
            return request

        peek_request.kvcatch = self  # type: ignore[attr-defined]
        return peek_request

    def _arm(self) -> None:
        if self._armed:
            return
        self._armed = True
        for owner, name, hook in (
            (self.manager, "allocate_slots", self._watch_slots(self.manager.allocate_slots)),
            (
                self.coordinator,
                "get_num_blocks_to_allocate",
                self._watch_need(self.coordinator.get_num_blocks_to_allocate),
            ),
        ):
            self._saved[id(owner), name] = vars(owner).get(name)
            setattr(owner, name, hook)

    def _disarm(self) -> None:
        self._armed = False
        for owner, name in (
            (self.manager, "allocate_slots"),
            (self.coordinator, "get_num_blocks_to_allocate"),
        ):
            before = self._saved.pop((id(owner), name), None)
            if before is not None:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)

    def _watch_need(self, count: Callable[..., int]) -> Callable[..., int]:
        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            need = count(*args, **kwargs)
            name = kwargs.get("request_id") or (args[0] if args else None)
            if name != self._asked:
                self._asked, self._needs = name, []
            self._needs.append(need)
            self._found = kwargs.get("new_computed_blocks") or ()
            return need

        return get_num_blocks_to_allocate

    def _watch_slots(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            # 0.20 asks whether the whole sequence fits before this call: that answer was yes.
            self._asked, self._needs = request.request_id, []
            blocks = allocate(request, *args, **kwargs)
            if blocks is None:
                try:
                    self._refuse(request, args, kwargs)
                except Exception:
                    self._fault()
            else:
                self._asked = None
            return blocks

        return allocate_slots

    def _refuse(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        whole = bool(kwargs.get("full_sequence_must_fit")) and len(self._needs) == 1
        compared = Compared(
            request, self._needs, is_whole=whole, free=self.pool.get_num_free_blocks()
        )
        status = request.status.name
        if kwargs.get("has_scheduled_reqs", True) and status in ("WAITING", "PREEMPTED"):
            compared.watermark = self.watermark_blocks
        if not whole:
            compared.reserved = int(kwargs.get("reserved_blocks", 0) or 0)
        # 0.10 to 0.12 pass the first three by position.
        names = ("num_new_tokens", "num_new_computed_tokens", "new_computed_blocks")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        compared.hit_tokens = int(given.get("num_new_computed_tokens", 0) or 0)
        compared.tokens = int(given.get("num_new_tokens", 0)) + compared.hit_tokens
        self._count_hits(compared, getattr(given.get("new_computed_blocks"), "blocks", ()))
        self._refused = compared

    def _count_hits(self, compared: Compared, groups: Any) -> None:
        name = compared.request.request_id
        compared.held = sum(
            len(part.req_to_blocks.get(name, ())) for part in self.coordinator.single_type_managers
        )
        compared.hits = sum(
            1 for group in groups for block in group if block.ref_cnt and not block.is_null
        )

    # -- the end of a step ----------------------------------------------------------------------

    def _end(self, output: Any, now: float) -> None:
        self.last_step_s = now
        tokens = output.total_num_scheduled_tokens
        if tokens:
            self.steps += 1
        else:
            self.empty_steps += 1
        self.step_tokens += tokens
        self._follow(output, now)
        preempted = getattr(output, "preempted_req_ids", ())
        if not hasattr(output, "preempted_req_ids"):
            preempted = self._preempted()
        if preempted is not None:
            self.preemptions = (self.preemptions or 0) + len(preempted)
            for name in preempted:
                self.admitted_s.pop(name, None)
        waiting = sum(map(len, self._bound))
        ledger = self.ledger
        if not waiting:
            if ledger.assigned:
                ledger.settle(now, ())
                ledger.clear()
            return
        self._explain(waiting, tokens, len(preempted or ()), now)

    def _preempted(self) -> list[str]:
        """Who was preempted in this step, where vLLM does not say (0.10, 0.11).

        After a preemption the waiting loop does not run, so the queue has grown by the preempted alone.
        """
        waiting = self.scheduler.waiting
        if self._peeked or len(waiting) <= self._waited:
            return []
        return [
            request.request_id
            for request in waiting
            if request.status.name == "PREEMPTED" and request.request_id in self.admitted_s
        ]

    def _follow(self, output: Any, now: float) -> None:
        """Who was admitted, who got blocks, who is gone."""
        grown, admitted = self.grown_s, self.admitted_s
        for data in output.scheduled_new_reqs:
            admitted[data.req_id] = grown[data.req_id] = now
        cached = output.scheduled_cached_reqs
        # Of 256 running requests some 16 get a block in a step: the others cost one comparison.
        for name, new in [pair for pair in zip(cached.req_ids, cached.new_block_ids) if pair[1]]:  # noqa: B905
            if any(new):  # 0.10 and 0.11 write empty lists instead of None
                grown[name] = now
                if name not in admitted:
                    admitted[name] = now
        gone = output.finished_req_ids
        if gone:
            self.finished += len(gone)
            for name in gone:
                grown.pop(name, None)
                admitted.pop(name, None)

    def _explain(self, waiting: int, tokens: int, preempted: int, now: float) -> None:
        scheduler = self.scheduler
        left = scheduler.max_num_scheduled_tokens - tokens
        aside = self.count_deferred()
        compared = self._refused or self._refused_before_slots()
        if compared is not None:
            refused: Refused | None = capacity(scheduler, compared, self.block_sizes)
        else:
            refused = passed_by(
                scheduler,
                budget_left=left,
                preempted=preempted,
                has_peeked=self._peeked,
                counts_sessions=self.counts_sessions,
            )
        if refused is None:
            return
        if compared is None:
            refused.free = self.pool.get_num_free_blocks()
        refused.running = len(scheduler.running)
        refused.deferred = aside
        refused.budget_left = left
        others = waiting - aside if refused.gate != "deferred" else waiting
        refused.behind = max(0, others - 1)
        self.ledger.note(refused, now)
        self.ledger.settle(now, _shares(refused.gate, waiting, aside))

    def _refused_before_slots(self) -> Compared | None:
        """0.19 to 0.23 ask for the whole sequence in a call of its own."""
        if self._asked is None or not self._needs:
            return None
        free = self.pool.get_num_free_blocks()
        request = self.scheduler.requests.get(self._asked)
        if request is None or request in self.scheduler.running or self._needs[-1] <= free:
            return None
        compared = Compared(request, self._needs, is_whole=True, free=free)
        self._count_hits(compared, self._found)
        return compared

    def count_deferred(self) -> int:
        """Waiting requests that the scheduler set aside."""
        scheduler = self.scheduler
        deferred = getattr(scheduler, "deferred_waiting", None)
        if deferred is not None:
            return len(deferred)
        skipped = getattr(scheduler, "skipped_waiting", None)
        if skipped is not None:
            return len(skipped)
        return sum(is_deferred(scheduler, request) for request in scheduler.waiting)


def _names(function: Any, name: str, depth: int = 4) -> bool:
    """Whether a function's code, or that of a function it wraps, names an attribute."""
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return False
    if name in code.co_names:
        return True
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return any(_names(inner, name, depth - 1) for inner in cells if callable(inner))


def _shares(gate: str, waiting: int, aside: int) -> list[tuple[str, int]]:
    """Which gate keeps how many of the waiting requests out."""
    if gate == "deferred":
        return [(gate, waiting)]
    asked = max(1, waiting - aside)
    shares = [("deferred", waiting - asked)] if waiting > asked else []
    if gate in ALL_BEHIND or asked == 1:
        return [(gate, asked), *shares]
    return [(gate, 1), ("head_of_line", asked - 1), *shares]
