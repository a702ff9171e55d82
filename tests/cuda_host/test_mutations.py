"""Bugs planted in the real kernels are found by the check named for each."""

from __future__ import annotations

import functools
import json
import re

import pytest

pytest.importorskip("torch", reason="the emulated backend makes torch tensors")

from cuda_host import sanitize
from cuda_host.mutations import MUTATIONS, mutated, tried


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    found, said = tried(name)
    assert found == mutation.finds, said
    assert re.search(mutation.says, said)


@functools.cache
def said_by_tsan() -> dict[str, str]:
    done = sanitize.run("mutations", "tsan")
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", [name for name, mutation in MUTATIONS.items() if mutation.race])
def test_race_is_found_by_tsan(name: str) -> None:
    said = said_by_tsan()[name]
    assert "WARNING: ThreadSanitizer: data race" in said
    assert MUTATIONS[name].file in said


def test_a_stale_mutation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    name = next(iter(MUTATIONS))
    monkeypatch.setitem(MUTATIONS, name, replace(MUTATIONS[name], old="no such text"))
    with pytest.raises(LookupError, match="'no such text' 0 times: must be once"):
        mutated(name)
