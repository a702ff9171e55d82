"""The one interface through which KV bytes are moved, written and read.

Every backend takes the same calls and gives the same results: ``cpu`` (torch and the Rust core),
``cuda`` (CuPy over the kernels in ``cuda/``), and in the tests ``emulated`` (those same kernels run
by the CPU).

Two kinds of arguments. **Ids that a planner made** (``src``, ``dst``, ``block_ids``) are host
arrays, are checked before anything is launched, and a refused call moves nothing. **Tables that
change every step** (``block_tables``, ``seq_lens``, ``slot_mapping``) are int32/int64 tensors on
the device: checked on the CPU always, on a GPU only with ``check_ids=True``, because looking at
them would make the host wait.

Work is ordered on one stream, the caller's current one; the swaps run on a stream of their own and
order themselves against it by events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvcatch.kernels.cache import KVCache
    from kvcatch.kernels.layout import KVLayout

    BlockIds = Sequence[int] | NDArray[np.integer[Any]]

__all__ = ["Backend", "DecodePlan", "Transfer"]

Tensor = Any
"""A tensor of the backend: torch, or for ``cuda`` anything that speaks DLPack."""


class Transfer(Protocol):
    """A swap under way.

    The blocks it reads must stay pinned and those it writes out of use until it is done.
    """

    def done(self) -> bool:
        """Whether all bytes have arrived; does not wait."""

    def wait(self) -> None:
        """Make the current stream wait for it; the host goes on."""

    def synchronise(self) -> None:
        """Make the host wait for it."""


class DecodePlan(Protocol):
    """How the tokens of a decode batch are shared among the processors; made once a step, used by every layer."""

    @property
    def num_seqs(self) -> int:
        """Sequences it was made for."""


@runtime_checkable
class Backend(Protocol):
    """Moves, writes and reads KV blocks on one device.

    All methods raise ``InvalidArgument`` or ``InvalidType`` (ids out of range, dtype, device, shape
    or stride that do not fit, head counts that do not divide) before any byte changes;
    ``OutOfMemory`` when an allocation fails; ``KernelError`` when a kernel cannot be built or
    launched, or when ``check_ids`` found a bad id on the device.
    """

    @property
    def name(self) -> str:
        """``cpu``, ``cuda`` or ``emulated``."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""

    # --- memory ---------------------------------------------------------------------------------

    def allocate(
        self, layout: KVLayout, num_blocks: int, head_scales: Tensor | None = None
    ) -> KVCache:
        """A zeroed pool on the device.

        ``head_scales`` [num_layers, 2, num_kv_heads] where ``layout.scale`` is ``head``.
        """

    def allocate_host(self, layout: KVLayout, num_blocks: int) -> KVCache:
        """A host pool to swap to: pinned where there is a device, block-major whatever ``layout.order`` is."""

    # --- whole blocks ---------------------------------------------------------------------------

    def move_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Copy block ``src[i]`` to ``dst[i]``, all layers, without hazards.

        Every ``dst`` differs and none is a ``src``. A ``src`` may feed several ``dst``
        (copy-on-write).
        """

    def assign_blocks(self, cache: KVCache, src: BlockIds, dst: BlockIds) -> None:
        """Simultaneous assignment ``new[dst[i]] = old[src[i]]``, without a scratch block.

        Every ``dst`` differs; chains, cycles and fan-out are allowed.
        """

    def gather_blocks(self, cache: KVCache, block_ids: BlockIds, out: KVCache) -> None:
        """Copy blocks ``block_ids`` into blocks ``0..n-1`` of the staging cache ``out``."""

    def scatter_blocks(self, staging: KVCache, cache: KVCache, block_ids: BlockIds) -> None:
        """Copy blocks ``0..n-1`` of ``staging`` into blocks ``block_ids`` of ``cache``."""

    def swap_out(self, cache: KVCache, host: KVCache, src: BlockIds, dst: BlockIds) -> Transfer:
        """Start copying blocks ``src`` of the device to blocks ``dst`` of the host pool."""

    def swap_in(self, host: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds) -> Transfer:
        """Start copying blocks ``src`` of the host pool to blocks ``dst`` of the device."""

    # --- tokens ---------------------------------------------------------------------------------

    def write_kv(
        self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens to their slots.

        ``key`` and ``value`` [tokens, num_kv_heads, head_dim], ``slot_mapping`` [tokens] int64. A
        slot is ``block_id * block_size + offset``; a negative one is padding and is skipped. An
        e4m3 cache is quantised on the way (``token``: one scale per token and head from its largest
        magnitude; ``head``: the cache's); a ``block``-scaled cache refuses, its blocks come from
        :meth:`quantise_blocks`.

        The dtype is the cache's; an e4m3 cache takes float32, float16 and bfloat16. A row's elements lie side by side;
        rows start at multiples of 16 bytes, as slices of a larger tensor may. Naming a slot twice leaves either token.

        An e4m3 code is made so on every backend, bit for bit. All in float32, to nearest, ties to even: ``amax`` is the
        largest magnitude of the elements that share a scale, NaN left out; ``scale = amax / 448``, or 1 where ``amax <
        2**-100``; ``code = e4m3(clamp(x * (1 / scale), -448, 448))``, NaN as 0x7F. An infinity makes its ``amax`` and
        ``scale`` infinite, and what shares that scale reads back as NaN.
        """

    def quantise_blocks(
        self, source: KVCache, cache: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert full blocks of a 16 or 32-bit pool into blocks of an e4m3 pool of any scale.

        The formula is that of :meth:`write_kv`. The two pools are apart in memory; their orders may differ.
        """

    def dequantise_blocks(
        self, cache: KVCache, target: KVCache, src: BlockIds, dst: BlockIds
    ) -> None:
        """Convert blocks of an e4m3 pool into blocks of a 16 or 32-bit pool: code times scale, rounded to even."""

    # --- attention ------------------------------------------------------------------------------

    def plan_decode(
        self, layout: KVLayout, seq_lens: BlockIds, num_q_heads: int, window: int | None = None
    ) -> DecodePlan:
        """Share the tokens of a batch among the processors.

        ``seq_lens`` on the host, in tokens, 0 for an empty row.
        """

    def decode_attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        plan: DecodePlan | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one new token per sequence over its blocks.

        ``query`` [seqs, num_q_heads, head_dim], ``block_tables`` [seqs, max_blocks] int32,
        ``seq_lens`` [seqs] int32 (tokens in the cache, the new one included); ``num_q_heads`` is
        1..16 times the kv heads. Logits are ``scale * q.k``, then ``soft_cap * tanh(logit /
        soft_cap)``, then ``+ slope[head] * (key position - query position)``. ``window`` keeps the
        last ``window`` tokens; table entries of blocks wholly before it are not read and may name
        anything. A sequence of length 0 gives zeros. Returns ``out`` [as query], which must not
        overlap what is read. ``scale`` lies within -2^60..2^60, ``soft_cap`` within 2^-60..2^60. A
        device may ask that rows of ``query`` start at multiples of 16 bytes, of ``out`` of 4.
        Without ``plan`` the lengths are read back to make one: give it where waiting matters.
        """

    def prefill_attention(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        query_starts: BlockIds,
        block_tables: Tensor,
        seq_lens: BlockIds,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the last tokens of each sequence over its blocks.

        A chunk of a prompt over its prefix.

        ``query`` [tokens, num_q_heads, head_dim]; rows ``query_starts[s]..query_starts[s+1]``
        (host, [seqs+1]) are the last tokens of sequence ``s``, whose keys and values are written
        already; ``seq_lens`` [seqs] (host) counts them. The rest is as in :meth:`decode_attention`.
        """

    def synchronise(self) -> None:
        """Wait for the current stream and raise what ``check_ids`` found."""
