"""Types of the Rust core. Blocks are ``int`` ids in ``range(num_blocks)``; sizes say their unit."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as _Seq
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from kvcatch.kernels import Backend, KVCache

_Tokens: TypeAlias = "npt.NDArray[np.integer[Any]] | _Seq[int] | Prefix"
_Batch: TypeAlias = "Sequence | npt.NDArray[np.int64] | _Seq[Sequence | int]"
_Salt: TypeAlias = "str | bytes | int | None"

__all__ = [
    "BlockPool",
    "BlockQueue",
    "CompactionPlan",
    "CpuLayout",
    "FreeBlocks",
    "MissReport",
    "Pin",
    "Prefix",
    "Sequence",
    "__version__",
    "build_profile",
    "check_block_ids",
    "check_moves",
    "cpu_advise_huge_pages",
    "cpu_assign_blocks",
    "cpu_attention",
    "cpu_convert_blocks",
    "cpu_copy_blocks",
    "cpu_levels",
    "cpu_team",
    "cpu_write_kv",
    "cuda_sources",
    "decode_work",
    "evictions",
    "order_moves",
    "placements",
]

__version__: str
build_profile: str

@final
class Sequence:
    """Handle of one sequence in a pool. Carries a generation: after ``free`` it is stale, never another's."""

    @property
    def id(self) -> int:
        """The handle as one integer (fits int64), for batches kept in a numpy array."""
    @property
    def hit_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when the sequence was created."""
    @property
    def owner(self) -> str | None: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Prefix:
    """A prompt with its chained block hashes, computed once and usable with pools of the same block size and hash."""

    def __new__(
        cls,
        tokens: _Tokens,
        block_size: int = 16,
        *,
        salt: _Salt = None,
        hash: Literal["xxh3", "blake3"] = "xxh3",
    ) -> Prefix: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_full_blocks(self) -> int: ...
    def block_hashes(self) -> list[int]:
        """128-bit hash of every full block, chained from the first."""
    def __len__(self) -> int: ...

@final
class MissReport:
    """Why a prefix lookup stopped where it did (``BlockPool.explain_miss``)."""

    @property
    def hit_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def reason(
        self,
    ) -> Literal["full_hit", "empty_cache", "diverged", "evicted", "never_committed", "other_salt"]:
        """``diverged``: a cached neighbour continues the same prefix with other tokens."""
    @property
    def block_index(self) -> int:
        """Index of the first block of the prompt that was not found."""
    @property
    def neighbour_block(self) -> int | None:
        """Cached block that follows the same prefix and agrees with the prompt longest."""
    @property
    def diverges_at(self) -> int | None:
        """Index of the first prompt token that differs from that neighbour."""

@final
class Pin:
    """Handle of a pin: its blocks are neither moved nor evicted until ``unpin``."""

    @property
    def id(self) -> int: ...
    @property
    def blocks(self) -> npt.NDArray[np.int32]: ...
    def __index__(self) -> int: ...

@final
class CompactionPlan:
    """Block moves with what they cost and gain. Apply it as a whole, or drop it."""

    @property
    def objective(self) -> Literal["runs", "pages", "largest_run"]: ...
    @property
    def src(self) -> npt.NDArray[np.int32]: ...
    @property
    def dst(self) -> npt.NDArray[np.int32]: ...
    @property
    def rounds(self) -> list[int]:
        """End offset of every round in ``src``/``dst``. Within a round no destination is also a source."""
    @property
    def num_moves(self) -> int: ...
    @property
    def runs_before(self) -> int: ...
    @property
    def runs_after(self) -> int: ...
    @property
    def runs_bound(self) -> int | None:
        """No arrangement has fewer runs than this; None for the other objectives."""
    @property
    def empty_pages_before(self) -> int: ...
    @property
    def empty_pages_after(self) -> int: ...
    @property
    def largest_run_before(self) -> int: ...
    @property
    def largest_run_after(self) -> int: ...
    @property
    def bytes_moved(self) -> int | None: ...
    @property
    def seconds(self) -> float | None:
        """Predicted copy time: every byte is read once and written once at ``bandwidth``."""
    def apply(self, kv_cache: KVCache | None = None, backend: Backend | None = None) -> None:
        """Move bytes and tables as one step: tables, prefix index and owners follow the blocks.

        With ``kv_cache`` and ``backend`` the copies are put on the backend's stream first, without
        waiting for them; the tables change after that, so that whatever is launched next reads and
        writes behind the copies. The pool is held meanwhile: other threads wait. Without them the
        bytes are the caller's to copy before anything reads.

        Raises StalePlan when the pool changed in a way that matters or the plan was applied
        already, InvalidArgument when the cache is not of this pool's size, and whatever the backend
        refuses; nothing is changed then.
        """
    def to_dict(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...

@final
class FreeBlocks:
    """All blocks that may be handed out: one placement and one eviction. Knows no counts, no hashes."""

    def __new__(
        cls, num_blocks: int, *, placement: str = "bitmap", eviction: str = "lru", seed: int = 0
    ) -> FreeBlocks: ...
    @property
    def placement(self) -> str: ...
    @property
    def eviction(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_clean(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def largest_run(self) -> int: ...
    def take(
        self,
        n: int,
        *,
        after: int | None = None,
        contiguous: bool = False,
        out: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.int32] | int:
        """Hand out ``n`` blocks, evicting cached ones as needed.

        ``after`` is the caller's last block: growth continues behind it where it can. With ``out`` the ids are
        written there and the number of evicted blocks comes back; without it a new int32 array does.
        """
    def remove(self, block: int) -> None:
        """Take this very block out: a cached block is hit."""
    def touch(self, block: int) -> None:
        """Tell the eviction that a block already handed out was hit once more."""
    def give_clean(self, blocks: npt.NDArray[np.int32] | _Seq[int]) -> None:
        """Give blocks back with nothing in them; the first is handed out first under ``queue``."""
    def give_cached(self, blocks: npt.NDArray[np.int32] | _Seq[int]) -> None:
        """Give blocks back with content worth keeping, evict-first order (a sequence's tail first)."""
    def is_clean(self, block: int) -> bool: ...
    def is_cached(self, block: int) -> bool: ...
    def __len__(self) -> int: ...
    def __contains__(self, block: int, /) -> bool: ...
    def __iter__(self) -> Iterator[int]:
        """Ids in hand-out order as things stand: clean blocks, then cached ones, next victim first."""
    def validate(self) -> None: ...

@disjoint_base
class BlockQueue:
    """``FreeBlocks`` behind the interface of vLLM's ``FreeKVCacheBlockQueue``, on the engine's block objects.

    ``blocks[i].block_id`` must be ``i``; all are in the queue at first. Blocks given back by ``append`` and
    ``append_n`` are cached ones, the first to be evicted first; by ``prepend_n``, or without ``_block_hash``
    where the engine never prepends, they have no content. An object of a subclass has its attribute
    ``num_free_blocks`` set at each change; ``len()`` tells it of any.
    """

    def __new__(
        cls,
        blocks: list[Any],
        *,
        placement: str = "bitmap",
        eviction: str = "lru",
        seed: int = 0,
        prepends: bool = True,
    ) -> Self: ...
    @property
    def num_clean(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def placement(self) -> str: ...
    @property
    def eviction(self) -> str: ...
    @property
    def growing(self) -> int | None:
        """Who takes next, once: ``None`` nobody that grows, -1 a new sequence, else one with this last block."""
    @growing.setter
    def growing(self, value: int | None) -> None: ...
    def set_watchers(self, watchers: dict[int, Any]) -> None:
        """Ids whose content somebody still reads: such a block is evicted in its turn, never early."""
    def set_early(self, early: bool) -> None:
        """Whether blocks may be evicted before they are needed (the default), so that there are runs to choose."""
    def popleft(self) -> Any:
        """The block that is first in order; ``ValueError`` when there is none."""
    def popleft_n(self, n: int) -> list[Any]: ...
    def remove(self, block: Any) -> None:
        """Take this very block out, because it was hit; ``RuntimeError`` when it is not in the queue."""
    def append(self, block: Any) -> None: ...
    def append_n(self, blocks: Iterable[Any]) -> None: ...
    def prepend_n(self, blocks: Iterable[Any]) -> None: ...
    def touch(self, blocks: Iterable[Any]) -> None:
        """Tell the eviction of hits of blocks that are in use."""
    def retain(self, blocks: Iterable[Any], priority: int, ttl: float | None = None) -> None:
        """Retain the content of blocks in use or cached: priority 0 to 100 (0 ends it), seconds to live."""
    def clear(self) -> None:
        """The content of every block in the queue is void."""
    def order(self) -> list[int]:
        """Ids in hand-out order: blocks without content, then cached ones, next victim first."""
    def get_all_free_blocks(self) -> list[Any]: ...
    def validate(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, block: Any, /) -> bool: ...

@final
class BlockPool:
    """Paged KV-cache blocks: who holds which, what is cached, what may be handed out."""

    def __new__(
        cls,
        num_blocks: int,
        block_size: int = 16,
        *,
        placement: str = "bitmap",
        eviction: str = "lru",
        contiguity: Literal["preferred", "required"] = "preferred",
        blocks_per_page: int = 128,
        null_block: bool = False,
        hash: Literal["xxh3", "blake3"] = "xxh3",
        seed: int = 0,
        manual_clock: bool = False,
    ) -> BlockPool: ...

    # what it is
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def placement(self) -> str: ...
    @property
    def eviction(self) -> str: ...
    @property
    def contiguity(self) -> str: ...
    @property
    def blocks_per_page(self) -> int: ...
    # block counts
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def available(self) -> int:
        """free + cached - pinned cached - reserved."""
    @property
    def num_sequences(self) -> int: ...
    @property
    def largest_run(self) -> int: ...
    # sequences
    def create(
        self,
        tokens: _Tokens,
        *,
        owner: str | None = None,
        tags: Mapping[str, str] | None = None,
        salt: _Salt = None,
        num_tokens: int | None = None,
        reserve_tokens: int = 0,
        use_cache: bool = True,
        commit: bool = False,
    ) -> Sequence:
        """Admit a prompt: share its committed prefix blocks, allocate the rest (all or nothing).

        At most ``len(tokens) - 1`` tokens are hit, so that at least one is computed. ``num_tokens`` allocates room
        for only so many of the prompt's tokens now (chunked prefill; later chunks come by ``append``).
        ``reserve_tokens`` promises room for that many tokens beyond the prompt. ``commit`` makes the full blocks
        findable at once (as vLLM does) instead of after ``commit()``.
        """
    def append(
        self, seqs: _Batch, n_tokens: int | npt.NDArray[np.integer[Any]] | _Seq[int] = 1
    ) -> list[tuple[int, int]]:
        """Make room for ``n_tokens`` more tokens in each sequence (all or nothing for the batch).

        Returns the copy-on-write pairs (source block, destination block) to copy before anything is written.
        """
    def commit(
        self,
        seqs: _Batch,
        tokens: npt.NDArray[np.integer[Any]] | _Seq[int] | None = None,
        counts: int | npt.NDArray[np.integer[Any]] | _Seq[int] | None = None,
        *,
        deduplicate: bool = False,
    ) -> int:
        """Say which tokens were written; blocks that became full may now be found by others.

        Without ``tokens``: the next ``counts`` tokens known from ``create`` (default all of them). With ``tokens``
        (all sequences' new tokens end to end; ``counts`` each, default equal shares): ids of generated tokens.
        Returns how many blocks were replaced by an equal cached one (``deduplicate=True``).
        """
    def fork(
        self,
        seq: Sequence | int,
        *,
        owner: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Sequence: ...
    def truncate(self, seq: Sequence | int, num_tokens: int) -> None: ...
    def reserve(self, seq: Sequence | int, num_tokens: int) -> None:
        """Promise room for ``num_tokens`` tokens beyond those appended (replaces an earlier promise; 0 ends it)."""
    def free(self, seqs: _Batch) -> None: ...
    def block_tables(self, seqs: _Batch, out: npt.NDArray[np.int32], *, pad: int = -1) -> None:
        """Write one row of ids per sequence into ``out`` (int32, [n, width], C-contiguous)."""
    def slot_mapping(
        self,
        seqs: _Batch,
        counts: int | npt.NDArray[np.integer[Any]] | _Seq[int] | None = None,
        *,
        starts: npt.NDArray[np.integer[Any]] | _Seq[int] | None = None,
        out: npt.NDArray[np.int64],
    ) -> int:
        """Write slot = block_id * block_size + offset of tokens [start, start + count) of every sequence, end to end.

        Default: from the first token not committed to the last one appended. Returns how many were written.
        """
    def block_ids(self, seq: Sequence | int) -> npt.NDArray[np.int32]: ...
    def num_tokens(self, seq: Sequence | int) -> int: ...
    def num_committed(self, seq: Sequence | int) -> int: ...
    def num_runs(self, seqs: _Batch) -> int: ...
    def describe(self, seq: Sequence | int) -> dict[str, Any]: ...
    def sequences(self) -> list[Sequence]: ...
    # prefix cache
    def prefix(self, tokens: _Tokens, *, salt: _Salt = None) -> Prefix: ...
    def lookup(self, tokens: _Tokens, *, salt: _Salt = None) -> int:
        """Hit tokens of this prompt now (all full blocks counted); takes nothing."""
    def hits(self, prefix: _Tokens) -> tuple[int, int]:
        """What ``create`` would share now: hit tokens, and of those the ones in active blocks. Takes nothing.

        At most ``len(tokens) - 1`` are hit. Active blocks cost the pool nothing; the others are cached and leave
        ``available`` when they are shared.
        """
    def lookup_many(self, prefixes: _Seq[Prefix]) -> npt.NDArray[np.int64]: ...
    def explain_miss(self, tokens: _Tokens, *, salt: _Salt = None) -> MissReport: ...
    def retain(
        self, tokens: _Tokens, *, priority: int = 1, ttl: float | None = None, salt: _Salt = None
    ) -> int:
        """Keep the cached blocks of this prefix longer: higher priority (0..100) is evicted later, for ``ttl`` seconds.

        Returns how many blocks it applies to. Blocks being used count too. Priority 0 ends a retention.
        """
    def set_next_use(self, seq: Sequence | int, next_use: npt.NDArray[np.int64]) -> None:
        """Only under ``eviction="clairvoyant"``: when each of the sequence's first blocks is needed next."""
    def evict(self, n: int) -> int:
        """Make up to ``n`` cached blocks clean, next victims first; returns how many."""
    def reset_prefix_cache(self) -> int: ...
    @property
    def now(self) -> float: ...
    @now.setter
    def now(self, seconds: float) -> None: ...
    # pins
    def pin(
        self,
        what: Sequence | int | npt.NDArray[np.int32] | _Seq[int],
        *,
        owner: str | None = None,
        deadline: float | None = None,
    ) -> Pin: ...
    def unpin(self, pin: Pin | int) -> None: ...
    # compaction
    def plan_compaction(
        self,
        objective: Literal["runs", "pages", "largest_run"],
        *,
        n: int | None = None,
        max_moves: int | None = None,
        seqs: _Batch | None = None,
        bytes_per_block: int | None = None,
        bandwidth: float | None = None,
    ) -> CompactionPlan: ...
    # seeing
    def stats(self) -> dict[str, Any]: ...
    def holdings(self, by: str = "owner") -> list[dict[str, Any]]: ...
    def audit(self, live: Iterable[str], *, now: float | None = None) -> dict[str, Any]: ...
    def snapshot(self) -> dict[str, Any]: ...
    def validate(self) -> None: ...

def placements() -> list[str]: ...
def evictions() -> list[str]: ...

# kernels: what the host works out before a launch
_Ids: TypeAlias = "npt.NDArray[np.integer[Any]] | _Seq[int]"

def check_block_ids(name: str, ids: _Ids, num_blocks: int) -> npt.NDArray[np.int32]:
    """``ids`` as int32; InvalidArgument names one that is not within ``0..num_blocks-1``."""

def check_moves(src: _Ids, dst: _Ids, *, allow_overlap: bool) -> None:
    """Refuse a destination named twice and, unless ``allow_overlap``, one that is also a source."""

def order_moves(src: _Ids, dst: _Ids) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Order any assignment so that each block is read before it is overwritten.

    Returns ``ops`` [n, 2] of (dst, src), where -1 is a temporary, and ``first`` [groups + 1]:
    groups may run side by side.
    """

def decode_work(
    seq_lens: _Ids, num_slots: int, *, min_tokens: int = 128, window: int = 0
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Share the tokens of a decode batch among ``num_slots`` processors.

    Returns ``pieces`` [n, 4] of (row, first token, end token, partial result or -1), longest first;
    ``merges`` [m, 4] of (row, first partial, end partial, 0), with first = end for an empty
    sequence; and the number of partial results.
    """

def cuda_sources() -> dict[str, str]:
    """The texts of ``cuda/``, by file name, as they were when this extension was built."""

# cpu: the kernels of the CPU backend, on numpy views of its tensors (bfloat16 and float16 as int16)
_Array: TypeAlias = "npt.NDArray[Any]"

@final
class CpuLayout:
    """Shape of a pool and distances in it, checked once; ``strides`` as ``kvcatch.kernels.layout.Strides``."""

    def __new__(
        cls,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        scale: str,
        strides: tuple[int, int, int, int, int, int, int, int],
    ) -> CpuLayout: ...

def cpu_levels() -> list[str]:
    """Instruction sets of this machine, weakest first."""

def cpu_team() -> str:
    """Whose threads the kernels join in this process: ``openmp`` or ``own``."""

def cpu_advise_huge_pages(buffer: _Array) -> bool:
    """Ask for large pages behind a buffer that is about to be written for the first time."""

def cpu_attention(
    pool: _Array,
    layout: CpuLayout,
    layer: int,
    query: _Array,
    tables: _Array,
    lens: _Array,
    out: _Array,
    *,
    dtype: str,
    scale: float,
    window: int,
    threads: int,
    level: str,
    head_scales: _Array | None = None,
    soft_cap: float | None = None,
    alibi_slopes: _Array | None = None,
    starts: _Array | None = None,
    own_threads: bool = False,
) -> None:
    """Decode attention, or prefill attention where ``starts`` are given; ``dtype`` is that of ``query`` and ``out``."""

def cpu_write_kv(
    pool: _Array,
    layout: CpuLayout,
    layer: int,
    key: _Array,
    value: _Array,
    slots: _Array,
    *,
    dtype: str,
    threads: int,
    head_scales: _Array | None = None,
    own_threads: bool = False,
) -> None:
    """Write rows of keys and values to their slots."""

def cpu_copy_blocks(
    source: _Array,
    source_layout: CpuLayout,
    target: _Array,
    target_layout: CpuLayout,
    src: _Ids,
    dst: _Ids,
    *,
    threads: int,
    own_threads: bool = False,
) -> None:
    """Copy blocks between two pools, or within one."""

def cpu_assign_blocks(
    pool: _Array,
    layout: CpuLayout,
    src: _Ids,
    dst: _Ids,
    *,
    threads: int,
    own_threads: bool = False,
) -> None:
    """Assign blocks at once: new[dst[i]] = old[src[i]]."""

def cpu_convert_blocks(
    source: _Array,
    source_layout: CpuLayout,
    target: _Array,
    target_layout: CpuLayout,
    src: _Ids,
    dst: _Ids,
    *,
    threads: int,
    head_scales: _Array | None = None,
    own_threads: bool = False,
) -> None:
    """Convert blocks between an e4m3 pool and one of another type."""
