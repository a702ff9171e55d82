"""What one layer keeps of a sequence: attention of several reaches, latent (MLA) rows, states.

A layer is described as the model defines it; ``page_bytes`` and ``state_bytes`` say what one rank of a
tensor-parallel group stores of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.geometry.dtypes import DS_MLA_BYTES

if TYPE_CHECKING:
    from kvcatch.geometry.dtypes import KvDtype

__all__ = ["Attention", "Kind", "LayerCache", "State"]


class Kind(StrEnum):
    """How far back a layer's cache reaches, and so which blocks a request keeps."""

    FULL = "full"
    """Every token stays."""
    MLA = "mla"
    """One latent row per token, shared by all heads; every token stays."""
    INDEXER = "indexer"
    """The index keys of sparse MLA (DeepSeek V3.2, GLM): one row per token beside the latent one."""
    SLIDING_WINDOW = "sliding_window"
    """The last ``reach`` tokens."""
    CHUNKED_LOCAL = "chunked_local"
    """The tokens of the current chunk of ``reach``."""
    STATE = "state"
    """A state of fixed size per sequence (Mamba, gated delta net, KDA)."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The cache of one attention layer, whole model.

    Attributes:
        kind: FULL, MLA, INDEXER, SLIDING_WINDOW or CHUNKED_LOCAL.
        kv_heads: Key/value heads; 1 for MLA and the indexer.
        head_dim: Values of a key per head; for MLA the latent row: kv_lora_rank + qk_rope_head_dim.
        head_dim_v: Values of a value per head; 0 for MLA and the indexer, which keep one row.
        reach: Tokens of the window or chunk; 0 where every token stays.
        row_bytes: Bytes per token that do not follow the KV type (the indexer's fp8 row and its scales);
            0 elsewhere.
    """

    kind: Kind
    kv_heads: int
    head_dim: int
    head_dim_v: int
    reach: int = 0
    row_bytes: int = 0

    @property
    def is_latent(self) -> bool:
        """Whether all heads share one row, so that no tensor-parallel rank can hold a part of it."""
        return self.kind in (Kind.MLA, Kind.INDEXER)

    @property
    def stays(self) -> bool:
        """Whether every token of a sequence stays in the cache."""
        return self.kind in (Kind.FULL, Kind.MLA, Kind.INDEXER)

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on one of ``tp`` ranks: each rank has at least one, so few heads are replicated.

        Raises:
            InvalidArgument: the heads can be neither split nor replicated evenly.
        """
        if self.is_latent or self.kv_heads == 1:
            return 1
        if max(tp, self.kv_heads) % min(tp, self.kv_heads):
            raise InvalidArgument(
                f"tp = {tp}: neither divides {self.kv_heads} KV heads nor is a multiple of them"
            )
        return max(1, self.kv_heads // tp)

    def replicas(self, tp: int) -> int:
        """How many of ``tp`` ranks hold the same bytes."""
        return tp * self.kv_heads_per_rank(tp) // self.kv_heads

    def token_bytes(self, tp: int, dtype: KvDtype) -> int:
        """Bytes one token takes in this layer on one rank.

        Source: vLLM ``AttentionSpec``: heads * (d_k + d_v) * bytes; MLA has d_v = 0; the per-token-head
        types add one float32 to K and to V.

        Raises:
            InvalidArgument: the type is not defined for this kind of layer.
        """
        if self.row_bytes:
            return self.row_bytes
        if dtype.is_packed_mla:
            if self.kind is not Kind.MLA or self.head_dim != 576:
                raise InvalidArgument(
                    f"kv_dtype = '{dtype.name}': is a row of MLA with 512 + 64 values, "
                    f"not of a {self.kind} layer with {self.head_dim}"
                )
            return DS_MLA_BYTES
        if dtype.scale_bytes and self.kind is Kind.MLA:
            raise InvalidArgument(
                f"kv_dtype = '{dtype.name}': scales per head are not defined for MLA, which keeps one row"
            )
        per_head = (self.head_dim + self.head_dim_v) * dtype.element_bytes + 2 * dtype.scale_bytes
        return self.kv_heads_per_rank(tp) * per_head


@dataclass(frozen=True, slots=True)
class State:
    """The state of one recurrent layer, whole model: a convolution's tail and a recurrent state.

    Attributes:
        recipe: ``mamba1``, ``mamba2``, ``gated_delta_net`` or ``kda``.
        conv_dim: Channels of the convolution without Mamba-2's groups.
        conv_kernel: Its width; ``conv_kernel - 1`` past inputs are kept.
        heads: What tensor parallelism splits (Mamba-1: channels).
        head_values: Values of the recurrent state per head.
        conv_bytes: Bytes of a value of the convolution's tail.
        state_bytes_each: Bytes of a value of the recurrent state.
        groups: Mamba-2's groups (0 elsewhere).
        group_dim: Channels each group adds to the convolution, twice (B and C).
    """

    recipe: str
    conv_dim: int
    conv_kernel: int
    heads: int
    head_values: int
    conv_bytes: int
    state_bytes_each: int
    groups: int = 0
    group_dim: int = 0

    @property
    def kind(self) -> Kind:
        """Always STATE."""
        return Kind.STATE

    def rank_bytes(self, tp: int, speculative_tokens: int = 0) -> int:
        """Bytes of one sequence's state in this layer on one of ``tp`` ranks.

        Source: vLLM ``MambaStateShapeCalculator``. Mamba-2's groups are replicated until every rank has
        one; a speculative token lengthens the convolution's tail by one (not Mamba-1's).

        Raises:
            InvalidArgument: ``tp`` does not divide the heads or the channels.
        """
        groups = self.groups
        if groups and groups % tp:
            if tp < groups:
                raise InvalidArgument(
                    f"tp = {tp}: does not divide the {groups} groups of the state"
                )
            groups = tp
        channels = self.conv_dim + 2 * groups * self.group_dim
        for name, value in (("heads", self.heads), ("convolution channels", channels)):
            if value % tp:
                raise InvalidArgument(f"tp = {tp}: does not divide the {value} {name} of the state")
        tail = self.conv_kernel - 1 + (0 if self.recipe == "mamba1" else speculative_tokens)
        conv = channels // tp * tail * self.conv_bytes
        return conv + self.heads // tp * self.head_values * self.state_bytes_each


LayerCache = Attention | State
"""One cache of a layer; a layer has none (an MLP), one, or two (attention beside a state or an indexer)."""
