"""Runs the kernels of ``cuda/`` under AddressSanitizer, ThreadSanitizer and UndefinedBehaviorSanitizer.

    python tests/cuda_host/sanitize.py                       the small selection of scenarios.py, all three
    python tests/cuda_host/sanitize.py --all                 every scenario
    python tests/cuda_host/sanitize.py --only tsan "decode bf16"

A sanitizer's library has to be in the process before Python is, so each run is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPTIONS = {
    "asan": {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=66",
        "PYTHONMALLOC": "malloc",
    },
    "tsan": {
        "TSAN_OPTIONS": "report_thread_leaks=0:exitcode=66:history_size=0:report_signal_unsafe=0"
    },
    "ubsan": {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66"},
}


def environment(sanitizer: str) -> dict[str, str]:
    """Variables for a Python process with a sanitizer in it."""
    compiler = os.environ.get("KVCATCH_CXX", "g++")
    library = subprocess.run(
        [compiler, f"-print-file-name=lib{sanitizer}.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        **os.environ,
        **OPTIONS[sanitizer],
        "LD_PRELOAD": library,
        "KVCATCH_SANITIZER": sanitizer,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        # Threads of others would only be noise, and slow.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run(module: str, sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this package in a process with a sanitizer in it."""
    return subprocess.run(
        [sys.executable, "-m", f"cuda_host.{module}", *arguments],
        env=environment(sanitizer),
        capture_output=True,
        text=True,
        check=False,
    )


def say(line: str) -> None:
    """Print a line at once: others write to the same terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the scenarios under one sanitizer or all; the exit code says whether all were silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all scenarios, not the small selection")
    parser.add_argument("--only", choices=OPTIONS, help="one sanitizer")
    parser.add_argument("scenario", nargs="*", help="names of scenarios (see scenarios.py)")
    given = parser.parse_args()
    arguments = [*(["--all"] if given.all else []), *given.scenario]
    failed = []
    for sanitizer in [given.only] if given.only else OPTIONS:
        began = time.perf_counter()
        say(f"== {sanitizer}")
        command = [sys.executable, "-m", "cuda_host.scenarios", *arguments]
        done = subprocess.run(command, env=environment(sanitizer), check=False)
        say(f"== {sanitizer}: {time.perf_counter() - began:.0f} s")
        if done.returncode:
            failed.append(sanitizer)
    if failed:
        say(f"found something: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
