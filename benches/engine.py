"""The engine's figures, each beside its baseline in the same run.

    python benches/engine.py                                     all that needs no other engine (some minutes)
    python benches/engine.py --only prefix,host                  some sections
    python benches/engine.py --only serve --vllm http://127.0.0.1:8100          beside a vLLM that runs
    python benches/engine.py --only decode --transformers V/bin/python --folder DIR

``DIR`` is the model as a Hugging Face folder. Sections: serve (a server and a client, beside vLLM), decode (32 mixed
lengths, beside transformers' ``generate``), paged (a decode step of 32 at context 1,024 beside the same step with SDPA
over contiguous keys and values), host (what scheduler and pool take of a decode step), cold (``kvcatch generate`` to
its first token), prefix (a shared prefix of 1,000 tokens), memory (the pool beside what geometry predicts), flat (8
cold prompts in chunks beside one flat prefill). All times are wall times, medians; other work on the cores spoils
them, so what else ran is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvcatch.geometry import KvDtype, Model
from kvcatch.models.precision import read_cpu
from kvcatch.models.threads import set_threads
from openai_load import Load, Measured, measure, served_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcatch.engine.build import BuiltEngine
    from kvcatch.engine.engine import Engine

LOADS = (Load(8, 200, 48), Load(32, 45, 48))
SECTIONS = ("serve", "decode", "paged", "host", "cold", "prefix", "memory", "flat")
READY_SECONDS = 120
DECODE_BATCH, DECODE_OUT = 32, 48
POOL_IN_A_PROCESS = """
import os, pickle, sys
layout, num_blocks = pickle.load(sys.stdin.buffer)
from kvcatch.kernels import get_backend
backend = get_backend("cpu")
pages = lambda: int(open("/proc/self/statm").read().split()[1])
backend.allocate(layout, 1)
before = pages()
cache = backend.allocate(layout, num_blocks)
print((pages() - before) * os.sysconf("SC_PAGE_SIZE"))
"""
COLD_PROMPT = "The KV cache of a language model"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its baseline; ``met`` is None where nothing was promised or nothing compared."""

    section: str
    what: str
    kvcatch: str
    baseline: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


