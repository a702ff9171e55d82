from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from model_pool import ModelPool
from test_snapshot import fill, free_pool

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunKvcatch

SMALL = ("bench", "--requests", 30, "--num-blocks", 1500, "--policy", "queue", "--policy", "sorted")


def assert_one_line(text: str, *words: str) -> None:
    """One clear line and no traceback."""
    last = text.strip().splitlines()[-1]
    assert "Traceback" not in text
    assert last.startswith("kvcatch: ")
    for word in words:
        assert word in last


class TestBench:
    def test_tables_fit_a_terminal(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*SMALL)
        assert done.returncode == 0, done.stderr
        for words in ("chat: 30 requests", "queue", "sorted", "runs/seq", "hit tokens", "µs/token"):
            assert words in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert "\x1b" not in done.stdout + done.stderr

    def test_json_is_all_there_is_on_stdout(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*SMALL, "--json", "--order", "cache_aware:8", "--watermark", 0.01)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        assert list(data["policies"]) == ["queue", "sorted"]
        assert data["config"]["order"] == "cache_aware:8"
        assert data["config"]["watermark"] == 0.01

    def test_the_same_seed_gives_the_same_numbers(self, run_kvcatch: RunKvcatch) -> None:
        def facts() -> dict[str, Any]:
            done = run_kvcatch(*SMALL, "--json", "--seed", 5)
            row: dict[str, Any] = json.loads(done.stdout)["policies"]["queue"]
            return {k: v for k, v in row.items() if "us_per" not in k and k != "seconds"}

        assert facts() == facts()

    def test_a_real_trace(self, run_kvcatch: RunKvcatch, azure_trace: Path) -> None:
        done = run_kvcatch(*SMALL, "--trace", azure_trace)
        assert done.returncode == 0, done.stderr
        assert "azure_conv_2023.csv: 30 requests" in done.stdout
        assert "no prompt shares a prefix" in done.stderr

    def test_a_truncated_trace_is_said(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "cut.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,30,4\n2023-1")
        done = run_kvcatch("bench", "--trace", path, "--policy", "queue")
        assert done.returncode == 0
        assert "truncated: line 3 is incomplete" in done.stderr

    def test_the_report_is_written(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="the report extra is not installed")
        out = tmp_path / "out.html"
        done = run_kvcatch(*SMALL, "--report", out)
        assert done.returncode == 0, done.stderr
        assert "</html>" in out.read_text(encoding="utf-8")
        assert str(out) in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--trace", "/nowhere/x.jsonl"], ["/nowhere/x.jsonl", "No such file"]),
            (["--trace", "/tmp"], ["/tmp", "directory"]),
            (["--trace", "x", "--workload", "chat"], ["exclude each other"]),
            (["--workload", "poker"], ["poker", "chat, agent, documents"]),
            (["--policy", "best"], ["best", "queue"]),
            (["--policy", "queue+best"], ["best", "lru"]),
            (["--policy", "queue", "--policy", "queue"], ["twice"]),
            (["--order", "lifo"], ["lifo", "cache_aware"]),
            (["--requests", "0"], ["--requests 0"]),
            (["--num-blocks", "1"], ["num_blocks = 1"]),
            (["--num-blocks", "-5"], ["num_blocks = -5"]),
            (["--block-size", "0"], ["block_size = 0"]),
            (["--page-blocks", "0"], ["page_blocks = 0"]),
            (["--max-num-seqs", "0"], ["max_num_seqs = 0"]),
            (["--watermark", "1.5"], ["watermark = 1.5"]),
            (["--watermark", "nan"], ["watermark = nan"]),
            (["--bandwidth", "0"], ["bandwidth_gb_s = 0"]),
            (["--seed", "-1"], ["seed = -1"]),
            (["--report", "/nowhere/out.html"], ["/nowhere"]),
        ],
    )
    def test_bad_input_is_one_line_and_code_2(
        self, run_kvcatch: RunKvcatch, arguments: list[str], words: list[str]
    ) -> None:
        if "--report" in arguments:
            pytest.importorskip("matplotlib", reason="the report extra is not installed")
        done = run_kvcatch("bench", *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert_one_line(done.stderr, *words)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--max-num-seqs", 9999999999),
            ("--max-num-seqs", 10**20),
            ("--requests", 10**20),
            ("--bandwidth", "1e-320"),
            ("--bandwidth", "inf"),
            ("--descriptor-us", "1e308"),
        ],
    )
    def test_beyond_every_limit(self, run_kvcatch: RunKvcatch, option: str, value: object) -> None:
        done = run_kvcatch("bench", "--policy", "bitmap", option, value, "--json")
        assert done.returncode == 2
        assert_one_line(done.stderr, "must be between")

    def test_nothing_that_fits_is_a_failure(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch("bench", "--num-blocks", 2, "--requests", 20, "--policy", "bitmap")
        assert done.returncode == 1
        assert_one_line(done.stderr, "no request fits 2 blocks of 16 tokens")

    def test_no_figure_is_cut(self, run_kvcatch: RunKvcatch, mooncake_trace: Path) -> None:
        done = run_kvcatch(
            "bench", "--trace", mooncake_trace, "--requests", 100, "--num-blocks", 60000,
            "--policy", "sorted+clairvoyant", "--policy", "bitmap+clairvoyant",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100

    def test_a_malformed_trace(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text('{"timestamp": 0, "input_length": -4}\n')
        done = run_kvcatch("bench", "--trace", path)
        assert done.returncode == 2
        assert_one_line(done.stderr, f"{path}:1: ", "output_length = None: missing")

    def test_a_word_instead_of_a_number(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch("bench", "--num-blocks", "many")
        assert done.returncode == 2
        assert "--num-blocks" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="SIGINT as a shell sends it")
    def test_interrupt(self, kvcatch_command: list[str], tmp_path: Path) -> None:
        path = tmp_path / "long.csv"
        rows = ["2023-11-16,100,4"] + ["2023-11-16,160,2000"] * 100_000
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
        command = [*kvcatch_command, "bench", "--trace", str(path), "--policy", "queue", "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert "no prompt shares" in process.stderr.readline()
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert_one_line(err, "interrupted: 0 of 1 policies done (none)", "of 100001 requests")
        assert json.loads(out)["complete"] is False


class TestInspect:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        pool = ModelPool(64, 16, blocks_per_page=8, null_block=True)
        fill(pool)
        path = tmp_path / "pool.json"
        path.write_text(json.dumps(pool.snapshot()))
        return path

    def test_tables(self, run_kvcatch: RunKvcatch, path: Path) -> None:
        done = run_kvcatch("inspect", path, "--live", "a, c")
        assert done.returncode == 0, done.stderr
        for words in (
            "pool of 64 blocks of 16 tokens",
            "largest",
            "fragmentation",
            "pinned of 8",
            "internal fragmentation",
            "owner",
            "tag tenant",
            "acme",
            "(none)",
            "zombies: 8 blocks",
        ):
            assert words in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100

    def test_json(self, run_kvcatch: RunKvcatch, path: Path) -> None:
        data = json.loads(run_kvcatch("inspect", path, "--json", "--live", "a,b,c").stdout)
        assert data["zombies"] == []
        assert data["holdings"]["owner"][0]["name"] == "b"
        assert data["blocks"]["total"] == 64

    def test_nobody_alive(self, run_kvcatch: RunKvcatch, path: Path) -> None:
        data = json.loads(run_kvcatch("inspect", path, "--json", "--live", "").stdout)
        assert [zombie["name"] for zombie in data["zombies"]] == ["b", "a", "c"]

    def test_the_impossible_is_refused(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "odd.json"
        path.write_text(json.dumps(free_pool(65_536, 65_423, 80, {"64-127": 114})))
        done = run_kvcatch("inspect", path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert_one_line(done.stderr, str(path), "65,423 of 65,536", "114 runs", "574")

    def test_a_missing_field_is_named(
        self, run_kvcatch: RunKvcatch, path: Path, tmp_path: Path
    ) -> None:
        data = json.loads(path.read_text())
        del data["sequences"][0]["owner"]
        broken = tmp_path / "broken.json"
        broken.write_text(json.dumps(data))
        done = run_kvcatch("inspect", broken)
        assert done.returncode == 2
        assert_one_line(done.stderr, "sequences[0]", "owner")

    def test_a_sequence_listed_twice_is_refused(
        self, run_kvcatch: RunKvcatch, path: Path, tmp_path: Path
    ) -> None:
        data = json.loads(path.read_text())
        data["sequences"].append(data["sequences"][0])
        broken = tmp_path / "twice.json"
        broken.write_text(json.dumps(data))
        done = run_kvcatch("inspect", broken)
        assert done.returncode == 2
        assert_one_line(done.stderr, "is listed twice")

    def test_no_such_file(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch("inspect", "/nowhere/pool.json")
        assert done.returncode == 2
        assert_one_line(done.stderr, "/nowhere/pool.json", "No such file")


def test_version(run_kvcatch: RunKvcatch) -> None:
    import kvcatch

    done = run_kvcatch("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"kvcatch {kvcatch.__version__}")


@pytest.mark.parametrize("command", [[], ["bench"], ["inspect"]])
def test_help_has_an_example(run_kvcatch: RunKvcatch, command: list[str]) -> None:
    done = run_kvcatch(*command, "--help")
    assert done.returncode == 0
    assert "Example: kvcatch" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_import_needs_numpy_alone() -> None:
    code = (
        "import sys, kvcatch; "
        "print([m for m in ('typer', 'rich', 'click', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
