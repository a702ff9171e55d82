"""The model alone: how long it loads, what each precision costs in quality, and how fast it runs.

    python benches/model.py                       everything (some minutes)
    python benches/model.py --only quality        load, quality or speed
    python benches/model.py --threads 1 --json model.json

Quality is bfloat16 against float32 on the same weights: the share of next tokens that are the same when both
continue the same text, how many tokens of a free greedy continuation agree before the first that does not, and the
perplexity of a text that every Python brings. Speed is wall time, the median with the best behind it; keep other
work off the cores, and compare only within one run.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvcatch.models.precision import read_cpu
from kvcatch.models.threads import set_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcatch.kernels import Backend, KVDtype
    from kvcatch.models.load import LoadedModel

SECTIONS = ("load", "quality", "speed")
VARIANTS: tuple[tuple[str, str], ...] = (
    ("float32", "packed"),
    ("float32", "plain"),
    ("bfloat16", "packed"),
    ("bfloat16", "plain"),
)
TOPIC = "typesseq"
PROMPTS = (
    "What is the capital of France?",
    "Explain paging in an operating system to a child.",
    "Write a short story about a lighthouse keeper.",
    "Give me a Python function that reverses a list.",
    "Name five fruits and describe each.",
)
BLOCK = 16


@dataclass
class Run:
    """A loaded model with a pool, and one step over it.

    ``num_tokens`` is how many tokens each of the sequences has in the cache; sequence ``s`` owns a run of blocks.
    """

    loaded: LoadedModel
    backend: Backend
    max_len: int
    num_seqs: int
    num_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        self.torch = torch
        self.num_tokens = [0] * self.num_seqs
        dtype: KVDtype = self.loaded.precision.weights
        self.layout = self.loaded.config.kv_layout(block_size=BLOCK, dtype=dtype)
        self.width = -(-self.max_len // BLOCK)
        count = self.width * self.num_seqs
        self.cache = self.backend.allocate(self.layout, count)
        scattered = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self.tables = scattered.to(torch.int32).view(self.num_seqs, self.width)

    def _slots(self, seqs: Any, positions: Any) -> Any:
        return self.tables[seqs, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def prefill(self, seq: int, tokens: list[int], *, every_row: bool = False) -> Any:
        """Logits of the last row, or of all."""
        from kvcatch.models.step import PrefillPart, Step

        torch, start = self.torch, self.num_tokens[seq]
        end = start + len(tokens)
        self.num_tokens[seq] = end
        positions = torch.arange(start, end)
        rows = torch.arange(len(tokens)) if every_row else torch.tensor([len(tokens) - 1])
        part = PrefillPart([0, len(tokens)], self.tables[seq : seq + 1], [end])
        slots = self._slots(torch.full_like(positions, seq), positions)
        step = Step(torch.tensor(tokens), positions, slots, rows, prefill=part)
        return self.loaded.model.forward(step, self.cache, self.backend)

    def decode(self, tokens: Any) -> Any:
        """Logits [seqs, vocab] after one more token each."""
        from kvcatch.models.step import DecodePart, Step

        torch = self.torch
        positions = torch.tensor(self.num_tokens)
        self.num_tokens = [n + 1 for n in self.num_tokens]
        config = self.loaded.config
        plan = self.backend.plan_decode(self.layout, self.num_tokens, config.num_q_heads)
        lens = torch.tensor(self.num_tokens, dtype=torch.int32)
        rows = torch.arange(self.num_seqs)
        part = DecodePart(self.tables, lens, plan)
        step = Step(tokens, positions, self._slots(rows, positions), rows, decode=part)
        return self.loaded.model.forward(step, self.cache, self.backend)


class Bench:
    """Measures sections and keeps their rows: what, value, unit."""

    def __init__(self, source: str | None, repeats: int) -> None:
        self.source, self.repeats = source, repeats
        self.rows: list[dict[str, Any]] = []
        self._backend: Backend | None = None

    def add(self, what: str, value: float, unit: str, best: float | None = None) -> None:
        self.rows.append({"what": what, "value": value, "unit": unit, "best": best})

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            from kvcatch.kernels import get_backend

            self._backend = get_backend("cpu")
        return self._backend

    def model(self, weights: str, matmul: str) -> LoadedModel:
        from kvcatch.models import precision
        from kvcatch.models.load import load_model

        real = precision._can_pack
        precision._can_pack = lambda: matmul == "packed" and real()
        try:
            return load_model(self.source, precision=weights)
        finally:
            precision._can_pack = real

    def load(self) -> None:
        """In a process of its own each time, torch's import apart."""
        code = (
            "import sys, time; from kvcatch.models.threads import set_threads; set_threads(int(sys.argv[1]));"
            "begin = time.perf_counter(); import torch; middle = time.perf_counter();"
            "from kvcatch.models.load import load_model;"
            "load_model(sys.argv[2] or None); end = time.perf_counter();"
            "import resource; peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            "print(middle - begin, end - middle, peak)"
        )
        threads = str(self.threads)
        times = []
        for _ in range(3):
            command = [sys.executable, "-c", code, threads, self.source or ""]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times.append([float(word) for word in done.stdout.split()])
        imports, loads, peaks = zip(*times, strict=True)
        self.add("import torch", statistics.median(imports), "s", min(imports))
        self.add("load the model and its tokenizer", statistics.median(loads), "s", min(loads))
        self.add("most memory while loading (RSS)", max(peaks) / 1024, "MiB")

    threads = 1

    def quality(self) -> None:
        """bfloat16 against float32."""
        wide, narrow = self.model("float32", "packed"), self.model("bfloat16", "packed")
        text = pydoc_data.topics.topics[TOPIC]
        tokens = wide.tokenizer.encode(text)[:512]
        losses = {}
        tops = {}
        for loaded in (wide, narrow):
            name = loaded.precision.weights
            logits = Run(loaded, self.backend, 512, 1).prefill(0, tokens, every_row=True)
            targets = logits.new_tensor(tokens[1:]).long()[:, None]
            chosen = logits[:-1].log_softmax(-1).gather(1, targets)
            losses[name], tops[name] = math.exp(-float(chosen.mean())), logits.argmax(-1)
            self.add(f"perplexity of 512 tokens, {name}", losses[name], "")
        same = (tops["float32"] == tops["bfloat16"]).double().mean()
        self.add("next token the same after the same text", float(same) * 100, "%")
        change = losses["bfloat16"] / losses["float32"] - 1
        self.add("perplexity, bfloat16 over float32", change * 100, "% more")
        equal = total = 0
        for prompt in PROMPTS:
            one, other = (self._greedy(loaded, prompt, 48) for loaded in (wide, narrow))
            first = next((i for i in range(48) if one[i] != other[i]), 48)
            equal, total = equal + first, total + 48
        self.add(
            f"greedy tokens equal before the first that differs, {len(PROMPTS)} prompts",
            100 * equal / total,
            "%",
        )

    def _greedy(self, loaded: LoadedModel, prompt: str, count: int) -> list[int]:
        tokens = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        run = Run(loaded, self.backend, len(tokens) + count, 1)
        made = [run.prefill(0, tokens).argmax(-1)]
        while len(made) < count:
            made.append(run.decode(made[-1]).argmax(-1))
        return [int(token) for token in made]

    def speed(self) -> None:
        """Prefill of one sequence and decode of several, for each precision and matmul."""
        for weights, matmul in VARIANTS:
            loaded = self.model(weights, matmul)
            name = f"{weights} {matmul}"
            for count in (16, 200, 512):
                tokens = [(7 * i) % 1000 + 100 for i in range(count)]
                run = Run(loaded, self.backend, count, 1)

                def prefill(run: Run = run, tokens: list[int] = tokens) -> None:
                    run.num_tokens = [0]
                    run.prefill(0, tokens)

                self._rate(f"{name}: prefill {count}", prefill, count)
            for num_seqs, context in ((1, 256), (8, 256), (32, 256), (8, 1024)):
                run = Run(loaded, self.backend, context + 8, num_seqs)
                # Values do not matter, lengths do; what is read must have been written.
                run.cache.buffer.zero_()
                tokens_in = run.torch.arange(100, 100 + num_seqs)

                def decode(run: Run = run, tokens: Any = tokens_in, context: int = context) -> None:
                    run.num_tokens = [context - 1] * run.num_seqs
                    run.decode(tokens)

                self._rate(f"{name}: decode {num_seqs} x {context}", decode, num_seqs)

    def _rate(self, what: str, call: Callable[[], None], tokens: int) -> None:
        call()
        times = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        self.add(what, tokens / statistics.median(times), "tok/s", tokens / min(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a GGUF file or a folder; else the embedded default")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    console = Console(highlight=False, markup=False)
    from kvcatch.models.precision import choose_precision

    cpu = read_cpu()
    native = sorted(cpu.flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    facts = f"{cpu.vendor or 'CPU'} with {', '.join(native) or 'no vector extension known'}"
    console.print(f"{facts}; {threads}")
    console.print(f"chosen here: {choose_precision(cpu=cpu)}")
    bench = Bench(options.model, options.repeats)
    bench.threads = threads.num_threads
    for name in options.only.split(","):
        if name not in SECTIONS:
            parser.error(f"no section {name!r}: there are {', '.join(SECTIONS)}")
        getattr(bench, name)()
    table = Table(box=None, pad_edge=False)
    for name in ("what", "median", "best", ""):
        table.add_column(name, justify="left" if name in ("what", "") else "right")
    for row in bench.rows:
        best = "" if row["best"] is None else f"{row['best']:,.4g}"
        table.add_row(row["what"], f"{row['value']:,.4g}", best, row["unit"])
    console.print(table)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": facts, "threads": str(threads), "rows": bench.rows}, indent=2)
        )


if __name__ == "__main__":
    main()
