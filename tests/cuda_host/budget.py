"""The compile budget: what every kernel may use on each architecture, measured by NVRTC without a GPU.

    PYTHONPATH=tests python -m cuda_host.budget             # hold all variants to budget.toml
    PYTHONPATH=tests python -m cuda_host.budget --update    # rewrite it after a change that means to move a number

A kernel is beyond its budget when it needs more registers, stack or spills than the table says, or has fewer 16-byte
loads and stores or tensor-core products. Registers decide how many thread blocks a processor holds, and so how many
bytes are on their way; a lost 16-byte load is bandwidth lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_host.cubin import KernelUsage, usage
from kvcatch.errors import KernelError, MissingExtra
from kvcatch.kernels.cuda_variants import Variant, attention_variants, block_variants
from kvcatch.kernels.device_attention import HEAD_DIMS
from kvcatch.kernels.layout import KVLayout
from kvcatch.kernels.modules import CupyNvrtc, KernelCompiler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "ARCHES",
    "TABLE",
    "Case",
    "beyond",
    "cases",
    "compiler",
    "measure",
    "read",
    "unavailable",
]

HERE = Path(__file__).resolve().parent
ARCHES = (80, 90, 100)
TABLE = HERE / "budget.toml"
BUILD = "V13.0.88"
"""The NVRTC that the table is of; another one allots registers differently."""

MOST = ("registers", "stack", "spills")
LEAST = ("ldg128", "ldg64", "stg128", "ldgsts", "hmma")

DTYPES = {1: "fp16", 2: "bf16", 3: "e4m3", 0: "fp32"}
SCALES = {1: "token", 2: "head", 3: "block"}

Table = dict[str, dict[str, dict[str, KernelUsage]]]
"""Case, kernel, architecture (``sm_90``)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One variant by name; ``quick`` ones are held on every run, the others in the slow one."""

    name: str
    variant: Variant
    quick: bool


def cases() -> list[Case]:
    """Every variant in the budget: each axis (dtype, head_dim, group, block size, options) around a common model."""
    return list(
        {name: Case(name, v, _quick(v)) for v in _variants() if (name := _name(v))}.values()
    )


def _variants() -> Iterator[Variant]:
    def layout(head_dim: int = 128, **options: Any) -> KVLayout:
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, **options)

    e4m3 = {"dtype": "float8_e4m3"}
    kinds: tuple[dict[str, Any], ...] = (
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"scale": "token", **e4m3},
    )
    for head_dim in HEAD_DIMS:
        for kind in kinds:
            yield from block_variants(layout(head_dim, **kind))
            yield from attention_variants(layout(head_dim, **kind), 8)
            yield from attention_variants(layout(head_dim, **kind), 16)
    for scale in ("head", "block"):
        yield from block_variants(layout(scale=scale, **e4m3))
        yield from attention_variants(layout(scale=scale, **e4m3), 8)
    yield from block_variants(layout(dtype="float32"))
    yield from block_variants(layout(), check_ids=True)
    for group in (1, 4, 5, 7):
        yield from attention_variants(layout(), group)
    for block_size in (32, 64):
        yield from attention_variants(layout(block_size=block_size), 8)
    options = ("window", "soft_cap", "alibi", "check_ids")
    for option in options:
        yield from attention_variants(layout(), 8, **{option: True})
    every = attention_variants(
        layout(64, scale="token", **e4m3), 16, **dict.fromkeys(options, True)
    )
    yield from (variant for variant in every if variant.source != "merge")


def _quick(variant: Variant) -> bool:
    """Whether every run builds it: keys, values and queries of bf16; groups of 16 at a head_dim of 128 alone."""
    d = variant.defines
    return d.get("KV_IO", 2) == 2 and (d.get("KV_GROUP") != 16 or d["KV_HEAD_DIM"] == 128)


def _name(variant: Variant) -> str:
    """A short name: ``decode bf16 d128 b16 g8``."""
    d = dict(variant.defines)
    words = [variant.source]
    if "KV_DTYPE" in d:
        words.append(DTYPES[d["KV_DTYPE"]])
    if scale := d.get("KV_SCALE"):
        words.append(SCALES[scale])
    if "KV_IO" in d and d["KV_IO"] != d.get("KV_DTYPE"):
        words.append(f"io-{DTYPES[d['KV_IO']]}")
    for key, letter in (("KV_HEAD_DIM", "d"), ("KV_BLOCK_SIZE", "b"), ("KV_GROUP", "g")):
        if key in d:
            words.append(f"{letter}{d[key]}")
    words += [
        word
        for key, word in (
            ("KV_WINDOW", "window"),
            ("KV_SOFT_CAP", "cap"),
            ("KV_ALIBI", "alibi"),
            ("KV_CHECK_IDS", "check"),
        )
        if d.get(key)
    ]
    return " ".join(words)


def unavailable() -> str:
    """Why nothing can be measured here; empty where it can."""
    try:
        identity = CupyNvrtc().identity()
    except MissingExtra as why:
        return str(why)
    if BUILD not in identity:
        return f"the compile budget is of NVRTC {BUILD}, here is {identity}: pip install nvidia-cuda-nvrtc==13.0.88"
    return ""


def compiler() -> KernelCompiler:
    """The sources of this checkout; what was built is kept in ``target/cuda_budget``."""
    root = HERE.parents[1]
    return KernelCompiler(root / "cuda", root / "target" / "cuda_budget")


def measure(
    wanted: Iterable[Case], kernels: KernelCompiler, arches: Iterable[int] = ARCHES
) -> tuple[Table, dict[str, str]]:
    """Build cases on all architectures, on all processors, and say what each kernel uses.

    Returns:
        The table, and the error of each case that does not compile.
    """
    jobs = [(case, arch) for case in wanted for arch in arches]

    def build(job: tuple[Case, int]) -> dict[str, KernelUsage] | str:
        case, arch = job
        try:
            return usage(kernels.cubin(case.variant.source, case.variant.defines, arch))
        except KernelError as error:
            return str(error)

    table: Table = {}
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without the interpreter's lock
        for (case, arch), built in zip(jobs, pool.map(build, jobs), strict=True):
            if isinstance(built, str):
                errors[case.name] = built
                continue
            for kernel, used in built.items():
                table.setdefault(case.name, {}).setdefault(kernel, {})[f"sm_{arch}"] = used
    return table, errors


def beyond(case: str, measured: Table, budget: Table) -> list[str]:
    """What of one case is beyond its budget, a sentence each."""
    if case not in budget:
        return [f"{case}: not in {TABLE.name}; run cuda_host.budget --update"]
    found = []
    for kernel, by_arch in measured[case].items():
        for arch, used in by_arch.items():
            allowed = budget[case].get(kernel, {}).get(arch)
            if allowed is None:
                found.append(f"{case}: {kernel} on {arch} is not in {TABLE.name}")
                continue
            for field in (*MOST, *LEAST):
                has, limit = getattr(used, field), getattr(allowed, field)
                if has > limit if field in MOST else has < limit:
                    word = "at most" if field in MOST else "at least"
                    found.append(
                        f"{case}: {kernel} on {arch} has {has} {field}, {word} {limit} allowed"
                    )
    gone = {(k, a) for k, by in budget[case].items() for a in by} - {
        (k, a) for k, by in measured[case].items() for a in by
    }
    found += [
        f"{case}: {kernel} on {arch} is in {TABLE.name} and not built"
        for kernel, arch in sorted(gone)
    ]
    return found


def read(path: Path = TABLE) -> Table:
    """The budget on file."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        case: {
            kernel: {arch: KernelUsage(**numbers) for arch, numbers in by_arch.items()}
            for kernel, by_arch in kernels.items()
        }
        for case, kernels in raw.items()
    }


