"""A toy model whose KV cache holds the tokens themselves, so that every wrong read shows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine
from kvcatch.engine.request import FinishReason
from kvcatch.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from kvcatch import BlockPool

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """The model: a fixed function of all tokens so far."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


class ToyRunner:
    """Writes tokens to slots, reads them back through block tables, and demands they are the branch's own."""

    vocab_size = VOCAB

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.block_size
        self.cache = np.full((config.num_blocks, self.size), -1, np.int64)
        self.host = np.full((max(1, config.host_blocks), self.size), -1, np.int64)
        self.log: list[tuple[int, int]] = []

    def move(self, schedule: Any) -> None:
        for copy in schedule.swap_out:
            self.host[copy.dst] = self.cache[copy.src]
        for src, dst in schedule.copies:
            self.cache[dst] = self.cache[src]
        for copy in schedule.swap_in:
            self.cache[copy.dst] = self.host[copy.src]

    def forward(self, items: Any, pool: BlockPool) -> torch.Tensor:
        counts = np.array([item.count for item in items], np.int64)
        starts = np.array([item.start for item in items], np.int64)
        sequences = [item.branch.sequence for item in items]
        slots = np.empty(counts.sum(), np.int64)
        pool.slot_mapping(sequences, counts, starts=starts, out=slots)
        default = np.empty(counts.sum(), np.int64)
        assert pool.slot_mapping(sequences, out=default) == counts.sum()
        assert (default == slots).all()
        tokens = np.concatenate([i.branch.tokens[i.start : i.start + i.count] for i in items])
        assert len(set(slots.tolist())) == len(slots), "two tokens to one slot"
        self.cache.reshape(-1)[slots] = tokens
        self.log.append((len(items), int(counts.sum())))
        rows = []
        for item in items:
            end = item.start + item.count
            read = self.cache[pool.block_ids(item.branch.sequence)].reshape(-1)[:end].tolist()
            assert read == item.branch.tokens[:end], f"{item.branch} reads another's tokens"
            if item.samples:
                row = torch.full((VOCAB,), -4.0)
                row[next_token(read)] = 4.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def compact(self, pool: BlockPool, objective: str) -> int:
        plan = pool.plan_compaction(objective)  # type: ignore[arg-type]
        src, dst = plan.src, plan.dst
        for start, end in zip([0, *plan.rounds], plan.rounds, strict=False):
            self.cache[dst[start:end]] = self.cache[src[start:end]].copy()
        plan.apply()
        return len(plan)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def make(**options: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_model_len": 120,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        **options,
    }
    config = EngineConfig(**settings)
    return Engine(config, ToyRunner(config), clock=iter(range(1 << 40)).__next__)


def run(engine: Engine, limit: int = 5_000, check: bool = True) -> dict[tuple[str, int], list[int]]:
    """Step until idle; the tokens of every branch that ended otherwise than by abort."""
    outputs: dict[tuple[str, int], list[int]] = {}
    for _ in range(limit):
        if engine.is_idle:
            break
        for delta in engine.step():
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        if check:
            engine.pool.validate()
    assert engine.is_idle, f"not finished after {limit} steps: {engine!r}"
    engine.check_idle()
    return outputs


GREEDY = SamplingParams(temperature=0, max_tokens=12)
ABORT = FinishReason.ABORT
