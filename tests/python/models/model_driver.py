"""A loop that drives a model as an engine does: paged KV in scattered blocks, chunked prefill, mixed batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcatch.models.step import DecodePart, PrefillPart, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcatch.kernels import KVDtype
    from kvcatch.models.llama import LlamaModel


@dataclass
class Run:
    """One sequence: tokens known, how many are in the cache, its blocks, and the logits of each new token."""

    tokens: list[int]
    num_prompt: int
    table: list[int]
    num_cached: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def generate(
    model: LlamaModel,
    backend: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int = 1 << 20,
    budget: int = 1 << 20,
    block_size: int = 16,
    kv_dtype: KVDtype = "float32",
    forced: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> list[Run]:
    """Greedy continuations.

    ``chunk``: most prompt tokens of a sequence in a step. ``budget``: most tokens of a step. ``forced``: what to go
    on with instead of the largest logit.
    """
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    needed = [-(-length // block_size) for length in lengths]
    rng = np.random.default_rng(seed)
    free = rng.permutation(sum(needed) + 3).tolist()
    cache = backend.allocate(
        model.config.kv_layout(block_size=block_size, dtype=kv_dtype), len(free)
    )
    runs = [
        Run(list(prompt), len(prompt), [free.pop() for _ in range(count)])
        for prompt, count in zip(prompts, needed, strict=True)
    ]
    while any(len(run.new_tokens) < num_tokens for run in runs):
        _step(model, backend, cache, runs, num_tokens, chunk, budget, forced)
    return runs


def _step(
    model: LlamaModel,
    backend: Any,
    cache: Any,
    runs: list[Run],
    num_tokens: int,
    chunk: int,
    budget: int,
    forced: Sequence[Sequence[int]] | None,
) -> None:
    live = [run for run in runs if len(run.new_tokens) < num_tokens]
    decoding = [run for run in live if run.num_cached >= run.num_prompt]
    left = budget - len(decoding)
    prefilling = []
    for run in live:
        count = min(chunk, run.num_prompt - run.num_cached, left)
        if count > 0:
            prefilling.append((run, count))
            left -= count
    parts = [(run, 1) for run in decoding] + prefilling
    ids, positions, slots, rows, sampled = [], [], [], [], []
    size = cache.layout.block_size
    for run, count in parts:
        for position in range(run.num_cached, run.num_cached + count):
            ids.append(run.tokens[position])
            positions.append(position)
            slots.append(run.table[position // size] * size + position % size)
        run.num_cached += count
        if run.num_cached == len(run.tokens):
            rows.append(len(ids) - 1)
            sampled.append(run)
    decode = prefill = None
    if decoding:
        lens = torch.tensor([run.num_cached for run in decoding], dtype=torch.int32)
        plan = None
        if hasattr(backend, "plan_decode"):
            plan = backend.plan_decode(cache.layout, lens.tolist(), model.config.num_q_heads)
        decode = DecodePart(_tables(decoding), lens, plan)
    if prefilling:
        starts = np.cumsum([0] + [count for _, count in prefilling]).tolist()
        group = [run for run, _ in prefilling]
        prefill = PrefillPart(starts, _tables(group), [run.num_cached for run in group])
    step = Step(
        *(torch.tensor(values, dtype=torch.int64) for values in (ids, positions, slots, rows)),
        decode=decode,
        prefill=prefill,
    )
    logits = model.forward(step, cache, backend)
    assert logits.shape == (len(rows), model.config.vocab_size)
    assert logits.dtype == torch.float32
    for run, row in zip(sampled, logits, strict=True):
        token = int(row.argmax())
        if forced is not None:
            token = forced[next(i for i, other in enumerate(runs) if other is run)][
                len(run.new_tokens)
            ]
        run.tokens.append(token)
        run.logits.append(row)


def _tables(runs: list[Run]) -> torch.Tensor:
    width = max(len(run.table) for run in runs)
    rows = [run.table + [0] * (width - len(run.table)) for run in runs]
    return torch.tensor(rows, dtype=torch.int32)
