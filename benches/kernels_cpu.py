"""Figures of the CPU backend as ratios, each against baselines measured in turn with it.

    python benches/kernels_cpu.py              a minute
    python benches/kernels_cpu.py --seconds 1  less

What runs on several threads is measured by the clock, so other work on the machine counts: forms take turns, and the
least time of each is taken.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcatch import _core
from paged import SHAPES, Shape, copy_calls, decode_calls, prefill_calls
from test_copies import PIECES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure: time of kvcatch over that of the fastest baseline.

    Attributes:
        what: What was measured.
        seconds: Least time of kvcatch.
        baseline: The fastest of the others.
        baseline_seconds: Its least time.
        most: Ratio not to be passed; 0 where there is no target.
    """

    what: str
    seconds: float
    baseline: str
    baseline_seconds: float
    most: float = 0.0

    @property
    def ratio(self) -> float:
        """Time of kvcatch over the baseline's."""
        return self.seconds / self.baseline_seconds

    def __str__(self) -> str:
        target = f" (target <= {self.most:.2f})" if self.most else ""
        return (
            f"{self.what}: {self.ratio:.2f}x of {self.baseline}{target}, "
            f"{self.seconds * 1e3:.3f} against {self.baseline_seconds * 1e3:.3f} ms"
        )


def take_turns(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Least time of each call, in seconds, of as many turns as fit."""
    least = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()
            for _ in range(3):
                begin = time.perf_counter()
                call()
                least[name] = min(least[name], time.perf_counter() - begin)
    return least


def compare(
    what: str, calls: dict[str, Callable[[], object]], seconds: float, most: float = 0.0
) -> Ratio:
    """``kvcatch`` against the fastest of the others."""
    least = take_turns(calls, seconds)
    ours = least.pop("kvcatch")
    fastest = min(least, key=lambda name: least[name])
    return Ratio(what, ours, fastest, least[fastest], most)


def figures(seconds: float = 2.0) -> Iterator[Ratio]:
    """All figures, one after the other."""
    for dtype in ("float32", "bfloat16"):
        for shape in SHAPES:
            most = 1.25 if shape in SHAPES[:2] else 0.0
            yield compare(f"decode {dtype} {shape}", decode_calls(shape, dtype), seconds, most)
        calls = prefill_calls(Shape(1, 1280), 256, dtype)
        yield compare(f"prefill {dtype} 256 tokens after 1024", calls, seconds, 1.5)
    for piece, pieces in PIECES.items():
        what = f"{pieces} moves of {piece >> 10} KiB"
        yield compare(what, copy_calls(piece, pieces), seconds, 1 / 0.8)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each figure")
    options = parser.parse_args()
    level = _core.cpu_levels()[-1]
    print(
        f"{level}, {torch.get_num_threads()} threads of {_core.cpu_team()}, torch {torch.__version__}"
    )
    for figure in figures(options.seconds):
        print(figure)


if __name__ == "__main__":
    main()
