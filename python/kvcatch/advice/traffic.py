"""What the traffic looks like: lengths from a trace, a CSV, or an engine's own histograms."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.errors import InvalidArgument, TraceError
from kvcatch.ledger.lengths import LengthDistribution
from kvcatch.workload.readers import MAX_TOKENS, read_trace
from kvcatch.workload.request import Request, Workload
from kvcatch.workload.table import NO_SHARING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

MAX_SCRAPE_BYTES = 100_000_000
"""A larger metrics text is refused."""

SAMPLED_REQUESTS = 2_000
"""Requests made from histograms unless a number is given."""

HISTOGRAMS = {
    "vllm": ("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
    "sglang": ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram"),
    "tgi": ("tgi_request_input_length", "tgi_request_generated_tokens"),
}
"""Histograms of prompt and output lengths, per engine (vLLM from 0.4 on under these names)."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)_bucket\{(.*)\}\s+(\S+)(?:\s+\S+)?")
_LE = re.compile(r'(?:^|,)\s*le="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one kind.

    Attributes:
        values: The distribution; of a histogram, the upper bounds of its buckets.
        lower: Of a histogram: the lower bound of each bucket by its upper bound. Empty when the
            lengths are exact.
        beyond: Share of the requests above the last finite bucket, whose length is not known.
    """

    values: LengthDistribution
    lower: dict[int, int]
    beyond: float = 0.0

    def percentile(self, percent: float) -> tuple[int, int | None]:
        """Lowest and highest value that the percentile can have; None for no upper bound."""
        if percent / 100 > 1 - self.beyond + 1e-12:
            return self.values.lengths[-1], None
        high = self.values.percentile(percent)
        return self.lower.get(high, high - 1) + 1 if self.lower else high, high

    def to_dict(self) -> dict[str, Any]:
        """Percentiles in tokens; a pair of bounds where a histogram knows no better."""
        out: dict[str, Any] = {}
        for percent in PERCENTILES:
            low, high = self.percentile(percent)
            out[f"p{percent:g}_tokens"] = low if low == high else [low, high]
        return out


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to give advice for.

    Attributes:
        workload: What is replayed.
        prompt: Prompt lengths.
        output: Output lengths.
        total: Prompt and output together.
        is_exact: Lengths of single requests were known; else they were drawn from histograms.
    """

    workload: Workload
    prompt: Lengths
    output: Lengths
    total: Lengths
    is_exact: bool

    @classmethod
    def of(cls, workload: Workload) -> Traffic:
        """The traffic of a workload whose requests are known one by one."""
        requests = workload.requests
        return cls(
            workload,
            _exact([item.num_tokens for item in requests]),
            _exact([item.output_tokens for item in requests]),
            _exact([item.num_tokens + item.output_tokens for item in requests]),
            is_exact=True,
        )

    def to_dict(self) -> dict[str, Any]:
        """Percentiles of the lengths, for JSON."""
        return {
            "requests": len(self.workload),
            "is_exact": self.is_exact,
            "prompt": self.prompt.to_dict(),
            "output": self.output.to_dict(),
            "total": self.total.to_dict(),
            "notes": list(self.workload.notes),
        }


def read_traffic(path: Path, requests: int | None = None, seed: int = 0) -> Traffic:
    """Read a trace, a CSV of lengths, or an engine's metrics text.

    Args:
        path: The file; what it is is recognised by its content.
        requests: Only the first so many of a trace; of histograms, how many are drawn.
        seed: Of what is drawn from histograms.

    Raises:
        TraceError: The file is malformed or of an unknown format.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(4096).decode("utf-8", errors="replace")
    if "\0" in start:
        raise TraceError(f"{path}: has bytes of value 0: not a text file")
    first = start.lstrip("\ufeff \r\n").partition("\n")[0]
    if first.startswith("#") or _SAMPLE.match(first) or re.match(r"[\w:]+(\{.*\})? \S+$", first):
        if path.stat().st_size > MAX_SCRAPE_BYTES:
            raise TraceError(f"{path}: larger than {MAX_SCRAPE_BYTES // 1_000_000} MB")
        text = path.read_text(encoding="utf-8", errors="replace")
        return from_metrics(text, path.name, requests or SAMPLED_REQUESTS, seed)
    return Traffic.of(read_trace(path, requests))


def from_metrics(text: str, name: str, requests: int = SAMPLED_REQUESTS, seed: int = 0) -> Traffic:
    """Traffic drawn from an engine's histograms of prompt and output lengths.

    Prompt and output are drawn independently, for the histograms do not say which go together;
    inside a bucket evenly. Series of several engines or ranks are added up, and that is noted.

    Raises:
        TraceError: The histograms are not there, have counted nothing, or cannot be true.
    """
    if requests < 1:
        raise InvalidArgument(f"requests = {requests}: must be 1 or more")
    found = [
        (engine, names)
        for engine, names in HISTOGRAMS.items()
        if any(f"{item}_bucket" in text for item in names)
    ]
    if not found:
        known = ", ".join(item for names in HISTOGRAMS.values() for item in names)
        raise TraceError(f"{name}: no histogram of request lengths; looked for {known}")
    engine, names = found[0]
    rng = np.random.default_rng(seed)
    drawn: list[npt.NDArray[np.int64]] = []
    kinds: list[Lengths] = []
    notes = [f"{name}: {engine}'s histograms; prompt and output are drawn independently"]
    for histogram in names:
        buckets, series = _buckets(text, histogram, name)
        lengths = _from_buckets(buckets, histogram, name)
        kinds.append(lengths)
        drawn.append(_draw(lengths, requests, rng))
        if series > 1:
            notes.append(f"{name}: {histogram}: {series} series were added up")
        if lengths.beyond:
            notes.append(
                f"{name}: {histogram}: {lengths.beyond:.2%} are longer than "
                f"{lengths.values.lengths[-1]:,} tokens, by how much is not known"
            )
    notes.append(f"{name}: {NO_SHARING}")
    prompts, outputs = drawn
    workload = _workload(name, prompts.tolist(), outputs.tolist(), notes)
    total = _exact((prompts + outputs).tolist())
    return Traffic(workload, kinds[0], kinds[1], total, is_exact=False)


def _exact(values: Iterable[int]) -> Lengths:
    return Lengths(LengthDistribution.of((value, 1.0) for value in values), {})


def _workload(
    name: str, prompts: Sequence[int], outputs: Sequence[int], notes: Sequence[str]
) -> Workload:
    made, next_token = [], 0
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        made.append(
            Request(
                index,
                float(index),
                np.array([next_token], dtype=np.int64),
                np.array([prompt], dtype=np.int64),
                prompt,
                output,
                next_token + prompt,
                f"req-{index}",
            )
        )
        next_token += prompt + output
    if next_token > 2**31:
        raise TraceError(f"{name}: more than 2**31 tokens were drawn; ask for fewer requests")
    return Workload(name, "histograms", tuple(made), tuple(notes))


def _buckets(text: str, histogram: str, name: str) -> tuple[dict[float, float], int]:
    """Cumulative counts by upper bound, added up over all series, and how many series."""
    counts: dict[float, float] = {}
    seen: dict[str, set[float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith(f"{histogram}_bucket"):
            continue
        match = _SAMPLE.fullmatch(line.strip())
        bound = None if match is None else _LE.search(match[2])
        if match is None or bound is None:
            raise TraceError(f"{name}:{number}: {line[:60]!r}: not a histogram bucket")
        try:
            upper, count = float(bound[1]), float(match[3])
        except ValueError:
            raise TraceError(f"{name}:{number}: {line[:60]!r}: not a number") from None
        if math.isnan(upper) or upper < 0 or not math.isfinite(count) or count < 0:
            raise TraceError(f"{name}:{number}: {line[:60]!r}: not a bound and a count")
        labels = match[2].replace(bound[0].lstrip(","), "")
        if upper in seen.setdefault(labels, set()):
            raise TraceError(f"{name}:{number}: {line[:60]!r}: the series is there twice")
        seen[labels].add(upper)
        counts[upper] = counts.get(upper, 0.0) + count
    if not counts:
        raise TraceError(f"{name}: no {histogram}_bucket")
    if len({frozenset(bounds) for bounds in seen.values()}) > 1:
        raise TraceError(f"{name}: {histogram}: the series have different buckets")
    return counts, len(seen)


def _from_buckets(counts: dict[float, float], histogram: str, name: str) -> Lengths:
    bounds = sorted(counts)
    if bounds[-1] != math.inf:
        raise TraceError(f"{name}: {histogram}: the bucket +Inf is missing")
    total = counts[math.inf]
    if total <= 0:
        raise TraceError(f"{name}: {histogram}: no request was counted yet")
    lower: dict[int, int] = {}
    pairs: list[tuple[int, float]] = []
    below, reached = 0, 0.0
    for bound in bounds:
        if counts[bound] < reached:
            raise TraceError(
                f"{name}: {histogram}: bucket {bound:g} has {counts[bound]:g} requests, a lower "
                f"one {reached:g}"
            )
        if bound == math.inf:
            break
        upper = int(bound)
        if upper > below or not pairs:
            upper = max(1, upper)
            if upper > MAX_TOKENS:
                raise TraceError(f"{name}: {histogram}: bucket {bound:g}: beyond any request")
            pairs.append((upper, counts[bound] - reached))
            lower[upper] = below
            below = upper
        reached = counts[bound]
    beyond = (total - reached) / total
    if not pairs:
        raise TraceError(f"{name}: {histogram}: has the bucket +Inf alone")
    if beyond:
        pairs.append((pairs[-1][0], total - reached))
    values = LengthDistribution.of(pairs, name)
    return Lengths(values, lower, beyond)


def _draw(lengths: Lengths, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """``n`` lengths, evenly spread over the distribution, in random order."""
    values = np.array(lengths.values.lengths, dtype=np.int64)
    weights = np.array(lengths.values.weights)
    below = np.array([lengths.lower.get(int(value), int(value) - 1) for value in values])
    cumulative = np.cumsum(weights) / weights.sum()
    at = (np.arange(n) + 0.5) / n
    bucket = np.minimum(np.searchsorted(cumulative, at), len(values) - 1)
    before = np.where(bucket > 0, cumulative[bucket - 1], 0.0)
    inside = (at - before) / (cumulative[bucket] - before)
    drawn = below[bucket] + np.ceil(inside * (values[bucket] - below[bucket])).astype(np.int64)
    return rng.permutation(np.clip(drawn, 1, values[-1]))