class Bench:
    """Measures sections and keeps their rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.repeats: int = options.repeats
        self.rows: list[Row] = []
        self._built: BuiltEngine | None = None

    def add(
        self,
        section: str,
        what: str,
        kvcatch: str,
        baseline: str = "",
        ratio: float | None = None,
        target: tuple[str, float] | None = None,
    ) -> None:
        """Add a row; the target is ``<=`` or ``>=``, its unit if any, and what the ratio is held against."""
        met, text = None, ""
        if target is not None:
            (sign, *unit), bound = target[0].split(), target[1]
            text = " ".join((sign, f"{bound:g}", *unit))
            if ratio is not None:
                met = ratio <= bound if sign == "<=" else ratio >= bound
        self.rows.append(Row(section, what, kvcatch, baseline, ratio, text, met))

    # --- serve ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Both servers get the same prompts, in turn; the first round of each is thrown away."""
        with self._server() as url:
            servers = {"kvcatch": url}
            if self.options.vllm:
                servers["vllm"] = self.options.vllm.rstrip("/").removesuffix("/v1")
            models = {name: served_model(at) for name, at in servers.items()}
            for load in LOADS:
                found: dict[str, list[Measured]] = {name: [] for name in servers}
                for number in range(self.repeats + 1):
                    for name, at in servers.items():
                        found[name].append(measure(at, models[name], load, number))
                self._serve_rows(load, {name: runs[1:] for name, runs in found.items()})

    def _serve_rows(self, load: Load, found: dict[str, list[Measured]]) -> None:
        for label, field, factor, unit, target in (
            ("throughput", "throughput", 1.0, "tok/s", (">=", 1.0)),
            ("TTFT, median", "ttft_median", 1.0, "s", ("<=", 1.0)),
            ("TTFT, mean", "ttft_mean", 1.0, "s", None),
            ("ITL, mean", "itl", 1e3, "ms", ("<=", 1.0)),
            ("between tokens, median", "gap", 1e3, "ms", None),
        ):
            values = {
                name: statistics.median(getattr(run, field) for run in runs) * factor
                for name, runs in found.items()
            }
            other = values.get("vllm")
            self.add(
                "serve",
                f"{load}: {label}",
                f"{values['kvcatch']:.3g} {unit}",
                "" if other is None else f"vLLM {other:.3g} {unit}",
                None if other is None else values["kvcatch"] / other,
                target,
            )

    @contextmanager
    def _server(self) -> Iterator[str]:
        """A ``kvcatch serve`` of its own, on a free port."""
        command = [sys.executable, "-m", "kvcatch.cli", "serve", "--port", "0"]
        command += ["--max-model-len", "2048", *self._model_arguments()]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = ""
        try:
            while "http://" not in said:
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"kvcatch serve ended: {said}")
                said += line
            yield "http://" + said.partition("http://")[2].split("/")[0].strip()
        finally:
            process.terminate()
            process.wait(READY_SECONDS)

    def _model_arguments(self) -> list[str]:
        return ["--model", self.options.folder] if self.options.folder else []

    # --- decode ---------------------------------------------------------------------------------

    def decode(self) -> None:
        """Tokens of a mixed batch after the first of each; prefill apart on both sides."""
        chooser = random.Random(0)
        lengths = [chooser.randrange(32, 257) for _ in range(DECODE_BATCH)]
        prompts = [[chooser.randrange(1000, 9000) for _ in range(n)] for n in lengths]
        times = []
        for number in range(self.repeats + 1):
            engine = self._engine()
            for prompt in prompts:
                engine.add([1000 + number, *prompt[1:]], self._params(DECODE_OUT))
            while any(r.first_token is None for r in engine.requests.values()):
                engine.step()
            made = engine.counters.generated_tokens
            begin = time.perf_counter()
            while not engine.is_idle:
                engine.step()
            seconds = time.perf_counter() - begin
            times.append(seconds / (engine.counters.generated_tokens - made))
        rate = 1 / statistics.median(times[1:])
        theirs = None
        if self.options.transformers:
            theirs = self._transformers(prompts)
        self.add(
            "decode",
            f"{DECODE_BATCH} prompts of {min(lengths)} to {max(lengths)} tokens, {DECODE_OUT} out",
            f"{rate:.0f} tok/s",
            "" if theirs is None else f"transformers {theirs:.0f} tok/s",
            None if theirs is None else rate / theirs,
            (">=", 1.5),
        )

    def _transformers(self, prompts: list[list[int]]) -> float:
        if not self.options.folder:
            raise SystemExit("--transformers needs --folder, the model as a Hugging Face folder")
        job = {
            "prompts": prompts,
            "output_tokens": DECODE_OUT,
            "threads": self._threads.num_threads,
            "dtype": self.built.loaded.precision.weights,
            "repeats": min(2, self.repeats),
        }
        script = Path(__file__).with_name("transformers_decode.py")
        done = subprocess.run(
            [self.options.transformers, str(script), self.options.folder],
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            env=self._plain_environment,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        return DECODE_BATCH * (DECODE_OUT - 1) / float(found["whole"] - found["first"])

    # --- paged ----------------------------------------------------------------------------------

    def paged(self) -> None:
        """The same step twice: through the block tables, and with SDPA over keys and values laid end to end."""
        from contiguous import paged_and_contiguous

        for num_seqs, context in ((8, 256), (32, 256), (32, 1024)):
            paged, contiguous = paged_and_contiguous(self.built.loaded, num_seqs, context)
            mine, theirs = _in_turn(paged, contiguous, 2 * self.repeats + 1)
            judged = (num_seqs, context) == (32, 1024)
            self.add(
                "paged",
                f"decode step, {num_seqs} x {context}",
                f"{mine * 1e3:.1f} ms",
                f"contiguous SDPA {theirs * 1e3:.1f} ms",
                mine / theirs,
                ("<=", 1.25) if judged else None,
            )

    # --- host -----------------------------------------------------------------------------------

    def host(self) -> None:
        """Scheduler and pool: the decision of a step, its tables and slots, and the commit after it."""
        engine = self._engine()
        for number in range(DECODE_BATCH):
            engine.add([1000 + number] * 64, self._params(2000))
        while any(r.first_token is None for r in engine.requests.values()):
            engine.step()
        spent = dict.fromkeys(("schedule", "pool"), 0.0)
        _timed(engine.scheduler, "schedule", spent, "schedule")
        _timed(engine, "_commit", spent, "pool")
        pool = _TimedPool(engine.pool, spent)
        forward = engine.runner.forward
        engine.runner = _WithPool(engine.runner, forward, pool)
        steps, sampled = 20 * self.repeats, engine.counters.seconds["sample"]
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall = time.perf_counter() - begin
        sampled = engine.counters.seconds["sample"] - sampled - spent["pool"]
        share = (spent["schedule"] + spent["pool"]) / wall * 100
        self.add(
            "host",
            f"scheduler + pool, of a decode step of {DECODE_BATCH}",
            f"{(spent['schedule'] + spent['pool']) / steps * 1e6:.0f} us",
            f"the step {wall / steps * 1e3:.1f} ms",
            share,
            ("<= %", 2.0),
        )
        self.add("host", "choosing tokens and their text", f"{sampled / steps * 1e3:.2f} ms")

    # --- cold -----------------------------------------------------------------------------------

    def cold(self) -> None:
        """A new process each time, from its start to the first byte of text."""
        command = [sys.executable, "-m", "kvcatch.cli", "generate", COLD_PROMPT]
        command += ["--max-tokens", "4", *self._model_arguments()]
        times = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            first = process.stdout.read(1)
            times.append(time.perf_counter() - begin)
            process.communicate()
            if process.returncode or not first:
                raise SystemExit(f"kvcatch generate ended with {process.returncode}")
        seconds = statistics.median(times)
        self.add("cold", "kvcatch generate to its first token", f"{seconds:.2f} s", "", seconds,
                 ("<= s", 6.0))  # fmt: skip

    # --- prefix ---------------------------------------------------------------------------------

    def prefix(self) -> None:
        """A first request of 1,000 + 16 tokens, then one with the same 1,000."""
        ratios, firsts, seconds = [], [], []
        for number in range(self.repeats):
            engine = self._engine(max_num_batched_tokens=512)
            chooser = random.Random(number)
            shared = [chooser.randrange(1000, 9000) for _ in range(1000)]
            ttfts = []
            for tail in (1, 2):
                request = engine.add([*shared, *([100 + tail] * 16)], self._params(2))
                while not engine.is_idle:
                    engine.step()
                assert request.first_token is not None
                ttfts.append(request.first_token - request.arrived)
            firsts.append(ttfts[0])
            seconds.append(ttfts[1])
            ratios.append(ttfts[1] / ttfts[0])
        self.add(
            "prefix",
            "TTFT with a prefix of 1,000 tokens in the cache",
            f"{statistics.median(seconds) * 1e3:.0f} ms",
            f"without {statistics.median(firsts) * 1e3:.0f} ms",
            statistics.median(ratios),
            ("<=", 0.2),
        )

    # --- memory ---------------------------------------------------------------------------------

    def memory(self) -> None:
        """What the process grows by when a pool is made, beside blocks times bytes per block by geometry."""
        config, dtype = self.built.loaded.config, self.built.loaded.precision.weights
        model = Model.uniform(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)
        num_blocks, block_size = 1500, 16
        per_token = model.bytes_per_token(KvDtype.parse("auto", dtype))
        predicted = num_blocks * block_size * per_token
        layout = config.kv_layout(block_size=block_size, dtype=dtype)
        # In a process of its own: here memory that was freed would be taken again.
        done = subprocess.run(
            [sys.executable, "-c", POOL_IN_A_PROCESS],
            input=pickle.dumps((layout, num_blocks)),
            stdout=subprocess.PIPE,
            check=True,
        )
        grown = int(done.stdout)
        self.add(
            "memory",
            f"a pool of {num_blocks} blocks of {block_size}, resident",
            f"{grown / 2**20:.1f} MiB",
            f"geometry {predicted / 2**20:.1f} MiB",
            abs(grown / predicted - 1) * 100,
            ("<= %", 1.0),
        )

    # --- flat -----------------------------------------------------------------------------------

    def flat(self) -> None:
        """8 cold prompts of 200 tokens: in chunks of the default budget, and all in one step."""
        means: dict[int, list[float]] = {512: [], 2048: []}
        for number in range(self.repeats + 1):
            for budget, found in means.items():
                engine = self._engine(max_num_batched_tokens=budget)
                chooser = random.Random(number)
                requests = [
                    engine.add([chooser.randrange(1000, 9000) for _ in range(200)], self._params(2))
                    for _ in range(8)
                ]
                while not engine.is_idle:
                    engine.step()
                found.append(statistics.mean((r.first_token or 0) - r.arrived for r in requests))
        mine, theirs = (statistics.median(found[1:]) for found in means.values())
        self.add(
            "flat",
            "mean TTFT of 8 cold prompts of 200 tokens",
            f"{mine:.2f} s",
            f"one flat prefill {theirs:.2f} s",
            mine / theirs,
            ("<=", 1.0),
        )

    # --- the engine -----------------------------------------------------------------------------

    @property
    def built(self) -> BuiltEngine:
        """The model, loaded once."""
        if self._built is None:
            from kvcatch.engine.build import build_engine

            self._built = build_engine(self.options.folder, max_model_len=2048)
        return self._built

    def _engine(self, **changed: Any) -> Engine:
        """A new engine with an empty pool around the loaded model and its cache."""
        from kvcatch.engine.engine import Engine

        built = self.built
        config = replace(built.engine.config, **changed)
        return Engine(config, built.runner, built.loaded.tokenizer)

    def _params(self, count: int) -> Any:
        from kvcatch.engine.sampling import SamplingParams

        limit = min(count, 1900)
        return SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True)

    def start(self) -> str:
        """Set the threads; what the machine and they are, in a line."""
        # Another engine gets the environment as it was.
        self._plain_environment = dict(os.environ)
        self._threads = set_threads(self.options.threads)
        cpu = read_cpu()
        native = sorted(cpu.flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
        return f"{cpu.vendor or 'CPU'} with {', '.join(native)}; {self._threads}"


class _TimedPool:
    """A pool that counts what its calls take; for those a runner makes."""

    def __init__(self, pool: Any, spent: dict[str, float]) -> None:
        self._pool, self._spent = pool, spent

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._pool, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments, **options)
            self._spent["pool"] += time.perf_counter() - begin
            return result

        return timed


