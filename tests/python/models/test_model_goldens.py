"""The default model against transformers on the same weights, in every way an engine may batch it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs kvcatch[engine]")

from golden_texts import NUM_TOKENS  # noqa: E402
from model_driver import Run, generate  # noqa: E402
from torch_backend import TorchBackend  # noqa: E402

from kvcatch.kernels import Backend, get_backend  # noqa: E402
from kvcatch.models import load, weights  # noqa: E402
from kvcatch.models.llama import LlamaModel  # noqa: E402
from kvcatch.models.precision import Precision  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.models.config import LlamaConfig
    from kvcatch.models.load import LoadedModel

TOLERANCE = 1e-3
"""Of a logit in float32: other chunks and batches round otherwise by 1e-4."""


class Goldens:
    def __init__(self) -> None:
        stored = np.load(Path(__file__).with_name("goldens.npz"))
        self.prompts: list[list[int]] = json.loads(str(stored["prompts"]))
        self.tokens = stored["tokens"]
        self.tops, self.sums = stored["tops"], stored["sums"]
        self.columns, self.logits = stored["columns"].astype(np.int64), stored["logits"]

    def difference(self, runs: list[Run], rows: slice = slice(None)) -> float:
        """Largest |difference| of any stored number; ``runs`` are those of ``rows`` and may have fewer tokens."""
        worst = 0.0
        for run, tops, sums, logits in zip(
            runs, self.tops[rows], self.sums[rows], self.logits[rows], strict=True
        ):
            count = len(run.logits)
            got = torch.stack(run.logits).double()
            worst = max(worst, float(np.abs(got.topk(2).values.numpy() - tops[:count]).max()))
            worst = max(worst, float(np.abs(got.logsumexp(-1).numpy() - sums[:count]).max()))
            ends = (0, -1) if count == NUM_TOKENS else (0,)
            for end, row in zip(ends, logits, strict=False):
                worst = max(worst, float(np.abs(got[end].numpy()[self.columns] - row).max()))
        return worst


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return Goldens()


def test_goldens_are_worth_comparing_with(goldens: Goldens) -> None:
    assert len(goldens.prompts) == 20
    assert goldens.tokens.shape == (20, NUM_TOKENS)
    assert len({tuple(row) for row in goldens.tokens.tolist()}) == 20
    assert min(map(len, goldens.prompts)) == 1
    assert max(map(len, goldens.prompts)) > 256
    assert (goldens.tops[:, :, 0] - goldens.tops[:, :, 1]).min() > 10 * TOLERANCE


def test_one_by_one(default_model: LoadedModel, goldens: Goldens) -> None:
    rows = slice(0, 20, 7)
    runs = [
        generate(default_model.model, TorchBackend(), [prompt], NUM_TOKENS)[0]
        for prompt in goldens.prompts[rows]
    ]
    assert [run.new_tokens for run in runs] == goldens.tokens[rows].tolist()
    assert goldens.difference(runs, rows) < TOLERANCE


@pytest.mark.parametrize(
    ("chunk", "budget", "block_size", "count"),
    [(1 << 20, 1 << 20, 16, NUM_TOKENS), (7, 64, 16, 8), (16, 40, 5, 8), (64, 100, 32, 8)],
)
def test_all_in_one_batch(
    default_model: LoadedModel,
    goldens: Goldens,
    chunk: int,
    budget: int,
    block_size: int,
    count: int,
) -> None:
    """Prompts of 1 to 272 tokens in chunks; some decode while others are still prefilled."""
    runs = generate(
        default_model.model,
        TorchBackend(),
        goldens.prompts,
        count,
        chunk=chunk,
        budget=budget,
        block_size=block_size,
        seed=chunk,
    )
    assert [run.new_tokens for run in runs] == goldens.tokens[:, :count].tolist()
    assert goldens.difference(runs) < TOLERANCE


def test_prompts_fed_token_by_token(default_model: LoadedModel, goldens: Goldens) -> None:
    rows = slice(10, 17)
    runs = generate(default_model.model, TorchBackend(), goldens.prompts[rows], 8, chunk=1)
    assert [run.new_tokens for run in runs] == goldens.tokens[rows, :8].tolist()
    assert goldens.difference(runs, rows) < TOLERANCE


def test_through_the_cpu_backend(default_model: LoadedModel, goldens: Goldens) -> None:
    backend = get_backend("cpu")
    assert isinstance(backend, Backend)
    runs = generate(default_model.model, backend, goldens.prompts, NUM_TOKENS, chunk=16, budget=48)
    assert [run.new_tokens for run in runs] == goldens.tokens.tolist()
    assert goldens.difference(runs) < TOLERANCE


def test_plain_matmul(default_path: Path, goldens: Goldens, reload: Reload) -> None:
    model = reload(precision=Precision("float32", "plain", "a test"))
    rows = slice(0, 8)
    runs = generate(model, TorchBackend(), goldens.prompts[rows], 8)
    assert [run.new_tokens for run in runs] == goldens.tokens[rows, :8].tolist()
    assert goldens.difference(runs, rows) < TOLERANCE


def test_bfloat16_agrees_with_float32(goldens: Goldens, reload: Reload) -> None:
    """Given the same text before it, nearly every next token is the same; the logits are not."""
    model = reload(precision=Precision("bfloat16", "packed", "a test"))
    runs = generate(
        model,
        TorchBackend(),
        goldens.prompts,
        8,
        kv_dtype="bfloat16",
        forced=goldens.tokens.tolist(),
    )
    chosen = np.array([[int(row.argmax()) for row in run.logits] for run in runs])
    assert (chosen == goldens.tokens[:, :8]).mean() > 0.9
    assert TOLERANCE < goldens.difference(runs) < 3.0


def test_wide_rows_only_round_less(goldens: Goldens, reload: Reload) -> None:
    """Prompts in float32 over bfloat16 weights: nearer to float32 than all in bfloat16, and not the same."""
    found, agreeing = [], []
    for wide_rows in (0, 1):
        model = reload(precision=Precision("bfloat16", "packed", "a test", wide_rows))
        runs = generate(model, TorchBackend(), goldens.prompts, 1, kv_dtype="bfloat16")
        found.append(goldens.difference(runs))
        first = np.array([run.logits[0].argmax() for run in runs])
        agreeing.append((first == goldens.tokens[:, 0]).mean())
    narrow, wide = found
    assert TOLERANCE < wide < narrow
    assert agreeing[1] >= 0.95


REAL_ORDER = weights.halves_first


def _reversed_pairs(rows: Any, num_heads: int) -> Any:
    return REAL_ORDER(rows, num_heads).reshape(num_heads, 2, 32, -1).flip(1).reshape(rows.shape)


FAULTS: dict[str, dict[str, Any]] = {
    "queries and keys as they lie in the file": {"order": lambda rows, heads: rows},
    "keys as they lie in the file": {
        "order": lambda rows, heads: REAL_ORDER(rows, heads) if heads == 9 else rows
    },
    "halves of a head changed places": {"order": _reversed_pairs},
    "rope theta of 10,000": {"config": {"rope_theta": 1e4}},
    "epsilon of 1e-6": {"config": {"rms_norm_eps": 1e-6}},
    "head_dim scaled as hidden": {"scale": 576**-0.5},
    "positions one too high": {"shift": 1},
}
SEEN_BY = {"positions one too high": 0.0}
"""Rotary positions are relative: this one is no fault, and shows that the comparison can pass."""


@pytest.mark.parametrize("name", FAULTS)
def test_loader_faults_are_caught(
    name: str, goldens: Goldens, reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    if "order" in fault:
        monkeypatch.setattr(weights, "halves_first", fault["order"])
    model = reload(config=fault.get("config", {}))
    if "scale" in fault:
        model._scale = fault["scale"]
    if "shift" in fault:
        rotations = model._rotations
        model._rotations = lambda at, dtype: rotations(at + fault["shift"], dtype)  # type: ignore[method-assign]
    rows = slice(0, 20, 5)
    runs = generate(model, TorchBackend(), goldens.prompts[rows], 1)
    found = goldens.difference(runs, rows)
    assert (found < TOLERANCE) == (name in SEEN_BY), found


class Reload:
    """Loads the default model anew with something changed."""

    def __init__(self, path: Path) -> None:
        self.file = load.GGUFFile(path)

    def __call__(
        self, *, config: dict[str, Any] | None = None, precision: Precision | None = None
    ) -> LlamaModel:
        shape: LlamaConfig = replace(load._gguf_config(self.file), **(config or {}))
        precision = precision or Precision("float32", "packed", "a test")
        return LlamaModel(shape, weights.load_gguf(self.file, shape), precision)


@pytest.fixture(scope="module")
def reload(default_path: Path) -> Callable[..., LlamaModel]:
    return Reload(default_path)
