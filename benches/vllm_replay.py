"""A closed-loop replay of a trace in vLLM's own KVCacheManager, as it is and with the plugin, in one run.

    python benches/vllm_replay.py TRACE --requests 300 --blocks 90000 --with "" pool pool,evict

Run it with a Python that has vLLM (or one whose ``vllm.v1.core`` can be imported) and kvcatch. Each variant replays
in a fresh state of vLLM's classes: ``register()`` before, ``unregister()`` after. Up to 64 sequences at once, one
decode token per sequence and step, a whole prompt admitted when it fits, FCFS, the last running sequence preempted
when growth finds nothing. Prints a line per variant: runs per finished sequence, prefix hits, preemptions, prefilled
tokens, CPU microseconds of the manager's bookkeeping per decode token and its ratio to the first variant's. A replay's
steps are the same in every round: of each step the fastest of ``--repeat`` rounds counts, which take turns in their
order, so that what else the machine does falls out.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

TRACE_BLOCK = 512  # tokens per hash of the trace
MADE_AHEAD = 1000  # requests made before the clock starts


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """Those arguments that the function takes: signatures differ between versions."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


class Vllm:
    """What of vLLM a replay needs, over its versions."""

    def __init__(self) -> None:
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request, RequestStatus

        try:
            from vllm.utils.hashing import sha256
        except ImportError:
            from vllm.utils import sha256
        self.version = getattr(vllm, "__version__", "unknown")
        self.params, self.request, self.status = SamplingParams, Request, RequestStatus
        self.manager_class = KVCacheManager
        self.spec, self.config, self.group = FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        kv_cache_utils.init_none_hash(sha256)

    def manager(self, num_blocks: int, block_size: int, max_len: int) -> Any:
        import torch

        spec = self.spec(
            **accepted(
                self.spec,
                block_size=block_size,
                num_kv_heads=8,
                head_size=128,
                dtype=torch.bfloat16,
                use_mla=False,
            )
        )
        config = self.config(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[self.group(["l0"], spec)]
        )
        return self.manager_class(
            config,
            **accepted(
                self.manager_class,
                max_model_len=max_len,
                scheduler_block_size=block_size,
                hash_block_size=block_size,
                max_num_batched_tokens=max_len,
                enable_caching=True,
            ),
        )

    def new_request(self, i: int, row: dict[str, Any], max_len: int, block_size: int) -> Any:
        hashes, per = row["hash_ids"], TRACE_BLOCK // block_size
        prompt = row["input_length"] // block_size

        def block_hasher(request: Any) -> list[Any]:
            done, full = len(request.block_hashes), request.num_tokens // block_size
            return [
                b"%d.%d" % (hashes[b // per], b % per) if b < prompt else b"g%d.%d" % (i, b)
                for b in range(done, full)
            ]

        return self.request(
            **accepted(
                self.request,
                request_id=str(i),
                prompt_token_ids=[0] * row["input_length"],
                sampling_params=self.params(max_tokens=max_len),
                pooling_params=None,
                eos_token_id=None,
                block_hasher=block_hasher,
            )
        )


def count_runs(ids: list[int]) -> int:
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(ids))


def first_group_ids(manager: Any, request_id: str) -> list[int]:
    return list(manager.get_block_ids(request_id)[0])


def replay(
    vllm: Vllm, rows: list[dict[str, Any]], num_blocks: int, block_size: int, max_seqs: int
) -> dict[str, Any]:
    """One replay; see the module's text."""
    max_len = max(row["input_length"] + row["output_length"] for row in rows) + block_size
    manager = vllm.manager(num_blocks, block_size, max_len)
    # All at once would take gigabytes for a whole trace: those behind the first are made when first looked at.
    waiting: list[Any] = [
        vllm.new_request(i, row, max_len, block_size) if i < MADE_AHEAD else i
        for i, row in enumerate(rows)
    ][::-1]
    target = {str(i): row["output_length"] for i, row in enumerate(rows)}
    whole = accepted(manager.allocate_slots, full_sequence_must_fit=True)
    takes_scheduled = "has_scheduled_reqs" in inspect.signature(manager.allocate_slots).parameters
    step_starts = getattr(manager, "new_step_starts", lambda: None)
    running: list[Any] = []
    seen: set[str] = set()
    hits = first_hits = preemptions = runs = finished = never = tokens = prefill = steps = 0
    gc.collect()
    gc.disable()
    times = [time.thread_time()]
    while waiting or running:
        steps += 1
        step_starts()
        i = 0
        while i < len(running):
            request = running[i]
            slots = manager.allocate_slots(request, 1)
            while slots is None:
                victim = running.pop()
                manager.free(victim)
                victim.num_computed_tokens = 0
                victim.status = vllm.status.PREEMPTED
                preemptions += 1
                waiting.append(victim)
                if victim is request:
                    break
                slots = manager.allocate_slots(request, 1)
            if slots is None:
                break
            request.num_computed_tokens += 1
            tokens += 1
            i += 1
        while waiting and len(running) < max_seqs:
            request = waiting[-1]
            if isinstance(request, int):
                request = waiting[-1] = vllm.new_request(
                    request, rows[request], max_len, block_size
                )
            blocks, hit, *_ = manager.get_computed_blocks(request)
            if takes_scheduled:
                whole["has_scheduled_reqs"] = bool(running)
            new = request.num_tokens - hit
            # Before 0.24 nothing but the scheduler held a sequence back that does not fit in whole: here all are
            # allocated in whole.
            if manager.allocate_slots(request, new, hit, blocks, **whole) is None:
                if running:
                    break
                never += 1
                waiting.pop()
                continue
            waiting.pop()
            hits += hit
            prefill += new
            if request.request_id not in seen:
                seen.add(request.request_id)
                first_hits += hit
            request.status = vllm.status.RUNNING
            request.num_computed_tokens = request.num_tokens
            running.append(request)
        kept = []
        for request in running:
            request.append_output_token_ids(0)
            if request.num_output_tokens < target[request.request_id]:
                kept.append(request)
                continue
            runs += count_runs(first_group_ids(manager, request.request_id))
            finished += 1
            request.status = vllm.status.FINISHED_STOPPED
            manager.free(request)
        running = kept
        times.append(time.thread_time())
    gc.enable()
    queue = manager.block_pool.free_block_queue
    if queue.num_free_blocks != num_blocks - 1:
        raise SystemExit(
            f"{num_blocks - 1 - queue.num_free_blocks} blocks are still held at the end"
        )
    if hasattr(queue, "validate"):
        queue.validate()
    return {
        "runs_per_sequence": round(runs / max(1, finished), 2),
        "first_admission_hits": first_hits,
        "hits": hits,
        "preemptions": preemptions,
        "prefill_tokens": prefill,
        "decode_tokens": tokens,
        "steps": steps,
        "finished": finished,
        "never_fits": never,
        "step_seconds": [after - before for before, after in itertools.pairwise(times)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=90_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-seqs", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--with", dest="variants", nargs="+", default=["", "pool"], help="values of KVCATCH_VLLM"
    )
    args = parser.parse_args()
    with args.trace.open() as file:
        rows = [json.loads(line) for _, line in zip(range(args.requests), file, strict=False)]
    vllm = Vllm()
    from kvcatch.vllm import register, unregister

    found: dict[str, dict[str, Any]] = {}
    fastest: dict[str, list[float]] = {}
    for at in range(args.repeat):
        turn = at % len(args.variants)
        for variant in args.variants[turn:] + args.variants[:turn]:
            os.environ["KVCATCH_VLLM"] = variant
            register()
            try:
                figures = replay(vllm, rows, args.blocks, args.block_size, args.max_seqs)
            finally:
                unregister()
            times = figures.pop("step_seconds")
            fastest[variant] = list(map(min, times, fastest.get(variant, times)))
            found[variant] = figures
    first = sum(fastest[args.variants[0]])
    for variant in args.variants:
        figures, seconds = found[variant], sum(fastest[variant])
        line = {
            "vllm": vllm.version,
            "kvcatch": variant or "off",
            "blocks": args.blocks,
            "requests": len(rows),
            **figures,
            "us_per_decode_token": round(seconds / max(1, figures["decode_tokens"]) * 1e6, 3),
            "cost_ratio": round(seconds / first, 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
