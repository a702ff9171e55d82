"""Policies x workload: the same closed-loop replay for each, and its results side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcatch._core import BlockPool, __version__, evictions, placements
from kvcatch.errors import InvalidArgument
from kvcatch.workload.replay import ReplayResult, ReplaySettings, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcatch.workload.request import Workload

DEFAULT_POLICIES = ("queue", "sorted", "buddy", "bitmap", "bitmap+slru")


@dataclass(frozen=True, slots=True)
class Policy:
    """A placement and an eviction, written ``bitmap`` (with lru) or ``bitmap+slru``."""

    placement: str
    eviction: str = "lru"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``PLACEMENT`` or ``PLACEMENT+EVICTION``."""
        placement, _, eviction = text.partition("+")
        if placement not in placements():
            raise InvalidArgument(
                f"policy = {text!r}: no placement {placement!r}; there are "
                f"{', '.join(placements())}"
            )
        if "+" in text and eviction not in evictions():
            raise InvalidArgument(
                f"policy = {text!r}: no eviction {eviction!r}; there are {', '.join(evictions())}"
            )
        return cls(placement, eviction or "lru")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What a bench runs.

    Attributes:
        policies: ``PLACEMENT`` or ``PLACEMENT+EVICTION``, each run on an empty pool of its own.
        num_blocks: Blocks of the pool, one of which is the null block, as in vLLM.
        block_size: Tokens per block.
        page_blocks: Blocks per page.
        seed: Seed of what an eviction does at random.
        settings: What every replay is told.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    num_blocks: int = 8_192
    block_size: int = 16
    page_blocks: int = 128
    seed: int = 0
    settings: ReplaySettings = field(default_factory=ReplaySettings)

    def __post_init__(self) -> None:
        if not self.policies:
            raise InvalidArgument("policies is empty: name at least one")
        if len(set(self.policies)) < len(self.policies):
            raise InvalidArgument(f"policies = {', '.join(self.policies)}: one is named twice")
        for policy in self.policies:
            Policy.parse(policy)
        if self.num_blocks < 2:
            raise InvalidArgument(
                f"num_blocks = {self.num_blocks}: must be 2 or more (one is the null block)"
            )
        for name in ("block_size", "page_blocks"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.seed < 0:
            raise InvalidArgument(f"seed = {self.seed}: must be 0 or more")

    def pool(self, policy: str) -> BlockPool:
        """An empty pool under ``policy``."""
        parsed = Policy.parse(policy)
        return BlockPool(
            self.num_blocks,
            self.block_size,
            placement=parsed.placement,
            eviction=parsed.eviction,
            blocks_per_page=self.page_blocks,
            null_block=True,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """The configuration with units in the names, for JSON."""
        return {
            "num_blocks": self.num_blocks,
            "block_size_tokens": self.block_size,
            "page_blocks": self.page_blocks,
            "max_num_seqs": self.settings.max_num_seqs,
            "order": str(self.settings.order),
            "watermark": self.settings.watermark,
            "seed": self.seed,
            "descriptor_us": self.settings.descriptor_us,
            "bandwidth_gb_s": self.settings.bandwidth_gb_s,
            "bytes_per_token": self.settings.bytes_per_token,
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What each policy did, in the order they ran.

    Attributes:
        workload: What was replayed.
        config: How.
        policies: Result by policy name; fewer than configured when the bench was interrupted.
    """

    workload: Workload
    config: BenchConfig
    policies: dict[str, ReplayResult]

    @property
    def is_complete(self) -> bool:
        """Every configured policy was run."""
        return len(self.policies) == len(self.config.policies)

    def to_dict(self) -> dict[str, Any]:
        """What ``kvcatch bench --json`` prints."""
        return {
            "policies": {name: result.to_dict() for name, result in self.policies.items()},
            "workload": self.workload.to_dict(),
            "config": self.config.to_dict(),
            "complete": self.is_complete,
            "kvcatch": __version__,
        }


def each_policy(
    workload: Workload,
    config: BenchConfig,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[tuple[str, ReplayResult]]:
    """Run the policies one after another and give each result as it is there.

    Args:
        workload: What to replay.
        config: How.
        progress: Called with (policy, requests done, requests in all) now and then.
    """
    for policy in config.policies:

        def report(done: int, total: int, policy: str = policy) -> None:
            if progress is not None:
                progress(policy, done, total)

        yield policy, replay(workload, config.pool(policy), config.settings, report)


def run_bench(
    workload: Workload,
    config: BenchConfig | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> BenchResult:
    """Run every policy of ``config`` on ``workload``."""
    config = config or BenchConfig()
    return BenchResult(workload, config, dict(each_policy(workload, config, progress)))


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the result tables: where the number comes from and how it is written."""

    title: str
    key: str
    form: str
    meaning: str

    def text(self, result: ReplayResult) -> str:
        """The number as a person reads it."""
        return format(getattr(result, self.key), self.form)


PLACEMENT_COLUMNS: Sequence[Column] = (
    Column("runs/seq", "runs_per_sequence", ",.2f", "runs of a finished sequence, mean"),
    Column("p50", "runs_per_sequence_p50", ",d", ""),
    Column("p99", "runs_per_sequence_p99", ",d", ""),
    Column("least", "least_runs", ",.2f", "fewest possible given the shared prefixes"),
    Column("prompt runs", "prompt_runs", ",.2f", "runs at admission"),
    Column("free run", "largest_free_run", ",.0f", "longest run of clean blocks, mean over time"),
    Column("pages", "pages_pinned", ",.0f", "pages that are not empty, mean over time"),
    Column("send ms", "transfer_ms", ",.2f", "time to send one prompt under the transfer model"),
)
CACHE_COLUMNS: Sequence[Column] = (
    Column("hit tokens", "hit_tokens", ",d", "prompt tokens found cached, all admissions"),
    Column("first", "first_admission_hit_tokens", ",d", "the same on first admission"),
    Column("prefill", "prefill_tokens", ",d", "prompt tokens computed"),
    Column("preempt", "preemptions", ",d", "sequences preempted"),
    Column("wait p50", "waiting_steps_median", ",d", "steps until first admission"),
    Column("p99", "waiting_steps_p99", ",d", ""),
    Column("passed", "passed_over_max", ",d", "most times one request was passed over"),
    Column("µs/token", "us_per_decode_token", ",.2f", "bookkeeping per decode token"),
)
