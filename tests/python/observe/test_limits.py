from __future__ import annotations

import pytest

from kvcatch.errors import InvalidArgument
from kvcatch.observe.limits import EngineVersion, Limits, read_engine_args


class TestVersion:
    @pytest.mark.parametrize(
        ("text", "title"),
        [
            ("vllm@0.32", "vLLM 0.32"),
            ("vllm@v0.19.1rc1", "vLLM 0.19.1"),
            ("tensorrt-llm@1.2", "TensorRT-LLM 1.2"),
            ("vllm", "vLLM"),
        ],
    )
    def test_title(self, text: str, title: str) -> None:
        assert EngineVersion.parse(text).title == title

    @pytest.mark.parametrize("text", ["", "llm", "vllm@", "vllm@x", "vllm@0.32@1"])
    def test_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="engine = "):
            EngineVersion.parse(text)

    def test_since(self) -> None:
        minor = EngineVersion.parse("vllm@0.19")
        assert minor.since(0, 19) is True
        assert minor.since(0, 19, 1) is None  # 0.19.0 has it not, 0.19.1 has it
        assert minor.since(0, 20) is False
        assert EngineVersion.parse("vllm@0.19.1").since(0, 19, 1) is True
        assert EngineVersion("vllm").since(0, 8) is None


class TestArguments:
    def test_read(self) -> None:
        limits = read_engine_args(
            "vllm serve m --max-num-seqs 64 --max_model_len=32k --max-num-batched-tokens 8K "
            "--watermark 0.05 --enable-lora --unknown 3"
        )
        names = ("max_num_seqs", "max_model_len", "token_budget", "watermark", "lora")
        assert limits == Limits(
            64, 32000, 8192, 0.05, lora=True, source=dict.fromkeys(names, "engine args")
        )

    def test_suffixes(self) -> None:
        assert read_engine_args("--max-model-len 32k").max_model_len == 32_000
        assert read_engine_args("--max-model-len 32K").max_model_len == 32_768
        assert read_engine_args("--max-model-len auto").max_model_len is None

    @pytest.mark.parametrize(
        "text",
        ["--max-num-seqs", "--max-num-seqs x", "--max-num-seqs 0", "--watermark 2", "--a 'b"],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="engine args"):
            read_engine_args(text)

    def test_what_is_given_goes_before_what_is_read(self) -> None:
        given = read_engine_args("--max-num-seqs 64")
        both = given.joined(
            Limits(max_num_seqs=8, block_size=16, source={"block_size": "startup log"})
        )
        assert (both.max_num_seqs, both.block_size) == (64, 16)
        assert both.source == {"max_num_seqs": "engine args", "block_size": "startup log"}
