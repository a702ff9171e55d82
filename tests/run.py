"""Run every test of the repository and say at the end, by name, what was skipped and why.

Six suites: ``rust`` (cargo test), ``python`` (pytest), ``kernels`` (the CUDA kernels on the CPU, and what the compiler
makes of them), ``gpu`` (skipped without one), ``callgrind`` (instructions per hot call) and ``fuzz`` (the pool under
random operations, for a bounded time). Standard library only. `make test` is the way to call it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()

# What cargo-fuzz passes to rustc for a run without a sanitizer: stable flags all, so that no nightly
# and no cargo-fuzz is needed. The crate has no unsafe code for a sanitizer to watch.
FUZZ_RUSTFLAGS = " ".join(
    [
        "--cfg fuzzing",
        "-Cdebug-assertions",
        "-Cpasses=sancov-module",
        "-Cllvm-args=-sanitizer-coverage-level=4",
        "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
        "-Cllvm-args=-sanitizer-coverage-pc-table",
        "-Cllvm-args=-sanitizer-coverage-trace-compares",
    ]
)


@dataclass
class Suite:
    """What one runner said."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    broken: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.broken


def cpus() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def stream(
    command: list[str], env: Mapping[str, str] | None = None, hide: str = ""
) -> tuple[int, list[str]]:
    """Run a command, show its output as it comes (but what `hide` matches), and return its status and its lines."""
    print(f"\n$ {' '.join(command)}", flush=True)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            if not (hide and re.match(hide, line)):
                sys.stdout.write(line)
                sys.stdout.flush()
            lines.append(line.rstrip("\n"))
    return process.returncode, lines


def run_rust(_: argparse.Namespace) -> Suite:
    """Unit, model, integration and documentation tests of the crate."""
    suite = Suite("rust")
    status, lines = stream(["cargo", "test", "--no-fail-fast", "--features", "serde"])
    for line in lines:
        if closing := re.match(r"test result: \S+ (\d+) passed; (\d+) failed; (\d+) ignored", line):
            suite.passed += int(closing[1])
            suite.failed += int(closing[2])
        elif ignored := re.match(r"test (.+) \.\.\. ignored(?:, (.*))?$", line):
            suite.skipped.append((ignored[1], ignored[2] or "ignored"))
    if status and not suite.failed:
        suite.broken = f"cargo test exited {status}"
    elif not suite.passed:
        suite.broken = "cargo test ran no test"
    return suite


def run_pytest(name: str, folder: str, *options: str, workers: int = 1) -> Suite:
    """One pytest run; names and reasons of skipped tests come from its JUnit report.

    With several workers each takes whole files, and torch one thread: the spinning threads of one worker would take
    the other's time.
    """
    suite = Suite(name)
    report = TARGET / f"pytest-{name}.xml"
    report.unlink(missing_ok=True)
    env = {}
    if workers > 1:
        options = (*options, "--numprocesses", str(workers), "--dist", "loadfile")
        env["OMP_NUM_THREADS"] = "1"
    status, _ = stream(
        [sys.executable, "-m", "pytest", folder, f"--junitxml={report}", *options], env
    )
    if not report.exists():
        suite.broken = f"pytest exited {status}"
        return suite
    for case in ET.parse(report).iter("testcase"):
        full_name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            suite.failed += 1
        elif skip is None or skip.get("type") == "pytest.xfail":
            suite.passed += 1
        else:
            suite.skipped.append((full_name, skip.get("message", "")))
    if status == 5:
        suite.broken = "pytest found no test"
    elif status and not suite.failed:
        suite.broken = f"pytest exited {status}"
    return suite


def run_python(options: argparse.Namespace) -> Suite:
    """The package, and the core through its boundary."""
    return run_pytest("python", "tests/python", workers=options.workers)


def run_kernels(options: argparse.Namespace) -> Suite:
    """The CUDA kernels emulated, their sanitizer runs on small shapes, and the compile budget."""
    chosen = [] if options.slow else ["-m", "not slow"]
    return run_pytest("kernels", "tests/cuda_host", *chosen, workers=options.workers)


