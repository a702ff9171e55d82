"""kvcatch as it is installed: its entry points, what it costs whom it is not asked by, and bad input, one line each.

Skipped where kvcatch is used from a checkout: then there are no entry points to look at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

try:
    _INSTALLED = distribution("kvcatch").locate_file("kvcatch/vllm/plugin.py")
except PackageNotFoundError:
    pytest.skip("kvcatch is not installed as a distribution", allow_module_level=True)
SITE = Path(str(_INSTALLED)).parents[2]
if not (SITE / "kvcatch" / "vllm" / "plugin.py").is_file():
    pytest.skip("kvcatch is installed as a link to a checkout", allow_module_level=True)


def run(
    code: str, *arguments: str, path: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, as vLLM would see this environment."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVCATCH_", "VLLM_PLUGINS", "PYTHONPATH"))
    }
    environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **settings}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=SITE.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of vLLM's log that are of kvcatch."""
    return [line for line in (done.stdout + done.stderr).splitlines() if "kvcatch: " in line]


LOAD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.core.block_pool import BlockPool
queue = type(BlockPool(8, True, 16).free_block_queue).__name__
"""


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("vllm.general_plugins", "kvcatch_vllm:register"),
        ("vllm.stat_logger_plugins", "kvcatch_vllm:StatLogger"),
    ],
)
def test_entry_points(group, value):
    found = [entry for entry in entry_points(group=group) if entry.name == "kvcatch"]
    assert [entry.value for entry in found] == [value]
    assert callable(found[0].load())


def test_unasked_it_changes_nothing_and_imports_next_to_nothing():
    done = run(
        """
import sys
from vllm.v1.core import block_pool, kv_cache_manager, single_type_kv_cache_manager
from vllm.v1.core.sched import scheduler
owners = (
    block_pool, block_pool.BlockPool, kv_cache_manager.KVCacheManager, scheduler.Scheduler,
    single_type_kv_cache_manager.SingleTypeKVCacheManager,
)
before = [dict(vars(owner)) for owner in owners]
"""
        + LOAD
        + """
assert before == [dict(vars(owner)) for owner in owners]
names = sorted(name for name in sys.modules if name.startswith("kvcatch"))
print(queue, *names)
"""
    )
    queue, *names = done.stdout.splitlines()[-1].split()
    assert queue == "FreeKVCacheBlockQueue"
    assert names == ["kvcatch_vllm"]
    assert said(done) == []


def test_asked_it_is_loaded_by_vllm_itself():
    done = run(LOAD + "print(queue)", KVCATCH_VLLM="pool")
    assert done.stdout.splitlines()[-1] == "Queue"
    assert "without kvcatch" not in done.stdout + done.stderr


def test_vllm_plugins_can_leave_it_out():
    done = run(LOAD + "print(queue)", KVCATCH_VLLM="pool", VLLM_PLUGINS="other")
    assert done.stdout.splitlines()[-1] == "FreeKVCacheBlockQueue"


def test_an_unknown_switch_is_one_line_and_vllm_goes_on():
    done = run(LOAD + "print(queue)", KVCATCH_VLLM="pool,obsreve")
    assert done.stdout.splitlines()[-1] == "FreeKVCacheBlockQueue"
    assert len(said(done)) == 1
    assert "'obsreve'" in said(done)[0]


def test_a_missing_extra_is_one_line_and_the_other_switches_are_on(tmp_path):
    # A package that stands before the real one and cannot be imported, as if it were not there.
    (tmp_path / "prometheus_client.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'prometheus_client'\")\n"
    )
    code = """
import sys
from vllm.v1.core.sched.scheduler import Scheduler
plain = Scheduler.schedule
for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
"""
    done = run(
        code + LOAD + "print(queue, Scheduler.schedule is plain)",
        str(tmp_path),
        KVCATCH_VLLM="pool,observe",
    )
    assert done.stdout.splitlines()[-1] == "Queue True"
    wrong = [line for line in said(done) if "observe is off" in line]
    assert len(wrong) == 1
    assert "kvcatch[vllm]" in wrong[0]


def test_built_for_another_python_vllm_goes_on(tmp_path):
    shutil.copytree(
        SITE / "kvcatch", tmp_path / "kvcatch", ignore=shutil.ignore_patterns("_core*.so")
    )
    done = run(LOAD + "print(queue)", path=tmp_path, KVCATCH_VLLM="pool")
    assert done.stdout.splitlines()[-1] == "FreeKVCacheBlockQueue"
    assert "Traceback" not in done.stdout + done.stderr
    assert len(said(done)) == 1
    assert "No module named 'kvcatch._core'. vLLM runs without kvcatch." in said(done)[0]
