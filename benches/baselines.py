"""What kvcatch is measured against: block management as an engine does it in Python.

Written anew in the manner of vLLM 0.32 (a linked list of block objects as free queue, a dictionary
of block hashes, one manager call per request and step), so that the comparison needs no vLLM. With
vLLM installed, ``vllm_replay`` drives its own manager through the very same loop.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from kvcatch.workload.foresight import prefix_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcatch.workload.request import Request, Workload


class Block:
    """One block: its id, how many requests hold it, its content's hash, its place in the queue."""

    __slots__ = ("block_hash", "block_id", "following", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.previous: Block | None = None
        self.following: Block | None = None


class FreeQueue:
    """Blocks that may be handed out, as a doubly linked list between two sentinels."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.num_free = 0
        self.head = Block(-1)
        self.tail = Block(-1)
        self.head.following = self.tail
        self.tail.previous = self.head
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[Block]:
        """The first ``n`` blocks."""
        if n == 0:
            return []
        if n > self.num_free:
            raise ValueError(f"{n} of {self.num_free} free blocks")
        self.num_free -= n
        taken = []
        block = self.head.following
        for _ in range(n):
            assert block is not None
            taken.append(block)
            last, block = block, block.following
            last.previous = last.following = None
        assert block is not None
        self.head.following = block
        block.previous = self.head
        return taken

    def remove(self, block: Block) -> None:
        """Take this very block out."""
        before, behind = block.previous, block.following
        if before is None or behind is None:
            raise ValueError(f"block {block.block_id} is not in the queue")
        before.following = behind
        behind.previous = before
        block.previous = block.following = None
        self.num_free -= 1

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Put ``blocks`` at the end, in this order."""
        if not blocks:
            return
        self.num_free += len(blocks)
        last = self.tail.previous
        assert last is not None
        for block in blocks:
            block.previous = last
            last.following = block
            last = block
        last.following = self.tail
        self.tail.previous = last

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put ``blocks`` at the front, in this order."""
        if not blocks:
            return
        self.num_free += len(blocks)
        first = self.head.following
        assert first is not None
        last = self.head
        for block in blocks:
            block.previous = last
            last.following = block
            last = block
        last.following = first
        first.previous = last


class LinkedListPool:
    """Blocks with reference counts and a cache of full blocks by hash. Block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.queue = FreeQueue(self.blocks[1:])
        self.cached: dict[bytes, Block] = {}

    def allocate(self, n: int) -> list[Block]:
        """Hand out ``n`` blocks; what was cached in them is lost."""
        taken = self.queue.popleft_n(n)
        for block in taken:
            if block.block_hash is not None:
                if self.cached.get(block.block_hash) is block:
                    del self.cached[block.block_hash]
                block.block_hash = None
            block.ref_count += 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more request holds each of ``blocks``."""
        for block in blocks:
            if block.ref_count == 0:
                self.queue.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """One request less holds each of ``blocks``, given in the order they are to be evicted."""
        clean: list[Block] = []
        cached: list[Block] = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                (clean if block.block_hash is None else cached).append(block)
        self.queue.prepend_n(clean)
        self.queue.append_n(cached)


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request as the manager sees it: token counts, and a hash for every full block."""

    request_id: str
    num_tokens: int
    out_target: int
    block_size: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_output_tokens: int = 0

    def append_output_token_ids(self, _token: int) -> None:
        """A token was generated; the block it fills gets its hash."""
        self.num_output_tokens += 1
        self.num_tokens += 1
        if self.num_tokens % self.block_size == 0:
            self.block_hashes.append(b"g%s.%d" % (self.request_id.encode(), self.num_tokens))


class Manager(Protocol):
    """The calls of vLLM's ``KVCacheManager`` that a scheduler makes."""

    def new_step_starts(self) -> None: ...
    def get_computed_blocks(self, request: Any) -> tuple[Any, ...]: ...
    def allocate_slots(
        self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any: ...
    def free(self, request: Any) -> None: ...
    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]: ...


class PythonManager:
    """Block bookkeeping per request and step, in Python."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = LinkedListPool(num_blocks)
        self.block_size = block_size
        self.tables: dict[str, list[Block]] = {}
        self.num_cached: dict[str, int] = {}

    def new_step_starts(self) -> None:
        """Nothing to do here."""

    def get_computed_blocks(self, request: ReplayRequest) -> tuple[list[Block], int]:
        """The longest cached prefix: its blocks and how many tokens they hold."""
        found: list[Block] = []
        limit = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:limit]:
            block = self.pool.cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found, len(found) * self.block_size

    def allocate_slots(
        self,
        request: ReplayRequest,
        num_new_tokens: int,
        num_hit_tokens: int = 0,
        hits: Sequence[Block] = (),
        **_options: Any,
    ) -> list[Block] | None:
        """Room for new tokens behind the hits; the full blocks become findable. None: no room."""
        table = self.tables.get(request.request_id)
        held = len(table) if table is not None else 0
        total = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        needed = -(-total // self.block_size) - held - len(hits)
        evictable = sum(1 for block in hits if block.ref_count == 0)
        if needed + evictable > self.pool.queue.num_free:
            return None
        if table is None:
            table = self.tables[request.request_id] = []
        if hits:
            self.pool.touch(hits)
            table.extend(hits)
            self.num_cached[request.request_id] = len(hits)
        new = self.pool.allocate(needed) if needed > 0 else []
        table.extend(new)
        full = min(total, request.num_tokens) // self.block_size
        known = self.num_cached.get(request.request_id, 0)
        if full > known:
            cached = self.pool.cached
            for position in range(known, full):
                block, block_hash = table[position], request.block_hashes[position]
                block.block_hash = block_hash
                cached.setdefault(block_hash, block)
            self.num_cached[request.request_id] = full
        return new

    def free(self, request: ReplayRequest) -> None:
        """The request gives its blocks back, the last first."""
        self.num_cached.pop(request.request_id, None)
        self.pool.free(reversed(self.tables.pop(request.request_id)))

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """The request's block table (of the only cache group)."""
        return ([block.block_id for block in self.tables[request_id]],)


@dataclass(slots=True)
class ManagerResult:
    """What a manager did with a workload.

    Attributes:
        seconds: CPU time of scheduling and bookkeeping; not in it: hashing prompts, counting runs (s).
        decode_tokens: Tokens appended one by one.
        hit_tokens: Prompt tokens found cached, over all admissions.
        first_admission_hit_tokens: The same without readmissions.
        preemptions: Sequences preempted.
        runs: Runs of every finished sequence.
        blocks: Blocks of every finished sequence.
    """

    seconds: float = 0.0
    decode_tokens: int = 0
    hit_tokens: int = 0
    first_admission_hit_tokens: int = 0
    preemptions: int = 0
    runs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def us_per_decode_token(self) -> float:
        """Bookkeeping per decode token (µs)."""
        return self.seconds / max(1, self.decode_tokens) * 1e6


def replay_through(
    manager: Manager,
    requests: Sequence[Any],
    max_num_seqs: int = 64,
    mark: Callable[[Any, str], None] = lambda _request, _state: None,
    progress: Callable[[int, int], None] | None = None,
) -> ManagerResult:
    """Drive ``manager`` through the closed loop of ``kvcatch.workload.replay``, request by request.

    Args:
        manager: vLLM's manager, or one with its calls.
        requests: The requests, all waiting from the start.
        max_num_seqs: Sequences that run at once.
        mark: Told when a request is ``running``, ``preempted`` or ``finished``.
        progress: Called with (requests done, requests in all) now and then.
    """
    result = ManagerResult()
    waiting = deque(requests)
    running: list[Any] = []
    seen: set[str] = set()
    untimed = 0.0
    begin = time.thread_time()
    while waiting or running:
        manager.new_step_starts()
        i = 0
        while i < len(running):
            request = running[i]
            room = manager.allocate_slots(request, 1)
            while room is None:
                victim = running.pop()
                manager.free(victim)
                victim.num_computed_tokens = 0
                mark(victim, "preempted")
                result.preemptions += 1
                waiting.appendleft(victim)
                if victim is request:
                    break
                room = manager.allocate_slots(request, 1)
            if room is None:
                break
            request.num_computed_tokens += 1
            result.decode_tokens += 1
            i += 1
        while waiting and len(running) < max_num_seqs:
            request = waiting[0]
            hits, hit_tokens, *_ = manager.get_computed_blocks(request)
            room = manager.allocate_slots(
                request,
                request.num_tokens - hit_tokens,
                hit_tokens,
                hits,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(running),
            )
            if room is None:
                if running:
                    break
                waiting.popleft()
                continue
            waiting.popleft()
            result.hit_tokens += hit_tokens
            if request.request_id not in seen:
                seen.add(request.request_id)
                result.first_admission_hit_tokens += hit_tokens
            mark(request, "running")
            request.num_computed_tokens = request.num_tokens
            running.append(request)
        staying = []
        for request in running:
            request.append_output_token_ids(0)
            if request.num_output_tokens < request.out_target:
                staying.append(request)
                continue
            pause = time.thread_time()
            ids = manager.get_block_ids(request.request_id)[0]
            breaks = sum(after != before + 1 for before, after in pairwise(ids))
            result.runs.append(1 + breaks)
            result.blocks.append(len(ids))
            untimed += time.thread_time() - pause
            mark(request, "finished")
            manager.free(request)
            if progress is not None:
                progress(len(result.runs), len(requests))
        running = staying
    result.seconds = time.thread_time() - begin - untimed
    return result


def block_keys(request: Request, block_size: int) -> list[bytes]:
    """A hash for every full prompt block, equal where the prefixes are equal."""
    return [key.to_bytes(8, "little") for key in prefix_keys(request, block_size).tolist()]


def python_requests(workload: Workload, block_size: int = 16) -> list[ReplayRequest]:
    """The workload's requests, prompts hashed."""
    return [
        ReplayRequest(
            str(request.index),
            request.num_tokens,
            request.output_tokens,
            block_size,
            block_keys(request, block_size),
        )
        for request in workload.requests
    ]


def python_replay(
    workload: Workload,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> ManagerResult:
    """Replay ``workload`` through ``PythonManager``. Prompts are hashed before the clock starts."""
    requests = python_requests(workload, block_size)
    manager = PythonManager(num_blocks, block_size)
    return replay_through(manager, requests, max_num_seqs, progress=progress)


def has_vllm() -> bool:
    """Whether a real vLLM can be measured here."""
    return importlib.util.find_spec("vllm") is not None


def vllm_replay(
    workload: Workload,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> ManagerResult:
    """Replay ``workload`` through vLLM's own ``KVCacheManager``, through the same loop."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request as VllmRequest
    from vllm.v1.request import RequestStatus

    init_none_hash(sha256)
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    longest = max(request.num_tokens + request.output_tokens for request in workload.requests) + 16
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)],
        ),
        max_model_len=longest,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )
    states = {
        "running": RequestStatus.RUNNING,
        "preempted": RequestStatus.PREEMPTED,
        "finished": RequestStatus.FINISHED_STOPPED,
    }

    def hasher(keys: list[bytes], index: int) -> Callable[[Any], list[bytes]]:
        def hashes(request: Any) -> list[bytes]:
            known, full = len(request.block_hashes), request.num_tokens // block_size
            return [
                keys[block] if block < len(keys) else b"g%d.%d" % (index, block)
                for block in range(known, full)
            ]

        return hashes

    def mark(request: Any, state: str) -> None:
        request.status = states[state]

    params = SamplingParams(max_tokens=longest)
    requests = []
    for request in workload.requests:
        keys = block_keys(request, block_size)
        made = VllmRequest(
            str(request.index),
            [0] * request.num_tokens,
            params,
            None,
            block_hasher=hasher(keys, request.index),
        )
        made.out_target = request.output_tokens
        requests.append(made)
    return replay_through(manager, requests, max_num_seqs, mark, progress)


class PythonTables:
    """Block tables grown one sequence at a time: the least Python that appends a token."""

    def __init__(self, num_blocks: int, block_size: int, lengths: Sequence[int]) -> None:
        self.pool = LinkedListPool(num_blocks)
        self.block_size = block_size
        self.lengths = list(lengths)
        self.tables = [
            [block.block_id for block in self.pool.allocate(-(-length // block_size))]
            for length in lengths
        ]

    def append_all(self) -> None:
        """One token more in every sequence."""
        block_size, lengths = self.block_size, self.lengths
        for i, table in enumerate(self.tables):
            if lengths[i] % block_size == 0:
                table.append(self.pool.allocate(1)[0].block_id)
            lengths[i] += 1


def sha256_hash(value: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(value).digest()


def xxhash_hash() -> Callable[[bytes], bytes] | None:
    """128-bit xxh3, where the package ``xxhash`` is installed."""
    if importlib.util.find_spec("xxhash") is None:
        return None
    import xxhash

    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    return digest


def hash_chain(
    tokens: Sequence[int], block_size: int, digest: Callable[[bytes], bytes]
) -> list[bytes]:
    """Chained hash of every full block: the parent's hash and the tokens, pickled, then digested."""
    hashes = []
    parent = b"root"
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tuple(tokens[start : start + block_size])
        parent = digest(pickle.dumps((parent, block, None), protocol=pickle.HIGHEST_PROTOCOL))
        hashes.append(parent)
    return hashes


class PythonPrefixCache:
    """Cached blocks by hash, looked up prompt by prompt."""

    def __init__(self, block_size: int, digest: Callable[[bytes], bytes]) -> None:
        self.block_size = block_size
        self.digest = digest
        self.blocks: dict[bytes, int] = {}

    def insert(self, tokens: Sequence[int]) -> None:
        """Every full block of the prompt is findable."""
        for block_hash in hash_chain(tokens, self.block_size, self.digest):
            self.blocks.setdefault(block_hash, len(self.blocks))

    def lookup(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        hits = 0
        for block_hash in hash_chain(tokens, self.block_size, self.digest):
            if block_hash not in self.blocks:
                break
            hits += self.block_size
        return hits
