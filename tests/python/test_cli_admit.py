from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvcatch.cli import app

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from conftest import RunKvcatch

POOL = ("admit", "--num-blocks", 1000, "--used", 260)


class TestWorkedExamples:
    @pytest.mark.parametrize(
        ("request_text", "arguments", "enter", "gate", "required", "available"),
        [
            ("512:4096x30", ("--law", "worst_case"), 2, "worst_case", 288, 164),
            ("512:8192x30", ("--law", "worst_case"), 1, "worst_case", 544, 196),
            ("512:4096x30", ("--engine", "trtllm@1.2"), 2, "worst_case", 288, 164),
            ("512:4096x30", ("--engine", "tgi@3.3"), 2, "worst_case", 288, 164),
            ("512:4096x30", ("--engine", "vllm@0.32"), 23, "capacity", 32, 4),
            ("512:4096x30", ("--engine", "vllm@0.11"), 23, "capacity", 32, 4),
        ],
    )
    def test_a_quarter_is_used(
        self,
        run_kvcatch: RunKvcatch,
        request_text: str,
        arguments: tuple[str, ...],
        enter: int,
        gate: str,
        required: int,
        available: int,
    ) -> None:
        done = run_kvcatch(*POOL, "--request", request_text, *arguments, "--json")
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        assert data["enter"] == enter
        assert data["enter"] + data["wait"] == 30
        first = data["first_refusal"]
        assert first["request"] == enter + 1
        assert (first["gate"], first["required_blocks"], first["available_blocks"]) == (
            gate,
            required,
            available,
        )

    @pytest.mark.parametrize(("length", "enter"), [(8192, 3), (4096, 7)])
    def test_an_empty_pool(self, run_kvcatch: RunKvcatch, length: int, enter: int) -> None:
        done = run_kvcatch(
            "admit", "--num-blocks", 2000, "--request", "100x9", "--max-model-len", length,
            "--law", "worst_case", "--json",
        )  # fmt: skip
        assert json.loads(done.stdout)["enter"] == enter


