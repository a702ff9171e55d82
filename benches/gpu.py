"""Measure the CUDA kernels on a GPU, each as a fraction of what the same GPU copies or reads in the same run.

    python benches/gpu.py                          one table, a few minutes
    python benches/gpu.py --only moves,decode      some sections
    python benches/gpu.py --quick                  smaller pools, fewer repeats
    python benches/gpu.py --json gpu.json          the rows as JSON too ("-": instead of the table)

Times are between CUDA events around many calls in a row; swaps are timed by the host, from the call to the last byte.
A time is the median of five. Without a GPU it says so and exits with status 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvcatch import FreeBlocks
from kvcatch.errors import KernelError, MissingExtra
from kvcatch.kernels import KVLayout, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
BLOCK_2M = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128)
BLOCK_64K = KVLayout(num_layers=8, num_kv_heads=1, head_dim=128)
BLOCK_8K = KVLayout(num_layers=1, num_kv_heads=1, head_dim=128)
assert (BLOCK_2M.block_bytes, BLOCK_64K.block_bytes, BLOCK_8K.block_bytes) == (2 * MIB, 65536, 8192)

READ_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(256) read_only(const uint4* p, long long n, unsigned* out) {
  unsigned sum = 0;
  const long long step = (long long)gridDim.x * 256;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(p + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x9e3779b9u) *out = sum;  // keeps the loads
}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        section: name for ``--only``.
        what: what was called, with its shape.
        microseconds: of one call.
        gigabytes: per second, read and written together; None where bytes are not the point.
        of: what the rate is a fraction of: ``copy``, ``read``, ``link`` (pinned copies of 64 MiB), or nothing.
        fraction: of that.
        target: the fraction aimed at.
    """

    section: str
    what: str
    microseconds: float
    gigabytes: float | None = None
    of: str = ""
    fraction: float | None = None
    target: float | None = None


