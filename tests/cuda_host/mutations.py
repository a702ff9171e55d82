"""Bugs planted in the real kernels: one piece of text of ``cuda/`` replaced, and the check that must find it.

A mutation whose text is not in its file exactly once is an error: it has to move with the code.

Run as a program in the build for TSan it tries those that are races and prints, as JSON, what TSan said of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_host.build import CUDA, cache_folder
from cuda_host.emulated import EmulatedBackend
from cuda_host.kernel import ORDERS, EmulationError
from cuda_host.scenarios import run

__all__ = ["MUTATIONS", "Mutation", "mutated", "tried"]


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        file: of ``cuda/``.
        old: text to be found there once.
        new: text instead.
        scenario: what shows it (see ``scenarios.py``).
        finds: the check: ``orders`` (results differ between orders), ``error`` (the emulator reports a fault) or
            ``value`` (the same in all orders, and wrong).
        says: for ``error``, what it reports.
        race: TSan reports it too.
    """

    file: str
    old: str
    new: str
    scenario: str
    finds: str
    says: str = ""
    race: bool = False


MUTATIONS: dict[str, Mutation] = {
    "move: wrong destination": Mutation(
        "block_move.cu",
        "target + ids.y * target_block",
        "target + ids.x * target_block",
        "move",
        "value",
    ),
    "move: one block further": Mutation(
        "block_move.cu",
        "source + ids.x *",
        "source + (ids.x + 1) *",
        "move",
        "error",
        "beyond the end of source",
    ),
    "move: run not bounded": Mutation(
        "block_move.cu",
        "if (k * 512 < left) store16_once",
        "if (k * 512 <= left) store16_once",
        "move odd runs",
        "orders",
    ),
    "move: tail left out": Mutation(
        "block_move.cu",
        "if (k * 512 < left) store16_once",
        "if (k * 512 + 512 < left) store16_once",
        "move odd runs",
        "value",
    ),
    "move: misaligned": Mutation(
        "block_move.cu",
        "threadIdx.x % 32 * 16;",
        "threadIdx.x % 32 * 16 + 8;",
        "move",
        "error",
        "misaligned access",
    ),
    "assign: temporary of a cycle lost": Mutation(
        "block_assign.cu", "held[k] = now[k];", "held[k] = held[k];", "assign", "value"
    ),
    "assign: group ends early": Mutation(
        "block_assign.cu",
        "const int end = first[group + 1];",
        "const int end = first[group + 1] - 1;",
        "assign",
        "value",
    ),
    "write: slot one too far": Mutation(
        "write_kv.cu", "at % KV_BLOCK_SIZE;", "at % KV_BLOCK_SIZE + 1;", "write bf16", "value"
    ),
    "write: padding written": Mutation(
        "write_kv.cu",
        "const bool wanted = slot >= 0 &&",
        "const bool wanted = token < tokens &&",
        "write bf16",
        "error",
        "signed overflow|before the start of pool",
    ),
    "write: scale of a part of the row": Mutation(
        "write_kv.cu",
        "max_of_lanes(amax, LANES)",
        "max_of_lanes(amax, LANES / 2)",
        "write e4m3 token",
        "value",
    ),
    "write: scale of every lane": Mutation(
        "write_kv.cu",
        "const float scale = e4m3_scale(max_of_lanes(amax, LANES));",
        "const float scale = e4m3_scale(amax + 0.f * max_of_lanes(amax, LANES));",
        "write e4m3 token",
        "value",
    ),
    "write: scales of another token": Mutation(
        "write_kv.cu",
        "scales[head * KV_BLOCK_SIZE + offset] = scale;",
        "scales[head + offset] = scale;",
        "write e4m3 token",
        "value",
    ),
    "quantise: scale of one row for the block": Mutation(
        "quantise.cu",
        "max_of_lanes(most, 32)",
        "max_of_lanes(most, LANES)",
        "convert e4m3 block b64 from fp32",
        "value",
    ),
    "dequantise: scale of the next token": Mutation(
        "quantise.cu",
        "scale = scales[t.head * KV_BLOCK_SIZE + row];",
        "scale = scales[t.head * KV_BLOCK_SIZE + row + 1];",
        "convert e4m3 token",
        "value",
    ),
    "decode: barrier before the merge of warps": Mutation(
        "decode.cu", "  __syncthreads();\n", "", "decode bf16", "orders", race=True
    ),
    "decode: one block further": Mutation(
        "decode.cu",
        "int block = at < end ? table[at",
        "int block = at < end ? 1 + table[at",
        "decode bf16",
        "error",
        "beyond the end of cache",
    ),
    "decode: one token too many": Mutation(
        "decode.cu",
        "token >= first && token < end",
        "token >= first && token <= end",
        "decode bf16",
        "value",
    ),
    "decode: values of dead slots kept": Mutation(
        "decode.cu", "clear_values(v, first - at, end - at, lane);", "", "decode bf16", "value"
    ),
    "decode: shared memory beyond": Mutation(
        "decode.cu",
        "float* sums = maxima + WARPS * HEADS;",
        "float* sums = maxima + WARPS * HEADS + 1;",
        "decode bf16",
        "error",
        "beyond the end of shared memory",
    ),
    "decode: keys without their scale": Mutation(
        "attention.cuh", "x *= scales.key[token];", "x *= 1.f;", "decode e4m3 token d128", "value"
    ),
    "merge: last partial result left out": Mutation(
        "merge.cu",
        "sum += weight,",
        "sum += i < merge.z - 1 ? weight : 0.f,",
        "decode long",
        "value",
    ),
    "prefill: barrier before reading": Mutation(
        "prefill.cu",
        "    __syncthreads();\n    const u8* stage",
        "    const u8* stage",
        "prefill bf16",
        "orders",
        race=True,
    ),
    "prefill: barrier before the next copy": Mutation(
        "prefill.cu",
        "    __syncthreads();\n  }\n\n  finish_sums",
        "  }\n\n  finish_sums",
        "prefill long",
        "orders",
        race=True,
    ),
    "prefill: wait one group too weak": Mutation(
        "prefill.cu", "copies_wait<1>();", "copies_wait<2>();", "prefill long", "orders"
    ),
    "prefill: sees one token ahead": Mutation(
        "prefill.cu", "if (d > 0 ||", "if (d > 1 ||", "prefill bf16", "value"
    ),
    "prefill: window one token too wide": Mutation(
        "prefill.cu", "d <= -window", "d < -window", "prefill fp16 d256 window", "value"
    ),
}


