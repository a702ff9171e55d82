from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvcatch.cli import app
from kvcatch.geometry import BUILT_IN

if TYPE_CHECKING:
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
        (["--num-blocks", "many"], ["--num-blocks = 'many': not a whole number", "plan --help"]),
        (["--num-blocks", "1e3"], ["--num-blocks = '1e3': not a whole number"]),
        (["--num-blocks", ""], ["--num-blocks = '': not a whole number"]),
        (
            ["--gpu", "h200", "--memory-utilization", "x"],
            ["--memory-utilization = 'x': not a number"],
        ),
        (["--num-blocks", "9", "--memory-utilization", "0.9"], ["memory_utilization = 0.9"]),
        (["--num-blocks", "9", "--frob"], ["--frob"]),
        (["--num-blocks", "9", "more"], ["more"]),
        (["--num-blocks"], ["--num-blocks"]),
        (["--num-blocks", "9", "--model", "qwen3-next"], ["did you mean qwen3-next-80b-a3b?"]),
        (["--num-blocks", "9", "--model", "lama-3.1-8b"], ["did you mean llama-3.1-8b"]),
        (["--num-blocks", "9", "--model", "abacus"], ["built in are llama-2-7b"]),
        (["--num-blocks", "9", "--model", "a\n\x1b[2Jb"], ["a\\n\\x1b[2Jb"]),
        (["--num-blocks", "9", "--model", "x" * 200 + ".json"], [".json"]),
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


@pytest.mark.skipif(sys.platform == "win32", reason="devices of Linux")
def test_a_file_without_an_end_is_read_to_a_limit(run_kvcatch: RunKvcatch) -> None:
    """Its size is 0, so that a check of the size lets it pass."""
    done = run_kvcatch("plan", "--model", "/dev/zero", "--num-blocks", 9)
    assert done.returncode == 2
    assert done.stderr == "kvcatch: /dev/zero: more than 16 MiB are no model config\n"
    lengths = ("plan", "--model", "qwen3-8b", "--num-blocks", 9, "--lengths", "/dev/zero")
    assert run_kvcatch(*lengths).stderr == (
        "kvcatch: /dev/zero:1: a line of 4096 characters or more\n"
    )
    advice = ("advise", "/dev/zero", "--engine", "vllm@0.32", "--num-blocks", 9)
    assert run_kvcatch(*advice).stderr == (
        "kvcatch: /dev/zero: has bytes of value 0: not a text file\n"
    )
    assert run_kvcatch("admit", "--from", "/dev/zero").stderr == (
        "kvcatch: --from /dev/zero: more than 64 MiB\n"
    )
    done = run_kvcatch("plan", "--model", "/proc/self/mem", "--num-blocks", 9)
    assert done.stderr == "kvcatch: /proc/self/mem: Input/output error\n"


@pytest.mark.skipif(sys.platform == "win32", reason="devices of Linux")
@pytest.mark.parametrize(
    "arguments", [("plan", "--help"), ("plan", "--model", "llama-3.1-8b", "--gpu", "h200")]
)
def test_output_that_cannot_be_written(
    kvcatch_command: list[str], arguments: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*kvcatch_command, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_a_closed_stdout_is_no_traceback(kvcatch_command: list[str]) -> None:
    command = " ".join([*kvcatch_command, "plan --model llama-3.1-8b --gpu h200 >&-"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON: Expecting value (line 1, column 1)"),
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "head_dim": 64, "head_dim": 128}', "'head_dim' is there twice"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ('{"vocab_size": NaN}', "NaN is not a number of JSON"),
        ("\udcff", "not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_json(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = CliRunner().invoke(app, ["plan", "--model", str(path), "--num-blocks", "9"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"kvcatch: {path}: ")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_explain_holds_the_inputs(run_kvcatch: RunKvcatch) -> None:
    """gpt-oss: a window of 128 beside full layers, two steps of 8192 tokens in flight."""
    done = run_kvcatch("plan", "--model", "gpt-oss-120b", "--gpu", "h200", "--explain", "--json")
    explained = {item["name"]: item for item in json.loads(done.stdout)["explain"]}
    assert explained["blocks_per_request"]["numbers"] == (
        "ceil(min(128 - 1 + 16384, 131072) / 16) + 1 + ceil(ceil(131072 / 1) / 16) = 1033 + 8192"
    )
    numbers = explained["non_kv_bytes"]["numbers"]
    assert eval(numbers, {"__builtins__": {}}) == explained["non_kv_bytes"]["value"]


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
