"""How many bytes a rank has for its KV cache: GPU memory, less weights, less everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvcatch.errors import InvalidArgument
from kvcatch.ledger.gpus import GIB

if TYPE_CHECKING:
    from kvcatch.geometry import Geometry
    from kvcatch.ledger.engines import Engine
    from kvcatch.ledger.gpus import Gpu

__all__ = ["Memory", "Origin", "rank_memory"]

Origin = Literal["given", "estimated"]

FIXED_NON_KV = GIB
"""Estimate of what a rank needs besides activations: CUDA context, libraries, graphs."""

ESTIMATE_SEQS = 256
"""Sequences whose logits the estimate counts."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The budget of one rank, in bytes.

    Attributes:
        gpu: Its GPU.
        utilization: Share of the memory the engine takes.
        weights: Bytes of weights.
        weights_from: Whether they were given or estimated.
        non_kv: Bytes of activations, context, graphs.
        non_kv_from: Whether they were given or estimated.
        kv_bytes: What is left for the KV cache.
        formula: How ``kv_bytes`` follows.
        non_kv_numbers: How an estimated ``non_kv`` came about, with its inputs; else empty.
    """

    gpu: Gpu
    utilization: float
    weights: int
    weights_from: Origin
    non_kv: int
    non_kv_from: Origin
    kv_bytes: int
    formula: str
    non_kv_numbers: str = ""


def rank_memory(
    geometry: Geometry,
    stage: int,
    engine: Engine,
    gpu: Gpu,
    *,
    utilization: float | None,
    weights_bytes: int | None,
    non_kv_bytes: int | None,
    batched_tokens: int,
) -> Memory:
    """The budget of one rank of a stage.

    vLLM takes a share of the GPU's whole memory; SGLang's share leaves activations outside; TensorRT-LLM's
    share is of what is free after weights and activations.

    Args:
        geometry: The model on its ranks.
        stage: Pipeline stage, from 0.
        engine: Whose rule it is.
        gpu: The rank's GPU.
        utilization: Share; None for the engine's default.
        weights_bytes: Bytes of weights on the rank; None to count them from the config.
        non_kv_bytes: Bytes of the rest; None to estimate.
        batched_tokens: Tokens of the largest step.

    Raises:
        InvalidArgument: a rule that is not known, weights that cannot be counted, or nothing left.
    """
    model = geometry.model
    if engine.name not in ("vllm", "sglang", "trtllm"):
        raise InvalidArgument(
            f"engine = '{engine}': how it divides a GPU is not known; give its pool with --num-blocks or --kv-bytes"
        )
    if utilization is None:
        if engine.name == "sglang":
            raise InvalidArgument(
                "engine = 'sglang': picks its share by itself; give --memory-utilization"
            )
        utilization = engine.memory_utilization
    if not 0 < utilization <= 1:
        raise InvalidArgument(f"memory_utilization = {utilization}: must be above 0 and at most 1")
    weights, weights_from = weights_bytes, "given"
    if weights is None:
        if model.weights is None:
            raise InvalidArgument(
                f"{model.name}: its weights cannot be counted from the config; give --weights"
            )
        weights_from = "estimated"
        weights = model.weights.rank_bytes(geometry.ranks[stage].layers, geometry.parallel.tp)
    non_kv, non_kv_from, how = non_kv_bytes, "given", ""
    if non_kv is None:
        non_kv_from = "estimated"
        non_kv, how = _estimate(geometry, batched_tokens)
    share = int(gpu.num_bytes * utilization)
    if engine.name == "trtllm":
        left = int((gpu.num_bytes - weights - non_kv) * utilization)
        formula = "(GPU memory - weights - non-KV memory) * utilization"
    elif engine.name == "sglang":
        left = share - weights
        formula = "GPU memory * utilization - weights"
    else:
        left = share - weights - non_kv
        formula = "GPU memory * utilization - weights - non-KV memory"
    if left <= 0:
        raise InvalidArgument(
            f"no memory left for the KV cache of stage {stage}: {gpu.num_bytes / GIB:.2f} GiB * {utilization:g} "
            f"against {weights / GIB:.2f} GiB weights ({weights_from}) and {non_kv / GIB:.2f} GiB "
            f"non-KV memory ({non_kv_from})"
        )
    return Memory(
        gpu,
        utilization,
        weights,
        "given" if weights_from == "given" else "estimated",
        non_kv,
        "given" if non_kv_from == "given" else "estimated",
        left,
        formula,
        how,
    )


def _estimate(geometry: Geometry, batched_tokens: int) -> tuple[int, str]:
    """Activations of the largest step, logits, and a fixed part.

    A rule of thumb: eight hidden vectors and two of the MLP's inner ones per token in 16 bits, float32
    logits twice. A server's own startup log has the true figure.
    """
    counted = geometry.model.weights
    if counted is None:
        raise InvalidArgument(
            f"{geometry.model.name}: its activations cannot be estimated from the config; give --non-kv"
        )
    tp = geometry.parallel.tp
    per_token = (8 * counted.hidden + 2 * counted.inner // tp) * 2
    logits = ESTIMATE_SEQS * counted.vocab // tp * 4 * 2
    numbers = (
        f"{FIXED_NON_KV} + {batched_tokens} * (8 * {counted.hidden} + 2 * {counted.inner} // {tp}) * 2 "
        f"+ {ESTIMATE_SEQS} * {counted.vocab} // {tp} * 8"
    )
    return FIXED_NON_KV + batched_tokens * per_token + logits, numbers
