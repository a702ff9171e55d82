from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcatch.errors import TraceError
from kvcatch.workload import read_trace

BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_ROWS = [
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,230,1317,Conversation log",
    "118,GPT-4,417,276,693,Conversation log",
    "130.5,GPT-4,1000,0,1000,API log",
    "185,ChatGPT,1360,647,2007,API log",
]


def mooncake_line(**changes: Any) -> str:
    record = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
    record.update(changes)
    return json.dumps({key: value for key, value in record.items() if value != "gone"})


def write(path: Path, *rows: str, end: str = "\n") -> Path:
    path.write_text("\n".join(rows) + end, encoding="utf-8")
    return path


class TestMooncake:
    def test_equal_hash_ids_give_equal_tokens_and_different_ones_different(
        self, tmp_path: Path
    ) -> None:
        path = write(
            tmp_path / "t.jsonl",
            mooncake_line(hash_ids=[7, 8]),
            mooncake_line(input_length=1536, hash_ids=[7, 9, 8]),
            mooncake_line(input_length=512, hash_ids=[10**15]),
        )
        first, second, third = (request.tokens() for request in read_trace(path).requests)
        assert first.dtype == np.int32
        assert [len(first), len(second), len(third)] == [700, 1536, 512]
        np.testing.assert_array_equal(first[:512], second[:512])
        np.testing.assert_array_equal(first[512:], second[1024 : 1024 + 188])
        every = np.concatenate([second, third])
        assert len(np.unique(every)) == len(every)

    def test_generated_tokens_are_nobody_elses(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", *[mooncake_line(output_length=50)] * 3)
        requests = read_trace(path).requests
        outputs = [request.tokens(50)[700:] for request in requests]
        every = np.concatenate([requests[0].tokens(), *outputs])
        assert len(np.unique(every)) == len(every)
        np.testing.assert_array_equal(requests[1].tokens(20)[:700], requests[0].tokens())

    def test_arrival_is_in_seconds_from_the_first(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "t.jsonl", mooncake_line(timestamp=3000), mooncake_line(timestamp=4500)
        )
        assert [request.arrival for request in read_trace(path).requests] == [0.0, 1.5]

    @pytest.mark.parametrize(
        ("line", "field", "value"),
        [
            ("not json", "line", "not json"),
            ("[1, 2]", "line", "[1, 2]"),
            (mooncake_line(input_length=-5), "input_length", "-5"),
            (mooncake_line(input_length=0), "input_length", "0"),
            (mooncake_line(input_length=1.5), "input_length", "1.5"),
            (mooncake_line(input_length=True), "input_length", "True"),
            (mooncake_line(input_length="seven"), "input_length", "'seven'"),
            (mooncake_line(input_length=10**12), "input_length", "1000000000000"),
            (mooncake_line(output_length=0), "output_length", "0"),
            (mooncake_line(output_length=-1), "output_length", "-1"),
            (mooncake_line(output_length=None), "output_length", "None"),
            (mooncake_line(output_length="gone"), "output_length", "missing"),
            (mooncake_line(timestamp=float("nan")), "timestamp", "nan"),
            (mooncake_line(timestamp=float("inf")), "timestamp", "inf"),
            (mooncake_line(timestamp=-1), "timestamp", "-1"),
            (mooncake_line(hash_ids=[1]), "hash_ids", "1 ids for input_length 700: 2 are needed"),
            (mooncake_line(hash_ids=[1, 2, 3]), "hash_ids", "3 ids"),
            (mooncake_line(hash_ids={"a": 1}), "hash_ids", "not a list"),
            (mooncake_line(hash_ids=[1, -2]), "hash_ids[1]", "-2"),
            (mooncake_line(hash_ids=[1, "x"]), "hash_ids[1]", "'x'"),
            ("{" * 5000, "line", "{{{"),
        ],
    )
    def test_a_malformed_line_names_file_line_field_and_value(
        self, tmp_path: Path, line: str, field: str, value: str
    ) -> None:
        path = write(tmp_path / "bad.jsonl", mooncake_line(), "", line, mooncake_line())
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        message = str(caught.value)
        assert message.startswith(f"{path}:3: {field} = ")
        assert value in message
        assert "\n" not in message

    def test_a_truncated_file_keeps_what_was_read_and_says_so(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.jsonl"
        path.write_text(f"{mooncake_line()}\n{mooncake_line()}\n{mooncake_line()[:30]}")
        workload = read_trace(path)
        assert len(workload) == 2
        assert workload.notes == (
            f"{path}: truncated: line 3 is incomplete and was left out; "
            "the lines before it were kept",
        )

    def test_a_last_line_without_line_end_is_whole(self, tmp_path: Path) -> None:
        workload = read_trace(write(tmp_path / "t.jsonl", *[mooncake_line()] * 2, end=""))
        assert len(workload) == 2
        assert workload.notes == ()

    def test_only_the_first_requests_are_read(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", mooncake_line(), mooncake_line(), "broken")
        assert len(read_trace(path, requests=2)) == 2

    def test_the_real_trace(self, mooncake_trace: Path) -> None:
        workload = read_trace(mooncake_trace)
        assert len(workload) == 12_031
        assert workload.prompt_tokens == 144_793_823
        assert workload.notes == ()


class TestAzure:
    HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
    ROW = "2023-11-16 18:15:46.6805900,374,44"

    def test_the_real_trace(self, azure_trace: Path) -> None:
        workload = read_trace(azure_trace)
        assert workload.kind == "azure"
        assert len(workload) == 19_366
        assert workload.requests[1].arrival == pytest.approx(4.314579, abs=1e-5)
        assert (workload.requests[0].num_tokens, workload.requests[0].output_tokens) == (374, 44)
        assert "no prompt shares a prefix" in workload.notes[0]

    def test_no_prompt_shares_a_token_with_another(self, azure_trace: Path) -> None:
        requests = read_trace(azure_trace, requests=50).requests
        every = np.concatenate([request.tokens(request.output_tokens) for request in requests])
        assert len(np.unique(every)) == len(every)

    @pytest.mark.parametrize(
        ("row", "field"),
        [
            ("yesterday,374,44", "TIMESTAMP"),
            ("2023-11-16 18:15:46,-3,44", "ContextTokens"),
            ("2023-11-16 18:15:46,nan,44", "ContextTokens"),
            ("2023-11-16 18:15:46,3.5,44", "ContextTokens"),
            ("2023-11-16 18:15:46,374,0", "GeneratedTokens"),
            ("2023-11-16 18:15:46,374,", "GeneratedTokens"),
            ("2023-11-16 18:15:46,374", "line"),
            ("2023-11-16 18:15:46,374,44,9", "line"),
            ('2023-11-16 18:15:46,"374,44', "line"),
        ],
    )
    def test_a_malformed_line_names_file_line_and_field(
        self, tmp_path: Path, row: str, field: str
    ) -> None:
        path = write(tmp_path / "bad.csv", self.HEADER, self.ROW, row, self.ROW)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}:3: {field} = ")

    @pytest.mark.parametrize("cut", ["2023-11", "2023-11-16 18:15:46,374", "2023-11-16 18:15,3,"])
    def test_a_truncated_file_keeps_what_was_read_and_says_so(
        self, tmp_path: Path, cut: str
    ) -> None:
        workload = read_trace(write(tmp_path / "cut.csv", self.HEADER, self.ROW, cut, end=""))
        assert len(workload) == 1
        assert "truncated: line 3 is incomplete" in workload.notes[0]

    def test_windows_line_ends_and_a_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "windows.csv"
        path.write_bytes(b"\xef\xbb\xbf" + f"{self.HEADER}\r\n{self.ROW}\r\n".encode())
        assert read_trace(path).requests[0].output_tokens == 44


class TestBurstGPT:
    def test_a_sample(self, tmp_path: Path) -> None:
        path = write(tmp_path / "burst.csv", BURSTGPT_HEADER, *BURSTGPT_ROWS)
        workload = read_trace(path)
        assert workload.kind == "burstgpt"
        assert [request.num_tokens for request in workload.requests] == [472, 1087, 417, 1360]
        assert workload.requests[3].arrival == 180.0
        assert workload.requests[2].tags == {"model": "GPT-4", "log_type": "Conversation log"}
        assert "1 failed requests (Response tokens 0) were left out" in workload.notes[0]

    @pytest.mark.parametrize(
        ("row", "field"),
        [
            ("nan,ChatGPT,472,18,490,Conversation log", "Timestamp"),
            ("-1,ChatGPT,472,18,490,Conversation log", "Timestamp"),
            ("5,ChatGPT,0,18,18,Conversation log", "Request tokens"),
            ("5,ChatGPT,472,-18,454,Conversation log", "Response tokens"),
            ("5,ChatGPT,472,18,491,Conversation log", "Total tokens"),
            ("5,ChatGPT,472,18,490", "line"),
        ],
    )
    def test_a_malformed_line_names_file_line_and_field(
        self, tmp_path: Path, row: str, field: str
    ) -> None:
        path = write(tmp_path / "bad.csv", BURSTGPT_HEADER, row, BURSTGPT_ROWS[0])
        with pytest.raises(TraceError, match=r"bad\.csv:2: ") as caught:
            read_trace(path)
        assert f"{field} = " in str(caught.value)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"x\.csv:1: header = 'a,b,c'"):
        read_trace(write(tmp_path / "x.csv", "a,b,c", "1,2,3"))


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no lines"):
        read_trace(path)


def test_a_header_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no complete request"):
        read_trace(write(tmp_path / "x.csv", TestAzure.HEADER))


def test_a_column_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "prompt_tokens,output_tokens,prompt_tokens", "5,6,7")
    with pytest.raises(
        TraceError, match=r"x\.csv:1: header = .*'prompt_tokens' stands there twice"
    ):
        read_trace(path)


def test_a_file_without_line_ends_is_read_no_further_than_a_line_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcatch.workload.readers.MAX_LINE_BYTES", 4096)
    device = Path("/dev/zero")
    path = device if device.exists() else write(tmp_path / "x.csv", "0" * 5000)
    with pytest.raises(TraceError, match="longer than 4096 bytes: not a trace"):
        read_trace(path)


def test_binary_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\x80\x81\n\x82\n")
    with pytest.raises(TraceError, match=r"x\.jsonl:1: byte 1 = .*not UTF-8"):
        read_trace(path)
