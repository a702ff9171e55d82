"""A real vLLM engine with and without the plugin: the same tokens, prefix hits and preemptions.

Needs a model folder: ``KVCATCH_TEST_MODEL`` (a small Llama such as SmolLM2, as Hugging Face saves it). Minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.block_pool")

MODEL = os.environ.get("KVCATCH_TEST_MODEL", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="KVCATCH_TEST_MODEL names no model folder")


def serve(switches: str) -> dict:
    environ = os.environ | {
        "KVCATCH_VLLM": switches,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    script = Path(__file__).with_name("server_tokens.py")
    done = subprocess.run(
        [sys.executable, str(script), MODEL],
        env=environ,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert lines, done.stdout[-2000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def plain() -> dict:
    result = serve("")
    assert result["queue"] == "FreeKVCacheBlockQueue"
    # Else the load proves nothing.
    assert result["counts"]["preemptions"] > 0
    assert result["counts"]["hits"] > 0
    return result


@pytest.mark.parametrize("switches", ["pool", "pool,evict"])
def test_tokens_hits_and_preemptions_are_those_of_plain_vllm(plain, switches):
    result = serve(switches)
    assert result["queue"] == "Queue"
    assert result["tokens"] == plain["tokens"]
    # Another eviction hits other blocks; its tokens are the same all the same.
    if switches == "pool":
        assert result["counts"] == plain["counts"]
    assert result["held"] == plain["held"] == 0