def mutated(name: str) -> Path:
    """A copy of ``cuda/`` with the mutation made.

    Raises:
        LookupError: its text is not in the file exactly once.
    """
    mutation = MUTATIONS[name]
    text = (CUDA / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise LookupError(
            f"mutation {name!r}: {mutation.file} has {mutation.old!r} {text.count(mutation.old)} times: must be once"
        )
    files = sorted(CUDA.glob("*.cu*"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    digest.update(f"{mutation.file}\0{mutation.old}\0{mutation.new}".encode())
    folder = cache_folder() / f"mutated-{digest.hexdigest()[:20]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            copy = Path(unfinished) / "cuda"
            copy.mkdir()
            for path in files:
                shutil.copy(path, copy)
            (copy / mutation.file).write_text(text.replace(mutation.old, mutation.new))
            copy.rename(folder)
    return folder


def tried(name: str) -> tuple[str, str]:
    """What finds a mutation (``orders``, ``error``, ``value`` or nothing) and what was said."""
    mutation = MUTATIONS[name]
    folder = mutated(name)
    right = run(mutation.scenario, EmulatedBackend())
    results = []
    for order in ORDERS:
        try:
            results.append(
                run(mutation.scenario, EmulatedBackend((order,), cuda_dir=folder, seed=1))
            )
        except EmulationError as error:
            return "error", str(error)
    if any(not np.array_equal(result, results[0]) for result in results):
        return "orders", ""
    return ("", "") if np.array_equal(results[0], right) else ("value", "")


def main() -> None:
    """Print ``{mutation: what TSan said}``."""
    said = {}
    for name, mutation in MUTATIONS.items():
        if not mutation.race:
            continue
        with tempfile.TemporaryFile() as file:
            child = os.fork()
            if not child:
                os.dup2(file.fileno(), 2)
                for order in ORDERS:
                    run(mutation.scenario, EmulatedBackend((order,), cuda_dir=mutated(name)))
                os._exit(0)
            os.waitpid(child, 0)
            file.seek(0)
            said[name] = file.read().decode(errors="replace")
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