def write(table: Table, path: Path = TABLE) -> None:
    """Put a table on file, sorted, a line for each kernel and architecture."""
    lines = [
        f"# What the kernels of cuda/ use, by NVRTC {BUILD}. Written by cuda_host.budget --update.",
        "# registers, stack bytes and spills are the most allowed; loads, stores and products the least.",
    ]
    for case in sorted(table):
        lines += ["", f'["{case}"]']
        for kernel in sorted(table[case]):
            for arch, used in sorted(
                table[case][kernel].items(), key=lambda item: int(item[0][3:])
            ):
                numbers = ", ".join(f"{field} = {value}" for field, value in asdict(used).items())
                lines.append(f"{kernel}.{arch} = {{ {numbers} }}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Hold every variant to the table, or rewrite it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--update", action="store_true", help="rewrite the table from what is built now"
    )
    parser.add_argument("--quick", action="store_true", help="only what every run holds")
    options = parser.parse_args()
    if why := unavailable():
        sys.stderr.write(f"{why}\n")
        return 2
    wanted = [case for case in cases() if case.quick or not options.quick]
    measured, errors = measure(wanted, compiler())
    if errors:
        sys.stderr.write("\n".join(errors.values()) + "\n")
        return 1
    if options.update:
        write((read() if options.quick else {}) | measured)
        sys.stdout.write(
            f"{len(measured)} variants of {len(ARCHES)} architectures in {TABLE.name}\n"
        )
        return 0
    budget = read()
    faults = [fault for case in wanted for fault in beyond(case.name, measured, budget)]
    within = f"{len(wanted)} variants on {len(ARCHES)} architectures within budget"
    sys.stdout.write("\n".join(faults or [within]) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
