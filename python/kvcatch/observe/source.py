"""Where samples come from: a recording, a log, one saved metrics page, or running endpoints."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.observe.engines.vllm_plugin import PREFIX
from kvcatch.observe.errors import MetricsError, RecordingError
from kvcatch.observe.inside import is_inside, read_inside
from kvcatch.observe.limits import EngineVersion, Limits
from kvcatch.observe.log import read_vllm_log
from kvcatch.observe.prometheus import MAX_BODY_BYTES, Reader
from kvcatch.observe.record import read_recording
from kvcatch.observe.scrape import Scraper, metrics_url, page_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvcatch.observe.sample import EngineSample

__all__ = ["Source", "read_endpoints", "read_file"]

_TRIES = 3
"""So many looks that bring nothing end it, when no endpoint ever answered."""

_HOST = re.compile(r"[\w.-]+:\d{1,5}(/.*)?|localhost")


@dataclass(slots=True)
class Source:
    """What was read from one place.

    Attributes:
        name: The file or endpoint.
        samples: Of all engines and ranks in it.
        names: Metric names met, by engine.
        version: What it says of its version.
        limits: What it says of its limits.
        notes: What was not read, and what is doubtful; one line each.
        out_of_memory: PyTorch ran out of device memory so many times (from a log).
        inside: What a plugin in the engine says at the end: refusals and holdings; None without one.
    """

    name: str
    samples: list[EngineSample] = field(default_factory=list)
    names: dict[str, set[str]] = field(default_factory=dict)
    version: EngineVersion | None = None
    limits: Limits = field(default_factory=Limits)
    notes: list[str] = field(default_factory=list)
    out_of_memory: int = 0
    inside: dict[str, Any] | None = None


def _counted(errors: Sequence[str]) -> list[str]:
    if not errors:
        return []
    return [f"{len(errors)} scrapes failed, the first: {errors[0]}"]


def read_file(path: Path, progress: Callable[[int], None] | None = None) -> Source:
    """Read a recording (compact or raw, gzip or not), a vLLM log, or one saved metrics page.

    Raises:
        RecordingError: It is none of them.
        MetricsError: It is one metrics page that cannot be believed.
        OSError: It cannot be opened.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except FileNotFoundError:
        if _HOST.fullmatch(name) is None:
            raise
        raise RecordingError(f"{name}: no such file; an address begins with http://") from None
    if not start.strip():
        raise RecordingError(f"{name}: empty")
    if is_inside(start):
        raise RecordingError(f"{name}: a page of the plugin: kvcatch inspect prints it")
    if start.startswith(b"\x1f\x8b") or start.lstrip()[:1] == b"{":
        recording = read_recording(path, progress)
        notes = [*recording.notes, *_counted(recording.errors)]
        return Source(
            name,
            recording.samples,
            recording.names,
            recording.version,
            notes=notes,
            inside=recording.inside,
        )
    if start.startswith((b"# HELP", b"# TYPE")) or start.lstrip()[:1] == b"<":
        if path.stat().st_size > MAX_BODY_BYTES:
            raise MetricsError(f"{name}: larger than {MAX_BODY_BYTES:,} bytes")
        reader = Reader(name)
        samples = reader.read(path.read_bytes(), 0.0)
        return Source(name, samples, reader.names, notes=["one look is not a window"])
    if b"\0" in start:
        raise RecordingError(f"{name}: neither a recording nor a log")
    with path.open(encoding="utf-8", errors="replace") as lines:
        log = read_vllm_log(lines, name)
    notes = [
        f"PyTorch ran out of device memory: {item.wanted_bytes / 2**20:,.0f} MiB wanted"
        + (
            f" with {item.unallocated_bytes / 2**20:,.0f} MiB reserved and unallocated"
            if item.unallocated_bytes is not None
            else ""
        )
        + ". The KV pool is allocated once and is not the cause: lower --gpu-memory-utilization, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        for item in log.out_of_memory[:1]
    ]
    return Source(
        name,
        log.samples,
        {},
        log.version,
        log.limits,
        notes,
        out_of_memory=len(log.out_of_memory),
    )


async def read_endpoints(
    urls: Sequence[str],
    *,
    window_s: float,
    interval_s: float,
    timeout_s: float = 5.0,
    progress: Callable[[float], None] | None = None,
    token: str | None = None,
) -> list[Source]:
    """Look at endpoints for a while; what goes wrong at one is noted there and stops no other.

    Args:
        urls: Addresses, ``unix:PATH`` for a socket.
        window_s: How long to look.
        interval_s: Between two looks.
        timeout_s: For an answer.
        progress: Told the seconds gone by.
        token: Shown to each address that is no socket.

    Raises:
        InvalidArgument: A URL is none.
        MissingExtra: httpx is not installed.
    """
    endpoints = [metrics_url(url) for url in urls]
    sources = [Source(shown_url(endpoint)) for endpoint in endpoints]
    start, zero = time.monotonic(), time.time()

    async def follow(scraper: Scraper, endpoint: str, source: Source) -> None:
        reader, failed = Reader(source.name), []
        while True:
            at = time.monotonic()
            page = await scraper.fetch(endpoint)
            try:
                if page.body is None:
                    raise MetricsError(page.error or f"{source.name}: no answer")
                source.samples += reader.read(page.body, round(zero + at - start, 3))
            except MetricsError as error:
                failed.append(str(error))
            if progress is not None:
                progress(time.monotonic() - start)
            if len(failed) >= _TRIES and not any(other.samples for other in sources):
                break
            pause = at + interval_s - time.monotonic()
            if time.monotonic() - start + max(pause, 0) > window_s:
                break
            await asyncio.sleep(max(pause, 0))
        source.names = reader.names
        source.notes += _counted(failed)
        if has_plugin(reader.names):
            await look_inside(scraper, source, endpoint)
        elif "vllm" in reader.names:
            source.version = await scraper.version(endpoint, "vllm")

    async with Scraper(timeout_s=timeout_s, token=token) as scraper:
        # Each at its own pace: one that is slow to answer leaves the others their interval.
        await asyncio.gather(
            *(follow(scraper, *pair) for pair in zip(endpoints, sources, strict=True))
        )
    return sources


def has_plugin(names: Mapping[str, set[str]]) -> bool:
    """Whether metric names are those of an engine core with kvcatch's plugin inside."""
    return PREFIX + "max_num_seqs" in names.get("vllm", ())


async def look_inside(scraper: Scraper, source: Source, endpoint: str) -> None:
    """Fill in what the plugin says; that it could not be read is a note."""
    page = await scraper.fetch(page_url(endpoint, "/snapshot"))
    try:
        if page.body is None:
            raise MetricsError(page.error or f"{source.name}: no answer")
        source.inside = read_inside(page.body, source.name)
    except MetricsError as error:
        source.notes.append(f"the plugin's page was not read: {error}")
        return
    version = source.inside["vllm"]
    source.version = EngineVersion.exact("vllm", version, "the plugin")
