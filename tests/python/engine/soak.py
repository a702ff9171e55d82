"""Random load on engines with little room: python tests/python/engine/soak.py --seconds 300.

Every round makes an engine of a random policy and pool, puts random requests on it, aborts some at any moment, and
lets it come to rest. The toy model checks every read of the cache; outputs must be what it gives alone. At rest the
conservation law holds exactly and no owner is left. A failure prints the round's seed: --seed N --rounds 1 repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toy import VOCAB, ToyRunner, expected

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine
from kvcatch.engine.governor import GovernorConfig, QueueFull
from kvcatch.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.laws import Refusal

MAX_MODEL_LEN = 80
STEPS = 20_000


def policy(rng: random.Random) -> tuple[dict[str, Any], GovernorConfig | None]:
    """One of each choice; a pool in which two or three requests of full length fit."""
    swap = rng.random() < 0.5
    options: dict[str, Any] = {
        "num_blocks": rng.randrange(20, 60),
        "block_size": 4,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": rng.choice([2, 5, 12]),
        "max_num_batched_tokens": rng.choice([12, 32, 90]),
        "long_prefill_threshold": rng.choice([0, 0, 5]),
        "law": rng.choice(["full_prompt", "first_chunk", "worst_case", "estimate"]),
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "order": rng.choice(["fcfs", "priority", "cache_aware"]),
        "window": rng.choice([3, 16]),
        "max_passed_over": rng.choice([2, 8]),
        "preemption": "swap" if swap else "recompute",
        "host_blocks": rng.choice([6, 30, 100]) if swap else 0,
        "victim": rng.choice(["newest", "lowest_priority", "cheapest"]),
        "compaction": rng.choice(["off", "runs", "pages"]),
        "placement": rng.choice(["bitmap", "queue", "buddy"]),
        "eviction": rng.choice(["lru", "slru"]),
        "prefix_cache": rng.random() < 0.8,
    }
    if rng.random() < 0.4:
        return options, None
    return options, GovernorConfig(
        water_level=rng.choice([None, 0.3, 0.8]),
        short_tokens=30,
        long_share=rng.choice([None, 0.3, 0.7]),
        max_queued=rng.choice([None, 6]),
        max_queued_tokens=rng.choice([None, 300]),
    )


def toy_engine(config: EngineConfig, governor: GovernorConfig | None) -> Engine:
    ticks = iter(range(1 << 60)).__next__
    return Engine(config, ToyRunner(config), clock=ticks, governor=governor)


def soak_round(
    seed: int,
    make: Callable[[EngineConfig, GovernorConfig | None], Engine] = toy_engine,
    wanted: Callable[[list[int], int], list[int]] | None = expected,
    requests: int = 60,
) -> Counter[str]:
    """One engine from the first request to rest; what happened, counted.

    Args:
        seed: of the round.
        make: an engine of this config.
        wanted: the right output of a prompt; ``None`` where it is not known beforehand.
        requests: how many are put on it.
    """
    rng = random.Random(seed)
    options, governor = policy(rng)
    engine = make(EngineConfig(**options), governor)
    bases = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    rate = rng.choice([0.1, 0.5, 2.0])
    outputs: dict[tuple[str, int], list[int]] = {}
    asked: dict[str, tuple[list[int], int, int]] = {}
    seen: Counter[str] = Counter()
    left = requests
    refusal: Refusal | None = None
    for step in range(STEPS):
        while left and rng.random() < rate / (1 + rate):
            left -= 1
            prompt = [*rng.choice(bases), *(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))]
            count = rng.randrange(1, MAX_MODEL_LEN - len(prompt))
            n = min(rng.choice([1, 1, 1, 2, 4]), options["max_num_seqs"])
            params = SamplingParams(temperature=0, max_tokens=count, n=n, ignore_eos=True)
            try:
                request = engine.add(prompt, params, priority=rng.randrange(3))
            except QueueFull:
                seen["turned away"] += 1
            else:
                asked[request.id] = (prompt, count, n)
        if engine.requests and rng.random() < 0.03:
            name = rng.choice(sorted(engine.requests))
            engine.abort(name)
            asked.pop(name)
            seen["aborted"] += 1
            assert name not in {holding["owner"] for holding in engine.pool.holdings()}
        if not left and engine.is_idle:
            break
        for delta in engine.step():
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.tokens)
        if step % 7 == 0:
            engine.pool.validate()
        refusal = engine.scheduler.refusal or refusal
    assert engine.is_idle, f"not at rest after {STEPS} steps: {engine!r}; {refusal}"
    engine.check_idle()
    pool = engine.pool
    assert pool.num_free + pool.num_cached == pool.num_blocks
    assert pool.num_active == pool.num_reserved == pool.num_sequences == 0
    assert not list(pool.holdings())
    for name, (prompt, count, n) in asked.items():
        right = wanted(prompt, count) if wanted else None
        for index in range(n):
            got = outputs[(name, index)]
            assert len(got) == count, f"{name}/{index}: {len(got)} tokens of {count}"
            assert right is None or got == right, f"{name}/{index}: {got} is not {right}"
    seen["finished"] += len(asked)
    seen["forked"] += sum(n > 1 for _, _, n in asked.values())
    seen["compactions"] += engine.counters.compactions
    for kind, count in engine.scheduler.preemptions.items():
        seen[kind] += count
    seen[options["order"]] += 1
    seen["governed"] += governor is not None
    return seen


def soak(
    seconds: float,
    seed: int = 0,
    rounds: int | None = None,
    make: Callable[[EngineConfig, GovernorConfig | None], Engine] = toy_engine,
    wanted: Callable[[list[int], int], list[int]] | None = expected,
    requests: int = 60,
) -> Counter[str]:
    """Rounds until the time is over; what happened in all of them."""
    total: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end and (rounds is None or total["rounds"] < rounds):
        try:
            total += soak_round(seed, make, wanted, requests)
        except BaseException:
            sys.stderr.write(f"round of seed {seed} failed: --seed {seed} --rounds 1 repeats it\n")
            raise
        total["rounds"] += 1
        seed += 1
    return total


def tiny_engine_maker(folder: Path) -> Callable[[EngineConfig, GovernorConfig | None], Engine]:
    """Engines on a tiny Llama of random weights, written to a folder, through the CPU backend."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
    from tiny_folder import write_tiny_folder

    from kvcatch.engine.runner import ModelRunner
    from kvcatch.kernels import get_backend
    from kvcatch.models.load import load_model

    loaded = load_model(write_tiny_folder(folder), precision="float32")

    def make(config: EngineConfig, governor: GovernorConfig | None) -> Engine:
        runner = ModelRunner(loaded.model, get_backend("cpu"), config)
        return Engine(config, runner, loaded.tokenizer, governor=governor)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    total = soak(given.seconds, given.seed, given.rounds)
    for name, count in sorted(total.items()):
        sys.stdout.write(f"{name:<12} {count:>9,}\n")


if __name__ == "__main__":
    main()
