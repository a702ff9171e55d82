"""A scheduler of vLLM's shape, small enough to read: what the observer needs and no more.

The waiting loop asks in vLLM's order: paused, budget, slots, set aside, blocks.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.is_null = block_id, 0, block_id == 0


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(at) for at in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free = deque(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[Block]:
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            block.ref_cnt += 1
        return taken

    def give(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)


class Queue(deque[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Request:
    def __init__(self, request_id: str, tokens: int, max_tokens: int = 16, **more: Any) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = self.num_tokens = tokens
        self.num_computed_tokens = 0
        self.max_tokens = max_tokens
        self.status = SimpleNamespace(name="WAITING")
        self.lora_request = more.pop("lora", None)
        self.priority = more.pop("priority", 0)


class Coordinator:
    def __init__(self, pool: Pool, size: int) -> None:
        part = SimpleNamespace(block_size=size, req_to_blocks={}, block_pool=pool)
        self.single_type_managers = (part,)
        self.size = size

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int) -> int:
        held = len(self.single_type_managers[0].req_to_blocks.get(request_id, ()))
        return max(0, -(-num_tokens // self.size) - held)


class Manager:
    def __init__(self, num_blocks: int, size: int, watermark: int) -> None:
        self.block_pool = Pool(num_blocks)
        self.coordinator = Coordinator(self.block_pool, size)
        self.watermark_blocks = watermark

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> list[Block] | None:
        free = self.block_pool.get_num_free_blocks()
        mark = (
            self.watermark_blocks if has_scheduled_reqs and request.status.name != "RUNNING" else 0
        )
        count = self.coordinator.get_num_blocks_to_allocate
        name = request.request_id
        if (
            full_sequence_must_fit
            and count(request_id=name, num_tokens=request.num_tokens) + mark > free
        ):
            return None
        need = count(request_id=name, num_tokens=request.num_computed_tokens + num_new_tokens)
        if need + mark > free:
            return None
        table = self.coordinator.single_type_managers[0].req_to_blocks.setdefault(name, [])
        new = self.block_pool.take(need)
        table += new
        return new


class Scheduler:
    def __init__(
        self,
        num_blocks: int = 101,
        block_size: int = 16,
        max_num_seqs: int = 8,
        budget: int = 2048,
        watermark: int = 0,
    ) -> None:
        self.vllm_config = SimpleNamespace(
            speculative_config=None,
            parallel_config=SimpleNamespace(data_parallel_index=0),
            model_config=SimpleNamespace(served_model_name="model", model="model"),
        )
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=budget, enable_chunked_prefill=True
        )
        self.cache_config = SimpleNamespace(block_size=block_size)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=())
        self.kv_cache_manager = Manager(num_blocks, block_size, watermark)
        self.max_num_running_reqs = max_num_seqs
        self.max_num_scheduled_tokens = budget
        self.max_model_len = 1_000_000
        self.waiting = Queue()
        self.deferred_waiting: set[Request] = set()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.finished: set[str] = set()
        self.pause = False

    @property
    def _pause_state(self) -> Any:
        return SimpleNamespace(name="PAUSED_NEW" if self.pause else "UNPAUSED")

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.status.name.startswith("WAITING_FOR"):
            self.deferred_waiting.add(request)
        self.waiting.append(request)

    def schedule(self) -> Any:
        left, scheduled, new, preempted = self.max_num_scheduled_tokens, {}, [], set()
        grown: dict[str, Any] = {}
        for request in list(self.running):
            if request not in self.running:
                continue
            if left <= 0:
                break
            todo = min(left, request.num_tokens - request.num_computed_tokens)
            while (blocks := self.kv_cache_manager.allocate_slots(request, todo)) is None:
                victim = self.running.pop()
                self._free(victim)
                victim.status = SimpleNamespace(name="PREEMPTED")
                victim.num_computed_tokens = 0
                self.waiting.appendleft(victim)
                preempted.add(victim.request_id)
                if victim is request:
                    break
            if blocks is None:
                break
            scheduled[request.request_id] = todo
            grown[request.request_id] = (blocks,) if blocks else None
            left -= todo
        skipped = []
        while not preempted and not self.pause and self.waiting and left > 0:
            if len(self.running) >= self.max_num_running_reqs:
                break
            request = self.waiting.peek_request()
            if request in self.deferred_waiting:
                skipped.append(self.waiting.popleft())
                continue
            todo = min(left, request.num_tokens)
            if (
                self.kv_cache_manager.allocate_slots(
                    request,
                    todo,
                    full_sequence_must_fit=True,
                    has_scheduled_reqs=bool(self.running),
                )
                is None
            ):
                break
            self.waiting.popleft()
            request.status = SimpleNamespace(name="RUNNING")
            self.running.append(request)
            scheduled[request.request_id] = todo
            new.append(SimpleNamespace(req_id=request.request_id))
            left -= todo
        self.waiting.extendleft(reversed(skipped))
        for name, todo in scheduled.items():
            self.requests[name].num_computed_tokens += todo
        gone, self.finished = self.finished, set()
        cached = SimpleNamespace(req_ids=list(grown), new_block_ids=list(grown.values()))
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            finished_req_ids=gone,
            preempted_req_ids=preempted,
        )

    def update_from_output(self, output: Any) -> None:
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            if request.num_tokens - request.num_prompt_tokens + 1 >= request.max_tokens:
                self.finish_requests(name)
            else:
                request.num_tokens += 1

    def finish_requests(self, name: str) -> None:
        request = self.requests.pop(name)
        for row in (self.running, self.waiting):
            if request in row:
                row.remove(request)
        self.deferred_waiting.discard(request)
        self._free(request)
        self.finished.add(name)

    def _free(self, request: Request) -> None:
        table = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.kv_cache_manager.block_pool.give(table.pop(request.request_id, [])[::-1])


def step(scheduler: Scheduler) -> Any:
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    return output
