from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvcatch.cli import app
from kvcatch.geometry import BUILT_IN

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch

KEYS = (
    "kv_bytes_per_token", "kv_bytes_per_block", "num_blocks", "usable_blocks", "max_tokens",
    "blocks_per_request", "max_concurrency", "max_servable_length",
)  # fmt: skip


def test_json_from_blocks(run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch(
        "plan", "--model", "llama-3.1-8b", "--num-blocks", 2000, "--max-model-len", 8192, "--json"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [data[key] for key in KEYS] == [
        131_072,
        2_097_152,
        2000,
        1999,
        31_984,
        512,
        3.90625,
        8192,
    ]
    assert "explain" not in data


def test_json_has_every_rank(run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch(
        "plan", "--model", "qwen3-coder-30b-a3b", "--pp", 2, "--pp-layers", "16,32", "--kv-bytes", "3.18GiB",
        "--kv-bytes", "20GiB", "--json", "--explain", "--engine", "vllm@0.32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [rank["kv_bytes_per_token"] for rank in data["ranks"]] == [32_768, 65_536]
    assert data["kv_bytes_per_token"] == 32_768
    assert data["kv_bytes_per_token_model"] == 98_304
    assert data["binds"]["stage"] == 0
    assert data["engine_starts"] is False
    assert {figure["name"] for figure in data["explain"]} >= set(KEYS)


def test_json_from_a_gpu(run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch(
        "plan", "--model", "llama-3.1-8b", "--gpu", "h200", "--memory-utilization", 0.9, "--max-model-len", 32_768,
        "--block-size", 32, "--engine", "vllm@0.32", "--json",
    )  # fmt: skip
    data = json.loads(done.stdout)
    memory = data["ranks"][0]["memory"]
    assert memory["weights_from"] == memory["non_kv_from"] == "estimated"
    assert data["block_size"] == 32
    assert data["num_blocks"] == data["ranks"][0]["kv_bytes"] // (131_072 * 32)


@pytest.mark.parametrize(
    "model", ["gemma-3-27b", "nemotron-h-8b", "deepseek-v3.2", "llama-4-scout"]
)
def test_tables_fit_a_terminal(run_kvcatch: RunKvcatch, model: str) -> None:
    done = run_kvcatch(
        "plan",
        "--model",
        model,
        "--num-blocks",
        9000,
        "--explain",
        "--pp",
        2,
        "--mean-length",
        5000,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b" not in done.stdout + done.stderr
    for words in (
        "really fit",
        "at once, worst case",
        "at once, by lengths",
        "binds: stage",
        "max_servable_length =",
    ):
        assert words in done.stdout


def test_what_cannot_be_served_is_said(run_kvcatch: RunKvcatch) -> None:
    old = (
        "plan",
        "--model",
        "llama-3.1-8b",
        "--num-blocks",
        2048,
        "--max-model-len",
        32_768,
        "--engine",
    )
    assert (
        "more than 32,752 tokens would be accepted and never finish"
        in run_kvcatch(*old, "vllm@0.24").stdout
    )
    assert "vLLM 0.32 would refuse to start: 2,048 blocks" in run_kvcatch(*old, "vllm@0.32").stdout
    done = run_kvcatch(
        "plan", "--model", "qwen3-coder-30b-a3b", "--pp", 2, "--pp-layers", "16,32", "--kv-bytes", "3.18GiB",
        "--kv-bytes", "20GiB", "--engine", "vllm@0.15",
    )  # fmt: skip
    assert "24.00 GiB, the whole model's need" in " ".join(done.stdout.split())


def test_a_folder_and_a_histogram(run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BUILT_IN["qwen3-8b"]))
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("160,3\n320,1\n")
    done = run_kvcatch(
        "plan", "--model", tmp_path, "--kv-bytes", "8GiB", "--lengths", lengths, "--json"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["lengths"]["mean_blocks_per_request"] == 12.5
    assert data["lengths"]["concurrency"] == data["usable_blocks"] / 12.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-9", "--num-blocks", "9"], ["llama-9", "built in"]),
        (["--model", "/nowhere/config.json", "--num-blocks", "9"], ["/nowhere/config.json"]),
        (["--model", "", "--num-blocks", "9"], ["model ''", "no name"]),
        (["--num-blocks", "0"], ["num_blocks = 0"]),
        (["--num-blocks", "-7"], ["num_blocks = -7"]),
        (["--num-blocks", "1"], ["null block"]),
        (["--num-blocks", "9" * 30], ["num_blocks = 999"]),
        ([], ["give one of --num-blocks, --kv-bytes and --gpu"]),
        (["--num-blocks", "9", "--gpu", "h200"], ["given twice"]),
        (["--kv-bytes", "many"], ["kv_bytes = 'many'"]),
        (["--kv-bytes", "0"], ["kv_bytes = '0'"]),
        (["--kv-bytes", "1KiB"], ["less than one block"]),
        (["--gpu", "0GiB"], ["gpu = '0GiB'"]),
        (
            ["--kv-bytes", "1GiB", "--kv-bytes", "2GiB"],
            ["2 values for 1 stages of 1 ranks; give 1"],
        ),
        (["--gpu", "abacus"], ["gpu = 'abacus'", "known are"]),
        (["--gpu", "a100"], ["several sizes"]),
        (["--gpu", "h200", "--memory-utilization", "1.5"], ["memory_utilization = 1.5"]),
        (["--gpu", "h200", "--memory-utilization", "nan"], ["memory_utilization = nan"]),
        (["--gpu", "4GiB"], ["no memory left for the KV cache"]),
        (["--num-blocks", "9", "--engine", "vllm@0.99"], ["vllm@0.99", "unknown version", "0.33"]),
        (["--num-blocks", "9", "--engine", "vlm"], ["unknown engine"]),
        (["--num-blocks", "9", "--max-model-len", "131073"], ["max_model_len = 131073", "131072"]),
        (["--num-blocks", "9", "--max-model-len", "0"], ["max_model_len = 0"]),
        (["--num-blocks", "9", "--block-size", "24"], ["block_size = 24", "multiples of 16"]),
        (["--num-blocks", "9", "--tp", "3"], ["tp = 3", "32 attention heads"]),
        (["--num-blocks", "9", "--tp", "0"], ["tp = 0"]),
        (["--num-blocks", "9", "--pp", "33"], ["only 32 layers"]),
        (["--num-blocks", "9", "--pp", "2", "--pp-layers", "16;16"], ["pp_layers = '16;16'"]),
        (["--num-blocks", "9", "--dcp", "2"], ["dcp = 2"]),
        (["--num-blocks", "9", "--kv-dtype", "fp2"], ["kv_dtype = 'fp2'"]),
        (["--num-blocks", "9", "--mean-length", "0"], ["length 0"]),
        (["--num-blocks", "9", "--mean-length", "5", "--lengths", "x"], ["exclude each other"]),
        (["--num-blocks", "9", "--lengths", "/nowhere/x.csv"], ["/nowhere/x.csv", "No such file"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], words: list[str]) -> None:
    model = [] if "--model" in arguments else ["--model", "llama-3.1-8b"]
    done = CliRunner().invoke(app, ["plan", *model, *arguments])
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("kvcatch: ")
    for word in words:
        assert word in lines[0]


def test_a_word_instead_of_a_number(run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch("plan", "--model", "llama-3.1-8b", "--num-blocks", "many")
    assert done.returncode == 2
    assert "--num-blocks" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_config(run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": "many"}')
    done = run_kvcatch("plan", "--model", path, "--num-blocks", 9)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(path) in done.stderr


def test_help_has_an_example(run_kvcatch: RunKvcatch) -> None:
    done = run_kvcatch("plan", "--help")
    assert "Example: kvcatch plan" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvcatch.cli; "
        "print([m for m in ('torch', 'matplotlib', 'httpx', 'ray', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
