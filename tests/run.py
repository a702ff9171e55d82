"""Run every test of the repository and say at the end, by name, what was skipped and why.

Seven suites: ``rust`` (cargo test), ``python`` (pytest), ``kernels`` (the CUDA kernels on the CPU, and what the
compiler makes of them), ``gpu`` (skipped without one), ``callgrind`` (instructions per hot call), ``fuzz`` (the pool
under random operations, for a bounded time) and ``vllm`` (the plugin in a real vLLM, whose environment takes 6 GB:
only when asked for). Standard library only. `make test` is the way to call it.
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


def run_pytest(
    name: str,
    folder: str,
    *options: str,
    workers: int = 1,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> Suite:
    """One pytest run; names and reasons of skipped tests come from its JUnit report.

    With several workers each takes whole files, and torch one thread: the spinning threads of one worker would take
    the other's time.
    """
    suite = Suite(name)
    report = TARGET / f"pytest-{name}.xml"
    report.unlink(missing_ok=True)
    env = dict(env or {})
    if workers > 1:
        options = (*options, "--numprocesses", str(workers), "--dist", "loadfile")
        env["OMP_NUM_THREADS"] = "1"
    status, _ = stream([python, "-m", "pytest", folder, f"--junitxml={report}", *options], env)
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


VLLM_ENV_SECONDS = 600  # to make an environment with vLLM; longer, and the suite is skipped


def run_vllm(options: argparse.Namespace) -> Suite:
    """The plugin in a real vLLM, in an environment of its own: the one named, else the one kept in target/."""
    wheels = TARGET / "vllm-wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    status, _ = stream(
        [sys.executable, "-m", "maturin", "build", "--release", "--out", str(wheels)]
    )
    if status:
        return Suite("vllm", broken=f"kvcatch's wheel is not built (maturin exited {status})")
    wheel = str(next(wheels.glob("*.whl")))
    folder = options.vllm_env or TARGET / "vllm-env"
    python = str(folder / "bin" / "python")
    if options.vllm_env or (folder / "ready").exists():
        # Whatever version is in it: this tree's has the same number.
        install = ["install", "--quiet", "--no-deps", "--force-reinstall", wheel]
        if stream([python, "-m", "pip", *install])[0]:
            return Suite("vllm", broken=f"{folder} does not take kvcatch's wheel")
    elif reason := make_vllm_env(folder, wheel):
        return Suite("vllm", skipped=[("tests/vllm", reason)])
    model = os.environ.get("KVCATCH_TEST_MODEL") or str(folder / "model")
    return run_pytest(
        "vllm",
        "tests/vllm",
        *(
            "-c",
            os.devnull,
            "--rootdir",
            "tests/vllm",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            "-v",
        ),
        python=python,
        env={
            "KVCATCH_TEST_MODEL": model,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
    )


def make_vllm_env(folder: Path, wheel: str) -> str:
    """Make an environment with vLLM, kvcatch and a model in it; why there is none, else an empty text."""
    shutil.rmtree(folder, ignore_errors=True)
    end = time.monotonic() + VLLM_ENV_SECONDS
    for script, command, env in (
        ("make_env.sh", ["bash", "tests/vllm/make_env.sh", str(folder)], {"KVCATCH_WHEEL": wheel}),
        (
            "make_model.py",
            [str(folder / "bin" / "python"), "tests/vllm/make_model.py", str(folder / "model")],
            {},
        ),
    ):
        left = max(1, round(end - time.monotonic()))
        status, lines = stream(["timeout", "--kill-after=10", str(left), *command], env)
        if status:
            shutil.rmtree(folder, ignore_errors=True)
            why = f"exited {status}: {lines[-1] if lines else ''}"
            if status in (124, 137):
                why = f"was not done within {VLLM_ENV_SECONDS} s"
            return f"no environment with vLLM: {script} {why}"
    (folder / "ready").touch()
    return ""


SUITES = {
    "rust": run_rust,
    "python": run_python,
    "kernels": run_kernels,
    "gpu": run_gpu,
    "callgrind": run_callgrind,
    "fuzz": run_fuzz,
    "vllm": run_vllm,
}
ASKED_FOR = ("vllm",)
"""Suites that run only with ``--only`` or ``--with``."""


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
    parser.add_argument(
        "--with", dest="more", choices=ASKED_FOR, action="append", help="this suite, too"
    )
    named = os.environ.get("KVCATCH_VLLM_ENV")
    parser.add_argument(
        "--vllm-env",
        type=Path,
        default=Path(named) if named else None,
        help="environment that tests/vllm/make_env.sh made (%(default)s)",
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
    usual = [name for name in SUITES if name not in ASKED_FOR]
    for name in options.only or usual + (options.more or []):
        start = time.monotonic()
        suite = SUITES[name](options)
        suite.seconds = time.monotonic() - start
        suites.append(suite)
    print("\n".join(summary(suites)), flush=True)
    return 0 if all(suite.ok for suite in suites) else 1


if __name__ == "__main__":
    sys.exit(main())
