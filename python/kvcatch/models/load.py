"""From a file or folder to a model that runs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcatch.models.config import LlamaConfig
from kvcatch.models.errors import ModelError
from kvcatch.models.gguf import GGUFFile
from kvcatch.models.llama import LlamaModel
from kvcatch.models.precision import choose_precision
from kvcatch.models.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from kvcatch.models.weights import load_gguf, load_safetensors

if TYPE_CHECKING:
    from kvcatch.models.precision import Precision

__all__ = ["LoadedModel", "load_model", "read_shape"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with all that belongs to it.

    Attributes:
        name: File or folder name, for ``/v1/models``.
        path: Where it came from.
        config: Its shape.
        model: Its weights, ready to run.
        tokenizer: From the same source.
        precision: What was chosen for this processor.
        seconds: How long the load took.
    """

    name: str
    path: Path
    config: LlamaConfig
    model: LlamaModel
    tokenizer: Tokenizer
    precision: Precision
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.config.num_parameters / 1e6:.0f} M parameters, {self.precision}, "
            f"loaded in {self.seconds:.1f} s"
        )


def load_model(
    source: str | Path | None = None, *, device: str = "cpu", precision: str = "auto"
) -> LoadedModel:
    """Load a GGUF file, or a folder with ``config.json``, ``tokenizer.json`` and safetensors.

    Call :func:`kvcatch.models.threads.set_threads` first where nothing has imported torch yet.

    Args:
        source: file or folder; None is the embedded default, which is pulled if it is not cached.
        device: ``cpu`` or ``cuda:N``.
        precision: ``auto``, ``float32`` or ``bfloat16``; see :func:`choose_precision`.

    Raises:
        ModelError: missing, truncated or damaged.
        ConfigError: an architecture or variant that is not run here, by name.
        PullError: the default is neither cached nor to be had.
        MissingExtra: torch, tokenizers, jinja2 or safetensors is not installed.
    """
    if source is None:
        from kvcatch.models.pull import pull

        source = pull()
    path = Path(source)
    started = time.perf_counter()
    chosen = choose_precision(device, precision)
    if path.is_dir():
        config = _folder_config(path)
        tokenizer = tokenizer_from_folder(path)
        weights = load_safetensors(path, config)
    else:
        file = GGUFFile(path)
        config = _gguf_config(file)
        tokenizer = tokenizer_from_gguf(file)
        weights = load_gguf(file, config)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: {tokenizer.vocab_size} tokens in the tokenizer, {config.vocab_size} in the model"
        )
    model = LlamaModel(config, weights, chosen, device)
    seconds = time.perf_counter() - started
    name = path.resolve().name.removesuffix(".gguf")
    return LoadedModel(name, path, config, model, tokenizer, chosen, seconds)


def read_shape(source: str | Path) -> LlamaConfig:
    """The shape alone, without weights and without torch.

    Raises:
        ModelError, ConfigError: as :func:`load_model`.
    """
    path = Path(source)
    return _folder_config(path) if path.is_dir() else _gguf_config(GGUFFile(path))


def _gguf_config(file: GGUFFile) -> LlamaConfig:
    embedding = file.tensors.get("token_embd.weight")
    # The architecture is looked at first: another one has other tensors.
    config = LlamaConfig.from_gguf(
        file.metadata,
        str(file.path),
        tie_embeddings="output.weight" not in file.tensors,
        vocab_size=0 if embedding is None else embedding.shape[0],
    )
    if embedding is None:
        raise ModelError(f"{file.path}: lacks tensor token_embd.weight")
    return config


def _folder_config(folder: Path) -> LlamaConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file: a model folder has config.json and safetensors")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object")
    return LlamaConfig.from_hf(data, str(path))
