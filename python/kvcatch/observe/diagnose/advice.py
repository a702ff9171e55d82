"""What to change, on this engine and this version: never a setting that the version does not have.

A row that holds from or up to a version is given only when the version is known to be in its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcatch.observe.engines.table import Version
    from kvcatch.observe.limits import EngineVersion, Limits

__all__ = ["ROWS", "Row", "advise"]


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of advice.

    Attributes:
        gate: For which gate.
        engine: For which engine; empty for all.
        text: The advice; ``{max_num_seqs}`` and the like stand for known limits.
        first: First version it holds for.
        before: First version it no longer holds for.
    """

    gate: str
    engine: str
    text: str
    first: Version | None = None
    before: Version | None = None

    def holds(self, version: EngineVersion) -> bool:
        """Whether it is known to hold for this engine and version."""
        if self.engine not in ("", version.name):
            return False
        if self.first is not None and version.since(*self.first) is not True:
            return False
        return self.before is None or version.since(*self.before) is False


ROWS: tuple[Row, ...] = (
    # vLLM
    Row("max_num_seqs", "vllm", "raise --max-num-seqs{max_num_seqs}: KV has room for more"),
    Row(
        "max_num_seqs",
        "vllm",
        "deferred requests, where there are any, count against it as well: see why they are deferred",
        first=(0, 22, 1),
    ),
    Row(
        "token_budget",
        "vllm",
        "prompt computation is the limit, not KV: add replicas or prefill workers; more KV changes nothing",
    ),
    Row(
        "token_budget",
        "vllm",
        "a larger --max-num-batched-tokens{token_budget} helps only while steps do not fill the GPU, and "
        "raises inter-token latency",
    ),
    Row(
        "token_budget",
        "vllm",
        "set --enable-chunked-prefill: this version does not chunk short prompts by default",
        before=(0, 8),
    ),
    Row(
        "capacity",
        "vllm",
        "give KV more memory: raise --gpu-memory-utilization, or add replicas",
    ),
    Row(
        "capacity",
        "vllm",
        "--kv-cache-dtype fp8 doubles attention KV; check quality on long, multi-turn output first",
    ),
    Row("capacity", "vllm", "send fewer at once: the queue then waits where it costs no recompute"),
    Row(
        "watermark",
        "vllm",
        "lower --watermark{watermark}: it holds blocks back from admission",
        first=(0, 24),
    ),
    Row(
        "watermark",
        "vllm",
        "this version's 1 % watermark is fixed: more blocks, or shorter prompts",
        before=(0, 8),
    ),
    Row(
        "head_of_line",
        "vllm",
        "the waiting loop stops at the first request that does not fit: send long prompts to a replica "
        "of their own, or bound prompt length at the gateway",
    ),
    Row(
        "head_of_line",
        "vllm",
        "where nothing runs at all, abort the head request: nothing else frees its blocks",
    ),
    Row("deferred", "vllm", "with --enable-lora, raise --max-loras{max_loras}"),
    Row(
        "deferred",
        "vllm",
        "without LoRA: look at KV loads of the connector and at grammar compilation",
    ),
    Row(
        "never_fits",
        "vllm",
        "lower --max-model-len{max_model_len} to what the pool serves, or give it more memory: the "
        "scheduler accepts a request that can never run",
    ),
    Row("never_fits", "vllm", "abort the request at the head; bound prompt length at the gateway"),
    Row(
        "preemption_storm",
        "vllm",
        "set --watermark 0.02 to 0.05{watermark}: admission then leaves room to grow",
        first=(0, 24),
    ),
    Row(
        "preemption_storm",
        "vllm",
        "lower --max-num-seqs{max_num_seqs} to what the pool holds at full length",
    ),
    Row(
        "preemption_storm",
        "vllm",
        "0.19.1 and later look at the whole prompt before admitting it; this version looks at its first "
        "chunk alone",
        first=(0, 8),
        before=(0, 19, 1),
    ),
    Row(
        "stall",
        "vllm",
        "where the pool is empty, look at the head of the queue: up to 0.33.0 a request that needs more than "
        "the pool is accepted and waits like this (kvcatch plan computes the longest that is served)",
    ),
    Row(
        "leak",
        "vllm",
        "drain and restart the engine; with a KV connector, compare with its abort timeout first",
    ),
    Row(
        "prefix_cache_broken",
        "vllm",
        "restart the replica, and report the metrics of both sides of the moment hits stopped",
    ),
    Row(
        "prefix_cache_broken",
        "vllm",
        "prefix caching is off by default in this version: --enable-prefix-caching",
        before=(0, 8),
    ),
    # SGLang
    Row("max_num_seqs", "sglang", "raise --max-running-requests{max_num_seqs}"),
    Row(
        "token_budget",
        "sglang",
        "prompt computation is the limit: add replicas, or raise --chunked-prefill-size{token_budget}",
    ),
    Row("capacity", "sglang", "raise --mem-fraction-static, or add replicas"),
    Row(
        "capacity",
        "sglang",
        "where tokens are free: admission keeps back new_token_ratio of the outstanding output; lower "
        "--schedule-conservativeness, and watch retractions",
    ),
    Row("head_of_line", "sglang", "send long prompts to a replica of their own"),
    Row("deferred", "sglang", "requests wait for their grammar to be compiled: reuse grammars"),
    Row("never_fits", "sglang", "lower --context-length{max_model_len} to what the pool holds"),
    Row(
        "preemption_storm",
        "sglang",
        "raise --schedule-conservativeness: admission then expects longer outputs",
    ),
    Row(
        "leak",
        "sglang",
        "restart; tokens in evictable space are not leaked, /flush_cache frees those",
    ),
    Row(
        "prefix_cache_broken", "sglang", "check that --disable-radix-cache is not set, then restart"
    ),
    # TensorRT-LLM
    Row(
        "worst_case",
        "trtllm",
        "lower max_tokens in requests, and always set it: GUARANTEED_NO_EVICT reserves all of it",
    ),
    Row(
        "worst_case",
        "trtllm",
        "capacity_scheduler_policy MAX_UTILIZATION admits more and pauses later: 40 % fewer tokens/s where "
        "the working set exceeds the pool, no difference elsewhere",
    ),
    Row("max_num_seqs", "trtllm", "raise max_batch_size{max_num_seqs}"),
    Row("token_budget", "trtllm", "raise max_num_tokens{token_budget}, or add replicas"),
    Row(
        "preemption_storm",
        "trtllm",
        "capacity_scheduler_policy GUARANTEED_NO_EVICT never pauses a request; where the working set exceeds "
        "the pool it also generates more",
    ),
    Row("capacity", "trtllm", "raise kv_cache_config.free_gpu_memory_fraction, or add replicas"),
    Row("never_fits", "trtllm", "lower max_seq_len{max_model_len} to what the pool holds"),
    # TGI
    Row(
        "worst_case",
        "tgi",
        "lower max_new_tokens in requests: input + max_new_tokens is reserved until a request ends",
    ),
    Row("worst_case", "tgi", "raise --cuda-memory-fraction, or add replicas"),
    Row(
        "token_budget",
        "tgi",
        "prompt computation is the limit: add replicas; a larger --max-batch-prefill-tokens helps only while "
        "steps do not fill the GPU",
    ),
    Row("capacity", "tgi", "raise --cuda-memory-fraction, or add replicas"),
    # llama.cpp
    Row(
        "worst_case",
        "llamacpp",
        "ask for fewer tokens: the front end reserves what a request asks for",
    ),
    Row("capacity", "llamacpp", "raise --ctx-size, or admit by tokens: slots are not capacity"),
    Row("max_num_seqs", "llamacpp", "raise --parallel{max_num_seqs}"),
    # kvcatch
    Row("max_num_seqs", "kvcatch", "raise --max-num-seqs{max_num_seqs}"),
    Row(
        "token_budget",
        "kvcatch",
        "prompt computation is the limit: add replicas, or raise --max-num-batched-tokens{token_budget}",
    ),
    Row("never_fits", "kvcatch", "lower --max-model-len{max_model_len}, or raise --num-blocks"),
    Row("preemption_storm", "kvcatch", "set --watermark 0.02 to 0.05{watermark}"),
    Row("capacity", "kvcatch", "raise --num-blocks, or send fewer at once"),
    Row("watermark", "kvcatch", "lower --watermark{watermark}"),
    Row("worst_case", "kvcatch", "use the law full_prompt, or lower max_tokens in requests"),
    Row(
        "contiguity",
        "kvcatch",
        "compact (kvcatch plans it), or contiguity preferred instead of required",
    ),
    Row("head_of_line", "kvcatch", "order the queue by cache_aware or priority instead of fcfs"),
    # LMCache
    Row("leak", "lmcache", "restart the cache; pins of aborted look-ups are not given back"),
    # All
    Row(
        "head_of_line",
        "",
        "bound prompt length at the gateway, so that no head needs more than a few others together",
    ),
    Row("deferred", "", "see what they wait for: a KV transfer, a grammar, an adapter"),
    Row("never_fits", "", "refuse at the gateway what is longer than the pool holds"),
    Row("preemption_storm", "", "send fewer at once, to what the pool holds at full length"),
    Row("leak", "", "kvcatch leaks URL watches the conservation law while the engine is idle"),
    Row(
        "prefix_cache_broken",
        "",
        "compare prompts of before and after: a changed system prompt looks the same from outside",
    ),
    Row(
        "max_num_seqs",
        "",
        "more running sequences need KV for their outputs: watch preemptions after",
    ),
    Row(
        "stall",
        "",
        "nothing runs though requests wait: read the engine's log, dump its stacks, restart it",
    ),
    Row("contiguity", "", "a paged engine is never refused for scatter: doubt the report first"),
    Row(
        "not_enough_evidence",
        "",
        "watch longer under load, and give --engine and --engine-args: limits are not in the metrics",
    ),
)
"""Every piece of advice there is."""


def advise(gate: str, version: EngineVersion, limits: Limits) -> list[str]:
    """Advice for a gate on an engine and version, most useful first."""
    known = {
        name: "" if (value := getattr(limits, name)) is None else f" (now {value:,})"
        for name in ("max_num_seqs", "token_budget", "watermark", "max_loras", "max_model_len")
    }
    return [row.text.format(**known) for row in ROWS if row.gate == gate and row.holds(version)]
