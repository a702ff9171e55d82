"""What one forward pass is told: which tokens, where they stand, where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.kernels.backend import BlockIds, DecodePlan

__all__ = ["DecodePart", "PrefillPart", "Step"]

Tensor = Any
"""A torch tensor on the model's device."""


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences that get one token each; their tokens are the first rows of the step.

    Attributes:
        block_tables: [seqs, max_blocks] int32.
        seq_lens: [seqs] int32, tokens in the cache, the new one included.
        plan: What ``Backend.plan_decode`` made of the lengths; None lets each layer make one.
    """

    block_tables: Tensor
    seq_lens: Tensor
    plan: DecodePlan | None = None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The sequences that get a chunk of their prompt; their tokens are the rows behind the decode's.

    Attributes:
        query_starts: [seqs + 1] on the host, rows counted from the first prefill row.
        block_tables: [seqs, max_blocks] int32.
        seq_lens: [seqs] on the host, tokens in the cache, the chunk included.
    """

    query_starts: BlockIds
    block_tables: Tensor
    seq_lens: BlockIds


@dataclass(frozen=True, slots=True)
class Step:
    """One flat batch: decode rows first, then the prefill chunks one after the other.

    Attributes:
        input_ids: [tokens] int64.
        positions: [tokens] int64, from 0 in each sequence.
        slot_mapping: [tokens] int64, ``block_id * block_size + offset``.
        logit_rows: [rows] int64, the rows of the batch whose logits are wanted; may be empty.
        decode: None where no sequence decodes.
        prefill: None where none is prefilled.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    decode: DecodePart | None = None
    prefill: PrefillPart | None = None