def run_gpu(_: argparse.Namespace) -> Suite:
    """The kernels on a GPU; one skipped test says why where there is none."""
    return run_pytest("gpu", "tests/gpu")


def run_callgrind(_: argparse.Namespace) -> Suite:
    """Instructions of the hot calls against those on file."""
    return run_pytest("callgrind", "tests/callgrind")


def run_fuzz(options: argparse.Namespace) -> Suite:
    """Every fuzz target for a bounded time, from an empty corpus and a fixed seed."""
    suite = Suite("fuzz")
    targets = sorted(path.stem for path in (ROOT / "fuzz" / "fuzz_targets").glob("*.rs"))
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")
    missing = ""
    if not compiler:
        missing = "no C++ compiler, which libFuzzer is built with"
    elif not sys.platform.startswith("linux"):
        missing = "only on Linux"
    if missing:
        suite.skipped = [(f"fuzz::{target}", missing) for target in targets]
        return suite
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    build = TARGET / "fuzz"
    # --target keeps the coverage flags away from build scripts and macros.
    status, _ = stream(
        ["cargo", "build", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target", host],
        {"RUSTFLAGS": FUZZ_RUSTFLAGS, "CARGO_TARGET_DIR": str(build)},
    )
    if status:
        suite.broken = f"the fuzz targets do not build (cargo exited {status})"
        return suite
    for target in targets:
        corpus, artifacts = build / "corpus" / target, build / "artifacts" / target
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        artifacts.mkdir(parents=True, exist_ok=True)
        status, _ = stream(
            [
                str(build / host / "release" / target),
                f"-max_total_time={options.fuzz_seconds}",
                f"-artifact_prefix={artifacts}/",
                "-seed=1",
                "-len_control=0",
                "-max_len=2048",
                "-timeout=20",
                "-print_final_stats=1",
                "-verbosity=0",
                str(corpus),
            ],
            hide=r"\tNEW_FUNC|WARNING: Failed to find function|#{6} |\".*# Uses",
        )
        if status:
            suite.failed += 1
            print(f"fuzz::{target} failed; the input lies in {artifacts}")
        else:
            suite.passed += 1
    return suite


SUITES = {
    "rust": run_rust,
    "python": run_python,
    "kernels": run_kernels,
    "gpu": run_gpu,
    "callgrind": run_callgrind,
    "fuzz": run_fuzz,
}


def summary(suites: list[Suite]) -> Iterator[str]:
    """The last lines: every skipped test by name, one line a suite, and the sum alone on its line."""
    yield ""
    for suite in suites:
        for name, reason in suite.skipped:
            yield f"skipped {suite.name}: {name} ({reason})"
    for suite in suites:
        state = "ok" if suite.ok else f"FAILED{suite.broken and ' (' + suite.broken + ')'}"
        yield (
            f"{suite.name:<10} {suite.passed:>5} passed {suite.failed:>5} failed {len(suite.skipped):>5} skipped"
            f" {suite.seconds:>7.1f} s  {state}"
        )
    passed = sum(suite.passed for suite in suites)
    failed = sum(suite.failed or bool(suite.broken) for suite in suites)
    yield f"total: {passed} passed, {failed} failed, {sum(len(s.skipped) for s in suites)} skipped"


def main() -> int:
    """Run the suites asked for; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=SUITES, action="append", help="this suite alone (repeatable)"
    )
    seconds = int(os.environ.get("FUZZ_SECONDS", "10"))
    parser.add_argument(
        "--fuzz-seconds", type=int, default=seconds, help="for each fuzz target (%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=cpus(),
        help="processes of the suites python and kernels (%(default)s)",
    )
    parser.add_argument("--slow", action="store_true", help="every kernel variant and shape, too")
    options = parser.parse_args()
    TARGET.mkdir(parents=True, exist_ok=True)
    suites = []
    for name in options.only or SUITES:
        start = time.monotonic()
        suite = SUITES[name](options)
        suite.seconds = time.monotonic() - start
        suites.append(suite)
    print("\n".join(summary(suites)), flush=True)
    return 0 if all(suite.ok for suite in suites) else 1


if __name__ == "__main__":
    sys.exit(main())
