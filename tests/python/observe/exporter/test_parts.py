"""Histograms, holdings, device memory and the sampler, each alone."""

from __future__ import annotations

import os
import random
import sys
import threading
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.errors import InvalidArgument, MissingExtra
from kvcatch.observe.exporter.device import DeviceMemory, DeviceReader
from kvcatch.observe.exporter.exporter import Exporter
from kvcatch.observe.exporter.histogram import Histogram
from kvcatch.observe.exporter.holdings import OTHER, Holding, NameGate, top_holdings
from kvcatch.observe.exporter.sampler import Sampler
from kvcatch.observe.exporter.source import Glance


class TestHistogram:
    @given(st.lists(st.floats(0, 100), max_size=50))
    def test_counts_what_is_at_most_each_bound(self, values: list[float]) -> None:
        bounds = (0.5, 1.0, 10.0, 50.0)
        histogram = Histogram(bounds)
        for value in values:
            histogram.add(value)
        found = histogram.values()
        assert found.count == len(values)
        assert found.total == pytest.approx(sum(values))
        right = [(str(bound), sum(value <= bound for value in values)) for bound in bounds]
        assert found.cumulated() == [*right, ("+Inf", len(values))]

    def test_values_do_not_change_afterwards(self) -> None:
        histogram = Histogram((1.0,))
        before = histogram.values()
        histogram.add(0.5)
        assert (before.count, histogram.values().count) == (0, 1)


def rows(*holdings: tuple[str | None, int]) -> list[dict[str, Any]]:
    return [
        {"tenant": name, "blocks": blocks, "reserved_blocks": 1, "sequences": 2}
        for name, blocks in holdings
    ]


class TestHoldings:
    def test_the_largest_by_name_and_the_rest(self) -> None:
        found = top_holdings(rows(("a", 9), ("b", 7), ("c", 5), ("d", 3)), "tenant", 2, NameGate())
        assert found == [Holding("a", 9, 1, 2), Holding("b", 7, 1, 2), Holding(OTHER, 8, 2, 4)]

    def test_no_tag_at_all_is_nothing(self) -> None:
        assert top_holdings(rows((None, 9)), "tenant", 2, NameGate()) == []
        assert top_holdings([], "tenant", 2, NameGate()) == []

    def test_sequences_without_the_tag_have_an_empty_name(self) -> None:
        found = top_holdings(rows(("a", 9), (None, 7)), "tenant", 5, NameGate())
        assert [(item.name, item.blocks) for item in found] == [("a", 9), ("", 7)]

    def test_one_who_is_called_other_does_not_double_the_series(self) -> None:
        found = top_holdings(rows((OTHER, 9), ("a", 7), ("b", 5)), "tenant", 1, NameGate())
        assert [(item.name, item.blocks) for item in found] == [("a", 7), (OTHER, 14)]

    def test_names_that_are_equal_once_cut_are_one_series(self) -> None:
        found = top_holdings(rows(("x" * 200, 9), ("x" * 300, 7)), "tenant", 5, NameGate())
        assert [(len(item.name), item.blocks) for item in found] == [(128, 9), (5, 7)]

    def test_never_more_names_than_are_let_in_and_no_block_is_lost(self) -> None:
        """A day of new names every minute: 100 at once, then 100 an hour."""
        clock = [0.0]
        gate = NameGate(burst=100, per_hour=100, clock=lambda: clock[0])
        rng, names = random.Random(3), set()
        for minute in range(24 * 60):
            clock[0] = 60.0 * minute
            held = rows(*((f"{minute}-{i}", rng.randrange(1, 50)) for i in range(30)))
            held.sort(key=lambda row: -row["blocks"])
            found = top_holdings(held, "tenant", 10, gate)
            assert len(found) <= 11
            assert sum(item.blocks for item in found) == sum(row["blocks"] for row in held)
            names |= {item.name for item in found}
        assert 2300 <= len(names) <= 100 + 24 * 100 + 1

    def test_a_known_name_is_always_let_in(self) -> None:
        gate = NameGate(burst=1, per_hour=0, clock=lambda: 0.0)
        assert [gate.lets_in(name) for name in ("a", "b", "a", "c", "a")] == [
            True,
            False,
            True,
            False,
            True,
        ]

    def test_names_are_forgotten_in_the_end(self) -> None:
        gate = NameGate(burst=10_000, remembered=3)
        for number in range(100):
            assert gate.lets_in(str(number))
            assert gate.lets_in("stays")
        assert len(gate._known) == 3


