"""What the engine notes and tells: exact numbers on the toy engine, and the page of a server under load."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the engine extra")
pytest.importorskip("prometheus_client", reason="needs the observe extra")
pytest.importorskip("fastapi", reason="needs the serve extra")

from exporter_make import values_of
from serving import Served, start
from toy import GREEDY, make, run

from kvcatch.engine.engine import Rejected
from kvcatch.engine.governor import GovernorConfig, QueueFull
from kvcatch.engine.sampling import SamplingParams
from kvcatch.laws import GATES
from kvcatch.observe import Reader
from kvcatch.observe.exporter.exporter import Exporter
from kvcatch.serve.metrics import NOT_LOOKED_AT, EngineSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def tokens(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


class TestLatency:
    def test_times_of_one_request(self) -> None:
        engine = make()
        clock = [0.0]
        engine.clock = lambda: clock[0]
        engine.add([1] * 10, tokens(4))
        clock[0] = 2.0
        # Admitted at 2, tokens at 3, 4, 6 and 9.
        taken = iter([2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 9.0, 9.0])
        engine.clock = taken.__next__
        run(engine)
        times = engine.times.values()
        assert (times["queue"].count, times["queue"].total) == (1, 2.0)
        assert (times["ttft"].count, times["ttft"].total) == (1, 3.0)
        assert (times["itl"].count, times["itl"].total) == (3, 6.0)
        assert (times["e2e"].count, times["e2e"].total) == (1, 9.0)
        assert (times["tpot"].count, times["tpot"].total) == (1, 2.0)
        lengths = {name: times[f"{name}_tokens"].total for name in ("prompt", "output", "asked")}
        assert lengths == {"prompt": 10, "output": 4, "asked": 4}

    def test_branches_share_a_first_token_and_have_their_own_gaps(self) -> None:
        engine = make()
        engine.add([1] * 6, SamplingParams(temperature=0, max_tokens=5, n=3))
        run(engine)
        times = engine.times.values()
        assert (times["ttft"].count, times["itl"].count, times["e2e"].count) == (1, 12, 1)
        assert times["output_tokens"].total == 15

    def test_one_that_is_cut_off_has_no_end(self) -> None:
        engine = make()
        engine.add([1] * 6, tokens(30), request_id="gone")
        for _ in range(4):
            engine.step()
        engine.abort("gone")
        times = engine.times.values()
        assert (times["ttft"].count, times["e2e"].count, times["output_tokens"].count) == (1, 0, 0)

    def test_a_preemption_is_a_gap_like_any_other(self) -> None:
        engine = make(num_blocks=30, law="first_chunk")
        for number in range(6):
            engine.add([number] * 10, tokens(20))
        run(engine)
        assert engine.scheduler.preemptions["recompute"] > 0
        times = engine.times.values()
        # One first token each, however often it was computed again.
        assert (times["ttft"].count, times["itl"].count) == (6, 6 * 19)


class TestCounters:
    def test_tokens_of_steps_and_of_the_prefix_cache(self) -> None:
        engine = make()
        engine.add([7] * 12, tokens(3))
        run(engine)
        engine.add([7] * 12, tokens(3))
        run(engine)
        counters = engine.counters
        assert (counters.looked_up_tokens, counters.hit_tokens) == (24, 8)
        # 12 + 2 decodes, then what was not found + 2 decodes.
        assert counters.step_tokens == 14 + (12 - 8) + 2

    def test_without_a_prefix_cache_nothing_is_looked_up(self) -> None:
        engine = make(prefix_cache=False)
        engine.add([7] * 12, tokens(3))
        run(engine)
        assert (engine.counters.looked_up_tokens, engine.counters.hit_tokens) == (0, 0)

    def test_refused_at_the_door(self) -> None:
        engine = make()
        for _ in range(2):
            with pytest.raises(Rejected):
                engine.add([1] * 119, tokens(5))
        assert engine.counters.rejected == {"never_fits": 2}

    def test_turned_away_by_the_governor(self) -> None:
        served = make()
        from kvcatch.engine.engine import Engine

        engine = Engine(served.config, served.runner, governor=GovernorConfig(max_queued=1))
        engine.add([1], tokens(2))
        with pytest.raises(QueueFull):
            engine.add([2], tokens(2))
        assert engine.counters.rejected == {"queue_full": 1}

    def test_tokens_from_the_host(self) -> None:
        engine = make(num_blocks=30, law="first_chunk", preemption="swap", host_blocks=60)
        for number in range(6):
            engine.add([number] * 10, tokens(20))
        run(engine)
        source = EngineSource(engine, "toy").numbers()
        assert engine.scheduler.preemptions["swap"] > 0
        assert 0 < source.hit_tokens["host"] == engine.counters.host_hit_tokens
        assert source.host_blocks == {"free": 60, "used": 0}


class TestNumbers:
    def test_they_are_those_of_the_pool_and_the_queue(self) -> None:
        engine = make(num_blocks=20, max_num_seqs=8, max_model_len=80)
        for number in range(10):
            engine.add([number] * 20, tokens(10), tags={"tenant": f"t{number % 2}"})
        for _ in range(4):
            engine.step()
            numbers = EngineSource(engine, "toy").numbers()
            assert sum(numbers.blocks.values()) == 20
            assert numbers.running + numbers.waiting + numbers.swapped == len(engine.requests)
            assert sum(numbers.waiting_by_gate.values()) == numbers.waiting
            assert set(numbers.waiting_by_gate) == {*GATES, NOT_LOOKED_AT}
        assert engine.scheduler.refusal is not None
        assert numbers.head is not None
        assert numbers.head[0] == "capacity"
        assert numbers.head[1] > numbers.head[2] == numbers.available_blocks
        assert numbers.waiting_by_gate["capacity"] == 1
        assert numbers.oldest_waiting_seconds is not None
        before = numbers.steps
        engine.step()
        assert numbers.steps == before, "a look is a copy"

    def test_of_an_idle_engine(self) -> None:
        source = EngineSource(make(), "toy")
        numbers = source.numbers()
        assert (numbers.head, numbers.oldest_waiting_seconds, numbers.host_blocks) == (
            None,
            None,
            {},
        )
        assert numbers.finished == {"stop": 0, "length": 0, "abort": 0, "rejected": 0}
        assert source.glance().used_share == 0
        # The toy's cache is no KVCache: how many bytes it takes is unknown.
        assert (source.device, source.kv_cache_bytes) == ("cpu", None)

    def test_a_glance_counts_reserved_blocks(self) -> None:
        engine = make(law="worst_case")
        engine.add([1] * 8, tokens(12))
        engine.step()
        glance = EngineSource(engine, "toy").glance()
        # 8 tokens in 2 blocks of 4, 12 more promised: 5 of 40 in the worst case.
        assert glance.used_share == 5 / 40
        assert (glance.running, glance.waiting) == (1, 0)

    def test_holdings_add_up_to_what_is_held(self) -> None:
        engine = make(num_blocks=60)
        for number in range(8):
            engine.add([number] * 9, GREEDY, tags={"tenant": f"t{number % 3}"})
        engine.step()
        source = EngineSource(engine, "toy")
        exporter = Exporter(source, top_k=2)
        values = values_of(exporter.page(source.numbers()).decode())
        held: dict[str, dict[str, float]] = {}
        for (name, labels), value in values.items():
            if name == "kvcatch_holdings_blocks":
                row = dict(labels)
                held.setdefault(row["by"], {})[row["name"]] = value
        active = values["kvcatch_blocks", (("state", "active"),)]
        assert {by: sum(parts.values()) for by, parts in held.items()} == {
            "owner": active,
            "tenant": active,
        }
        assert all(len(parts) == 3 and "other" in parts for parts in held.values())

    def test_a_real_cache_tells_its_bytes(self) -> None:
        from kvcatch.kernels.cache import KVCache
        from kvcatch.kernels.layout import KVLayout

        engine = make()
        layout = KVLayout(2, 1, 8, 4, "float32")
        engine.runner.cache = KVCache(layout, 40, None, device="cuda:1")  # type: ignore[attr-defined]
        source = EngineSource(engine, "toy")
        # Keys and values of 2 layers, 1 head of 8, 4 tokens a block, 4 bytes each, 40 blocks.
        assert (source.device, source.kv_cache_bytes) == ("cuda:1", 2 * 2 * 8 * 4 * 4 * 40)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def begin(**options: Any) -> Served:
        servers.append(start(**options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def ask(served: Served, text: str, limit: int = 8) -> None:
    body = {"model": "toy", "prompt": text, "max_tokens": limit, "ignore_eos": True}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=30).status_code == 200


class TestServed:
    def test_the_page_after_two_requests(self, serve: Callable[..., Served]) -> None:
        served = serve()
        for _ in range(2):
            ask(served, "hello you there")
        answer = httpx.get(f"{served.url}/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        (sample,) = Reader("x").read(answer.content, 1.0)
        assert (sample.started_total, sample.finished_total, sample.e2e_count) == (2, 2, 2)
        assert (sample.generated_tokens_total, sample.itl_count) == (16, 14)
        assert (sample.prefix_query_tokens_total, sample.prefix_hit_tokens_total) == (30, 12)
        assert (sample.running_requests, sample.waiting_requests, sample.active_blocks) == (0, 0, 0)
        assert sample.process_start_seconds is not None
        assert 0 < time.time() - sample.process_start_seconds < 1e6

    def test_a_long_step_does_not_keep_a_scrape_waiting(self, serve: Callable[..., Served]) -> None:
        served = serve()
        ask(served, "hello")
        first = values_of(httpx.get(f"{served.url}/metrics").text)
        served.runner.pause = 4.0
        asking = threading.Thread(target=ask, args=(served, "hello", 1))
        asking.start()
        while not served.engine.requests:
            time.sleep(0.01)
        time.sleep(0.2)
        begin = time.monotonic()
        pages = [values_of(httpx.get(f"{served.url}/metrics").text) for _ in range(2)]
        assert time.monotonic() - begin < 3.5
        served.runner.pause = 0.0
        asking.join(20)
        age = "kvcatch_numbers_age_seconds", ()
        steps = "kvcatch_steps_total", ()
        assert [page[steps] for page in pages] == [first[steps]] * 2
        assert first[age] < pages[0][age] < pages[1][age]
        assert pages[0][age] >= 1.0
        last = values_of(httpx.get(f"{served.url}/metrics").text)
        assert last[steps] > first[steps]
        assert last[age] < 1.0

    def test_many_scrapes_at_once(self, serve: Callable[..., Served]) -> None:
        served = serve()
        found: list[int] = []

        def scrape() -> None:
            with httpx.Client(timeout=30) as client:
                found.extend(client.get(f"{served.url}/metrics").status_code for _ in range(5))

        threads = [threading.Thread(target=scrape) for _ in range(8)]
        threads += [threading.Thread(target=ask, args=(served, "x" * n)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [200] * 40

    def test_without_the_extra_the_page_says_so_and_the_rest_works(
        self, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
        served = serve()
        answer = httpx.get(f"{served.url}/metrics")
        assert answer.status_code == 501
        assert "pip install 'kvcatch[observe]'" in answer.json()["error"]["message"]
        ask(served, "hello")

    def test_sampling_goes_on_beside_the_engine_and_ends_with_it(self) -> None:
        served = start()
        served.runner.pause = 0.05
        ask(served, "hello", 12)
        page = values_of(httpx.get(f"{served.url}/metrics").text)
        assert page["kvcatch_sampled_used_share_count", ()] >= 3
        assert page["kvcatch_sampled_requests_running_sum", ()] >= 1
        served.stop()
        names = "kvcatch-sampler"
        end = time.monotonic() + 10
        mine = [thread for thread in threading.enumerate() if thread.name == names]
        while any(thread.is_alive() for thread in mine) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(thread.is_alive() for thread in mine)
