"""``import kvcatch``: numpy alone, and a warning when the core is a debug build."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
before = set(sys.modules)
{first}
import kvcatch
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names)))
"""

FAKED_CORE = """
import sys, types, warnings
import kvcatch._core as real
faked = types.ModuleType("kvcatch._core")
faked.__dict__.update({name: getattr(real, name) for name in real.__all__})
faked.build_profile = PROFILE
for name in [name for name in sys.modules if name.startswith("kvcatch")]:
    del sys.modules[name]
sys.modules["kvcatch._core"] = faked
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import kvcatch
print([(w.category.__name__, str(w.message), w.filename) for w in caught])
"""


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_needs_numpy_alone() -> None:
    # Site customisation may have imported anything before; what kvcatch brings is what counts.
    loaded = eval(python(SCRIPT.format(first="")))
    assert set(loaded) <= {"kvcatch", "numpy"}
    assert "kvcatch" in loaded


def test_use_needs_numpy_alone() -> None:
    script = (
        SCRIPT.replace("import kvcatch\n", "import kvcatch\n{use}\n", 1)
        .replace("{use}", "p = kvcatch.BlockPool(8); s = p.create([1]); p.block_ids(s); p.stats()")
        .format(first="")
    )
    assert set(eval(python(script))) <= {"kvcatch", "numpy"}


def test_every_extra_can_be_missing() -> None:
    """With everything but numpy out of reach, import and use still work."""
    script = """
import sys
for name in ("typer", "rich", "torch", "matplotlib", "httpx", "fastapi", "textual", "cupy", "vllm"):
    sys.modules[name] = None
import kvcatch, kvcatch.errors
print(kvcatch.BlockPool(8).num_free)
"""
    assert python(script) == "8"


def test_a_debug_build_warns() -> None:
    text = python("PROFILE = 'debug'\n" + FAKED_CORE)
    assert "RuntimeWarning" in text
    assert "--release" in text


def test_a_release_build_does_not() -> None:
    assert python("PROFILE = 'release'\n" + FAKED_CORE) == "[]"
