"""Builds vLLM's own Scheduler without a model, and steps it with made-up output; vLLM 0.10.2 to 0.33."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

try:
    from vllm.utils.hashing import sha256
except ImportError:  # 0.10
    from vllm.utils import sha256

if TYPE_CHECKING:
    from pathlib import Path

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1_000_000,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Once: before 0.30 each call draws another one, and no prefix would ever be hit.
init_none_hash(sha256)

HAS_WATERMARK = any(field.name == "watermark" for field in dataclasses.fields(SchedulerConfig))
"""Since 0.24."""
_ALLOCATE = inspect.signature(KVCacheManager.allocate_slots).parameters
RESERVES_BLOCKS = "reserved_blocks" in _ALLOCATE
"""Loads in flight have blocks promised: since 0.24."""
WHOLE_MUST_FIT = "full_sequence_must_fit" in _ALLOCATE or hasattr(
    KVCacheManager, "can_fit_full_sequence"
)
"""A prompt enters when the whole of it fits: since 0.19; before, when its first chunk does."""


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this version's function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def make_scheduler(
    folder: Path,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 65_536,
    watermark: float = 0.0,
    groups: list[KVCacheGroupSpec] | None = None,
    cache: dict[str, Any] | None = None,
    **options: Any,
) -> Scheduler:
    """A Scheduler of vLLM over a pool of ``num_blocks`` blocks, null block counted."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    model_config = ModelConfig(
        model=str(model),
        tokenizer=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_model_len,
        seed=0,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=True,
        **accepted(SchedulerConfig, is_encoder_decoder=False, watermark=watermark),
        **options,
    )
    cache_config = CacheConfig(
        block_size=block_size,
        gpu_memory_utilization=0.9,
        **{"enable_prefix_caching": True, **(cache or {})},
    )
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=scheduler_config,
        model_config=model_config,
        cache_config=cache_config,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = attention_spec(block_size)
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups or [KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        **accepted(Scheduler, block_size=block_size),
    )


def attention_spec(block_size: int) -> FullAttentionSpec:
    """Full attention of two small heads."""
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.bfloat16,
        **accepted(FullAttentionSpec, use_mla=False),
    )


def make_request(
    name: str,
    num_tokens: int,
    *,
    max_tokens: int = 16,
    block_size: int = 16,
    seed: int = 0,
    **options: Any,
) -> Request:
    """A request whose prompt is like no other's, unless ``seed`` is the same."""
    return Request(
        request_id=name,
        prompt_token_ids=[(seed * 7919 + at * 31) % 500 + 3 for at in range(num_tokens)],
        sampling_params=SamplingParams(ignore_eos=True, max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
        **accepted(Request, eos_token_id=None),
        **options,
    )


def step(scheduler: Scheduler) -> Any:
    """One step: schedule, and a token for each request whose prompt is done."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests[name]
        done = request.num_computed_tokens >= request.num_tokens
        tokens.append([7] if done else [])
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(output, result)
    return output
