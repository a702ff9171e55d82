"""The capacity ledger: how many blocks there are, what a request takes of them, how many fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kvcatch.geometry import Kind

if TYPE_CHECKING:
    from kvcatch.geometry import Geometry
    from kvcatch.ledger.engines import Engine
    from kvcatch.ledger.lengths import LengthDistribution
    from kvcatch.ledger.memory import Memory

__all__ = ["Binding", "Ledger", "RankLedger"]


@dataclass(frozen=True, slots=True)
class RankLedger:
    """The pool of one rank, or of all ranks of a stage where they are alike.

    Attributes:
        stage: Pipeline stage, from 0.
        tp_rank: Rank inside the stage; None for all of them.
        kv_bytes: Bytes of its KV cache; where the number of blocks was given, what they take.
        num_blocks: Blocks they make, null block included; None for a stage without a cache.
        memory: How ``kv_bytes`` came about; None where they were given.
    """

    stage: int
    tp_rank: int | None
    kv_bytes: int
    num_blocks: int | None
    memory: Memory | None = None

    @property
    def label(self) -> str:
        """How a person names it."""
        return f"stage {self.stage}" + ("" if self.tp_rank is None else f", rank {self.tp_rank}")


@dataclass(frozen=True, slots=True)
class Binding:
    """What sets the limit.

    Attributes:
        rank: The rank or stage with the fewest blocks.
        group: Index of the group that takes the most blocks of a longest request.
        blocks: How many that group takes.
    """

    rank: RankLedger
    group: int
    blocks: int


@dataclass(frozen=True)
class Ledger:
    """What fits into the KV cache of one replica of a model on an engine.

    Attributes:
        engine: The engine whose rules hold.
        geometry: The model on its ranks, in blocks.
        max_model_len: Longest request the engine accepts, in tokens.
        ranks: The pools; the engine uses as many blocks as the smallest has.
        lengths: How long requests are; None where nobody said.
        notes: What a reader has to know.
    """

    engine: Engine
    geometry: Geometry
    max_model_len: int
    ranks: tuple[RankLedger, ...]
    lengths: LengthDistribution | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the pool, null block included: the fewest of all ranks."""
        return min(rank.num_blocks for rank in self.ranks if rank.num_blocks is not None)

    @property
    def usable_blocks(self) -> int:
        """Blocks a request can get."""
        return self.num_blocks - self.engine.null_blocks

    @cached_property
    def blocks_per_request(self) -> int:
        """Blocks the engine counts for a request of ``max_model_len``."""
        return self.geometry.printed_blocks(self.max_model_len)

    @property
    def max_concurrency(self) -> float:
        """Requests of ``max_model_len`` the pool holds, as the engine prints it.

        vLLM counts the null block here. Before 0.9.1 it divided tokens by the length.
        """
        if self.engine.is_vllm and not self.engine.since(0, 9, 1):
            return self.num_blocks * self.geometry.block_size / self.max_model_len
        return self.num_blocks / self.blocks_per_request

    @cached_property
    def max_servable_length(self) -> int:
        """The longest request, up to ``max_model_len``, that really fits the usable blocks; 0 if none does."""
        return self.geometry.longest_in(self.usable_blocks, self.max_model_len)

    @cached_property
    def max_running(self) -> int:
        """Requests of ``max_model_len`` that are sure to fit at once, null block left out."""
        return self.usable_blocks // self.geometry.blocks_for(self.max_model_len)

    @property
    def holds_tokens_alike(self) -> bool:
        """Whether there is one group and it keeps every token, so that blocks times size is a capacity."""
        groups = self.geometry.groups
        return len(groups) == 1 and not groups[0].reach and groups[0].kind is not Kind.STATE

    @cached_property
    def max_tokens(self) -> int:
        """Tokens the usable blocks hold; for layers of unlike kinds: of requests as long as can be served."""
        if self.holds_tokens_alike:
            return self.usable_blocks * self.geometry.block_size * self.geometry.parallel.dcp
        length = self.max_servable_length
        return self.usable_blocks * length // self.geometry.blocks_for(length) if length else 0

    @cached_property
    def printed_tokens(self) -> int | None:
        """What vLLM logs as ``GPU KV cache size``, in tokens; None for other engines and V0.

        Up to 0.20.1 blocks // groups * smallest block size; from then on concurrency * max_model_len.
        """
        if not self.engine.is_vllm or self.engine.is_vllm_v0:
            return None
        if self.engine.since(0, 20, 2):
            return int(self.max_concurrency * self.max_model_len)
        groups = self.geometry.groups
        smallest = min(group.block_size for group in groups)
        return self.num_blocks // len(groups) * smallest * self.geometry.parallel.dcp

    @property
    def starts(self) -> bool | None:
        """Whether the engine's own startup check passes; None for engines that have none.

        vLLM wants room for one request of ``max_model_len``; 0.32 leaves the null block out of the room,
        older ones do not. From 0.15 to 0.20.1 it set the whole model's need against one stage's memory.
        """
        if not self.engine.is_vllm:
            return None
        if self.checks_whole_model:
            return self.needed_bytes_whole <= self.smallest_bytes
        room = self.usable_blocks if self.engine.since(0, 32) else self.num_blocks
        return self.blocks_per_request <= room

    @property
    def checks_whole_model(self) -> bool:
        """Whether this engine sets the whole model's need against one stage's memory when it starts."""
        return (
            self.engine.is_vllm
            and self.engine.since(0, 15)
            and not self.engine.since(0, 20, 2)
            and self.geometry.parallel.pp > 1
        )

    @property
    def smallest_bytes(self) -> int:
        """Bytes of the smallest KV cache of all ranks."""
        return min(rank.kv_bytes for rank in self.ranks)

    @property
    def needed_bytes_whole(self) -> int:
        """Bytes of a request of ``max_model_len`` in all stages together, one rank of each."""
        everywhere = range(self.geometry.model.num_layers)
        per_block = max(group.bytes_per_block(everywhere) for group in self.geometry.groups)
        return per_block * self.blocks_per_request

    @cached_property
    def binds(self) -> Binding:
        """The rank with the fewest blocks and the group that takes the most of them."""
        rank = min(
            (rank for rank in self.ranks if rank.num_blocks is not None),
            key=lambda rank: rank.num_blocks or 0,
        )
        by_group = self.geometry.blocks_by_group(self.max_model_len)
        group = max(range(len(by_group)), key=by_group.__getitem__)
        return Binding(rank, group, by_group[group])

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks a request of ``num_tokens`` ever holds, all groups together."""
        return self.geometry.blocks_for(num_tokens)

    def running_at(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` that fit the usable blocks at once."""
        return self.usable_blocks // self.geometry.blocks_for(num_tokens)

    @cached_property
    def length_figures(self) -> dict[str, float | int] | None:
        """Concurrency by the given lengths: usable blocks over the mean blocks of a request at its full length.

        Requests over ``max_model_len`` are refused at the door and left out; their share is stated.
        """
        if self.lengths is None:
            return None
        served = self.lengths.up_to(self.max_model_len)
        figures: dict[str, float | int] = {
            "share_over_max_model_len": self.lengths.share_over(self.max_model_len),
            "share_over_max_servable_length": self.lengths.share_over(self.max_servable_length),
        }
        if served is None:
            return figures
        blocks = served.mean(self.geometry.blocks_for)
        return {
            "mean_length": served.mean(),
            "p50": served.percentile(50),
            "p99": served.percentile(99),
            "mean_blocks_per_request": blocks,
            "concurrency": self.usable_blocks / blocks,
            **figures,
        }
