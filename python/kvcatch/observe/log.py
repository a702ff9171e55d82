"""vLLM's log: the startup lines of every version, and the periodic line of V0 and V1.

Formats: ``# GPU blocks: N, # CPU blocks: M`` up to 0.7.3; ``GPU KV cache size: N tokens`` with a line of
its own for the concurrency from 0.8.0; both in one line from 0.28.0; the device may be ``CPU`` or
``GPU + host``. The periodic line says ``Swapped:`` and ``Pending:`` (V0) or ``Waiting:`` (V1), then
``Deferred:`` (0.22.1), ``Preemptions:`` when not 0 (0.11.2) and ``KV fetch:`` (0.32.0).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from kvcatch.observe.errors import RecordingError
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.sample import EngineSample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcatch.observe.engines.table import Version

__all__ = ["LINE_SECONDS", "OutOfDeviceMemory", "VllmLog", "read_vllm_log"]

LINE_SECONDS = 10.0
"""vLLM writes its periodic line each 10 s and only while something happens."""

_STAMP = re.compile(r"\b(?:(\d{4})-)?(\d{2})-(\d{2})[ T](\d{2}):(\d{2}):(\d{2})")
_COUNT = {
    name: re.compile(rf"\b{name}: (\d+)(?: reqs)?")
    for name in ("Running", "Swapped", "Pending", "Waiting", "Deferred", "Preemptions")
}
_PROMPT = re.compile(r"Avg prompt throughput: (\d+(?:\.\d+)?) tokens/s")
_GENERATED = re.compile(r"Avg generation throughput: (\d+(?:\.\d+)?) tokens/s")
_USAGE = re.compile(r"\b[A-Z][\w+ ]{0,20}? KV cache usage: (\d+(?:\.\d+)?)%")
_HITS = re.compile(r"Prefix cache hit rate: (?:GPU: )?(\d+(?:\.\d+)?)%")
_ENGINE = re.compile(r"\bEngine (\d+):")
_BLOCKS = re.compile(r"# \w+ blocks: (\d+), # CPU blocks: (\d+)")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(
    r"Maximum concurrency for ([\d,]+) tokens per request: ([\d,]+(?:\.\d+)?)x"
)
_ATTENTION_BLOCK = re.compile(r"Setting attention block size to (\d+) tokens")
_VERSION = re.compile(
    r"(?:vLLM API server version|LLM engine \(v|vLLM server version|vllm version:?) ?v?(\d+\.\d+[\w.+]*)",
    re.IGNORECASE,
)
_ARGUMENTS: dict[str, re.Pattern[str]] = {
    name: re.compile(rf"\b{flag}['\"]?\s*[=:]\s*(\d+)\b")
    for name, flag in (
        ("max_num_seqs", "max_num_seqs"),
        ("max_model_len", "(?:max_model_len|max_seq_len)"),
        ("token_budget", "max_num_batched_tokens"),
        ("block_size", "block_size"),
        ("max_loras", "max_loras"),
    )
}
_LORA = re.compile(r"\benable_lora['\"]?\s*[=:]\s*True\b|--enable-lora\b")
_WATERMARK = re.compile(r"\bwatermark['\"]?\s*[=:]\s*(0?\.\d+)\b")
_FORMATS: tuple[tuple[re.Pattern[str], Version | None, Version | None], ...] = (
    (re.compile(r"# \w+ blocks: \d+, # CPU"), None, (0, 7, 3)),
    (re.compile(r"KV cache size: [\d,]+ tokens\s*$"), (0, 8, 0), (0, 27, 1)),
    (re.compile(r"KV cache size: [\d,]+ tokens, Maximum concurrency"), (0, 28, 0), None),
    (re.compile(r"GPU \+ host KV cache"), (0, 31, 0), None),
    (re.compile(r"throughput:.*\bDeferred: \d"), (0, 22, 1), None),
    (re.compile(r"throughput:.*\bPreemptions: \d"), (0, 11, 2), None),
    (re.compile(r"throughput:.*\bKV fetch: \d"), (0, 32, 0), None),
)
"""What a line's form tells of the version: first and last in which it was seen."""