class _WithPool:
    """A runner that is given another pool."""

    def __init__(self, runner: Any, forward: Callable[..., Any], pool: Any) -> None:
        self._runner, self._forward, self._pool = runner, forward, pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, items: Any, _: Any) -> Any:
        return self._forward(items, self._pool)


def _timed(owner: Any, name: str, spent: dict[str, float], key: str) -> None:
    """Count what a method takes."""
    call = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        spent[key] += time.perf_counter() - begin
        return result

    setattr(owner, name, timed)


def _in_turn(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of two calls, taken one after the other."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for call, found in zip((one, other), times, strict=True):
            begin = time.perf_counter()
            call()
            if number:
                found.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def _busy() -> tuple[float, float]:
    """Seconds that all CPUs of the machine worked, and that this process and its ended children did."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = sum(int(fields[at]) for at in (0, 1, 2, 5, 6))
    return ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", help="the model as a folder; else the embedded default")
    parser.add_argument("--vllm", help="URL of a vLLM with the same model")
    parser.add_argument("--transformers", help="a Python that has transformers")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    sections = options.only.split(",")
    for name in sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}: there are {', '.join(SECTIONS)}")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: must be at least 1")
    console = Console(highlight=False, markup=False)
    bench = Bench(options)
    machine = bench.start()
    console.print(machine)
    table = Table(box=None, pad_edge=False)
    for title in ("section", "what", "kvcatch", "baseline", "ratio", "target", ""):
        table.add_column(title, justify="right" if title == "ratio" else "left")
    for name in sections:
        begin, (busy, own) = time.perf_counter(), _busy()
        shown = len(bench.rows)
        getattr(bench, name)()
        wall, (busy_now, own_now) = time.perf_counter() - begin, _busy()
        others = max(0.0, busy_now - busy - (own_now - own)) / wall
        note = "" if name == "serve" else f" ({others:.2f} cores busy with other work)"
        console.print(f"{name}: {wall:.0f} s{note}")
        for row in bench.rows[shown:]:
            verdict = {True: "met", False: "missed", None: ""}[row.met]
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
            table.add_row(
                row.section, row.what, row.kvcatch, row.baseline, ratio, row.target, verdict
            )
    if bench._built is not None:
        console.print(f"{bench.built.loaded}; {bench.built.runner.cache!r}")
    console.print(table)
    if options.json:
        found = {"machine": machine, "rows": [asdict(row) for row in bench.rows]}
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