class TestOutput:
    def test_table(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*POOL, "--request", "512:4096x30", "--law", "worst_case")
        assert done.returncode == 0, done.stderr
        for words in (
            "740 of 1,000 blocks of 16 tokens available",
            "1-2",
            "3-30",
            "ceil((512 + 4096) / 16) = 288 <= 740",
            "288 > 164",
            "2 of 30 enter",
            "not checked, for it was not given: max_num_seqs, token_budget",
        ):
            assert words in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100

    @pytest.mark.parametrize("law", ["worst_case", "guaranteed_no_evict"])
    def test_what_is_promised_to_those_that_run_is_not_available(
        self, run_kvcatch: RunKvcatch, law: str
    ) -> None:
        """Two of 512 + 4096 with 10 generated hold 33 of 288 blocks each: 510 are promised, 230 left."""
        arguments = (
            *POOL,
            "--running-request",
            "512:10:4096x2",
            "--request",
            "512:4096",
            "--law",
            law,
        )
        done = run_kvcatch(*arguments, "--json")
        data = json.loads(done.stdout)
        assert data["state"]["reserved_blocks"] == 510
        assert data["state"]["available_blocks"] == 230
        assert data["first_refusal"]["available_blocks"] == 230
        table = run_kvcatch(*arguments).stdout
        assert "230 of 1,000 blocks of 16 tokens available" in table
        assert "reserved 510" in table

    def test_head_of_line(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(
            "admit", "--num-blocks", 270, "--used", 250, "--request", 1600, "--request", 160,
            "--engine", "vllm@0.33",
        )  # fmt: skip
        assert "head_of_line" in done.stdout
        assert "could enter (prompt ceil(160 / 16) = 10 <= 20)" in " ".join(done.stdout.split())

    def test_those_that_run(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(
            *POOL, "--running-request", "160:16:320x2", "--request", "16:16", "--law",
            "worst_case", "--max-num-seqs", 2, "--json",
        )  # fmt: skip
        data = json.loads(done.stdout)
        assert data["state"]["running"] == 2
        assert data["first_refusal"]["gate"] == "max_num_seqs"


QUESTION = {
    "state": {"num_blocks": 1000, "block_size": 16, "free": 740},
    "queue": [{"prompt_tokens": 512, "max_tokens": 4096, "count": 30}],
}


class TestJsonInput:
    def ask(self, text: str, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["admit", "--from", "-", *arguments], input=text)

    def test_stdin(self) -> None:
        done = self.ask(json.dumps(QUESTION), "--law", "worst_case", "--json")
        assert json.loads(done.stdout)["enter"] == 2

    def test_file(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        path = tmp_path / "q.json"
        path.write_text(json.dumps(QUESTION))
        done = run_kvcatch("admit", "--from", path, "--engine", "vllm@0.32", "--json")
        data = json.loads(done.stdout)
        assert data["enter"] == 23
        assert data["state"]["usable_blocks"] == 999

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("", "not JSON"),
            ("[]", "JSON object"),
            ("{}", "state: missing"),
            ('{"state": {}, "queue": []}', "missing 'num_blocks'"),
            ('{"state": {"num_blocks": 9, "block_size": 16, "free": 9}, "queue": []}', "empty"),
            ('{"state": {"num_blocks": 9, "block_size": 16, "free": NaN}, "queue": [1]}', "NaN"),
            (
                '{"state": {"num_blocks": 9, "block_size": 16, "free": 9}, "queue": [1]}',
                "queue: 1 is not a JSON object",
            ),
            (
                '{"state": {"num_blocks": 9, "block_size": 16, "free": 9}, '
                '"queue": [{"prompt_tokens": 5, "count": 0}]}',
                "count = 0",
            ),
            (
                '{"state": {"num_blocks": 9, "block_size": 16, "free": 9}, '
                '"queue": [{"prompt_tokens": 5, "count": 1e9}]}',
                "count = ",
            ),
            ('{"state": {}, "queue": [], "law": 1}', "unknown field 'law'"),
            ("[" * 100_000, "nested too deeply"),
            (
                '{"state": {"num_blocks": 9, "block_size": 16, "free": 9, "free": 5}, "queue": [1]}',
                "'free' is there twice",
            ),
            ('{"state": {"free": ' + "9" * 400 + '}, "queue": []}', "a number of 400 digits"),
            (
                '{"state": {"num_blocks": 9, "block_size": 16, "free": 9}, "queue": [{}]}',
                "request of the queue: missing 'prompt_tokens'",
            ),
            ('{"state": {"blocks": 9}, "queue": []}', "--from -: state: unknown field 'blocks'"),
        ],
    )
    def test_bad_json_is_one_line(self, text: str, word: str) -> None:
        done = self.ask(text)
        assert done.exit_code == 2, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--request", "5"), "--num-blocks"),
        (("--num-blocks", "0", "--request", "5"), "num_blocks = 0"),
        (("--num-blocks", "-5", "--request", "5"), "num_blocks = -5: must be 1 or more"),
        (("--num-blocks", "10", "--request", "\uff15"), "must be PROMPT"),
        (("--num-blocks", "many", "--request", "5"), "--num-blocks = 'many': not a whole number"),
        (("--num-blocks", "10", "--watermark", "x", "--request", "5"), "--watermark = 'x': not a number"),
        (("--num-blocks", "10"), "queue is empty"),
        (("--num-blocks", "10", "--request", "0"), "prompt_tokens = 0"),
        (("--num-blocks", "10", "--request", "5:0"), "max_tokens = 0"),
        (("--num-blocks", "10", "--request", "5:5x0"), "count = 0"),
        (("--num-blocks", "10", "--request", "5x999999999"), "more than 100000 requests"),
        (("--num-blocks", "10", "--request", "many"), "'many'"),
        (("--num-blocks", "10", "--used", "11", "--request", "5"), "more than --num-blocks 10"),
        (("--num-blocks", "10", "--used", "-1", "--request", "5"), "--used -1"),
        (("--num-blocks", "10", "--used", "1", "--free", "1", "--request", "5"), "exclude"),
        (("--num-blocks", "10", "--free", "8", "--cached", "3", "--request", "5"), "8 + 3 = 11"),
        (("--num-blocks", "10", "--block-size", "0", "--request", "5"), "block_size = 0"),
        (("--num-blocks", "10", "--watermark", "nan", "--request", "5"), "watermark = nan"),
        (("--num-blocks", "10", "--watermark", "1", "--request", "5"), "watermark = 1"),
        (
            ("--num-blocks", "10", "--watermark", "0.1", "--request", "5:5", "--law", "worst_case"),
            "does not look at it",
        ),
        (
            ("--num-blocks", "9", "--watermark", "0.1", "--request", "5", "--engine", "vllm@0.23"),
            "vllm@0.23 has no such setting (vLLM has it from 0.24.0 on)",
        ),
        (("--num-blocks", "10", "--request", "5", "--engine", "vllm@0.40"), "0.3 to 0.33"),
        (("--num-blocks", "10", "--request", "5", "--engine", "vllm@x"), "vllm@x"),
        (("--num-blocks", "10", "--request", "5", "--engine", "mlc@1"), "mlc@1"),
        (("--num-blocks", "10", "--request", "5", "--law", "lifo"), "'lifo'"),
        (("--num-blocks", "10", "--request", "5", "--engine", "tgi@3.3"), "max_model_len"),
        (("--num-blocks", "10", "--request", "5", "--from", "x.json"), "--from excludes"),
        (("--from", "/nowhere/x.json",), "No such file"),
        (("--num-blocks", "10", "--request", "5", "--running-request", "5:9:3"), "max_tokens = 3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: tuple[str, ...], word: str) -> None:
    done = CliRunner().invoke(app, ["admit", *arguments])
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr


@pytest.mark.parametrize("command", ["admit", "advise", "sweep"])
def test_help_has_an_example(run_kvcatch: RunKvcatch, command: str) -> None:
    done = run_kvcatch(command, "--help")
    assert done.returncode == 0
    assert f"Example: kvcatch {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
