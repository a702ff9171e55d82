"""vLLM's log lines of every version."""

from __future__ import annotations

import pytest
from observe_make import v0_line, v1_line

from kvcatch.observe.errors import RecordingError
from kvcatch.observe.log import read_vllm_log


class TestStartup:
    def test_v0(self) -> None:
        log = read_vllm_log(["INFO 02-18 x.py:57] # CUDA blocks: 5691, # CPU blocks: 2048"])
        assert log.limits.num_blocks == 5691
        assert log.version.title == "vLLM 0.7.3 or earlier"

    def test_two_lines(self) -> None:
        log = read_vllm_log(
            [
                "INFO 04-20 [kv_cache_utils.py:634] GPU KV cache size: 290,864 tokens",
                "INFO 04-20 [kv_cache_utils.py:637] Maximum concurrency for 32,768 tokens per request: 33.04x",
            ]
        )
        limits = log.limits
        assert (limits.pool_tokens, limits.max_model_len, limits.max_concurrency) == (
            290864,
            32768,
            33.04,
        )
        assert log.version.title == "vLLM 0.8.0 to 0.27.1"

    @pytest.mark.parametrize(("device", "version"), [("CPU", "0.28.0"), ("GPU + host", "0.31.0")])
    def test_one_line(self, device: str, version: str) -> None:
        line = (
            f"INFO 11-29 11:58:29 [kv_cache_utils.py:2327] {device} KV cache size: 3,840 tokens, "
            "Maximum concurrency for 2,048 tokens per request: 1.88x"
        )
        log = read_vllm_log([line])
        assert (log.limits.pool_tokens, log.limits.max_concurrency) == (3840, 1.88)
        assert log.version.title == f"vLLM {version} or later"

    def test_version_and_arguments(self) -> None:
        log = read_vllm_log(
            [
                "INFO 05-01 [api_server.py:1] vLLM API server version 0.10.2",
                "INFO 05-01 [utils.py:1] non-default args: {'max_num_seqs': 64, 'enable_lora': True, "
                "'max_num_batched_tokens': 4096, 'watermark': 0.05}",
                "INFO 05-01 [config.py:1] Setting attention block size to 528 tokens to ensure",
            ]
        )
        assert log.version.title == "vLLM 0.10.2"
        limits = log.limits
        assert (limits.max_num_seqs, limits.token_budget, limits.watermark) == (64, 4096, 0.05)
        assert limits.lora is True
        assert limits.block_size == 528


class TestPeriodic:
    def test_v0(self) -> None:
        (sample,) = read_vllm_log([v0_line(1, 3, 3.1, 12.5, 30.0)]).samples
        assert (sample.running_requests, sample.waiting_requests) == (1, 3)
        assert sample.kv_usage_share == pytest.approx(0.031)
        assert sample.swapped_requests == 0
        assert sample.waiting_deferred_requests is None
        assert sample.preemptions_total is None

    def test_v1_with_everything(self) -> None:
        more = ", Deferred: 2 reqs, Preemptions: 4, KV fetch: 1 reqs"
        lines = [
            v1_line(5, 10, 54.6, 100.0, 18.4, second=0, more=more, hits=25.8),
            v1_line(5, 10, 54.6, 0.0, 18.4, second=10, more=", Preemptions: 3"),
        ]
        log = read_vllm_log(lines)
        first, second = log.samples
        assert (first.waiting_requests, first.waiting_deferred_requests) == (12, 2)
        assert (first.preemptions_total, second.preemptions_total) == (4, 7)
        assert first.hit_share == pytest.approx(0.258)
        assert first.covers_seconds == 10
        assert second.t_seconds - first.t_seconds == 10
        assert second.prompt_tokens_total == 1000
        assert log.version.title == "vLLM 0.32.0 or later"

    def test_stamps_pass_new_year(self) -> None:
        lines = [
            v1_line(1, 0, 1.0).replace("11-29 12:00:00", "12-31 23:59:55"),
            v1_line(1, 0, 1.0).replace("11-29 12:00:00", "01-01 00:00:05"),
        ]
        first, second = read_vllm_log(lines).samples
        assert second.t_seconds - first.t_seconds == 10

    def test_the_real_excerpt(self, recordings: object) -> None:
        path = recordings / "server_log_excerpt.txt"  # type: ignore[operator]
        log = read_vllm_log(path.read_text().splitlines())
        assert len(log.samples) == 15
        assert log.limits.pool_tokens == 3840
        assert [int(s.waiting_requests or 0) for s in log.samples[:7]] == [0, 0, 1, 8, 13, 15, 8]


def test_vllm_37428_memory_outside_of_the_pool() -> None:
    line = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total "
        "capacity of 19.53 GiB of which 329.87 MiB is free. Of the allocated memory 18.40 GiB is allocated "
        "by PyTorch, and 402.27 MiB is reserved by PyTorch but unallocated."
    )
    (found,) = read_vllm_log([line]).out_of_memory
    assert found.wanted_bytes == 384 * 2**20
    assert found.unallocated_bytes == int(402.27 * 2**20)


def test_another_text_is_refused() -> None:
    with pytest.raises(RecordingError, match="notes: no line of a vLLM log"):
        read_vllm_log(["hello", "world"], "notes")
