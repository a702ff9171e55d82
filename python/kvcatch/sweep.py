"""Replay grids: pool size x block size x policy x law x watermark x sequences, on all cores or Ray.

Every point is one closed-loop replay of the same workload on an empty pool of its own. The points
are independent, so each core (or Ray worker) takes the next one; the workload travels once to each.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import re
import signal
import socket
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from kvcatch._core import BlockPool, __version__
from kvcatch.bench import Policy
from kvcatch.errors import InvalidArgument, KvcatchError, MissingExtra
from kvcatch.laws import LAWS, OWN_LAWS
from kvcatch.workload.replay import ReplaySettings, start_replay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

    from kvcatch.workload.replay import ReplayResult
    from kvcatch.workload.request import Workload

MAX_POINTS = 20_000
"""Most replays of one sweep."""


@dataclass(frozen=True, slots=True)
class Point:
    """One replay of a sweep.

    Attributes:
        num_blocks: Blocks of the pool, one of them the null block.
        block_size: Tokens per block.
        policy: ``PLACEMENT`` or ``PLACEMENT+EVICTION``.
        law: One of kvcatch's admission laws.
        watermark: Share of the pool that stays available after an admission.
        max_num_seqs: Sequences that run at once.
    """

    num_blocks: int
    block_size: int
    policy: str
    law: str
    watermark: float
    max_num_seqs: int

    def pool(self, seed: int = 0) -> BlockPool:
        """An empty pool of this size and policy."""
        policy = Policy.parse(self.policy)
        return BlockPool(
            self.num_blocks,
            self.block_size,
            placement=policy.placement,
            eviction=policy.eviction,
            null_block=True,
            seed=seed,
        )

    def settings(self, base: ReplaySettings) -> ReplaySettings:
        """What its replay is told."""
        return replace(base, law=self.law, watermark=self.watermark, max_num_seqs=self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Grid:
    """Which values every knob takes; the points are all combinations, in this order.

    Attributes:
        num_blocks: Pool sizes (blocks, one of them the null block). Empty when ``kv_tokens`` is
            given.
        kv_tokens: Pool sizes (tokens): the same memory at every block size.
        block_sizes: Block sizes (tokens).
        policies: ``PLACEMENT`` or ``PLACEMENT+EVICTION``.
        laws: Admission laws.
        watermarks: Watermarks (shares); a law that has none runs once, with 0.
        max_num_seqs: Sequences that run at once.
        seed: Seed of what an eviction does at random.
        settings: What all replays have in common.
    """

    num_blocks: tuple[int, ...] = (8_192,)
    kv_tokens: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = (16,)
    policies: tuple[str, ...] = ("bitmap",)
    laws: tuple[str, ...] = ("full_prompt",)
    watermarks: tuple[float, ...] = (0.0,)
    max_num_seqs: tuple[int, ...] = (64,)
    seed: int = 0
    settings: ReplaySettings = field(default_factory=ReplaySettings)

    def __post_init__(self) -> None:
        if bool(self.num_blocks) == bool(self.kv_tokens):
            raise InvalidArgument("give the pool sizes either in num_blocks or in kv_tokens")
        for name in ("block_sizes", "policies", "laws", "watermarks", "max_num_seqs"):
            if not getattr(self, name):
                raise InvalidArgument(f"{name} is empty: give at least one value")
        for name in (*_KNOBS, "kv_tokens"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                shown = ", ".join(map(str, values))
                raise InvalidArgument(f"{name} = {shown}: one value is given twice")
        if self.seed < 0:
            raise InvalidArgument(f"seed = {self.seed}: must be 0 or more")
        for law in self.laws:
            if law not in OWN_LAWS:
                raise InvalidArgument(f"law = {law!r}: the replay knows {', '.join(OWN_LAWS)}")
        if any(self.watermarks) and not any(LAWS[law].has_watermark for law in self.laws):
            raise InvalidArgument(
                f"watermark = {', '.join(map(str, self.watermarks))}: "
                f"{' and '.join(self.laws)} {'have' if len(self.laws) > 1 else 'has'} none"
            )
        for size in self.block_sizes:
            if not 1 <= size <= 65_536:
                raise InvalidArgument(f"block_size = {size}: must be between 1 and 65536")
        if _product(self) > MAX_POINTS:
            raise InvalidArgument(
                f"{_product(self)} combinations: a sweep has at most {MAX_POINTS}"
            )
        for point in self.points():
            if point.num_blocks < 2 or point.num_blocks > 2**31:
                raise InvalidArgument(
                    f"num_blocks = {point.num_blocks} (block size {point.block_size}): must be "
                    "between 2 (one is the null block) and 2**31"
                )
            Policy.parse(point.policy)
            point.settings(self.settings)

    def points(self) -> list[Point]:
        """Every combination once."""
        points: dict[Point, None] = {}
        for size, block_size, policy, law, watermark, sequences in product(
            self.num_blocks or self.kv_tokens,
            self.block_sizes,
            self.policies,
            self.laws,
            self.watermarks,
            self.max_num_seqs,
        ):
            blocks = size // block_size if self.kv_tokens else size
            mark = watermark if LAWS[law].has_watermark else 0.0
            points[Point(blocks, block_size, policy, law, mark, sequences)] = None
        return list(points)


_KNOBS = ("num_blocks", "block_sizes", "policies", "laws", "watermarks", "max_num_seqs")


def _product(grid: Grid) -> int:
    count = len(grid.num_blocks or grid.kv_tokens)
    for name in _KNOBS[1:]:
        count *= len(getattr(grid, name))
    return count


@dataclass(frozen=True, slots=True)
class Row:
    """What one point did. All counts are over the whole replay.

    Attributes:
        point: Which.
        finished: Requests that generated all their tokens.
        never_fits: Requests dropped because they do not fit the empty pool.
        steps: Engine steps.
        preemptions: Sequences preempted.
        hit_tokens: Prompt tokens found cached.
        prefill_tokens: Prompt tokens computed, again after a preemption.
        waiting_steps_p50: Steps to the first admission, median.
        waiting_steps_p99: The same, 99 % waited no longer.
        utilisation: Mean over time of the active blocks, as a share of the usable ones.
        runs_per_sequence: Mean runs of a finished sequence.
        seconds: Wall time of the replay (s).
    """

    point: Point
    finished: int
    never_fits: int
    steps: int
    preemptions: int
    hit_tokens: int
    prefill_tokens: int
    waiting_steps_p50: int
    waiting_steps_p99: int
    utilisation: float
    runs_per_sequence: float
    seconds: float

    @classmethod
    def of(cls, point: Point, result: ReplayResult) -> Row:
        """The row of a replay's result."""
        return cls(
            point,
            result.finished,
            result.never_fits,
            result.steps,
            result.preemptions,
            result.hit_tokens,
            result.prefill_tokens,
            result.waiting_steps_median,
            result.waiting_steps_p99,
            utilisation(point, result),
            result.runs_per_sequence,
            result.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Point and figures in one flat record, for JSON and CSV."""
        data = asdict(self)
        point: dict[str, Any] = data.pop("point")
        return {**point, **data}


def utilisation(point: Point, result: ReplayResult) -> float:
    """Mean over the samples of active blocks / usable blocks (0 when nothing was sampled)."""
    samples = result.samples
    if not samples:
        return 0.0
    active = sum(int(sample["active"]) for sample in samples)
    return active / len(samples) / (point.num_blocks - 1)


def run_point(workload: Workload, grid: Grid, point: Point) -> Row:
    """Replay one point."""
    replay = start_replay(workload, point.pool(grid.seed), point.settings(grid.settings))
    return Row.of(point, replay.run())


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sweep(workload: Workload, grid: Grid, workers: int | None = None) -> Iterator[Row]:
    """Replay every point and give each row as it is there, in the order they finish.

    Closing the iterator, or an exception in its consumer, stops all work.

    Args:
        workload: What every point replays.
        grid: Which points.
        workers: Processes; None for one per core. With 1 everything runs in this process.

    Raises:
        InvalidArgument: ``workers`` is below 1.
    """
    workers = cores() if workers is None else workers
    if workers < 1:
        raise InvalidArgument(f"workers = {workers}: must be 1 or more")
    points = grid.points()
    workers = min(workers, len(points))
    if workers == 1:
        return (run_point(workload, grid, point) for point in points)
    return _in_processes(workload, grid, points, workers)


_work: tuple[Workload, Grid] | None = None


def _start_worker(workload: Workload, grid: Grid) -> None:
    """Runs once in every worker. Ctrl-C is the parent's business; a worker does not outlive it."""
    global _work  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    _work = workload, grid


def _end_after(parent: BaseProcess) -> None:
    # A parent that is killed cannot tell its workers, and they would wait for work forever.
    parent.join()
    os._exit(1)


def _run_in_worker(point: Point) -> Row:
    assert _work is not None
    return run_point(*_work, point)


def _in_processes(
    workload: Workload, grid: Grid, points: Sequence[Point], workers: int
) -> Iterator[Row]:
    # A fresh interpreter per worker: forking a process that has threads is unsafe.
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(workload, grid),
    )
    finished = False
    try:
        pending: set[Future[Row]] = {executor.submit(_run_in_worker, point) for point in points}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
        finished = True
    finally:
        processes = list((getattr(executor, "_processes", None) or {}).values())
        executor.shutdown(wait=finished, cancel_futures=True)
        if not finished:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(5)