class FakeNvml(types.ModuleType):
    """NVIDIA's library with two devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: list[tuple[int, int | None]], fails: str = "") -> None:
        super().__init__("pynvml")
        self.processes, self.fails = processes, fails

    def _step(self, name: str) -> None:
        if self.fails == name:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._step("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index > 1:
            raise self.NVMLError("no such device")
        return f"device {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self._step("memory")
        total = {"device 0": 10, "device 1": 20, "GPU-abc": 30}[handle]
        return types.SimpleNamespace(total=total, used=5)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:  # noqa: N802
        self._step("processes")
        return [types.SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in self.processes]


class TestDevice:
    def read(
        self,
        monkeypatch: pytest.MonkeyPatch,
        device: str,
        visible: str | None = None,
        nvml: Any = None,
    ) -> DeviceMemory | None:
        fake = FakeNvml([(1, 2), (os.getpid(), 4)]) if nvml is None else nvml
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return DeviceReader(device, environ).read()

    def test_total_used_and_of_this_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.read(monkeypatch, "cuda:0") == DeviceMemory(10, 5, 4)
        assert self.read(monkeypatch, "cuda") == DeviceMemory(10, 5, 4)

    @pytest.mark.parametrize(
        ("device", "visible", "total"),
        [
            ("cuda:1", None, 20),
            ("cuda:0", "1", 20),
            ("cuda:1", "1,0", 10),
            ("cuda:0", "GPU-abc", 30),
        ],
    )
    def test_visible_devices_are_renumbered(
        self, monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, total: int
    ) -> None:
        memory = self.read(monkeypatch, device, visible)
        assert memory is not None
        assert memory.total_bytes == total

    @pytest.mark.parametrize("processes", [[], [(1, 2)], [(os.getpid(), None)]])
    def test_a_process_that_the_driver_does_not_name_is_unknown(
        self, monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int | None]]
    ) -> None:
        memory = self.read(monkeypatch, "cuda:0", nvml=FakeNvml(processes))
        assert memory == DeviceMemory(10, 5, None)

    def test_what_fails_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for fails in ("init", "memory"):
            assert self.read(monkeypatch, "cuda:0", nvml=FakeNvml([], fails)) is None
        half = self.read(monkeypatch, "cuda:0", nvml=FakeNvml([], "processes"))
        assert half == DeviceMemory(10, 5, None)
        for device, visible in (("cuda:7", None), ("cuda:3", "0,1"), ("cuda:x", None)):
            assert self.read(monkeypatch, device, visible) is None

    def test_a_cpu_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.read(monkeypatch, "cpu") is None

    def test_without_the_library_it_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert DeviceReader("cuda:0").read() is None


class Source:
    """Glances that were told before."""

    device = "cpu"

    def __init__(self, *glances: Glance) -> None:
        self.left = list(glances)
        self.done = threading.Event()

    def glance(self) -> Glance:
        if len(self.left) == 1:
            self.done.set()
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


class TestSampler:
    def test_each_look_is_one_observation(self) -> None:
        sampler = Sampler(Source(Glance(0.25, 2, 0), Glance(1.0, 3, 9)))  # type: ignore[arg-type]
        sampler.look()
        sampler.look()
        share, waiting = sampler.used_share.values(), sampler.waiting.values()
        assert (share.count, share.total) == (2, 1.25)
        assert dict(share.cumulated())["0.3"] == 1
        assert dict(waiting.cumulated())["0.0"] == 1
        assert sampler.running.values().total == 5

    def test_the_thread_looks_and_ends(self) -> None:
        source = Source(*(Glance(0.5, 1, 1) for _ in range(5)))
        sampler = Sampler(source, 0.001)  # type: ignore[arg-type]
        sampler.start()
        assert source.done.wait(10)
        sampler.stop()
        assert sampler.used_share.values().count >= 4
        assert not sampler._thread.is_alive()

    def test_it_ends_with_the_engine(self) -> None:
        alive = [True, True, False]
        sampler = Sampler(Source(Glance(0, 0, 0)), 0.001, lambda: alive.pop(0))  # type: ignore[arg-type]
        sampler.start()
        sampler._thread.join(10)
        assert not sampler._thread.is_alive()
        assert sampler.used_share.values().count == 2


class TestExporter:
    def test_bad_settings_are_refused(self) -> None:
        pytest.importorskip("prometheus_client", reason="needs the observe extra")
        source: Any = Source(Glance(0, 0, 0))
        for top_k in (0, 101):
            with pytest.raises(InvalidArgument, match=f"top_k = {top_k}"):
                Exporter(source, top_k=top_k)
        with pytest.raises(InvalidArgument, match="at most 8"):
            Exporter(source, tags=[str(i) for i in range(9)])
        with pytest.raises(InvalidArgument, match="none were taken before"):
            Exporter(source).page(None)

    def test_without_the_extra_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MissingExtra, match=r"pip install 'kvcatch\[observe\]'"):
            Exporter(Source(Glance(0, 0, 0)))  # type: ignore[arg-type]
