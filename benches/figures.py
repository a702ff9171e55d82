"""Print every figure of the README beside its baseline, measured in the same run.

    python benches/figures.py                          everything (some minutes)
    python benches/figures.py --quick                  fewer requests and repeats
    python benches/figures.py --only alloc,append      some sections

Times are CPU time of the measuring thread: what else the machine does counts only by what it takes
from the caches. A time is the median over repeats, with the least one behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import operations
from baselines import has_vllm, python_replay, sha256_hash, vllm_replay, xxhash_hash
from kvcatch import __version__, build_profile, evictions, placements
from kvcatch.bench import BenchConfig
from kvcatch.workload.readers import read_trace
from kvcatch.workload.replay import MAX_PASSED_OVER, Order, ReplayResult, ReplaySettings, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baselines import ManagerResult
    from kvcatch.workload.request import Workload

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
WINDOW = 300
"""Requests of the short replay, and of every window that evictions are compared on."""

BEST = "bitmap+slru"
"""Placement and eviction that the eviction figures are about."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        section: Name for ``--only``.
        what: What was measured, with its unit.
        baseline: What it is compared with.
        kvcatch: What this library does.
        target: What is to be reached; empty where the figure stands for itself.
        met: Whether it is; None without a target, or where ``--quick`` measured something smaller.
        values: The numbers, for ``--json``.
    """

    section: str
    what: str
    baseline: str
    kvcatch: str
    target: str = ""
    met: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU time of one call (ns): median and least of the repeats."""

    median: float
    least: float

    def per(self, units: int) -> Timing:
        """The same per unit."""
        return Timing(self.median / units, self.least / units)

    def text(self, unit: str = "ns", factor: float = 1.0) -> str:
        """Median, and the least in brackets."""
        return f"{self.median * factor:,.3g} {unit} (least {self.least * factor:,.3g})"


def measure(call: Callable[[], object], repeats: int, seconds: float = 0.01) -> Timing:
    """Time ``call``: ``repeats`` times, each as many calls as take about ``seconds``."""
    call()
    begin = time.thread_time_ns()
    call()
    once = max(1, time.thread_time_ns() - begin)
    calls = max(1, int(seconds * 1e9 / once))
    times = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - begin) / calls)
    return Timing(statistics.median(times), min(times))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvcatch": __version__,
        "build": build_profile,
    }


