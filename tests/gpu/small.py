"""The busy step on a GPU, for compute-sanitizer: CuPy's tensors, so that little else runs."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "python" / "kernels")]

import cupy  # noqa: E402
from busy_step import a_busy_step  # noqa: E402

from kvcatch.kernels import get_backend  # noqa: E402

found = a_busy_step(get_backend("cuda", library="cupy"), cupy.asarray, cupy.asnumpy)
sys.stdout.write(f"{sum(int(x.nbytes) for x in found)} bytes\n")
