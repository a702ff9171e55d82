"""What a replay is told and what it answers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcatch.errors import InvalidArgument
from kvcatch.laws import OWN_LAWS
from kvcatch.workload.readers import MAX_TOKENS

MAX_PASSED_OVER = 512
"""Under ``cache_aware`` no request is passed over more often than this."""

DESCRIPTOR_US = 3.4
"""Cost of one transfer descriptor: 79.6 ms to post 23,252 of them (vLLM pull request 55841)."""

BANDWIDTH_GB_S = 40.0
"""Copy bandwidth with merged runs: 40 to 43 GB/s (vLLM pull request 35990)."""

BYTES_PER_TOKEN = 131_072
"""K and V of one token of Llama-3.1-8B in bf16: 32 layers x 8 KV heads x 128 x 2 x 2 bytes."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order waiting requests are admitted.

    Attributes:
        name: ``fcfs``, or ``cache_aware``: the longest cached prefix among the first ``window``
            waiting (ties: the earliest), nobody passed over more than ``MAX_PASSED_OVER`` times, a
            preempted one at the head first.
        window: Waiting requests looked at.
    """

    name: str = "fcfs"
    window: int = 1

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read ``fcfs``, ``cache_aware`` (a window of 64) or ``cache_aware:WINDOW``."""
        if text == "fcfs":
            return cls()
        match = re.fullmatch(r"cache_aware(?::(\d{1,6}))?", text)
        if match is None:
            raise InvalidArgument(
                f"order = {text!r}: must be fcfs, cache_aware or cache_aware:WINDOW"
            )
        window = int(match[1] or 64)
        if window < 1:
            raise InvalidArgument(f"order = {text!r}: the window must be 1 request or more")
        return cls("cache_aware", window)

    def __str__(self) -> str:
        return self.name if self.name == "fcfs" else f"{self.name}:{self.window}"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is the same for every policy of a run.

    Attributes:
        max_num_seqs: Sequences that run at once.
        order: Order of admission.
        watermark: Share of the pool that must stay available after an admission while something
            runs.
        law: Admission law: ``full_prompt``, ``first_chunk``, ``worst_case`` or ``estimate`` (the last
            two do not look at the watermark).
        token_budget: Tokens a step computes at most; prompts are then computed in chunks. None: a
            step computes whole prompts, as many as are admitted.
        max_tokens: Output tokens every request asks for, as far as it does not generate more; None:
            each asks for exactly what it generates. Only laws that look at the output care.
        max_model_len: Where ``max_tokens`` is None: every request leaves it open and so asks for as
            much as this total length allows (tokens).
        descriptor_us: Cost of one transfer descriptor (µs); one run is one descriptor.
        bandwidth_gb_s: Transfer bandwidth (GB/s).
        bytes_per_token: K and V of one token, all layers (bytes).
    """

    max_num_seqs: int = 64
    order: Order = field(default_factory=Order)
    watermark: float = 0.0
    descriptor_us: float = DESCRIPTOR_US
    bandwidth_gb_s: float = BANDWIDTH_GB_S
    bytes_per_token: int = BYTES_PER_TOKEN
    law: str = "full_prompt"
    token_budget: int | None = None
    max_tokens: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= 1_000_000:
            limits = "must be between 1 and 1000000"
            raise InvalidArgument(f"max_num_seqs = {self.max_num_seqs}: {limits}")
        if not 0 <= self.watermark < 1:
            raise InvalidArgument(f"watermark = {self.watermark}: must be at least 0 and below 1")
        if not 0 <= self.descriptor_us <= 1e9:
            limits = "must be between 0 and 1e9"
            raise InvalidArgument(f"descriptor_us = {self.descriptor_us}: {limits}")
        if not 1e-6 <= self.bandwidth_gb_s <= 1e9:
            limits = "must be between 1e-6 and 1e9"
            raise InvalidArgument(f"bandwidth_gb_s = {self.bandwidth_gb_s}: {limits}")
        if self.bytes_per_token < 1:
            raise InvalidArgument(f"bytes_per_token = {self.bytes_per_token}: must be 1 or more")
        if self.law not in OWN_LAWS:
            raise InvalidArgument(f"law = {self.law!r}: the replay knows {', '.join(OWN_LAWS)}")
        for name in ("token_budget", "max_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise InvalidArgument(f"{name} = {value}: must be between 1 and {MAX_TOKENS}")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one policy did with a workload. Means are over finished sequences unless said otherwise.

    Attributes:
        finished: Sequences that generated all their tokens.
        never_fits: Requests dropped because they do not fit the empty pool.
        steps: Engine steps.
        decode_tokens: Tokens appended one by one.
        runs_per_sequence: Mean runs of a sequence's blocks when it was freed.
        runs_per_sequence_p50: Half of the sequences had no more runs.
        runs_per_sequence_p90: 90 % of the sequences had no more runs.
        runs_per_sequence_p99: 99 % of the sequences had no more runs.
        least_runs: Mean of the fewest runs possible given the shared prefixes
            (``measure.LeastRuns``).
        prompt_runs: Mean runs at admission, over all admissions.
        blocks_per_sequence: Mean blocks of a sequence when it was freed.
        hit_tokens: Prompt tokens found cached, over all admissions.
        first_admission_hit_tokens: The same without readmissions after a preemption.
        prefill_tokens: Prompt tokens computed, over all admissions.
        preemptions: Sequences preempted.
        us_per_decode_token: CPU time of the loop per decode token (µs; a busy machine does not
            count): every pool call (create with hashing, append, commit, free, lookup) and the
            loop's own Python. Not in it: making token ids, counting runs, samples, foresight for
            ``clairvoyant``, table export.
        export_us_per_decode_token: ``block_tables`` (rows as wide as the longest of the batch) and
            ``slot_mapping`` per decode token (µs), measured on the sampled steps.
        largest_free_run: Mean over samples of the longest run of clean blocks (blocks).
        pages_pinned: Mean over samples of the pages that cannot be given back because a block in
            them is active or cached (pages).
        waiting_steps_median: Steps from the start of the replay to a request's first admission.
        waiting_steps_p99: The same, 99 % waited no longer.
        waiting_steps_max: The same, the longest.
        passed_over_max: Most times one request was passed over by a later one.
        transfer_ms: Mean time to send one admitted prompt (ms):
            prompt_runs * descriptor_us + prompt bytes / bandwidth.
        seconds: Wall time of the whole replay, everything in it (s).
        runs_histogram: Finished sequences by runs, in power-of-two buckets.
        samples: State of the pool over time, at most 200 rows.
    """

    finished: int
    never_fits: int
    steps: int
    decode_tokens: int
    runs_per_sequence: float
    runs_per_sequence_p50: int
    runs_per_sequence_p90: int
    runs_per_sequence_p99: int
    least_runs: float
    prompt_runs: float
    blocks_per_sequence: float
    hit_tokens: int
    first_admission_hit_tokens: int
    prefill_tokens: int
    preemptions: int
    us_per_decode_token: float
    export_us_per_decode_token: float
    largest_free_run: float
    pages_pinned: float
    waiting_steps_median: int
    waiting_steps_p99: int
    waiting_steps_max: int
    passed_over_max: int
    transfer_ms: float
    seconds: float
    runs_histogram: dict[str, int]
    samples: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The columns as snake_case keys, for JSON."""
        return asdict(self)
