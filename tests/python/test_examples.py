"""The programs that the README sends a new user to run as they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
NEEDS = {
    "generate.py": ("torch", "tokenizers", "jinja2", "gguf", "safetensors"),
    "stream.py": ("torch", "tokenizers", "jinja2", "gguf", "safetensors"),
    "serve_client.py": (
        "torch",
        "tokenizers",
        "jinja2",
        "gguf",
        "safetensors",
        "fastapi",
        "openai",
    ),
}
"""Examples that run a model, given to them, and what they import for it."""


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES} >= {"library.py", "compare_policies.py", *NEEDS}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(path: Path, tmp_path: Path) -> None:
    arguments: list[Path] = []
    if path.name in NEEDS:
        missing = [name for name in NEEDS[path.name] if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
        sys.path.insert(0, str(Path(__file__).resolve().parent / "models"))
        from tiny_folder import write_tiny_folder

        arguments.append(write_tiny_folder(tmp_path))
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
