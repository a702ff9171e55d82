"""What the exporter costs a decode step: steps with it and without it in turn, and each of its parts alone.

    python benches/exporter.py [--steps 40] [--batch 32] [--scrape-every 1]

With: request times are noted, gauges are sampled ten times a second, and the page is made every ``--scrape-every``
seconds (Prometheus asks every 15 s or so) in another thread, as the server does. Without: none of that. The steps are
those of the default model on the CPU. Other work on the cores spoils the paired figure; the parts are CPU time of
their own thread and stand by themselves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from kvcatch.models.threads import set_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.engine.engine import Engine

TARGET_SHARE = 0.01


class NoTimes:
    """In the place of an engine's histograms: notes nothing."""

    def __getattr__(self, name: str) -> NoTimes:
        return self

    def add(self, value: float) -> None:
        return None


class Scraper:
    """Takes numbers between two steps when they are due, and makes the page in a thread of its own."""

    def __init__(self, source: Any, exporter: Any, every_s: float) -> None:
        self.source, self.exporter, self.every_s = source, exporter, every_s
        self.pages = 0
        self._due = time.perf_counter()
        self._numbers: Any = None
        self._wake = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def between_steps(self) -> None:
        if time.perf_counter() >= self._due:
            self._due += self.every_s
            self._numbers = self.source.numbers()
            self._wake.set()

    def stop(self) -> None:
        self._ends = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ends:
                return
            self.exporter.page(self._numbers)
            self.pages += 1


def engine_of(batch: int) -> Engine:
    """The default model with ``batch`` sequences that decode."""
    from kvcatch.engine.build import build_engine
    from kvcatch.engine.sampling import SamplingParams

    engine = build_engine(max_num_seqs=batch, max_model_len=2048).engine
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    for number in range(batch):
        engine.add([1000 + number] * 64, params, tags={"tenant": f"t{number % 5}"})
    while any(request.first_token is None for request in engine.requests.values()):
        engine.step()
    return engine


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread per call."""
    work()
    begin = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - begin) / repeats


def paired(engine: Engine, steps: int, every_s: float) -> tuple[list[float], list[float], int]:
    """Seconds of steps with and without, in blocks of five that alternate; and how many pages were made."""
    from kvcatch.observe.exporter.exporter import Exporter
    from kvcatch.serve.metrics import EngineSource

    with_it: list[float] = []
    without: list[float] = []
    noting, pages = engine.times, 0
    for block in range(2 * steps // 5):
        is_on = block % 2 == 0
        engine.times = noting if is_on else NoTimes()  # type: ignore[assignment]
        scraper = exporter = None
        if is_on:
            source = EngineSource(engine, "bench")
            exporter = Exporter(source)
            exporter.start()
            scraper = Scraper(source, exporter, every_s)
        for _ in range(5):
            begin = time.perf_counter()
            if scraper is not None:
                scraper.between_steps()
            engine.step()
            (with_it if is_on else without).append(time.perf_counter() - begin)
        if scraper is not None and exporter is not None:
            scraper.stop()
            exporter.stop()
            pages += scraper.pages
    engine.times = noting
    return with_it, without, pages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="with and without, each")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--scrape-every", type=float, default=1.0, metavar="SECONDS")
    options = parser.parse_args()
    set_threads(None)
    engine = engine_of(options.batch)
    from kvcatch.observe.exporter.exporter import Exporter
    from kvcatch.serve.metrics import EngineSource

    with_it, without, pages = paired(engine, options.steps, options.scrape_every)
    step = statistics.median(without)
    source = EngineSource(engine, "bench")
    exporter = Exporter(source)
    numbers = source.numbers()

    def note() -> None:
        for _ in range(options.batch):
            engine.times.itl.add(0.02)

    parts = {
        "noting the times of a step's tokens": (cpu_seconds(note, 500), 1 / step),
        "a sample, 10 a second": (cpu_seconds(source.glance, 500), 10.0),
        "numbers between two steps, a scrape": (
            cpu_seconds(source.numbers, 200),
            1 / options.scrape_every,
        ),
        "the page, a scrape": (
            cpu_seconds(lambda: exporter.page(numbers), 50),
            1 / options.scrape_every,
        ),
    }
    share = sum(seconds * per_second for seconds, per_second in parts.values())
    ratio = statistics.median(with_it) / step
    print(
        f"load average {os.getloadavg()[0]:.1f}; batch {options.batch}, page of {len(exporter.page(numbers)):,} bytes"
    )
    print(
        f"decode step, median of {len(without)}: without {step * 1e3:.2f} ms, with "
        f"{statistics.median(with_it) * 1e3:.2f} ms, ratio {ratio:.4f}; {pages} pages meanwhile"
    )
    for name, (seconds, per_second) in parts.items():
        print(f"{name:40} {seconds * 1e6:8.1f} us  {seconds * per_second:8.4%} of the time")
    verdict = "met" if share <= TARGET_SHARE else "NOT met"
    print(
        f"{'all together':40} {'':11}  {share:8.4%} of the time (<= {TARGET_SHARE:.0%}: {verdict})"
    )


if __name__ == "__main__":
    main()
