"""Which way imports point."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ALLOWED = ("kvcatch.errors", "kvcatch.geometry", "kvcatch.ledger", "kvcatch.laws")


@pytest.mark.parametrize("package", ["geometry", "ledger"])
def test_geometry_and_ledger_import_nothing_else_of_kvcatch(package: str) -> None:
    spec = importlib.util.find_spec(f"kvcatch.{package}")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                assert not name.startswith("kvcatch") or name.startswith(ALLOWED), (
                    f"{file.name}: {name}"
                )
                assert not name.startswith("kvcatch.ledger") or package != "geometry", (
                    f"{file.name}: {name}"
                )
