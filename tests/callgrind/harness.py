"""Instructions per hot call of the core, counted by valgrind's callgrind.

Seconds on a shared machine are noise; instructions are not. ``benches/hot_calls.rs`` is the program that is counted:

* ``hot_calls --list`` prints one scenario a line: its name and how many iterations are enough to count it;
* ``hot_calls NAME ITERATIONS`` sets up, then makes the call that often. The setup may not depend on ITERATIONS,
  and every iteration has to leave things as it found them.

Each scenario runs twice, with N and with 2 N iterations; the difference over N is what one call costs, without the
setup. ``counts.toml`` holds the counts of the last update: ``make callgrind-update`` rewrites it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = Path(__file__).with_name("counts.toml")
TOLERANCE = 0.10

HEADER = """\
# Instructions per call of the core's hot calls (scenarios of benches/hot_calls.rs). A test fails when one
# grows by more than 10 %. Written by `make callgrind-update`: commit it with the change that moved a count,
# and say in the commit why it did.
"""


@dataclass(frozen=True)
class Counts:
    """The counts on file, and where they were made."""

    target: str
    rustc: str
    instructions: dict[str, float]

    @classmethod
    def load(cls) -> Counts:
        """Read ``counts.toml``."""
        data = tomllib.loads(COUNTS.read_text(encoding="utf-8"))
        instructions = {name: float(count) for name, count in data["instructions"].items()}
        return cls(data["made"]["target"], data["made"]["rustc"], instructions)

    def save(self) -> None:
        """Write ``counts.toml``."""
        lines = [
            HEADER,
            "[made]",
            f'target = "{self.target}"',
            f'rustc = "{self.rustc}"',
            "",
            "[instructions]",
        ]
        lines += [f"{name} = {count:.1f}" for name, count in sorted(self.instructions.items())]
        COUNTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def missing() -> str:
    """What this machine lacks for counting, or nothing."""
    return "" if shutil.which("valgrind") else "valgrind is not installed"


@cache
def toolchain() -> tuple[str, str]:
    """Target triple and version of the compiler."""
    text = subprocess.run(
        ["rustc", "-vV"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    facts = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return facts["host"], facts["release"]


@cache
def binary() -> Path:
    """Build the program (as benches are built) and say where it lies."""
    command = ["cargo", "bench", "--no-run", "--bench", "hot_calls"]
    command += ["--message-format", "json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "hot_calls":
            return Path(message["executable"])
    raise RuntimeError("cargo built no hot_calls")


@cache
def scenarios() -> dict[str, int]:
    """Every scenario of the program with its iterations."""
    listed = subprocess.run([binary(), "--list"], capture_output=True, text=True, check=True).stdout
    return {
        name: int(iterations) for name, iterations in (line.split() for line in listed.splitlines())
    }


def instructions(scenario: str, iterations: int) -> int:
    """Instructions of one whole run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run(
        [*command, binary(), scenario, str(iterations)],
        capture_output=True,
        text=True,
        check=False,
        # A fixed environment: its size moves the stack, and with it a few instructions.
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not collected:
        raise RuntimeError(f"{scenario} under callgrind exited {done.returncode}:\n{done.stderr}")
    return int(collected[1])


def count(scenario: str) -> float:
    """Instructions of one call."""
    n = scenarios()[scenario]
    return (instructions(scenario, 2 * n) - instructions(scenario, n)) / n


def main() -> int:
    """Print every count beside the one on file; rewrite the file when asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="rewrite counts.toml")
    options = parser.parse_args()
    if lacking := missing():
        sys.exit(lacking)
    old = Counts.load().instructions if COUNTS.exists() else {}
    new = {}
    for scenario in scenarios():
        new[scenario] = count(scenario)
        before = old.get(scenario)
        change = f"{new[scenario] / before - 1:+8.1%} from {before:,.1f}" if before else "     new"
        sys.stdout.write(f"{scenario:<40} {new[scenario]:>14,.1f} {change}\n")
        sys.stdout.flush()
    if options.update:
        Counts(*toolchain(), new).save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
