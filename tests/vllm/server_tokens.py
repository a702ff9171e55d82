"""Runs a fixed load in a real vLLM engine and prints tokens and counters as JSON; used by ``test_tokens.py``.

    python server_tokens.py MODEL_FOLDER

``KVCATCH_VLLM`` says what is installed. The engine core runs in this process, so that the same requests
enter at the same steps in every run: 50 greedy requests with shared prefixes, a pool small enough to
preempt, some aborted on the way.
"""

import json
import os
import random
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

REQUESTS = 50
BLOCKS = int(os.environ.get("SERVER_BLOCKS", "64"))


def main() -> None:
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.inputs import TokensPrompt

    from kvcatch.vllm import plugin

    plugin.register()
    if bool(plugin._installed) != bool(os.environ.get("KVCATCH_VLLM")):
        raise SystemExit("kvcatch was not installed; see the log line above")
    args = EngineArgs(
        model=sys.argv[1],
        max_model_len=1024,
        num_gpu_blocks_override=BLOCKS,
        block_size=32,
        max_num_seqs=16,
        enforce_eager=True,
        seed=0,
    )
    engine = LLMEngine.from_engine_args(args)
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    counts = {"preemptions": 0, "queries": 0, "hits": 0, "admissions": 0}
    make_stats = scheduler.make_stats

    def counted(*args: object, **kwargs: object) -> object:
        stats = make_stats(*args, **kwargs)
        if stats is not None and stats.prefix_cache_stats is not None:
            prefix = stats.prefix_cache_stats
            counts["queries"] += prefix.queries
            counts["hits"] += prefix.hits
            counts["admissions"] += prefix.requests
        return stats

    scheduler.make_stats = counted
    preempt = scheduler._preempt_request

    def preempted(*args: object, **kwargs: object) -> object:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = preempted
    rng = random.Random(5)
    vocabulary = range(1000, 40_000)
    prefixes = [rng.choices(vocabulary, k=n) for n in (96, 160, 224)]
    prompts = [
        rng.choice(prefixes) + rng.choices(vocabulary, k=rng.randint(8, 90))
        for _ in range(REQUESTS)
    ]
    lengths = [rng.randint(30, 90) for _ in range(REQUESTS)]
    aborted = {i: rng.randint(6, 20) for i in rng.sample(range(REQUESTS), 6)}
    tokens: dict[str, list[int]] = {}
    arrivals = list(range(REQUESTS))
    begun: dict[int, int] = {}
    step = 0
    while arrivals or engine.has_unfinished_requests():
        if step % 3 == 0:
            for i in arrivals[:4]:
                params = SamplingParams(temperature=0.0, max_tokens=lengths[i], ignore_eos=True)
                engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompts[i]), params)
                begun[i] = step
            arrivals = arrivals[4:]
        due = [str(i) for i, after in aborted.items() if i in begun and step == begun[i] + after]
        if due:
            engine.abort_request(due)
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    result = {
        "tokens": tokens,
        "counts": counts,
        "held": held,
        "steps": step,
        "queue": type(pool.free_block_queue).__name__,
    }
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
