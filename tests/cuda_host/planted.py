"""The planted bugs of ``bugs.cu``: how each is launched, and which checks must find it.

Run as a program it launches every kernel in a process of its own, in the build for the sanitizer that
``KVCATCH_SANITIZER`` names, and prints what the sanitizer said of each as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_host.build import HERE, build
from cuda_host.kernel import ORDERS, EmulationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

__all__ = ["PLANTED", "Outcome", "Planted", "launch", "outcome"]

BEYOND = "heap-buffer-overflow"
RACE = "data race"
LAST_BLOCK = ((4, np.float32), (1, np.uint32))
RING = 3 * 32 * 16


def _tree(x: Floats) -> Floats:
    sums = x.copy()
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return np.r_[sums, np.zeros(len(x) - 1, np.float32)]


def _sum_of_blocks(x: Floats) -> Floats:
    blocks = [np.add.accumulate(block)[-1] for block in x.reshape(4, -1)]
    return np.r_[np.add.accumulate(blocks)[-1:], np.zeros(len(x) - 1, np.float32)]


@dataclass(frozen=True)
class Planted:
    """One kernel of ``bugs.cu``: its launch, and what finds it. What is not named must be silent.

    Attributes:
        error: what the plain build reports, a regular expression.
        orders: results differ between orders of threads and blocks.
        value: forward order gives a wrong result.
        asan: what AddressSanitizer reports, a regular expression.
        tsan: what ThreadSanitizer reports.
        ubsan: what UndefinedBehaviorSanitizer reports.
        expected: the right result for the input; ``None`` where there is none.
        grid: blocks.
        block: threads.
        shared: bytes of shared memory.
        n: floats in, and the kernel's ``n``.
        out: floats out, if not ``n``.
        zeros: the output starts as zeros, not as NaN.
        more: further buffers of zeros: how many of which dtype.
        sanitizers: builds that it can run in.
    """

    error: str = ""
    orders: bool = False
    value: bool = False
    asan: str = ""
    tsan: str = ""
    ubsan: str = ""
    expected: Callable[[Floats], Floats] | None = np.copy
    grid: int = 1
    block: int = 32
    shared: int = 0
    n: int = 32
    out: int = 0
    zeros: bool = False
    more: tuple[tuple[int, Any], ...] = ()
    sanitizers: tuple[str, ...] = ("asan", "tsan", "ubsan")


def _rolled(x: Floats) -> Floats:
    return np.roll(x, -1)


PLANTED: dict[str, Planted] = {
    # Shared memory and barriers
    "ok_neighbours": Planted(expected=_rolled, block=64, n=64, shared=256),
    "missing_syncthreads": Planted(
        orders=True, value=True, tsan=RACE, expected=_rolled, block=64, n=64, shared=256
    ),
    "ok_warp_tree": Planted(expected=_tree, shared=128, zeros=True),
    "missing_syncwarp": Planted(
        orders=True, value=True, tsan=RACE, expected=_tree, shared=128, zeros=True
    ),
    "shared_beyond": Planted(
        error=r"store 0 byte\(s\) beyond the end of shared memory \(128 bytes\).*bugs.cu:\d+",
        asan=BEYOND,
        shared=128,
    ),
    "shared_before": Planted(
        error=r"wrote 1 byte\(s\) before its 128 bytes of shared memory",
        asan=BEYOND,
        shared=128,
        sanitizers=("asan", "ubsan"),
    ),
    "shared_unwritten": Planted(value=True, shared=128),
    "shared_of_last_block": Planted(
        value=True, grid=2, block=16, shared=64, n=16, out=32, expected=lambda x: np.tile(x, 2)
    ),
    "divergent_barrier": Planted(
        error=r"16 thread\(s\) at __syncthreads \(bugs.cu:\d+\)|after \d+ thread\(s\) of the block"
    ),
    "two_barriers": Planted(
        error=r"divergent __syncthreads: thread 16 is at bugs.cu:\d+, others at bugs.cu:\d+"
    ),
    # Warp collectives
    "divergent_shuffle": Planted(
        error=r"20 at a warp operation \(bugs.cu:|lanes fff00000 of the mask ffffffff have exited"
    ),
    "shuffle_from_outside": Planted(
        error=r"shuffle at bugs.cu:\d+: lane 0 reads lane 16, which is not in the mask"
    ),
    "not_in_own_mask": Planted(error="lane 16 is not in its own mask 0000ffff"),
    "ballot_of_half_warp": Planted(
        error="mask ffffffff names lanes that the block does not have", block=16, n=16
    ),
    # Global memory
    "load_beyond": Planted(
        error=r"load 0 byte\(s\) beyond the end of in \(128 bytes\)",
        asan=BEYOND,
        sanitizers=("asan", "ubsan"),
    ),
    "store_beyond": Planted(
        error=r"store 0 byte\(s\) beyond the end of out \(128 bytes\), .* of block \(2,0,0\)",
        asan=BEYOND,
        grid=3,
        block=16,
        sanitizers=("asan", "ubsan"),
    ),
    "store_before": Planted(
        error=r"store 1 byte\(s\) before the start of out",
        asan=BEYOND,
        sanitizers=("asan", "ubsan"),
    ),
    "wild_id": Planted(
        error=r"load 127999872 byte\(s\) beyond the end of in \(128 bytes\)",
        asan="SEGV|" + BEYOND,
        sanitizers=("asan",),
    ),
    "null_pointer": Planted(
        error="load through a null pointer",
        asan="SEGV",
        ubsan="null pointer",
        sanitizers=("asan", "ubsan"),
    ),
    "store_through_const": Planted(error="store through a pointer to const: in, byte 0"),
    "misaligned_load": Planted(
        error="misaligned access: address ends in 0x.?4, 16 bytes", ubsan="misaligned address"
    ),
    "missing_tail": Planted(value=True, n=50),
    # Between blocks
    "block_race": Planted(orders=True, tsan=RACE, grid=8, zeros=True, expected=None),
    "float_atomics": Planted(orders=True, grid=8, n=256, zeros=True, expected=None),
    "ok_last_block": Planted(grid=4, n=128, zeros=True, more=LAST_BLOCK, expected=_sum_of_blocks),
    "plain_counter": Planted(
        tsan=RACE, grid=4, n=128, zeros=True, more=LAST_BLOCK, expected=_sum_of_blocks
    ),
    # cp.async
    "ok_ring": Planted(n=1024, shared=RING),
    "weak_wait": Planted(orders=True, value=True, tsan=RACE, n=1024, shared=RING),
    "early_refill": Planted(orders=True, tsan=RACE, n=1024, shared=RING),
    # Arithmetic
    "local_beyond": Planted(
        error="index 4 out of bounds of an array",
        asan="stack-buffer-overflow",
        ubsan="out of bounds",
    ),
    "wide_shift": Planted(error="shift out of bounds", ubsan="shift exponent 32", expected=None),
    "int_overflow": Planted(error=r"signed overflow of \*", ubsan="signed integer overflow"),
    "divide_by_zero": Planted(
        error="division by zero", ubsan="division by zero", sanitizers=("ubsan",)
    ),
    "uninitialised": Planted(value=True),
    # Control
    "hang": Planted(error="still running after", grid=2, expected=None, sanitizers=()),
    "stack_overflow": Planted(error="stack overflow of a thread", sanitizers=()),
    "trap": Planted(error=r"trap at bugs.cu:\d+, thread \(3,0,0\) of block \(0,0,0\)"),
    "ok_bounded": Planted(block=64, n=64),
}


@dataclass(frozen=True)
class Outcome:
    """What the plain build shows of one kernel: a report, results that differ, a wrong one."""

    error: str
    orders: bool
    value: bool


def launch(name: str, order: str) -> Floats:
    """Launch a kernel and return its output.

    Raises:
        EmulationError: as :class:`cuda_host.kernel.Kernel`.
    """
    bug = PLANTED[name]
    values = np.random.default_rng(0).uniform(1, 2, bug.n).astype(np.float32)
    out = np.full(bug.out or bug.n, 0 if bug.zeros else np.nan, np.float32)
    more = [np.zeros(count, dtype) for count, dtype in bug.more]
    kernel = build(HERE / "bugs.cu").get_function(name)
    kernel(
        (bug.grid,), (bug.block,), (out, values, np.int32(bug.n), *more), bug.shared, order, seed=3
    )
    return out


def outcome(name: str) -> Outcome:
    """Launch a kernel in every order and say what shows."""
    results = []
    for order in ORDERS:
        try:
            results.append(launch(name, order))
        except EmulationError as error:
            return Outcome(str(error), orders=False, value=False)
    bug = PLANTED[name]
    values = np.random.default_rng(0).uniform(1, 2, bug.n).astype(np.float32)
    wrong = bug.expected is not None and not np.array_equal(results[0], bug.expected(values))
    differ = any(result.tobytes() != results[0].tobytes() for result in results)
    return Outcome("", differ, wrong)


def _in_child(name: str) -> str:
    """What a sanitizer says of one kernel; empty if nothing."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            for order in ORDERS:
                try:
                    launch(name, order)
                except EmulationError:
                    continue
            os._exit(0)
        os.waitpid(child, 0)
        said.seek(0)
        return said.read().decode(errors="replace")


def main() -> None:
    """Print ``{kernel: what was said}``."""
    sanitizer = os.environ["KVCATCH_SANITIZER"]
    names = [name for name, bug in PLANTED.items() if sanitizer in bug.sanitizers]
    build(HERE / "bugs.cu")
    json.dump({name: _in_child(name) for name in names}, sys.stdout)


if __name__ == "__main__":
    main()