def sweep_on_ray(workload: Workload, grid: Grid, address: str | None = None) -> Iterator[Row]:
    """As ``sweep``, on a Ray cluster.

    Args:
        workload: What every point replays.
        grid: Which points.
        address: The cluster's address; None for a Ray of this machine, started and stopped here
            unless this process is connected already.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidArgument: The address is of no known form.
        KvcatchError: The cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("--ray needs Ray: pip install kvcatch[ray]") from error
    if address is not None:
        _check_reachable(address)
    return _on_ray(ray, workload, grid, address)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes; a host that does not answer at once is refused in seconds."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\]/]+?)\]?:(\d{1,5})", address)
    if match is None:
        if address not in ("auto", "local"):
            raise InvalidArgument(f"Ray address {address!r}: must be auto, local or HOST:PORT")
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=5).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise KvcatchError(f"no Ray at {address}: {error}") from None


def _on_ray(ray: Any, workload: Workload, grid: Grid, address: str | None) -> Iterator[Row]:
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                **({} if address else {"num_cpus": cores()}),
            )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error)
            raise KvcatchError(f"no Ray at {address or 'this machine'}: {reason}") from None
    try:
        task = ray.remote(run_point)
        shared = ray.put(workload)
        settings = ray.put(grid)
        pending = [task.remote(shared, settings, point) for point in grid.points()]
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=1)
                for reference in done:
                    yield ray.get(reference)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)
    finally:
        if started:
            ray.shutdown()


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The rows of a sweep, in the grid's order.

    Attributes:
        workload: What was replayed.
        grid: Which points there were.
        rows: Those that finished.
    """

    workload: Workload
    grid: Grid
    rows: tuple[Row, ...]

    @classmethod
    def sorted(cls, workload: Workload, grid: Grid, rows: Sequence[Row]) -> SweepResult:
        """The rows brought into the grid's order."""
        place = {point: index for index, point in enumerate(grid.points())}
        return cls(workload, grid, tuple(sorted(rows, key=lambda row: place[row.point])))

    @property
    def is_complete(self) -> bool:
        """Every point was run."""
        return len(self.rows) == len(self.grid.points())

    def to_dict(self) -> dict[str, Any]:
        """What ``kvcatch sweep --json`` prints."""
        settings = self.grid.settings
        return {
            "rows": [row.to_dict() for row in self.rows],
            "points": len(self.grid.points()),
            "complete": self.is_complete,
            "workload": self.workload.to_dict(),
            "order": str(settings.order),
            "token_budget": settings.token_budget,
            "max_tokens": settings.max_tokens,
            "seed": self.grid.seed,
            "kvcatch": __version__,
        }

    def to_csv(self) -> str:
        """One line per row, the columns as in the JSON."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, list(self.rows[0].to_dict()), lineterminator="\n")
            writer.writeheader()
            writer.writerows(row.to_dict() for row in self.rows)
        return out.getvalue()
