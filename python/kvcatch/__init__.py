"""kvcatch: a paged KV-cache block pool for LLM serving, with a Rust core.

.. code-block:: python

    import numpy as np, kvcatch

    pool = kvcatch.BlockPool(num_blocks=60_000, block_size=16, placement="bitmap")
    seq = pool.create(tokens, owner="req-17", tags={"tenant": "acme"})  # shares cached prefix blocks
    seq.hit_tokens                            # tokens that need no prefill
    pool.commit(seq)                          # written: others may find them
    pool.append([seq], 1)                     # room for a token, whole batch
    pool.block_tables([seq], out=tables)
    pool.slot_mapping([seq], out=slots)
    pool.commit([seq], new_tokens)
    pool.free(seq)

``BlockPool`` is the one object most users need; ``FreeBlocks`` is the same placement and eviction
for an engine that keeps its own reference counts and hashes. ``kvcatch.kernels`` moves and reads the
bytes, ``kvcatch.engine`` serves a model with both. Every refusal is a ``KvcatchError`` with its
numbers; ``OutOfBlocks`` says what was needed and what was there.

From a shell: ``kvcatch --help``.
"""

import warnings as _warnings

from kvcatch._core import (
    BlockPool,
    CompactionPlan,
    FreeBlocks,
    MissReport,
    Pin,
    Prefix,
    Sequence,
    __version__,
    build_profile,
    evictions,
    placements,
)
from kvcatch.errors import (
    CorruptPool,
    DoubleFree,
    InvalidArgument,
    InvalidType,
    KernelError,
    KvcatchError,
    MissingExtra,
    OutOfBlocks,
    OutOfMemory,
    SnapshotError,
    StaleHandle,
    StalePlan,
    TraceError,
)

__all__ = [
    "BlockPool",
    "CompactionPlan",
    "CorruptPool",
    "DoubleFree",
    "FreeBlocks",
    "InvalidArgument",
    "InvalidType",
    "KernelError",
    "KvcatchError",
    "MissReport",
    "MissingExtra",
    "OutOfBlocks",
    "OutOfMemory",
    "Pin",
    "Prefix",
    "Sequence",
    "SnapshotError",
    "StaleHandle",
    "StalePlan",
    "TraceError",
    "__version__",
    "build_profile",
    "evictions",
    "placements",
]

if build_profile == "debug":
    _warnings.warn(
        "kvcatch._core is a debug build and slow; build it with `maturin develop --release`",
        RuntimeWarning,
        stacklevel=2,
    )
