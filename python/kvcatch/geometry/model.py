"""A model as the ledger needs it: its layers' caches, its heads, its length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.geometry.dtypes import WEIGHT_BYTES
from kvcatch.geometry.layers import Attention, Kind, LayerCache, State
from kvcatch.geometry.parallel import require_count

if TYPE_CHECKING:
    from kvcatch.geometry.dtypes import KvDtype
    from kvcatch.geometry.parallel import Parallel
    from kvcatch.geometry.weights import Weights

__all__ = ["Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """The geometry of one model, independent of engine and ranks.

    Attributes:
        name: File or built-in name it came from.
        architecture: As the config names it.
        dtype: Type of its weights and activations, a key of WEIGHT_BYTES.
        attention_heads: Query heads of an attention layer; tensor parallelism has to divide them.
        max_model_len: Longest sequence it was made for, in tokens; 0 where the config states none.
        layers: The caches of each decoder layer, in order.
        weights: What its weights weigh; None where kvcatch cannot count them.
        notes: What a reader of the plan has to know.
    """

    name: str
    architecture: str
    dtype: str
    attention_heads: int
    max_model_len: int
    layers: tuple[tuple[LayerCache, ...], ...]
    weights: Weights | None = None
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def uniform(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        attention_heads: int | None = None,
        dtype: str = "bfloat16",
        max_model_len: int = 0,
        sliding_window: int = 0,
        name: str = "model",
    ) -> Model:
        """A model whose layers are all alike, from its numbers alone.

        Raises:
            InvalidArgument: a number below 1, or an unknown type.
        """
        for what, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            require_count(what, value, 2**20)
        if dtype not in WEIGHT_BYTES:
            raise InvalidArgument(
                f"dtype = {dtype!r}: unknown; known are {', '.join(WEIGHT_BYTES)}"
            )
        kind = Kind.SLIDING_WINDOW if sliding_window else Kind.FULL
        layer = Attention(kind, kv_heads, head_dim, head_dim, reach=sliding_window)
        return cls(
            name, "uniform", dtype, attention_heads or kv_heads, max_model_len, ((layer,),) * layers
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers, with and without a cache."""
        return len(self.layers)

    def caches(self) -> list[LayerCache]:
        """Every cache of every layer, in order."""
        return [cache for layer in self.layers for cache in layer]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of cache it has, in the order they appear."""
        return tuple(dict.fromkeys(cache.kind for cache in self.caches()))

    @property
    def has_state(self) -> bool:
        """Whether some layers keep a state instead of tokens."""
        return any(isinstance(cache, State) for cache in self.caches())

    @property
    def is_mla(self) -> bool:
        """Whether its attention keeps latent rows."""
        return Kind.MLA in self.kinds

    def bytes_per_token(self, dtype: KvDtype, tp: int = 1) -> int:
        """Bytes one token writes into all layers on one rank; states do not count, windows do.

        Raises:
            InvalidArgument: ``tp`` does not fit the KV heads, or the type not the layers.
        """
        return sum(
            cache.token_bytes(tp, dtype) for cache in self.caches() if isinstance(cache, Attention)
        )

    def check(self, parallel: Parallel) -> None:
        """Refuse what no engine can run.

        Raises:
            InvalidArgument: heads that do not divide, or decode context parallelism where it cannot be.
        """
        tp, dcp = parallel.tp, parallel.dcp
        if self.attention_heads % tp:
            raise InvalidArgument(
                f"tp = {tp}: does not divide the {self.attention_heads} attention heads of {self.name}"
            )
        for cache in self.caches():
            if isinstance(cache, State):
                cache.rank_bytes(tp)
                continue
            replicas = cache.replicas(tp)
            if dcp == 1:
                continue
            if not cache.stays:
                raise InvalidArgument(
                    f"dcp = {dcp}: the {cache.kind} layers of {self.name} cannot share out their tokens"
                )
            if replicas % dcp:
                raise InvalidArgument(
                    f"dcp = {dcp}: only ranks with the same KV heads can share out tokens; tp = {tp} "
                    f"gives {replicas} such rank{'s' if replicas > 1 else ''}"
                )
        parallel.stages(self.num_layers)
