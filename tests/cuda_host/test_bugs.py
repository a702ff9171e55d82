"""Every planted bug is found by the checks named for it and by no other; correct kernels pass them all."""

from __future__ import annotations

import functools
import json
import re

import pytest

from cuda_host import sanitize
from cuda_host.planted import PLANTED, outcome

SANITIZERS = ("asan", "tsan", "ubsan")


@pytest.mark.parametrize("name", PLANTED)
def test_plain_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "hang":
        monkeypatch.setenv("KVCATCH_LAUNCH_SECONDS", "0.2")
    bug = PLANTED[name]
    found = outcome(name)
    assert re.search(bug.error, found.error) if bug.error else not found.error
    assert (found.orders, found.value) == (bug.orders, bug.value)


@functools.cache
def said_by(sanitizer: str) -> dict[str, str]:
    """What a sanitizer says of each planted bug."""
    done = sanitize.run("planted", sanitizer)
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("sanitizer", "name"),
    [(s, name) for s in SANITIZERS for name, bug in PLANTED.items() if s in bug.sanitizers],
)
def test_sanitizer(sanitizer: str, name: str) -> None:
    said = said_by(sanitizer)[name]
    wanted = getattr(PLANTED[name], sanitizer)
    assert re.search(wanted, said) if wanted else not said


def test_every_bug_has_a_check_and_every_kernel_is_planted() -> None:
    from cuda_host.build import HERE

    kernels = re.findall(r"^KVEMU_KERNEL\((\w+)\)", (HERE / "bugs.cu").read_text(), re.MULTILINE)
    assert sorted(kernels) == sorted(PLANTED)
    for name, bug in PLANTED.items():
        found = any((bug.error, bug.orders, bug.value, bug.asan, bug.tsan, bug.ubsan))
        assert found != name.startswith("ok_"), name
