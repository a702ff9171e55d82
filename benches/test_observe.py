"""Looking at engines: a metrics body of 1 MB, and an hour of recording at one look a second.

The baseline of the parser is prometheus_client's on the same body. The hour is a busy vLLM with every
series of the real one; bodies are built here, so that nothing but this file is needed.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from kvcatch.observe import Reader
from kvcatch.observe.diagnose import diagnose
from kvcatch.observe.record import Recorder, read_recording

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

HISTOGRAMS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_max_num_generation_tokens",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
INFO = 'num_gpu_blocks="5001",block_size="16",kv_cache_size_tokens="80000",kv_cache_max_concurrency="9.765625"'


def body(at: int, engines: int = 1) -> str:
    """A metrics page as vLLM writes it, after ``at`` seconds; about 60 kB an engine."""
    lines = []
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="a-model-with-a-name-of-usual-length"'
        values = {
            "num_requests_running": 20 + at % 7,
            "num_requests_waiting": at % 40 == 0,
            "kv_cache_usage_perc": 0.5 + at % 10 / 50,
            "num_preemptions_total": at // 100,
            "prompt_tokens_total": 900 * at,
            "generation_tokens_total": 500 * at,
            "request_success_total": 3 * at,
            "prefix_cache_queries_total": 900 * at,
            "prefix_cache_hits_total": 300 * at,
            "admission_rejections_total": 0,
        }
        for reason in ("capacity", "deferred"):
            values[f'num_requests_waiting_by_reason{{{labels},reason="{reason}"}}'] = 0
        for name, value in values.items():
            series = name if "{" in name else f"{name}{{{labels}}}"
            lines += [
                f"# HELP vllm:{name.partition('{')[0]} Text that says what it is.",
                f"vllm:{series} {float(value)}",
            ]
        for name in HISTOGRAMS:
            lines.append(f"# TYPE vllm:{name} histogram")
            for bucket in range(40):
                lines.append(
                    f'vllm:{name}_bucket{{{labels},le="{2.0**bucket}"}} {float(3 * at * (bucket > 9))}'
                )
            lines.append(f'vllm:{name}_bucket{{{labels},le="+Inf"}} {float(3 * at)}')
            lines.append(f"vllm:{name}_count{{{labels}}} {float(3 * at)}")
            lines.append(f"vllm:{name}_sum{{{labels}}} {float(700 * at)}")
        lines.append(f'vllm:cache_config_info{{engine="{engine}",{INFO}}} 1.0')
    return "\n".join(lines) + "\n"


def megabyte() -> str:
    engines = 1
    while len(text := body(7, engines)) < 1_000_000:
        engines += 1
    return text


@pytest.mark.benchmark(group="parse 1 MB")
class TestParse:
    def test_first_body(self, benchmark: BenchmarkFixture) -> None:
        text = megabyte().encode()
        benchmark(lambda: Reader("x").read(text, 0.0))
        if benchmark.stats is not None:
            assert benchmark.stats["median"] <= 0.06

    def test_next_body(self, benchmark: BenchmarkFixture) -> None:
        text, reader = megabyte().encode(), Reader("x")
        benchmark(lambda: reader.read(text, 0.0))
        if benchmark.stats is not None:
            assert benchmark.stats["median"] <= 0.06

    def test_prometheus_client(self, benchmark: BenchmarkFixture) -> None:
        parser = pytest.importorskip("prometheus_client.parser")
        text = megabyte()
        benchmark(lambda: list(parser.text_string_to_metric_families(text)))


@pytest.mark.benchmark(group="an hour at 1 s, raw bodies")
def test_raw_hour(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    path = tmp_path / "hour.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        for at in range(3600):
            file.write(json.dumps({"t": float(at), "text": body(at)}) + "\n")
    told: list[int] = []

    def run() -> str:
        recording = read_recording(path, told.append)
        return diagnose(recording.samples, names=recording.names).worst.gate

    assert benchmark.pedantic(run, rounds=1) == "healthy"
    assert len(told) >= 70, "progress is told all along"
    if benchmark.stats is not None:
        assert benchmark.stats["median"] <= 15.0


@pytest.mark.benchmark(group="an hour at 1 s")
def test_hour(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    path = tmp_path / "hour.jsonl.gz"
    with Recorder(path, "http://engine/metrics", 0.0, "vllm@0.32.0") as recorder:
        for at in range(3600):
            recorder.add(float(at), body(at))
    print(f"\n{path.stat().st_size:,} bytes for 3600 bodies of {len(body(3599)):,}")

    def run() -> str:
        recording = read_recording(path)
        return diagnose(recording.samples, recording.version, names=recording.names).worst.gate

    assert benchmark.pedantic(run, rounds=3) == "healthy"
    if benchmark.stats is not None:
        assert benchmark.stats["median"] <= 2.0