_OOM = re.compile(
    r"CUDA out of memory\. Tried to allocate (\d+(?:\.\d+)?) (MiB|GiB)"
    r"(?:.*?(\d+(?:\.\d+)?) (MiB|GiB) is reserved by PyTorch but unallocated)?"
)
_UNIT = {"MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class OutOfDeviceMemory:
    """PyTorch's allocator failed. That is outside the KV pool, which is allocated once at the start.

    Attributes:
        wanted_bytes: What was asked for.
        unallocated_bytes: Held by PyTorch and not used; None when the message does not say.
    """

    wanted_bytes: int
    unallocated_bytes: int | None


@dataclass(slots=True)
class VllmLog:
    """What a log says.

    Attributes:
        samples: One per periodic line; ``covers_seconds`` is set.
        version: Of the engine.
        limits: From the startup lines.
        out_of_memory: PyTorch's out-of-memory messages.
    """

    samples: list[EngineSample] = field(default_factory=list)
    version: EngineVersion = field(default_factory=lambda: EngineVersion("vllm"))
    limits: Limits = field(default_factory=Limits)
    out_of_memory: list[OutOfDeviceMemory] = field(default_factory=list)


@dataclass(slots=True)
class _Totals:
    t_seconds: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0
    preemptions: float = 0.0


def read_vllm_log(lines: Iterable[str], name: str = "log") -> VllmLog:
    """Read a vLLM log, whatever else is in it.

    Raises:
        RecordingError: No line of it is one of vLLM's that say something about the KV cache.
    """
    log = VllmLog()
    found: dict[str, Any] = {}
    totals: dict[str, _Totals] = {}
    clock = _Clock()
    formats: set[tuple[Version | None, Version | None]] = set()
    for line in lines:
        if "KV cache" in line or "blocks:" in line or "throughput:" in line:
            formats.update((first, last) for sign, first, last in _FORMATS if sign.search(line))
        if "throughput:" in line and (sample := _periodic(line, name, clock, totals)):
            log.samples.append(sample)
            continue
        if "CUDA out of memory" in line and (match := _OOM.search(line)):
            log.out_of_memory.append(
                OutOfDeviceMemory(
                    int(float(match[1]) * _UNIT[match[2]]),
                    int(float(match[3]) * _UNIT[match[4]]) if match[3] else None,
                )
            )
            continue
        _startup(line, found, log)
    if log.version.low is None and formats:
        low = max((first for first, last in formats if first), default=None)
        high = min((last for first, last in formats if last), default=None)
        if low is None or high is None or low <= high:
            log.version = EngineVersion("vllm", low, high, "inferred from the log's format")
    if not log.samples and not found and not log.out_of_memory:
        raise RecordingError(
            f"{name}: no line of a vLLM log that tells of the KV cache, and no recording"
        )
    log.limits = Limits(**found, source=dict.fromkeys(found, "startup log"))
    return log


def _startup(line: str, found: dict[str, Any], log: VllmLog) -> None:
    if match := _BLOCKS.search(line):
        found["num_blocks"] = int(match[1])
    if match := _TOKENS.search(line):
        found["pool_tokens"] = int(match[1].replace(",", ""))
    if match := _CONCURRENCY.search(line):
        found["max_model_len"] = int(match[1].replace(",", ""))
        found["max_concurrency"] = float(match[2].replace(",", ""))
    if match := _VERSION.search(line):
        log.version = EngineVersion.exact("vllm", match[1], "startup log")
    if "max_" in line or "enable_lora" in line or "enable-lora" in line or "watermark" in line:
        for key, pattern in _ARGUMENTS.items():
            if (match := pattern.search(line)) and int(match[1]):
                found.setdefault(key, int(match[1]))
        if match := _WATERMARK.search(line):
            found["watermark"] = float(match[1])
        if _LORA.search(line):
            found["lora"] = True
    if match := _ATTENTION_BLOCK.search(line):
        # Last word on a hybrid model's block: the metric's label may be older.
        found["block_size"] = int(match[1])


def _periodic(
    line: str, name: str, clock: _Clock, totals: dict[str, _Totals]
) -> EngineSample | None:
    counts = {key: int(match[1]) for key, at in _COUNT.items() if (match := at.search(line))}
    prompt, generated = _PROMPT.search(line), _GENERATED.search(line)
    if "Running" not in counts or prompt is None:
        return None
    waiting = counts.get("Waiting", counts.get("Pending"))
    rank = match[1] if (match := _ENGINE.search(line)) else ""
    t_seconds = clock.read(line)
    total = totals.setdefault(rank, _Totals())
    covers = LINE_SECONDS
    if total.t_seconds and t_seconds is not None:
        covers = min(LINE_SECONDS, max(0.0, t_seconds - total.t_seconds)) or LINE_SECONDS
    total.t_seconds = total.t_seconds + LINE_SECONDS if t_seconds is None else t_seconds
    total.prompt += float(prompt[1]) * covers
    total.preemptions += counts.get("Preemptions", 0)
    sample = EngineSample(
        total.t_seconds, "vllm", f"engine={rank}" if rank else "", name, covers_seconds=covers
    )
    sample.running_requests = float(counts["Running"])
    deferred = counts.get("Deferred")
    if waiting is not None:
        sample.waiting_requests = float(waiting + (deferred or 0))
    if deferred is not None:
        sample.waiting_deferred_requests = float(deferred)
    if "Swapped" in counts:
        sample.swapped_requests = float(counts["Swapped"])
    if match := _USAGE.search(line):
        sample.kv_usage_share = float(match[1]) / 100
    if match := _HITS.search(line):
        sample.hit_share = float(match[1]) / 100
    sample.prompt_tokens_per_second = float(prompt[1])
    sample.prompt_tokens_total = total.prompt
    if generated is not None:
        total.generated += float(generated[1]) * covers
        sample.generated_tokens_per_second = float(generated[1])
        sample.generated_tokens_total = total.generated
    if "Preemptions" in counts or total.preemptions:
        sample.preemptions_total = total.preemptions
    return sample


class _Clock:
    """Seconds from the first stamp on; stamps without a year may pass New Year."""

    def __init__(self) -> None:
        self._first: datetime | None = None
        self._last: datetime | None = None

    def read(self, line: str) -> float | None:
        match = _STAMP.search(line)
        if match is None:
            return None
        year, *rest = match.groups()
        try:
            # 2000 is a leap year: 29 February is a date in it.
            known = int(year) if year else (self._last.year if self._last else 2000)
            month, day, hour, minute, second = map(int, rest)
            stamp = datetime(known, month, day, hour, minute, second)
        except ValueError:
            return None
        if self._first is None or self._last is None:
            self._first = self._last = stamp
        if year is None and stamp < self._last - timedelta(days=180):
            stamp = stamp.replace(year=self._last.year + 1)
        self._last = max(stamp, self._last)
        return LINE_SECONDS + (stamp - self._first).total_seconds()
