"""From a model, an engine and a pool or a GPU to a Ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvcatch.errors import InvalidArgument
from kvcatch.geometry import Demand, Geometry, GroupRule, Kind, KvDtype, Parallel
from kvcatch.geometry.parallel import require_count
from kvcatch.ledger.engines import DEFAULT_ENGINE, Engine
from kvcatch.ledger.gpus import GIB, MAX_BYTES
from kvcatch.ledger.ledger import Ledger, RankLedger
from kvcatch.ledger.memory import rank_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.geometry import Model
    from kvcatch.ledger.gpus import Gpu
    from kvcatch.ledger.lengths import LengthDistribution

__all__ = ["Pool", "Run", "plan"]

T = TypeVar("T")

MAX_MODEL_LEN = 2**40
MAX_BLOCKS = 2**40
MAX_BATCHED = 2**30
DEFAULT_BATCHED = 8192
"""vLLM's server takes this many tokens a step on GPUs of 70 GiB and more (the A100 excepted), else 2048."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the blocks come from: exactly one of the three.

    Attributes:
        num_blocks: Blocks, null block included (vLLM's ``num_gpu_blocks``).
        kv_bytes: Bytes of the KV cache: one number for all ranks, one per stage, or one per rank.
        gpus: GPUs, in the same numbers.
        utilization: Share of a GPU the engine takes; None for its default.
        weights_bytes: Bytes of weights per rank; None to count them.
        non_kv_bytes: Bytes of activations and the like per rank; None to estimate.
    """

    num_blocks: int | None = None
    kv_bytes: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    utilization: float | None = None
    weights_bytes: int | None = None
    non_kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """How the engine is run, as far as it changes the blocks of a request.

    Attributes:
        max_num_batched_tokens: Tokens of the largest step; None for the engine's default.
        async_scheduling: The next step is scheduled while one runs (vLLM's default where it can).
        prefix_caching: For models with states; None for the version's default.
        speculative_tokens: Draft tokens per step.
    """

    max_num_batched_tokens: int | None = None
    async_scheduling: bool = True
    prefix_caching: bool | None = None
    speculative_tokens: int = 0


def plan(
    model: Model,
    pool: Pool,
    *,
    engine: Engine | str = DEFAULT_ENGINE,
    parallel: Parallel | None = None,
    kv_dtype: str = "auto",
    block_size: int | None = None,
    max_model_len: int | None = None,
    run: Run | None = None,
    lengths: LengthDistribution | None = None,
) -> Ledger:
    """Work out what fits.

    Args:
        model: The model.
        pool: Where the blocks come from.
        engine: The engine, such as ``vllm@0.32``.
        parallel: How the model is spread; one GPU without it.
        kv_dtype: Type of K and V, one of KV_DTYPES.
        block_size: Tokens per block; None for the engine's default.
        max_model_len: Longest request in tokens; None for the model's own.
        run: How the engine is run.
        lengths: How long requests are.

    Raises:
        InvalidArgument: what cannot be, or what is not known of that engine; nothing is guessed.
    """
    engine = Engine.parse(engine) if isinstance(engine, str) else engine
    parallel = parallel or Parallel()
    run = run or Run()
    notes = list(model.notes)
    length = _length(model, max_model_len)
    size = _block_size(engine, block_size)
    _check_engine(engine, model, parallel)
    batched = _batched(pool, run, engine, notes)
    dtype = KvDtype.parse(kv_dtype, model.dtype)
    if dtype.name in ("fp8", "fp8_e4m3") and Kind.INDEXER in model.kinds:
        dtype = KvDtype.parse("fp8_ds_mla", model.dtype)
        notes.append("fp8 of sparse MLA is vLLM's fp8_ds_mla: 656 bytes a row")
    require_count("speculative_tokens", run.speculative_tokens, 1024, 0)
    geometry = Geometry(
        model,
        parallel,
        dtype,
        size,
        _rule(engine),
        Demand(
            _in_flight(engine, parallel, run, batched),
            parallel.dcp,
            _state_blocks(engine, run, notes, has_state=model.has_state),
        ),
        run.speculative_tokens,
    )
    if geometry.block_size != size:
        notes.append(
            f"blocks of {geometry.block_size} tokens instead of {size}: pages of all layers have to be alike"
        )
    if parallel.dp > 1:
        notes.append(f"figures hold for each of the {parallel.dp} replicas; each has such a pool")
    ranks = _ranks(geometry, engine, pool, batched)
    ledger = Ledger(engine, geometry, length, ranks, lengths, tuple(notes))
    if ledger.usable_blocks < 1:
        raise InvalidArgument(
            f"num_blocks = {ledger.num_blocks}: no block is left for requests"
            + (" beside the null block" if engine.null_blocks else "")
        )
    return ledger


def _length(model: Model, max_model_len: int | None) -> int:
    own = model.max_model_len
    if max_model_len is None:
        if not own:
            raise InvalidArgument(f"{model.name}: states no longest length; give --max-model-len")
        return own
    require_count("max_model_len", max_model_len, MAX_MODEL_LEN)
    if own and max_model_len > own:
        raise InvalidArgument(
            f"max_model_len = {max_model_len}: {model.name} was made for at most {own} tokens"
        )
    return max_model_len


def _block_size(engine: Engine, block_size: int | None) -> int:
    if block_size is None:
        return engine.block_size
    require_count("block_size", block_size, 2**20)
    if engine.is_vllm and not engine.is_vllm_v0 and block_size % 16:
        raise InvalidArgument(f"block_size = {block_size}: {engine.title} takes multiples of 16")
    return block_size


def _check_engine(engine: Engine, model: Model, parallel: Parallel) -> None:
    if engine.is_vllm:
        return
    uneven = [kind for kind in model.kinds if kind not in (Kind.FULL, Kind.MLA, Kind.INDEXER)]
    if uneven:
        raise InvalidArgument(
            f"engine = '{engine}': how it stores {' and '.join(uneven)} layers is not known; "
            f"such models can be planned for vllm"
        )
    if parallel.dcp > 1:
        raise InvalidArgument(
            f"dcp = {parallel.dcp}: decode context parallelism is known for vllm only"
        )


def _rule(engine: Engine) -> GroupRule:
    """Versions as sampled: groups from 0.9.1, padded groups from 0.12, ratio 1.5 from 0.20.2."""
    if not engine.is_vllm:
        return GroupRule()
    ratio = 1.5 if engine.since(0, 20, 2) else 1.25 if engine.since(0, 12) else 0.0
    return GroupRule(engine.since(0, 9, 1), ratio)


def _batched(pool: Pool, run: Run, engine: Engine, notes: list[str]) -> int:
    if run.max_num_batched_tokens is not None:
        return require_count("max_num_batched_tokens", run.max_num_batched_tokens, MAX_BATCHED)
    small = any(gpu.num_bytes < 70 * GIB or gpu.name.startswith("a100") for gpu in pool.gpus)
    batched = 2048 if small else DEFAULT_BATCHED
    if engine.is_vllm:
        notes.append(f"max_num_batched_tokens {batched} is assumed")
    return batched


def _in_flight(engine: Engine, parallel: Parallel, run: Run, batched: int) -> int:
    """Tokens scheduled and not yet settled: from 0.28 on one step for each that may be under way."""
    if engine.is_vllm and engine.since(0, 28):
        return batched * (parallel.pp + 1 if run.async_scheduling else parallel.pp)
    return batched


def _state_blocks(engine: Engine, run: Run, notes: list[str], *, has_state: bool) -> int:
    """Blocks of states a sequence keeps: one more for prefix caching, which is the default from 0.28 on."""
    if not has_state:
        return 1
    caching = engine.since(0, 28) if run.prefix_caching is None else run.prefix_caching
    notes.append(
        "a sequence keeps "
        + ("two state blocks per group: prefix caching" if caching else "one state block per group")
        + (f", and {run.speculative_tokens} for speculation" if run.speculative_tokens else "")
    )
    return (2 if caching else 1) + run.speculative_tokens


def _ranks(geometry: Geometry, engine: Engine, pool: Pool, batched: int) -> tuple[RankLedger, ...]:
    given = (pool.num_blocks is not None) + bool(pool.kv_bytes) + bool(pool.gpus)
    if given != 1:
        how = "give one of --num-blocks, --kv-bytes and --gpu"
        raise InvalidArgument(
            f"where the blocks come from is {'given twice' if given else 'missing'}: {how}"
        )
    _check_unused(pool)
    if pool.num_blocks is not None:
        require_count("num_blocks", pool.num_blocks, MAX_BLOCKS)
        return tuple(
            RankLedger(
                rank.stage,
                None,
                pool.num_blocks * rank.kv_bytes_per_block,
                pool.num_blocks if rank.kv_bytes_per_block else None,
            )
            for rank in geometry.ranks
        )
    if pool.kv_bytes:
        for size in pool.kv_bytes:
            require_count("kv_bytes", size, MAX_BYTES)
        return tuple(
            _rank(geometry, stage, tp_rank, size)
            for stage, tp_rank, size in _spread("kv_bytes", pool.kv_bytes, geometry.parallel)
        )
    ranks = []
    for stage, tp_rank, gpu in _spread("gpu", pool.gpus, geometry.parallel):
        memory = rank_memory(
            geometry,
            stage,
            engine,
            gpu,
            utilization=pool.utilization,
            weights_bytes=pool.weights_bytes,
            non_kv_bytes=pool.non_kv_bytes,
            batched_tokens=batched,
        )
        rank = _rank(geometry, stage, tp_rank, memory.kv_bytes)
        ranks.append(RankLedger(stage, tp_rank, rank.kv_bytes, rank.num_blocks, memory))
    return tuple(ranks)


def _check_unused(pool: Pool) -> None:
    if pool.gpus:
        for name in ("weights_bytes", "non_kv_bytes"):
            size = getattr(pool, name)
            if size is not None:
                require_count(name, size, MAX_BYTES, 0)
        return
    for name, called in (
        ("utilization", "memory_utilization"),
        ("weights_bytes", "weights"),
        ("non_kv_bytes", "non_kv"),
    ):
        if getattr(pool, name) is not None:
            raise InvalidArgument(
                f"{called} = {getattr(pool, name)}: only a plan from --gpu uses it"
            )


def _rank(geometry: Geometry, stage: int, tp_rank: int | None, size: int) -> RankLedger:
    per_block = geometry.ranks[stage].kv_bytes_per_block
    blocks = size // per_block if per_block else None
    if blocks == 0:
        raise InvalidArgument(
            f"{size} bytes of KV cache on stage {stage}: less than one block of {per_block} bytes"
        )
    return RankLedger(stage, tp_rank, size, blocks)


def _spread(name: str, values: Sequence[T], parallel: Parallel) -> list[tuple[int, int | None, T]]:
    """Values for all ranks, for each stage, or for each rank (stage by stage), as (stage, rank, value)."""
    if len(values) == 1:
        return [(stage, None, values[0]) for stage in range(parallel.pp)]
    if len(values) == parallel.pp:
        return [(stage, None, value) for stage, value in enumerate(values)]
    if len(values) == parallel.pp * parallel.tp:
        return [(*divmod(rank, parallel.tp), value) for rank, value in enumerate(values)]
    wanted = sorted({1, parallel.pp, parallel.pp * parallel.tp})
    raise InvalidArgument(
        f"{name}: {len(values)} values for {parallel.pp} stages of {parallel.tp} ranks; "
        f"give {' or '.join(map(str, wanted))}"
    )
