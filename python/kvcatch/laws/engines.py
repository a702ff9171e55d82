"""Which law an engine and version follows, and what of it a user can set there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument
from kvcatch.laws import foreign, own

if TYPE_CHECKING:
    from kvcatch.laws.decision import Decision, Step
    from kvcatch.laws.state import QueuedRequest, State
    from kvcatch.ledger.engines import Engine

Rule = Callable[["State", "QueuedRequest", "Step"], "Decision"]
"""An admission law: a pure function of the state, the request, and what this step used up."""


@dataclass(frozen=True, slots=True)
class Law:
    """One admission law.

    Attributes:
        name: How it is called in ``--law``.
        rule: The law itself.
        engine: Whose it is.
        source: The engine's file it was read from.
        text: When a request enters, in one line.
        reserves_output: The whole output a request may generate counts from the start.
        has_watermark: It looks at the watermark a user sets.
    """

    name: str
    rule: Rule
    engine: str
    source: str
    text: str
    reserves_output: bool = False
    has_watermark: bool = False


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "full_prompt",
            own.full_prompt,
            "kvcatch",
            "laws/own.py",
            "blocks(prompt) + watermark <= available",
            has_watermark=True,
        ),
        Law(
            "first_chunk",
            own.first_chunk,
            "kvcatch",
            "laws/own.py",
            "blocks(first chunk) + watermark <= available",
            has_watermark=True,
        ),
        Law(
            "worst_case",
            own.worst_case,
            "kvcatch",
            "laws/own.py",
            "blocks(prompt + max_tokens) <= available",
            reserves_output=True,
        ),
        Law(
            "estimate",
            own.estimate,
            "kvcatch",
            "laws/own.py",
            "blocks(prompt + min(output, 4096)) <= available - expected growth of the running",
        ),
        Law(
            "vllm_v0",
            foreign.vllm_v0,
            "vllm",
            "vllm/core/block_manager.py",
            "blocks(prompt) <= free - 1 % of the pool",
        ),
        Law(
            "vllm_first_chunk",
            foreign.vllm_first_chunk,
            "vllm",
            "vllm/v1/core/kv_cache_manager.py",
            "blocks(first chunk) <= free",
        ),
        Law(
            "vllm_full_prompt",
            foreign.vllm_full_prompt,
            "vllm",
            "vllm/v1/core/kv_cache_manager.py",
            "blocks(prompt) - active hits + watermark while something runs <= free",
            has_watermark=True,
        ),
        Law(
            "sglang_estimate",
            foreign.sglang_estimate,
            "sglang",
            "python/sglang/srt/managers/schedule_policy.py",
            "prompt + min(max_new, 4096) + page < available + evictable - expected growth",
        ),
        Law(
            "guaranteed_no_evict",
            foreign.guaranteed_no_evict,
            "trtllm",
            "cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp",
            "blocks(prompt + max_new) <= free - what those that run need to finish",
            reserves_output=True,
        ),
        Law(
            "max_utilization",
            foreign.max_utilization,
            "trtllm",
            "cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp",
            "blocks(prompt) <= free - next step of the running",
        ),
        Law(
            "static_batch",
            foreign.static_batch,
            "trtllm",
            "cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp",
            "nothing runs, and blocks(prompt + max_new) <= free",
            reserves_output=True,
        ),
        Law(
            "tgi_worst_case",
            foreign.tgi_worst_case,
            "tgi",
            "backends/v3/src/queue.rs",
            "blocks(input + max_new + speculate - 1) <= free",
            reserves_output=True,
        ),
        Law("slot", foreign.slot, "llamacpp", "tools/server/server.cpp", "a free slot"),
    )
}
"""Every law by name."""

OWN_LAWS = tuple(law.name for law in LAWS.values() if law.engine == "kvcatch")
"""Names of kvcatch's own laws, in the order they are shown."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user calls an engine's limits; None where there is no such setting.

    Attributes:
        max_num_seqs: Sequences that run at once.
        max_model_len: Most tokens of a request.
        block_size: Tokens per block.
        watermark: Share of the pool that an admission leaves available.
        memory_utilization: Share of the device that weights and KV may take.
    """

    max_num_seqs: str | None
    max_model_len: str | None
    block_size: str | None
    watermark: str | None
    memory_utilization: str | None


_BLOCK_SIZES: dict[str, tuple[int, ...]] = {
    "vllm": (16, 32, 48, 64, 128, 256),
    "sglang": (1, 16, 32, 64, 128),
    "trtllm": (8, 16, 32, 64, 128),
    "tgi": (),
    "llamacpp": (),
    "kvcatch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
}


def law_of(engine: Engine) -> Law:
    """The law that an engine of this version follows unless it is told another."""
    if engine.is_vllm:
        if engine.is_vllm_v0:
            return LAWS["vllm_v0"]
        return LAWS["vllm_full_prompt" if engine.since(0, 19, 1) else "vllm_first_chunk"]
    return LAWS[
        {
            "sglang": "sglang_estimate",
            "trtllm": "guaranteed_no_evict",
            "tgi": "tgi_worst_case",
            "llamacpp": "slot",
        }.get(engine.name, "full_prompt")
    ]


def block_sizes(engine: Engine) -> tuple[int, ...]:
    """Block sizes (tokens) that a user of this engine may choose from; empty where there is no choice.

    vLLM V1's attention kernels on CUDA take multiples of 16 (engines of MLA models 64 and up).
    """
    return (8, 16, 32) if engine.is_vllm_v0 else _BLOCK_SIZES[engine.name]


def null_blocks(engine: Engine) -> int:
    """Blocks that no request ever gets: vLLM V1's block 0, and TGI's, kept for health checks."""
    return engine.null_blocks


def settings_of(engine: Engine) -> Settings:
    """What this engine calls its limits."""
    if engine.is_vllm:
        return Settings(
            "--max-num-seqs",
            "--max-model-len",
            "--block-size",
            "--watermark" if engine.since(0, 24) else None,
            "--gpu-memory-utilization",
        )
    return _SETTINGS[engine.name]


_SETTINGS = {
    "sglang": Settings(
        "--max-running-requests",
        "--context-length",
        "--page-size",
        None,
        "--mem-fraction-static",
    ),
    "trtllm": Settings(
        "max_batch_size",
        "max_seq_len",
        "tokens_per_block",
        None,
        "kv_cache_config.free_gpu_memory_fraction",
    ),
    "tgi": Settings(None, "--max-total-tokens", None, None, "--cuda-memory-fraction"),
    "llamacpp": Settings("--parallel", "--ctx-size", None, None, None),
    "kvcatch": Settings(
        "--max-num-seqs",
        "--max-model-len",
        "--block-size",
        "--watermark",
        "--memory-utilization",
    ),
}


def find_law(engine: Engine | None, name: str | None) -> Law:
    """The law by name, which must be one of the engine's; or the engine's; or ``full_prompt``.

    Raises:
        InvalidArgument: There is no such law, or the engine does not follow it.
    """
    if name is None:
        return law_of(engine) if engine is not None else LAWS["full_prompt"]
    if name not in LAWS:
        raise InvalidArgument(f"law = {name!r}: unknown; there are {', '.join(LAWS)}")
    law = LAWS[name]
    if engine is not None and law.engine != engine.name:
        theirs = ", ".join(item.name for item in LAWS.values() if item.engine == engine.name)
        raise InvalidArgument(f"law = {name!r}: is {law.engine}'s; {engine.name} follows {theirs}")
    return law
