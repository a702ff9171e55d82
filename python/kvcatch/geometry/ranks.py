"""A model on its ranks: bytes per token and block of each pipeline stage, blocks of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.geometry.groups import Demand, Group, GroupRule, form_groups
from kvcatch.geometry.layers import Attention, Kind, State
from kvcatch.geometry.parallel import require_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.geometry.dtypes import KvDtype
    from kvcatch.geometry.model import Model
    from kvcatch.geometry.parallel import Parallel

__all__ = ["Geometry", "RankGeometry", "longest"]

MAX_LENGTH = 2**40
"""Longest sequence anything here is asked about, in tokens."""


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """One rank of one pipeline stage; all tensor-parallel ranks of a stage are alike.

    Attributes:
        stage: Pipeline stage, from 0.
        layers: Its decoder layers.
        kv_bytes_per_token: Bytes one token writes into its layers, windows included, states not.
        kv_bytes_per_token_kept: Of these, in layers that keep every token: the slope at great length.
        kv_bytes_per_block: Bytes one block id costs on this rank.
        state_bytes_per_sequence: Bytes of one copy of a sequence's states.
        replicas: Tensor-parallel ranks that hold the same bytes in every layer of this stage.
    """

    stage: int
    layers: range
    kv_bytes_per_token: int
    kv_bytes_per_token_kept: int
    kv_bytes_per_block: int
    state_bytes_per_sequence: int
    replicas: int


@dataclass(frozen=True)
class Geometry:
    """A model, spread over ranks, in blocks.

    Attributes:
        model: The model.
        parallel: How it is spread.
        kv_dtype: Type of K and V.
        asked_block_size: Tokens per block as asked for; ``block_size`` says what became of it.
        rule: How groups are formed.
        demand: How the engine runs.
        speculative_tokens: Draft tokens per step.
    """

    model: Model
    parallel: Parallel
    kv_dtype: KvDtype
    asked_block_size: int
    rule: GroupRule
    demand: Demand
    speculative_tokens: int = 0

    def __post_init__(self) -> None:
        require_count("block_size", self.asked_block_size, 2**20)
        self.model.check(self.parallel)
        _ = self.ranks

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The KV cache groups of the whole model, pages of one rank."""
        return form_groups(
            self.model,
            self.parallel.tp,
            self.kv_dtype,
            self.asked_block_size,
            self.rule,
            self.speculative_tokens,
        )

    @cached_property
    def ranks(self) -> tuple[RankGeometry, ...]:
        """One rank of each pipeline stage."""
        tp = self.parallel.tp
        ranks = []
        for number, stage in enumerate(self.parallel.stages(self.model.num_layers)):
            caches = [cache for layer in stage for cache in self.model.layers[layer]]
            attention = [cache for cache in caches if isinstance(cache, Attention)]
            per_token = {
                stays: sum(
                    cache.token_bytes(tp, self.kv_dtype)
                    for cache in attention
                    if cache.stays or not stays
                )
                for stays in (False, True)
            }
            ranks.append(
                RankGeometry(
                    number,
                    stage,
                    per_token[False],
                    per_token[True],
                    max(group.bytes_per_block(stage) for group in self.groups),
                    sum(
                        cache.rank_bytes(tp, self.speculative_tokens)
                        for cache in caches
                        if isinstance(cache, State)
                    ),
                    reduce(gcd, (cache.replicas(tp) // self.parallel.dcp for cache in attention), 0)
                    or 1,
                )
            )
        if not any(rank.kv_bytes_per_block for rank in ranks):
            raise InvalidArgument(f"{self.model.name}: no stage holds any cache")
        return tuple(ranks)

    @cached_property
    def unlike_groups(self) -> tuple[tuple[Group, int], ...]:
        """A group of each sort and how many there are: groups of one sort take equally many blocks."""
        counts: dict[tuple[Kind, int, int], list[Group]] = {}
        for group in self.groups:
            counts.setdefault((group.kind, group.reach, group.block_size), []).append(group)
        return tuple((groups[0], len(groups)) for groups in counts.values())

    @property
    def block_size(self) -> int:
        """Tokens per block of the attention groups after states were fitted in; the smallest of them."""
        sizes = [group.block_size for group in self.groups if group.kind is not Kind.STATE]
        return min(sizes, default=self.asked_block_size)

    def blocks_by_group(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks a request of ``num_tokens`` ever holds, in each group."""
        require_count("num_tokens", num_tokens, MAX_LENGTH)
        return tuple(group.blocks_for(num_tokens, self.demand) for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks a request of ``num_tokens`` ever holds, all groups together."""
        require_count("num_tokens", num_tokens, MAX_LENGTH)
        return sum(
            group.blocks_for(num_tokens, self.demand) * count for group, count in self.unlike_groups
        )

    def printed_blocks(self, num_tokens: int) -> int:
        """Blocks the engine counts for a request of ``num_tokens`` when it starts."""
        require_count("num_tokens", num_tokens, MAX_LENGTH)
        return sum(group.printed_blocks(num_tokens, self.demand) for group in self.groups)

    def bytes_for(self, num_tokens: int, stage: int = 0) -> int:
        """Bytes of the pool a request of ``num_tokens`` takes on one rank of a stage."""
        return self.blocks_for(num_tokens) * self.ranks[stage].kv_bytes_per_block

    def longest_in(self, num_blocks: int, limit: int = MAX_LENGTH) -> int:
        """The longest request, up to ``limit`` tokens, that ``num_blocks`` blocks hold; 0 if none fits."""
        return longest(lambda tokens: self.blocks_for(tokens) <= num_blocks, limit)


def longest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest length of 1 to ``limit`` that fits, where all shorter ones fit too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
