"""Synthetic samples, metrics bodies and logs for the tests of observe."""

from __future__ import annotations

from typing import Any

from kvcatch.observe.sample import EngineSample


def steady(
    engine: str = "vllm",
    seconds: int = 60,
    step: float = 1.0,
    *,
    start: float = 0.0,
    rates: dict[str, float] | None = None,
    counters: dict[str, float] | None = None,
    ramps: dict[str, float] | None = None,
    **gauges: Any,
) -> list[EngineSample]:
    """Samples whose gauges stay (or ramp by so much a second) and whose counters grow by rates."""
    samples = []
    for number in range(int(seconds / step) + 1):
        at = number * step
        values = dict(gauges)
        for name, slope in (ramps or {}).items():
            values[name] = values[name] + slope * at
        for name, rate in (rates or {}).items():
            values[name] = (counters or {}).get(name, 0.0) + rate * at
        samples.append(EngineSample(start + at, engine, **values))
    return samples


def vllm_body(
    values: dict[str, float],
    labels: str = 'engine="0",model_name="m"',
    info: str = "",
) -> str:
    """A metrics body of vLLM; ``info`` is the labels of cache_config_info."""
    lines = []
    for name, value in values.items():
        metric, _, more = name.partition("|")
        inside = ",".join(text for text in (labels, more) if text)
        lines += [f"# TYPE vllm:{metric} gauge", f"vllm:{metric}{{{inside}}} {value}"]
    if info:
        lines.append(f'vllm:cache_config_info{{engine="0",{info}}} 1.0')
    return "\n".join(lines) + "\n"


def v1_line(
    running: int,
    waiting: int,
    usage: float,
    prompt: float = 0.0,
    generated: float = 0.0,
    *,
    second: int = 0,
    more: str = "",
    hits: float = 0.0,
) -> str:
    """A periodic line of vLLM V1."""
    return (
        f"INFO 11-29 12:{second // 60:02d}:{second % 60:02d} [loggers.py:335] Engine 000: "
        f"Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generated} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs{more}, GPU KV cache usage: {usage}%, "
        f"Prefix cache hit rate: {hits}%"
    )


def v0_line(
    running: int, pending: int, usage: float, prompt: float, generated: float, second: int = 0
) -> str:
    """A periodic line of vLLM V0."""
    return (
        f"INFO 12-26 03:{second // 60:02d}:{second % 60:02d} metrics.py:455] Avg prompt throughput: "
        f"{prompt} tokens/s, Avg generation throughput: {generated} tokens/s, Running: {running} reqs, "
        f"Swapped: 0 reqs, Pending: {pending} reqs, GPU KV cache usage: {usage}%, CPU KV cache usage: 0.0%."
    )
