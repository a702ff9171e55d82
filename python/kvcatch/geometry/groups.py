"""KV cache groups: layers that share one block table, formed as vLLM forms them.

The rule is that of vLLM 0.32.0 (``get_kv_cache_groups`` with a layer-outermost layout, the default of its
CUDA backends), with the two numbers that differed in older versions in ``GroupRule``. All groups draw
block ids from one pool, so one id costs the same bytes whichever group takes it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.geometry.layers import Attention, Kind, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcatch.geometry.dtypes import KvDtype
    from kvcatch.geometry.model import Model

__all__ = ["Demand", "Group", "GroupRule", "Page", "aligned_block_size", "form_groups"]

KERNEL_BLOCK = 16
"""Attention kernels take multiples of this many tokens (vLLM's FlashAttention, Triton, Flex)."""

MLA_BLOCK = 128
"""With MLA beside states vLLM keeps a block a multiple of this many tokens."""


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, exactly."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What of the grouping depends on the engine's version.

    Attributes:
        hybrid: Layers of unlike kinds get groups of their own; otherwise all are kept as if full.
        padding_ratio: Where the largest kind has fewer than this many times the layers of the smallest,
            the smaller is padded up to it; 0 never pads so.
    """

    hybrid: bool = True
    padding_ratio: float = 1.5


@dataclass(frozen=True, slots=True)
class Demand:
    """How the engine runs, as far as the blocks of a request depend on it.

    Attributes:
        in_flight_tokens: Most tokens scheduled and not yet settled; blocks behind a window are freed later.
        dcp: Ranks that share out a sequence's tokens.
        state_blocks: Blocks a sequence keeps in a group of states.
    """

    in_flight_tokens: int
    dcp: int = 1
    state_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Page:
    """What one layer's cache takes of one block on one rank.

    Attributes:
        kind: Kind of the layer.
        reach: Tokens of its window or chunk; 0 where all stay.
        block_size: Tokens per block; of no meaning to a state.
        token_bytes: Bytes of one token; 0 for a state.
        num_bytes: Bytes of the page, padding included.
        shape: KV heads per rank, values of a key and of a value: pages of unlike shapes share no table.
        padding: Bytes of ``num_bytes`` that hold nothing.
    """

    kind: Kind
    reach: int
    block_size: int
    token_bytes: int
    num_bytes: int
    shape: tuple[int, int, int] = (0, 0, 0)
    padding: int = 0

    def padded_to(self, num_bytes: int) -> Page:
        """The same page in a larger one."""
        more = num_bytes - self.num_bytes
        return replace(self, num_bytes=num_bytes, padding=self.padding + more)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table.

    Attributes:
        kind: Kind of all of them (FULL where latent and full layers mix).
        reach: Tokens of the window or chunk; 0 where all stay.
        block_size: Tokens per block of this group.
        layers: The decoder layer of each cache.
        pages: The page of each cache, in the same order.
    """

    kind: Kind
    reach: int
    block_size: int
    layers: tuple[int, ...]
    pages: tuple[Page, ...]

    def bytes_per_block(self, stage: range) -> int:
        """Bytes of one block in the layers of one pipeline stage."""
        return sum(
            page.num_bytes
            for layer, page in zip(self.layers, self.pages, strict=True)
            if layer in stage
        )

    def printed_blocks(self, num_tokens: int, demand: Demand) -> int:
        """Blocks vLLM counts for a request of ``num_tokens`` in its startup check and its printed concurrency."""
        if self.kind is Kind.STATE:
            return demand.state_blocks
        if self.kind is Kind.SLIDING_WINDOW:
            held = min(self.reach - 1 + demand.in_flight_tokens, num_tokens)
            # A window seldom starts where a block does: one more.
            return ceil_div(held, self.block_size) + 1
        if self.kind is Kind.CHUNKED_LOCAL:
            held = min(self.reach + demand.in_flight_tokens, num_tokens)
            return ceil_div(held, self.block_size)
        return ceil_div(ceil_div(num_tokens, demand.dcp), self.block_size)

    def blocks_for(self, num_tokens: int, demand: Demand) -> int:
        """Most blocks a request of ``num_tokens`` ever holds: never more than its tokens fill."""
        printed = self.printed_blocks(num_tokens, demand)
        if self.kind is Kind.STATE:
            return printed
        return min(printed, ceil_div(num_tokens, self.block_size))

    def numbers(self, num_tokens: int, demand: Demand) -> str:
        """``formula`` with its inputs filled in."""
        size, reach, flying = self.block_size, self.reach, demand.in_flight_tokens
        if self.kind is Kind.STATE:
            return str(demand.state_blocks)
        if self.kind is Kind.SLIDING_WINDOW:
            return f"ceil(min({reach} - 1 + {flying}, {num_tokens}) / {size}) + 1"
        if self.kind is Kind.CHUNKED_LOCAL:
            return f"ceil(min({reach} + {flying}, {num_tokens}) / {size})"
        return f"ceil(ceil({num_tokens} / {demand.dcp}) / {size})"

    def formula(self) -> str:
        """How ``printed_blocks`` counts, in words of its inputs."""
        if self.kind is Kind.STATE:
            return "state blocks per sequence"
        if self.kind is Kind.SLIDING_WINDOW:
            return "ceil(min(window - 1 + in-flight tokens, length) / block size) + 1"
        if self.kind is Kind.CHUNKED_LOCAL:
            return "ceil(min(chunk + in-flight tokens, length) / block size)"
        return "ceil(ceil(length / dcp) / block size)"


def aligned_block_size(model: Model, tp: int, dtype: KvDtype, block_size: int, states: int) -> int:
    """The block size after vLLM made an attention page at least as large as a state.

    Args:
        model: The model.
        tp: Tensor-parallel ranks.
        dtype: Type of K and V.
        block_size: The size asked for, in tokens.
        states: Bytes of the largest state on a rank; 0 where there is none.
    """
    per_token = _attention_token_bytes(model, tp, dtype)
    if not states or not per_token:
        return block_size
    unit = max(KERNEL_BLOCK, block_size, MLA_BLOCK if model.is_mla else 0)
    needed = unit * ceil_div(states, unit * per_token)
    needed = KERNEL_BLOCK * ceil_div(needed, KERNEL_BLOCK)
    return max(block_size, needed)


def _attention_token_bytes(model: Model, tp: int, dtype: KvDtype) -> int:
    return max(
        (c.token_bytes(tp, dtype) for c in model.caches() if isinstance(c, Attention)), default=0
    )


def form_groups(
    model: Model,
    tp: int,
    dtype: KvDtype,
    block_size: int,
    rule: GroupRule,
    speculative_tokens: int = 0,
) -> tuple[Group, ...]:
    """Split the layers' caches into groups.

    Args:
        model: The model.
        tp: Tensor-parallel ranks; pages are those of one rank.
        dtype: Type of K and V.
        block_size: Tokens per block as asked for; states may enlarge it.
        rule: The engine's version of the rule.
        speculative_tokens: Draft tokens per step; they lengthen states.

    Raises:
        InvalidArgument: pages that cannot be made equal, or states in an engine without groups.
    """
    states = max(
        (c.rank_bytes(tp, speculative_tokens) for c in model.caches() if isinstance(c, State)),
        default=0,
    )
    block_size = aligned_block_size(model, tp, dtype, block_size, states)
    pages: list[tuple[int, Page]] = []
    for index, layer in enumerate(model.layers):
        for cache in layer:
            if isinstance(cache, State):
                size = cache.rank_bytes(tp, speculative_tokens)
                pages.append((index, Page(Kind.STATE, 0, block_size, 0, size)))
            else:
                size = cache.token_bytes(tp, dtype)
                shape = (cache.kv_heads_per_rank(tp), cache.head_dim, cache.head_dim_v)
                page = Page(cache.kind, cache.reach, block_size, size, size * block_size, shape)
                pages.append((index, page))
    if not pages:
        raise InvalidArgument(f"{model.name}: no layer has a cache, so there is nothing to plan")
    if not rule.hybrid and not _alike(pages):
        if states:
            raise InvalidArgument(f"{model.name}: this engine version has no pool for states")
        pages = [(index, replace(page, kind=Kind.FULL, reach=0)) for index, page in pages]
    if _alike(pages):
        return (_group(pages),)
    if states and _attention_token_bytes(model, tp, dtype):
        # vLLM pads the state to the attention page before it forms groups.
        pages = [
            (i, p if p.kind is not Kind.STATE else p.padded_to(_largest(pages))) for i, p in pages
        ]
    pages = _equal_pages(model, pages)
    buckets: dict[Page, list[tuple[int, Page]]] = defaultdict(list)
    for index, page in pages:
        buckets[page].append((index, page))
    fewest = min(map(len, buckets.values()))
    most = max(map(len, buckets.values()))
    size = most if most < fewest * rule.padding_ratio else fewest
    groups = []
    for members in buckets.values():
        count = ceil_div(len(members), size)
        # Every n-th layer, so that pipeline stages get an even share of each group.
        groups += [_group(members[first::count]) for first in range(count)]
    return tuple(groups)


_STAYS = (Kind.FULL, Kind.MLA, Kind.INDEXER)


def _alike(pages: Sequence[tuple[int, Page]]) -> bool:
    """Whether all layers need the same number of tokens' slots, so that one block table does."""
    first = pages[0][1]
    if first.kind in _STAYS:
        return all(page.kind in _STAYS for _, page in pages)
    same = all(page.kind is first.kind and page.reach == first.reach for _, page in pages)
    return same and (
        first.kind is not Kind.STATE or len({page.num_bytes for _, page in pages}) == 1
    )


def _largest(pages: Iterable[tuple[int, Page]]) -> int:
    return max(page.num_bytes for _, page in pages)


def _equal_pages(model: Model, pages: list[tuple[int, Page]]) -> list[tuple[int, Page]]:
    """All pages as large as the largest: by more tokens per block, or padded where that does not divide."""
    largest = _largest(pages)
    equal = []
    for index, page in pages:
        if page.num_bytes == largest:
            equal.append((index, page))
        elif page.kind is not Kind.STATE and largest % page.num_bytes == 0:
            tokens = page.block_size * (largest // page.num_bytes)
            equal.append((index, replace(page, block_size=tokens, num_bytes=largest)))
        elif page.kind in (Kind.MLA, Kind.INDEXER):
            raise InvalidArgument(
                f"{model.name}: pages of {page.num_bytes} and {largest} bytes cannot share a pool"
            )
        else:
            equal.append((index, page.padded_to(largest)))
    return equal


def _group(members: Sequence[tuple[int, Page]]) -> Group:
    pages = tuple(page for _, page in members)
    kinds = {page.kind for page in pages}
    kind = (
        pages[0].kind
        if len(kinds) == 1
        else (Kind.MLA if kinds <= {Kind.MLA, Kind.INDEXER} else Kind.FULL)
    )
    return Group(kind, pages[0].reach, pages[0].block_size, tuple(i for i, _ in members), pages)