class Machine:
    """The GPU under measurement: its backend, its clocks, raw copies and reads."""

    def __init__(self, backend: Any, repeats: int) -> None:
        import cupy
        import torch

        self.backend, self.repeats = backend, repeats
        self._cupy, self._torch = cupy, torch
        index = int(backend.device.removeprefix("cuda:"))
        cupy.cuda.Device(index).use()
        torch.cuda.set_device(index)
        self.name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        self.memory = torch.cuda.get_device_properties(index).total_memory
        self._read = cupy.RawKernel(READ_KERNEL, "read_only")

    def time(self, call: Callable[[], object], calls: int = 20) -> float:
        """Microseconds of the GPU for one call, among many in a row."""
        for _ in range(3):
            call()
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        stream = self.backend.runtime.stream()
        times = []
        for _ in range(self.repeats):
            start.record(stream)
            for _ in range(calls):
                call()
            end.record(stream)
            end.synchronize()
            times.append(self._cupy.cuda.get_elapsed_time(start, end) * 1e3 / calls)
        return statistics.median(times)

    def host_time(self, call: Callable[[], object]) -> float:
        """Microseconds of the host for one call that waits for its work."""
        call()
        times = []
        for _ in range(self.repeats):
            self.backend.synchronise()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """A plain copy between two addresses on the current stream."""
        runtime = self._cupy.cuda.runtime
        stream = self.backend.runtime.stream()
        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDefault, stream.ptr)

    def read(self, buffer: Any, num_bytes: int) -> None:
        """Read a buffer and keep nothing of it."""
        grid = 8 * self.backend.runtime.num_sms
        sink = np.uint64(address(buffer))
        arguments = (np.uint64(address(buffer)), np.int64(num_bytes // 16), sink)
        self._read.kernel((grid,), (256,), arguments, stream=self.backend.runtime.stream())

    def tensor(self, array: Any) -> Any:
        """A tensor on the GPU."""
        return self._torch.from_numpy(array).to(self.backend.device)

    def bf16(self, shape: tuple[int, ...]) -> Any:
        """A random bf16 tensor on the GPU."""
        torch = self._torch
        return torch.randn(shape, dtype=torch.bfloat16, device=self.backend.device)


def address(buffer: Any) -> int:
    """Where a buffer of torch or numpy starts."""
    return int(buffer.data_ptr() if hasattr(buffer, "data_ptr") else buffer.ctypes.data)


class Bench:
    """All sections. What copies, reads and links reach is measured first; the rest are fractions of it."""

    def __init__(self, machine: Machine, quick: bool = False) -> None:
        self.machine, self.quick = machine, quick
        self.backend = machine.backend
        self.limits: dict[str, float] = {}
        self.rng = np.random.default_rng(0)

    def row(
        self,
        section: str,
        what: str,
        microseconds: float,
        num_bytes: int = 0,
        of: str = "",
        target: float | None = None,
    ) -> Row:
        """A row whose rate is held against a limit measured before."""
        if not num_bytes:
            return Row(section, what, microseconds)
        rate = num_bytes / microseconds / 1e3
        fraction = rate / self.limits[of] if of in self.limits else None
        return Row(section, what, microseconds, rate, of, fraction, target)

    def bandwidth(self) -> Iterator[Row]:
        """What the GPU and its link reach without kvcatch."""
        size = (256 if self.quick else 2048) * MIB
        layout, one = BLOCK_2M, size // BLOCK_2M.block_bytes
        source, target = (self.backend.allocate(layout, one).buffer for _ in range(2))
        for name, call, moved in (
            ("copy", lambda: self.machine.copy(address(target), address(source), size), 2 * size),
            ("read", lambda: self.machine.read(source, size), size),
        ):
            microseconds = self.machine.time(call)
            self.limits[name] = moved / microseconds / 1e3
            yield self.row("bandwidth", f"{name}, {size // MIB} MiB", microseconds, moved, name)
        host = address(pinned := self.backend.allocate_host(layout, 32).buffer)
        device = address(source)
        for size in (64 * MIB, 2 * MIB, 65536):
            for way, pair in (("to host", (host, device)), ("to GPU", (device, host))):
                microseconds = self.machine.time(lambda p=pair, n=size: self.machine.copy(*p, n))
                if size == 64 * MIB:
                    self.limits[way] = size / microseconds / 1e3
                what = f"pinned copy {way}, {size // 1024} KiB"
                yield self.row("bandwidth", what, microseconds, size, way)
        del pinned  # it had to live until here

    def launch(self) -> Iterator[Row]:
        """What a call costs at least: a move of one small block, upload of its ids included."""
        cache = self.backend.allocate(BLOCK_8K, 4)
        call = lambda: self.backend.move_blocks(cache, [0], [1])  # noqa: E731
        yield self.row("launch", "move of one 8-KiB block", self.machine.time(call, 200))

    def moves(self) -> Iterator[Row]:
        """Moves to free blocks and assignments of any kind, both layouts, large and small blocks."""
        for layout, size in ((BLOCK_2M, "2 MiB"), (BLOCK_64K, "64 KiB")):
            for order in ("block", "layer"):
                most = 256 if self.quick else 1024
                cache = self.backend.allocate(replace(layout, order=order), 2 * most)
                for n in (16, 64, 256, 1024):
                    if n > most:
                        continue
                    ids = self.rng.permutation(2 * most).astype(np.int32)
                    src, dst = ids[:n], ids[n : 2 * n]
                    target = 0.9 if n >= 64 and size == "2 MiB" else None
                    for name, call in (
                        ("move", lambda s=src, d=dst, c=cache: self.backend.move_blocks(c, s, d)),
                        (
                            "assign",
                            lambda s=src, c=cache: self.backend.assign_blocks(c, s, np.roll(s, 1)),
                        ),
                    ):
                        yield self.row(
                            "moves",
                            f"{name} {n} x {size}, {order}-major",
                            self.machine.time(call, 10),
                            2 * n * layout.block_bytes,
                            "copy",
                            target if name == "move" else None,
                        )

    def staging(self) -> Iterator[Row]:
        """Gather to and scatter from a staging pool."""
        n = 64 if self.quick else 256
        cache, staging = self.backend.allocate(BLOCK_2M, 2 * n), self.backend.allocate(BLOCK_2M, n)
        ids = self.rng.permutation(2 * n)[:n].astype(np.int32)
        for name, call in (
            ("gather", lambda: self.backend.gather_blocks(cache, ids, staging)),
            ("scatter", lambda: self.backend.scatter_blocks(staging, cache, ids)),
        ):
            moved = 2 * n * BLOCK_2M.block_bytes
            microseconds = self.machine.time(call, 10)
            yield self.row("staging", f"{name} {n} x 2 MiB", microseconds, moved, "copy", 0.9)

    def swap(self) -> Iterator[Row]:
        """GPU to pinned host and back: blocks in runs, blocks apart, and where `sorted` placement puts them."""
        total = (16 if self.quick else 256) * MIB
        for layout, size in ((BLOCK_8K, "8 KiB"), (BLOCK_64K, "64 KiB"), (BLOCK_2M, "2 MiB")):
            n = total // layout.block_bytes
            cache = self.backend.allocate(layout, 4 * n)
            host = self.backend.allocate_host(layout, n)
            apart = 2 * self.rng.permutation(2 * n)[:n].astype(np.int32)
            places = {
                "one run": np.arange(n, n + n, dtype=np.int32),
                "sorted placement": sorted_places(4 * n, n, self.rng),
                "blocks apart": apart,
            }
            there = np.arange(n, dtype=np.int32)
            each = layout.block_bytes

            def one_by_one(
                ids: Any = apart, c: Any = cache, h: Any = host, each: int = each
            ) -> None:
                start, end = address(c.buffer), address(h.buffer)
                for i, block in enumerate(ids.tolist()):
                    self.machine.copy(end + i * each, start + block * each, each)
                self.backend.synchronise()

            what = f"swap to host, {n} x {size}, apart, a copy each by hand"
            yield self.row("swap", what, self.machine.host_time(one_by_one), total, "to host")
            for name, ids in places.items():
                for way, call in (
                    (
                        "to host",
                        lambda i=ids, c=cache, h=host, t=there: self.backend.swap_out(
                            c, h, i, t
                        ).synchronise(),
                    ),
                    (
                        "to GPU",
                        lambda i=ids, c=cache, h=host, t=there: self.backend.swap_in(
                            h, c, t, i
                        ).synchronise(),
                    ),
                ):
                    what = f"swap {way}, {n} x {size}, {name}"
                    yield self.row("swap", what, self.machine.host_time(call), total, way)

    def write(self) -> Iterator[Row]:
        """New tokens into their slots, one layer."""
        for dtype, scale in (("bfloat16", "none"), ("float8_e4m3", "token")):
            layout = replace(BLOCK_2M, num_layers=1, dtype=dtype, scale=scale)
            cache = self.backend.allocate(layout, 1024)
            for tokens in (1, 64, 1024, 8192):
                keys = self.machine.bf16((tokens, layout.num_kv_heads, layout.head_dim))
                slots = self.rng.permutation(1024 * layout.block_size)[:tokens].astype(np.int64)
                slots = self.machine.tensor(slots)
                call = lambda c=cache, k=keys, s=slots: self.backend.write_kv(c, 0, k, k, s)  # noqa: E731
                written = (
                    tokens * layout.num_kv_heads * layout.head_dim * 2 * (2 + layout.item_bytes)
                )
                what = f"write {tokens} tokens, {short(layout)}"
                yield self.row("write", what, self.machine.time(call, 100), written, "copy")

    def decode(self) -> Iterator[Row]:
        """Paged decode of one layer: long and short sequences, groups, dtypes, both layouts."""
        shapes = {"64 x 8192": [8192] * 64, "8 x 32768": [32768] * 8, "256 x 1024": [1024] * 256}
        shapes["64 ragged to 16384"] = np.sort(self.rng.integers(1, 16384, 64)).tolist()
        if self.quick:
            shapes = {"8 x 2048": [2048] * 8}
        for dtype, scale, target in (
            ("bfloat16", "none", 0.9),
            ("float8_e4m3", "token", 0.8),
        ):
            layout = replace(BLOCK_2M, num_layers=1, dtype=dtype, scale=scale)
            for name, lens in shapes.items():
                for group in (1, 4, 8):
                    held = target if name == "64 x 8192" else None
                    yield self._decode(layout, name, lens, group, held)
        if self.quick:
            return
        for count in (
            64,
            600,
        ):  # pools of 8 and 75 GiB: the same bytes read, from places far apart or near
            for order in ("block", "layer"):
                layout = replace(BLOCK_2M, order=order)
                if count * 64 * layout.block_bytes < 0.8 * self.machine.memory:
                    lens = [1024] * count
                    yield self._decode(layout, f"{count} x 1024", lens, 8, None, layer=16)

    def _decode(
        self,
        layout: KVLayout,
        name: str,
        lens: list[int],
        group: int,
        target: float | None,
        layer: int = 0,
    ) -> Row:
        counts = [-(-n // layout.block_size) for n in lens]
        cache = self.backend.allocate(layout, sum(counts))
        tables = np.zeros((len(lens), max(counts)), np.int32)
        ids = self.rng.permutation(sum(counts)).astype(np.int32)
        for i, (start, n) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
            tables[i, :n] = ids[start : start + n]
        query = self.machine.bf16((len(lens), layout.num_kv_heads * group, layout.head_dim))
        out = self.machine.bf16(query.shape)
        block_tables = self.machine.tensor(tables)
        seq_lens = self.machine.tensor(np.array(lens, np.int32))
        plan = self.backend.plan_decode(layout, lens, query.shape[1])

        def call() -> None:
            self.backend.decode_attention(
                cache, layer, query, block_tables, seq_lens, scale=0.1, plan=plan, out=out
            )

        # An area holds one layer's keys (or values) of a block, scales included.
        read = sum(lens) * 2 * layout.area_bytes // layout.block_size
        what = f"decode {name}, group {group}, {short(layout)}"
        return self.row("decode", what, self.machine.time(call), read, "read", target)

    def sections(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """What can be named in ``--only``, in the order of the table."""
        names = ("bandwidth", "launch", "moves", "staging", "swap", "write", "decode")
        return {name: getattr(self, name) for name in names}


def short(layout: KVLayout) -> str:
    """What of a layout tells rows apart."""
    names = {"bfloat16": "bf16", "float8_e4m3": "e4m3", "float16": "fp16"}
    order = f", {layout.order}-major, {layout.num_layers} layers" if layout.num_layers > 1 else ""
    return names[layout.dtype] + order


def sorted_places(num_blocks: int, wanted: int, rng: np.random.Generator) -> Any:
    """Where `sorted` placement puts a sequence of blocks in a pool that has seen sequences come and go."""
    free, held = FreeBlocks(num_blocks, placement="sorted"), []
    while free.num_clean > num_blocks // 32:
        count = int(rng.integers(1, max(2, min(64, num_blocks // 16))))
        held.append(free.take(min(count, free.num_clean)))
    rng.shuffle(held)
    while free.num_clean < wanted:
        free.give_clean(held.pop())
    return free.take(wanted)


def table(rows: list[Row], machine: str) -> Table:
    """The rows for people."""
    found = Table(title=f"kvcatch on {machine}", title_justify="left")
    found.add_column("what", overflow="fold")
    for name in ("time", "GB/s", "fraction", "target"):
        found.add_column(name, justify="right", no_wrap=True)
    section = ""
    for row in rows:
        if section and row.section != section:
            found.add_section()
        section = row.section
        micro = row.microseconds
        found.add_row(
            row.what,
            f"{micro / 1e3:.2f} ms" if micro >= 1000 else f"{micro:.1f} us",
            "" if row.gigabytes is None else f"{row.gigabytes:.1f}",
            "" if row.fraction is None else f"{row.fraction:.0%} of {row.of}",
            "" if row.target is None else f"{row.target:.0%}",
        )
    return found


def measure(bench: Bench, only: list[str]) -> Iterator[Row]:
    """Rows of the chosen sections; the limits are always measured, and first."""
    for name, section in bench.sections().items():
        if name == "bandwidth":
            rows = list(section())
            if not only or name in only:
                yield from rows
        elif not only or name in only:
            yield from section()


def main() -> int:
    """Measure and print; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(Bench.sections(Bench.__new__(Bench)))
    parser.add_argument("--only", default="", help=f"some of {','.join(names)}")
    parser.add_argument("--quick", action="store_true", help="smaller pools, fewer repeats")
    parser.add_argument("--device", type=int, default=0, help="CUDA device number (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for the output")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    try:
        backend = get_backend(f"cuda:{options.device}", library="torch")
    except (KernelError, MissingExtra) as why:
        print(f"gpu.py needs a GPU: {why}", file=sys.stderr)
        return 2
    machine = Machine(backend, 3 if options.quick else 5)
    rows = list(measure(Bench(machine, options.quick), only))
    if options.json:
        record = {"device": machine.name, "quick": options.quick, "rows": [asdict(r) for r in rows]}
        text = json.dumps(record, indent=1)
        if options.json == "-":
            print(text)
            return 0
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    Console().print(table(rows, machine.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
