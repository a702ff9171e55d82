"""From a model and a few numbers to an engine that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.engine.governor import GovernorConfig
    from kvcatch.engine.runner import ModelRunner
    from kvcatch.kernels.layout import KVDtype
    from kvcatch.models.load import LoadedModel

__all__ = ["DEFAULT_KV_BYTES", "BuiltEngine", "build_engine"]

DEFAULT_KV_BYTES = 1 << 30
"""KV memory where nothing is said, in bytes; less where every sequence at full length needs less."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with what it was built from.

    Attributes:
        engine: ready to take requests.
        loaded: the model, its tokenizer and name.
        runner: model and KV cache.
        threads: thread count and wait policy, as text for a person.
    """

    engine: Engine
    loaded: LoadedModel
    runner: ModelRunner
    threads: str

    def __str__(self) -> str:
        return f"{self.loaded}; {self.runner.cache!r}; {self.threads}"


def build_engine(
    model: str | Path | None = None,
    *,
    device: str = "cpu",
    precision: str = "auto",
    kv_dtype: KVDtype | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    max_model_len: int | None = None,
    num_threads: int | None = None,
    governor: GovernorConfig | None = None,
    **options: Any,
) -> BuiltEngine:
    """Load a model and put an engine around it.

    Sets threads and wait policy before torch loads, where it is not loaded yet.

    Args:
        model: GGUF file or safetensors folder; ``None`` is the embedded default.
        device: ``cpu`` or ``cuda:N``.
        precision: ``auto``, ``float32`` or ``bfloat16``.
        kv_dtype: of the cache; ``None`` for that of the weights.
        num_blocks: blocks of the pool.
        kv_bytes: its bytes instead; neither: enough for ``max_num_seqs`` sequences of full length, at
            most :data:`DEFAULT_KV_BYTES`.
        max_model_len: most tokens of a request; ``None``: the model's own, or what the pool holds.
        num_threads: of one torch operation.
        governor: limits under load; ``None`` for none.
        options: fields of :class:`EngineConfig`.

    Raises:
        InvalidArgument: an option that cannot be; both ``num_blocks`` and ``kv_bytes``; a pool in which
            a ``max_model_len`` that was asked for does not fit.
        ModelError, PullError, MissingExtra, OutOfMemory: as from what it calls.
    """
    from kvcatch.models.threads import set_threads

    threads = set_threads(num_threads)
    from kvcatch.engine.runner import ModelRunner, layout_of
    from kvcatch.kernels import get_backend
    from kvcatch.models.load import load_model

    if num_blocks is not None and kv_bytes is not None:
        raise InvalidArgument(
            f"num_blocks = {num_blocks} and kv_bytes = {kv_bytes}: give one of them"
        )
    backend = get_backend(device)  # a device that is not there is said before the model loads
    loaded = load_model(model, device=device, precision=precision)
    block_size = options.get("block_size", 16)
    layout = layout_of(loaded.model, block_size, kv_dtype)
    longest = loaded.config.max_model_len
    if num_blocks is None:
        wanted = options.get("max_num_seqs", 32) * -(-(max_model_len or longest) // block_size)
        limit = (DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes) // layout.block_bytes
        num_blocks = limit if kv_bytes is not None else min(wanted, limit)
        if num_blocks < 1:
            raise InvalidArgument(
                f"block_size = {block_size}: one block takes {layout.block_bytes} bytes, kv_bytes is"
                f" {DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes}"
            )
    if max_model_len is None:
        max_model_len = min(longest, num_blocks * block_size)
    config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len, **options)
    runner = ModelRunner(loaded.model, backend, config, kv_dtype)
    return BuiltEngine(
        Engine(config, runner, loaded.tokenizer, governor=governor), loaded, runner, str(threads)
    )
