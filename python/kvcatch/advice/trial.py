"""One deployment, and what a replay says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch.errors import InvalidArgument
from kvcatch.laws import ESTIMATE_CLIP, Law, block_sizes, law_of, null_blocks
from kvcatch.sweep import Point, utilisation
from kvcatch.workload.measure import quantile
from kvcatch.workload.replay import ReplaySettings, start_replay

if TYPE_CHECKING:
    from kvcatch.ledger.engines import Engine
    from kvcatch.workload.request import Workload

REPLAYED_AS: dict[str, tuple[str, str]] = {
    "vllm_v0": ("full_prompt", "queue"),
    "vllm_first_chunk": ("first_chunk", "queue"),
    "vllm_full_prompt": ("full_prompt", "queue"),
    "sglang_estimate": ("estimate", "sorted"),
    "guaranteed_no_evict": ("worst_case", "queue"),
    "max_utilization": ("full_prompt", "queue"),
    "tgi_worst_case": ("worst_case", "queue"),
    "full_prompt": ("full_prompt", "bitmap"),
    "first_chunk": ("first_chunk", "bitmap"),
    "worst_case": ("worst_case", "bitmap"),
    "estimate": ("estimate", "bitmap"),
}
"""Law and placement of the replay that stands for a law of an engine."""

V0_WATERMARK = 0.01
"""What vLLM V0 leaves available, and nobody can set."""

Progress = Callable[[str], None]
"""Told what is being replayed."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """How an engine is run today.

    Attributes:
        engine: Engine and version.
        law: Its law.
        num_blocks: Blocks of the pool, null block counted.
        block_size: Tokens per block.
        max_num_seqs: Sequences that run at once.
        max_model_len: Most tokens of a request; None when it is not known.
        watermark: Share of the pool that an admission leaves available.
        token_budget: Tokens a step computes.
        max_tokens: Output tokens that clients ask for; None when they leave it open.
        memory_utilization: Share of the device that weights and KV take; None when not known.
        device_bytes: Memory of the device (bytes); None when not known.
        kv_bytes_per_token: K and V of one token on that device (bytes); None when not known.
    """

    engine: Engine
    law: Law
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int | None = None
    watermark: float = 0.0
    token_budget: int = 8_192
    max_tokens: int | None = None
    memory_utilization: float | None = None
    device_bytes: int | None = None
    kv_bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        if self.law.name not in REPLAYED_AS:
            raise InvalidArgument(
                f"law {self.law.name}: no replay stands for it; advice is for engines with a "
                "paged pool that run requests together"
            )
        for name, least in (
            ("num_blocks", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 2),
            ("token_budget", 1),
            ("max_tokens", 1),
            ("device_bytes", 1),
            ("kv_bytes_per_token", 1),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= 2**48:
                raise InvalidArgument(f"{name} = {value}: must be between {least} and 2**48")
        if not 0 <= self.watermark < 1:
            raise InvalidArgument(f"watermark = {self.watermark}: must be at least 0 and below 1")
        share = self.memory_utilization
        if share is not None and not 0 < share <= 1:
            raise InvalidArgument(f"memory_utilization = {share}: must be above 0 and at most 1")
        if self.reserves_open_outputs and self.max_model_len is None:
            raise InvalidArgument(
                f"{self.engine} reserves the whole output: give max_tokens (what clients ask for), "
                "or max_model_len (what it may be when they leave it open)"
            )
        sizes = block_sizes(self.engine)
        if sizes and self.block_size not in sizes:
            raise InvalidArgument(
                f"block_size = {self.block_size}: {self.engine} takes {', '.join(map(str, sizes))}"
            )

    @classmethod
    def on(cls, engine: Engine, num_blocks: int, **fields: Any) -> Deployment:
        """A deployment under the law that the engine follows."""
        return cls(engine, law_of(engine), num_blocks, **fields)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - null_blocks(self.engine)

    @property
    def reserves_open_outputs(self) -> bool:
        """Clients leave the output open, and the engine reserves all that the length allows."""
        return self.law.reserves_output and self.max_tokens is None

    def trial(self, workload: Workload) -> Trial:
        """The replay that stands for this deployment."""
        law, placement = REPLAYED_AS[self.law.name]
        watermark = V0_WATERMARK if self.law.name == "vllm_v0" else self.watermark
        # The pool of the replay keeps one null block, whatever the engine does.
        point = Point(
            self.usable_blocks + 1,
            self.block_size,
            placement,
            law,
            watermark,
            min(self.max_num_seqs, len(workload)),
        )
        max_tokens = self.max_tokens
        if max_tokens is None and self.law.name == "sglang_estimate":
            max_tokens = ESTIMATE_CLIP
        settings = ReplaySettings(
            token_budget=self.token_budget,
            max_tokens=max_tokens,
            max_model_len=self.max_model_len if self.reserves_open_outputs else None,
        )
        return Trial(workload, point, settings)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a replay showed.

    Attributes:
        finished: Requests that generated all their tokens.
        never_fits: Requests that do not fit the empty pool.
        steps: Engine steps until all were done.
        preemptions: Sequences preempted.
        waiting_steps_p50: Steps to the first admission, median.
        waiting_steps_p99: The same, 99 %.
        hit_tokens: Prompt tokens found cached.
        prefill_tokens: Prompt tokens computed, again after a preemption.
        utilisation: Active blocks as a share of the usable ones, mean over time.
        running_mean: Sequences that decoded in a step, mean.
    """

    finished: int
    never_fits: int
    steps: int
    preemptions: int
    waiting_steps_p50: int
    waiting_steps_p99: int
    hit_tokens: int
    prefill_tokens: int
    utilisation: float
    running_mean: float

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trial:
    """A replay that can be run.

    Attributes:
        workload: What is replayed.
        point: Pool, policy and law.
        settings: The rest.
        waits: After ``run``: steps to the first admission by the request's index.
    """

    workload: Workload
    point: Point
    settings: ReplaySettings
    waits: dict[int, int] = field(default_factory=dict)

    def run(self) -> Effect:
        """Replay it on a pool of its own."""
        replay = start_replay(self.workload, self.point.pool(), self.point.settings(self.settings))
        result = replay.run()
        self.waits.clear()
        self.waits.update(zip(replay.first_admitted, replay.waits, strict=True))
        return Effect(
            result.finished,
            result.never_fits,
            result.steps,
            result.preemptions,
            result.waiting_steps_median,
            result.waiting_steps_p99,
            result.hit_tokens,
            result.prefill_tokens,
            utilisation(self.point, result),
            result.decode_tokens / max(1, result.steps),
        )

    def wait(self, indices: set[int], share: float) -> int:
        """Steps that a share of these requests waited no longer than, after ``run``."""
        return quantile([steps for index, steps in self.waits.items() if index in indices], share)