class Figures:
    """Measures sections and keeps their rows."""

    def __init__(self, trace: Path, quick: bool, progress: Progress) -> None:
        self.trace = trace
        self.quick = quick
        self.progress = progress
        self.rows: list[Row] = []
        self.repeats = 5 if quick else 25
        self._workloads: dict[int | None, Workload] = {}

    # helpers

    def add(
        self,
        section: str,
        what: str,
        baseline: str,
        kvcatch: str,
        target: str = "",
        met: bool | None = None,
        **values: Any,
    ) -> None:
        """Add a row."""
        self.rows.append(Row(section, what, baseline, kvcatch, target, met, values))

    def workload(self, requests: int | None) -> Workload:
        """The first ``requests`` of the trace (None: all)."""
        if requests not in self._workloads:
            self._workloads[requests] = read_trace(self.trace, requests)
        return self._workloads[requests]

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """A progress bar for one measurement."""
        task = self.progress.add_task(name, total=total)

        def report(done: int, of: int) -> None:
            self.progress.update(task, completed=done, total=of)

        try:
            yield report
        finally:
            self.progress.remove_task(task)

    def replay(
        self, workload: Workload, policy: str, num_blocks: int, order: str = "fcfs", seed: int = 0
    ) -> ReplayResult:
        """Replay ``workload`` under one policy."""
        settings = ReplaySettings(order=Order.parse(order))
        config = BenchConfig((policy,), num_blocks=num_blocks, settings=settings, seed=seed)
        name = f"{policy} {order} {num_blocks:,} blocks, {len(workload):,} requests"
        with self.task(name, len(workload)) as report:
            return replay(workload, config.pool(policy), settings, report)

    def all_requests(self) -> Workload:
        """The whole trace; under ``--quick`` its first tenth."""
        return self.workload(1_200 if self.quick else None)

    def time(
        self,
        name: str,
        call: Callable[[], object],
        repeats: int | None = None,
        seconds: float = 0.01,
    ) -> Timing:
        """Time a call, with a note of what is being measured."""
        with self.task(name, 1):
            return measure(call, repeats or self.repeats, seconds)

    # sections

    def replay300(self) -> None:
        """Placement on the first 300 requests."""
        work = self.workload(WINDOW)
        anchors = {
            60_000: (437.0, 212_800, 153_088, 5, 58.0, 8.0),
            90_000: (380.7, 161_792, 161_792, 0, 46.0, 3.5),
        }
        for num_blocks, (runs, hits, first, preemptions, ordered, target) in anchors.items():
            queue = self.replay(work, "queue", num_blocks)
            by_id = self.replay(work, "sorted", num_blocks)
            bitmap = self.replay(work, "bitmap", num_blocks)
            where = f"first {WINDOW}, {num_blocks:,} blocks"
            self.add(
                "replay300",
                f"{where}: the baseline itself",
                f"vLLM 0.32: {runs:g} runs, {hits:,} hits ({first:,} first), {preemptions} preempted",
                f"queue: {queue.runs_per_sequence:.1f} runs, {queue.hit_tokens:,} hits "
                f"({queue.first_admission_hit_tokens:,} first), {queue.preemptions} preempted, "
                f"{queue.blocks_per_sequence:.1f} blocks",
                "the same (± 3 runs, ± 100 hits)",
                abs(queue.runs_per_sequence - runs) <= 3
                and abs(queue.hit_tokens - hits) <= 100
                and queue.preemptions == preemptions,
                queue=numbers(queue),
            )
            self.add(
                "replay300",
                f"{where}: free list kept sorted",
                f"SGLang's rule: {ordered:g} runs",
                f"sorted: {by_id.runs_per_sequence:.1f} runs",
                "the same (± 1)",
                abs(by_id.runs_per_sequence - ordered) <= 1,
                sorted=numbers(by_id),
            )
            self.placement_rows("replay300", where, queue, bitmap, target)

    def replay_all(self) -> None:
        """Placement on the whole trace."""
        work = self.all_requests()
        queue = self.replay(work, "queue", 60_000)
        by_id = self.replay(work, "sorted", 60_000)
        bitmap = self.replay(work, "bitmap", 60_000)
        where = f"{len(work):,} requests, 60,000 blocks"
        self.add(
            "replay",
            f"{where}: free list kept sorted",
            "" if self.quick else "379 runs",
            f"sorted: {by_id.runs_per_sequence:.1f} runs",
            "" if self.quick else "the same (± 1 %)",
            None if self.quick else abs(by_id.runs_per_sequence - 379) < 3.8,
            sorted=numbers(by_id),
        )
        self.placement_rows("replay", where, queue, bitmap, None if self.quick else 10.9)

    def placement_rows(
        self,
        section: str,
        where: str,
        queue: ReplayResult,
        bitmap: ReplayResult,
        target: float | None,
    ) -> None:
        """Runs, and what must not suffer for them."""
        runs = bitmap.runs_per_sequence
        self.add(
            section,
            f"{where}: runs per finished sequence",
            f"queue: {queue.runs_per_sequence:.1f}",
            f"bitmap: {runs:.2f} (least {bitmap.least_runs:.2f}, p99 {bitmap.runs_per_sequence_p99},"
            f" at admission {bitmap.prompt_runs:.2f})",
            f"<= {target:g}" if target else "",
            runs <= target if target else None,
            queue=numbers(queue),
            bitmap=numbers(bitmap),
        )
        first = bitmap.first_admission_hit_tokens / max(1, queue.first_admission_hit_tokens)
        self.add(
            section,
            f"{where}: first-admission hit tokens",
            f"queue: {queue.first_admission_hit_tokens:,}",
            f"bitmap: {bitmap.first_admission_hit_tokens:,} ({first:.2%})",
            ">= 99 %",
            first >= 0.99,
        )
        self.add(
            section,
            f"{where}: preemptions",
            f"queue: {queue.preemptions}",
            f"bitmap: {bitmap.preemptions}",
            "no more",
            bitmap.preemptions <= queue.preemptions,
        )
        prefill = bitmap.prefill_tokens / queue.prefill_tokens
        self.add(
            section,
            f"{where}: prompt tokens computed",
            f"queue: {queue.prefill_tokens:,}",
            f"bitmap: {bitmap.prefill_tokens:,} ({prefill:.4f}x)",
            "<= 1.005x",
            prefill <= 1.005,
        )

    def evict(self) -> None:
        """Evictions and orders on the whole trace."""
        work = self.all_requests()
        where = f"{len(work):,} requests, 90,000 blocks"
        lru = self.replay(work, "queue", 90_000)
        best = self.replay(work, BEST, 90_000)
        ceiling = self.replay(work, "queue+clairvoyant", 90_000)
        aware = self.replay(work, BEST, 90_000, "cache_aware:256")
        base = lru.first_admission_hit_tokens
        if not self.quick:
            self.add(
                "evict",
                f"{where}: the baselines themselves",
                "lru 8,724,240; clairvoyant 30,860,224",
                f"lru {base:,}; clairvoyant {ceiling.first_admission_hit_tokens:,}",
                "the same (± 1 %)",
                abs(base / 8_724_240 - 1) < 0.01
                and abs(ceiling.first_admission_hit_tokens / 30_860_224 - 1) < 0.01,
            )
        for name, result, least in (("fcfs", best, 1.3), ("cache_aware:256", aware, 3.0)):
            found = result.first_admission_hit_tokens
            self.add(
                "evict",
                f"{where}: first-admission hit tokens, {name}",
                f"lru, fcfs: {base:,}",
                f"{BEST}: {found:,} ({found / max(1, base):.2f}x; clairvoyant, fcfs: "
                f"{ceiling.first_admission_hit_tokens / max(1, base):.2f}x)",
                "" if self.quick else f">= {least:g}x",
                None if self.quick else found >= least * base,
                lru=numbers(lru),
                best=numbers(result),
                clairvoyant=numbers(ceiling),
            )
        self.add(
            "evict",
            f"{where}: most times a request is passed over, cache_aware:256",
            "fcfs: 0",
            f"{aware.passed_over_max} (waits p50 {aware.waiting_steps_median:,} steps, p99 "
            f"{aware.waiting_steps_p99:,}, most {aware.waiting_steps_max:,}; fcfs "
            f"{best.waiting_steps_median:,}, {best.waiting_steps_p99:,}, "
            f"{best.waiting_steps_max:,})",
            f"<= {MAX_PASSED_OVER}",
            aware.passed_over_max <= MAX_PASSED_OVER,
        )

    def windows(self) -> None:
        """Short windows: an eviction that learns must not start badly."""
        requests = self.all_requests().requests
        starts = range(0, len(requests) - WINDOW + 1, WINDOW)
        below, ratios = [], []
        for start in starts:
            part = replace(self.all_requests(), requests=requests[start : start + WINDOW])
            lru = self.replay(part, "bitmap", 90_000).first_admission_hit_tokens
            best = self.replay(part, BEST, 90_000).first_admission_hit_tokens
            ratios.append(best / max(1, lru))
            if best < lru:
                below.append(start)
        self.add(
            "windows",
            f"{len(starts)} windows of {WINDOW} requests, 90,000 blocks: windows below lru",
            "bitmap+lru",
            f"{BEST}: {len(below)} (hits {min(ratios):.3f}x to {max(ratios):.3f}x)",
            "0",
            not below,
            first_requests_of_windows_below=below,
            ratios=ratios,
        )

    def alloc(self) -> None:
        """Allocate and free 64 blocks."""
        units = operations.ALLOCATE
        base = self.time("linked list", operations.allocate_and_free_linked_list()).per(units)
        for placement in sorted(placements(), key=lambda name: name != "bitmap"):
            done = self.time(placement, operations.allocate_and_free(placement)).per(units)
            main = placement == "bitmap"
            self.add(
                "alloc",
                "allocate and free 64 blocks, half full at random, per block",
                f"linked list in Python: {base.text()}",
                f"{placement}: {done.text()}",
                "<= 10 ns (aim 6)" if main else "",
                done.median <= 10 if main else None,
                baseline_ns=asdict(base),
                kvcatch_ns=asdict(done),
                placement=placement,
            )

    def append(self) -> None:
        """Append to 256 sequences in one call."""
        units = operations.BATCH
        # Short repeats: the sequences grow with every call.
        base = self.time("per sequence", operations.append_batch_python(), seconds=0.001).per(units)
        done = self.time("one call", operations.append_batch(), seconds=0.001).per(units)
        self.add(
            "append",
            "append a token to each of 256 sequences, per sequence",
            f"loop in Python: {base.text()}",
            f"one call: {done.text()}",
            "<= 25 ns",
            done.median <= 25,
            baseline_ns=asdict(base),
            kvcatch_ns=asdict(done),
        )

    def hash(self) -> None:
        """Hash and look up prompts."""
        prompts, cold = (10, 100) if self.quick else (100, 1_000)
        repeats = 3 if self.quick else 7
        few = max(1, prompts // 10)
        tokens = operations.PROMPT
        chains = {"sha256": sha256_hash, "xxhash": xxhash_hash()}
        times = {
            name: self.time(
                f"{name} chain", operations.lookup_hits_python(few, digest), min(repeats, 3)
            ).per(few * tokens)
            for name, digest in chains.items()
            if digest is not None
        }
        base = "; ".join(f"{name}: {timing.median:.3g} ns" for name, timing in times.items())
        if "xxhash" not in times:
            base += "; xxhash: not installed"
        for what, call, count, target in (
            ("all 512 blocks hit", operations.lookup_hits(prompts), prompts, 2),
            ("cold", operations.lookup_misses(cold), cold, 5),
        ):
            done = self.time(what, call, repeats).per(count * tokens)
            self.add(
                "hash",
                f"hash and look up {count:,} prompts of 8,192 tokens, {what}, per token",
                f"Python chains, all hit: {base}",
                f"int32 array: {done.text()}",
                f"<= {target} ns",
                done.median <= target,
                baseline_ns={name: asdict(timing) for name, timing in times.items()},
                kvcatch_ns=asdict(done),
            )

    def bookkeeping(self) -> None:
        """The whole replay's bookkeeping."""
        work = self.workload(WINDOW)
        repeats = 1 if self.quick else 5
        managers: dict[str, Callable[..., ManagerResult]] = {"Python manager": python_replay}
        if has_vllm():
            managers["vLLM's manager"] = vllm_replay
        base = {}
        for name, run in managers.items():
            with self.task(name, len(work)) as report:
                base[name] = run(work, 60_000, progress=report).us_per_decode_token
        done = [self.replay(work, "bitmap", 60_000) for _ in range(repeats)]
        cost = [result.us_per_decode_token for result in done]
        export = [result.export_us_per_decode_token for result in done]
        median = statistics.median(cost)
        vllm = "" if has_vllm() else "; vLLM 0.32: 10.5 (not installed here)"
        self.add(
            "bookkeeping",
            f"first {WINDOW}, 60,000 blocks: bookkeeping per decode token",
            "; ".join(f"{name}: {each:.3g} µs" for name, each in base.items()) + vllm,
            f"bitmap: {median:.3g} µs (least {min(cost):.3g}), hashing included; "
            f"table export {statistics.median(export):.3g} µs (least {min(export):.3g})",
            "<= 0.7 µs",
            median <= 0.7,
            baseline_us=base,
            kvcatch_us=cost,
            export_us=export,
        )

    def compaction(self) -> None:
        """Plan a compaction of a large pool."""
        blocks = 131_072 if self.quick else 1_048_576
        with self.task("a pool half active at random", 1):
            pool, count = operations.scattered_pool(blocks, 512)
        for objective, options, target in (
            ("pages", {}, 15),
            ("largest_run", {"n": 4_096}, 15),
            ("runs", {}, 60),
        ):

            def plan(objective: Any = objective, options: Any = options) -> object:
                return pool.plan_compaction(objective, **options)

            moves = pool.plan_compaction(objective, **options).num_moves  # type: ignore[arg-type]
            done = self.time(f"plan {objective}", plan, 5 if self.quick else 9)
            name = f"{objective} (4,096)" if options else objective
            self.add(
                "compaction",
                f"plan {name}: {blocks:,} blocks half active, {count:,} sequences of 512",
                "",
                f"{done.text('ms', 1e-6)}, {moves:,} moves",
                "" if self.quick else f"<= {target} ms",
                None if self.quick else done.median <= target * 1e6,
                kvcatch_ns=asdict(done),
                moves=moves,
            )


def numbers(result: ReplayResult) -> dict[str, Any]:
    """A replay's columns without its samples."""
    return {key: value for key, value in result.to_dict().items() if key != "samples"}


NEED_TRACE = ("replay300", "replay", "evict", "windows", "bookkeeping")
SECTIONS: dict[str, Callable[[Figures], None]] = {
    "alloc": Figures.alloc,
    "append": Figures.append,
    "hash": Figures.hash,
    "compaction": Figures.compaction,
    "bookkeeping": Figures.bookkeeping,
    "replay300": Figures.replay300,
    "replay": Figures.replay_all,
    "evict": Figures.evict,
    "windows": Figures.windows,
}


def table(rows: list[Row]) -> Table:
    """The rows, section by section."""
    shown = Table(show_lines=False, pad_edge=False)
    for title in ("what", "baseline", "kvcatch", "target"):
        shown.add_column(title, overflow="fold")
    shown.add_column("met", justify="right")
    before = ""
    for row in rows:
        if before not in ("", row.section):
            shown.add_section()
        before = row.section
        met = "" if row.met is None else "[green]yes[/]" if row.met else "[bold red]no[/]"
        shown.add_row(row.what, row.baseline, row.kvcatch, row.target, met)
    return shown


def sections(text: str) -> list[str]:
    """Names for ``--only``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r}: there are {', '.join(SECTIONS)}")
    return names


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake JSONL (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer requests and repeats")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there too")
    parser.add_argument(
        "--only", type=sections, default=list(SECTIONS), help=f"of {','.join(SECTIONS)}"
    )
    options = parser.parse_args()
    wide = Console(width=None if sys.stdout.isatty() else 200)
    errors = Console(stderr=True)
    if build_profile != "release":
        errors.print(f"kvcatch is a {build_profile} build: these figures mean nothing")
    where = machine()
    skipped: dict[str, str] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    ) as progress:
        figures = Figures(options.trace, options.quick, progress)
        for name in (name for name in SECTIONS if name in options.only):
            if name in NEED_TRACE and not options.trace.exists():
                skipped[name] = f"no trace at {options.trace}: give --trace"
            elif name in ("evict", "windows") and BEST.partition("+")[2] not in evictions():
                skipped[name] = f"this build has no {BEST}"
            else:
                SECTIONS[name](figures)
                rows = [row for row in figures.rows if row.section == name]
                errors.print(f"{name}: {len(rows)} figures measured")
    wide.print(table(figures.rows))
    load = where["load_average"]
    wide.print(
        f"{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, "
        f"kvcatch {where['kvcatch']} ({where['build']} build)"
        + (f", load average {load:.1f} at the start" if load is not None else "")
        + (", --quick" if options.quick else "")
    )
    for name, why in skipped.items():
        wide.print(f"skipped {name}: {why}")
    judged = [row for row in figures.rows if row.met is not None]
    wide.print(f"{sum(bool(row.met) for row in judged)} of {len(judged)} targets met")
    if options.json:
        data = {
            "machine": where,
            "quick": options.quick,
            "skipped": skipped,
            "rows": [asdict(row) for row in figures.rows],
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
