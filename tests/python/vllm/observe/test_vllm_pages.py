"""Holdings, runs, conservation and what Prometheus reads; and kvcatch's commands on a live socket."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from fake_vllm import Request, step
from prometheus_client.parser import text_string_to_metric_families

from kvcatch.observe import Reader
from kvcatch.observe.errors import MetricsError
from kvcatch.observe.inside import read_inside
from kvcatch.vllm.observe.front_end import FrontEndPages, Totals
from kvcatch.vllm.observe.publish import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def busy(observed: Any) -> Any:
    made = observed(num_blocks=101, max_num_seqs=8)
    for name, tokens in (("acme-1", 320), ("zeta-2", 480), ("acme-3", 160), ("big-4", 900)):
        made.scheduler.add_request(Request(name, tokens, max_tokens=2000))
    step(made.scheduler)
    return made


def test_holdings(busy: Any) -> None:
    page = busy.pages.holdings()
    # 320, 480 and 160 tokens are 20, 30 and 10 blocks; each gave a token, so none has grown yet.
    rows = [(item["request"], item["blocks"], item["runs"]) for item in page["holdings"]]
    assert rows == [("zeta-2", 30, 1), ("acme-1", 20, 1), ("acme-3", 10, 1)]
    assert page["blocks"] == {
        "total": 101, "null": 1, "free": 40, "held": 60, "retired": 0, "unaccounted": 0,
    }  # fmt: skip
    assert page["by_tag"]["tenant"] == [
        {"value": "acme", "requests": 2, "blocks": 30},
        {"value": "zeta", "requests": 1, "blocks": 30},
    ]
    assert page["runs"]["free_run_histogram"] == {"32-63": 1}
    assert page["runs"]["largest_free_run"] == 40
    # Blocks 1 to 60 and the null block, in pages of 16: four of seven.
    assert page["pages"] == {"blocks_per_page": 16, "total": 7, "pinned": 4}


def test_scattered_and_shared_blocks(observed: Any) -> None:
    made = observed(num_blocks=41)
    tables = made.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    blocks = made.scheduler.kv_cache_manager.block_pool.blocks
    pool = made.scheduler.kv_cache_manager.block_pool
    wanted = {"a": [0, 3, 4, 5, 9, 8, 20], "b": [3, 4, 30]}  # a null block, a step down, gaps
    for name, ids in wanted.items():
        tables[name] = [blocks[at] for at in ids]
    used = {at for ids in wanted.values() for at in ids if at}
    for at in used:
        pool.free.remove(blocks[at])
    page = made.pages.holdings()
    a, b = page["holdings"]
    assert (a["request"], a["blocks"], a["runs"], a["shared_blocks"]) == ("a", 6, 4, 2)
    assert (b["blocks"], b["runs"], b["shared_blocks"]) == (3, 2, 2)
    assert page["blocks"]["held"] == len(used) == 7
    assert page["blocks"]["unaccounted"] == 0
    # Free: 1-2, 6-7, 10-19, 21-29, 31-40.
    assert page["runs"]["free_run_histogram"] == {"2-3": 2, "8-15": 3}


def test_growth_and_age(busy: Any) -> None:
    now = 1000.0
    busy.observer.clock = lambda: now
    step(busy.scheduler)  # token 321, 481 and 161: each gets a block now
    now = 1007.0
    for item in busy.pages.holdings()["holdings"]:
        assert item["last_growth_seconds_ago"] == 7.0
    assert busy.pages.holdings()["blocks"]["free"] == 37


def test_zombies_and_lost_blocks_at_idle(observed: Any) -> None:
    made = observed(num_blocks=101)
    scheduler, manager = made.scheduler, made.scheduler.kv_cache_manager
    scheduler.add_request(Request("acme-1", 64, max_tokens=1))
    step(scheduler)
    assert made.pages.check_idle() is None
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    tables["ghost"] = manager.block_pool.take(5)
    lost = manager.block_pool.take(3)
    page = made.pages.snapshot()
    law = page["conservation"]
    assert law["is_idle"]
    assert not law["holds"]
    assert [(item["request"], item["blocks"]) for item in law["zombies"]] == [("ghost", 5)]
    assert law["unowned_block_ids"] == sorted(block.block_id for block in lost)
    assert page["blocks"]["unaccounted"] == 3
    line = made.pages.check_idle()
    assert line == (
        "idle, and 8 blocks are not free (held by ghost): "
        "100 usable = 92 free + 5 held + 0 retired + 3 unaccounted"
    )


def test_memory_of_finished_requests_is_given_back(observed: Any) -> None:
    made = observed(num_blocks=101)
    for number in range(500):
        made.scheduler.add_request(Request(f"r{number}", 16, max_tokens=1))
        step(made.scheduler)
    step(made.scheduler)
    assert made.observer.finished == 500
    assert not made.observer.admitted_s
    assert not made.observer.grown_s


def test_metrics_are_prometheus_text_and_read_by_the_adapter(busy: Any) -> None:
    text = busy.pages.metrics().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["kvcatch_vllm_free_blocks"].samples[0].value == 40
    rows = {
        sample.labels["value"]: sample.value
        for sample in families["kvcatch_vllm_tag_blocks"].samples
    }
    assert rows == {"acme": 30, "zeta": 30}
    (sample,) = Reader("socket").read(text, 0.0)
    assert (sample.engine, sample.replica) == ("vllm", "model_name=model,engine=0")
    assert sample.head_gate == "capacity"
    assert (sample.running_requests, sample.waiting_requests) == (3, 1)
    assert (sample.num_blocks, sample.free_blocks, sample.used_blocks) == (101, 40, 60)
    assert sample.kv_usage_share == pytest.approx(0.6)
    assert (sample.max_num_seqs, sample.token_budget_tokens) == (8, 2048)


def test_tags_beyond_the_top_k_are_summed(observed: Any) -> None:
    made = observed(num_blocks=301, max_num_seqs=50)
    for number, name in enumerate(("other", "b", "c", "d", "e", "f")):
        made.scheduler.add_request(Request(f"{name}-{number}", 16 * (10 - number)))
    step(made.scheduler)
    values = made.pages.holdings()["by_tag"]["tenant"]
    # The tenant called "other" and the rest become one row: no series is there twice.
    assert [(item["value"], item["blocks"]) for item in values] == [
        ("b", 9), ("c", 8), ("other", 10 + 7 + 6 + 5),
    ]  # fmt: skip
    made.pages.metrics()
    Reader("socket").read(made.pages.metrics(), 0.0)


def test_readers_and_steps_at_once(observed: Any) -> None:
    """Copies are of one moment: conservation holds in each, whatever the engine does meanwhile."""
    made = observed(num_blocks=61, max_num_seqs=6)
    stop, wrong, copies = threading.Event(), [], [0]

    def read() -> None:
        while not stop.is_set():
            page = made.pages.snapshot(is_whole=True)
            made.pages.metrics()
            copies[0] += 1
            if page["blocks"]["unaccounted"] or page["conservation"]["zombies"]:
                wrong.append(page)

    reader = threading.Thread(target=read)
    reader.start()
    chance = random.Random(3)
    for number in range(1500):
        if len(made.scheduler.waiting) < 10:
            made.scheduler.add_request(Request(f"r{number}", chance.randint(1, 200), 20))
        if chance.random() < 0.1:
            made.scheduler.finish_requests(chance.choice(sorted(made.scheduler.requests)))
        output = made.scheduler.schedule()
        made.scheduler.update_from_output(output)
    stop.set()
    reader.join(20)
    assert not wrong
    assert copies[0] > 3
    assert made.observer.faults == 0


@pytest.fixture
def socket_of(busy: Any, tmp_path: Path) -> Iterator[str]:
    publisher = Publisher(busy.pages)
    assert publisher.serve_socket(tmp_path / "engine.sock")
    yield f"unix:{tmp_path / 'engine.sock'}"
    publisher.close()


def test_inspect_names_the_refused_and_the_holders(socket_of: str, run_kvcatch: Any) -> None:
    done = run_kvcatch("inspect", socket_of)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "big-4 is refused at capacity: ceil(900 / 16) = 57 blocks > 40 free" in text
    for name in ("zeta-2", "acme-1", "acme-3"):
        assert name in text
    done = run_kvcatch("inspect", socket_of, "--json")
    assert json.loads(done.stdout)["head"]["request"] == "big-4"


def test_inspect_of_a_saved_page(socket_of: str, tmp_path: Path, run_kvcatch: Any) -> None:
    saved = tmp_path / "page.json"
    saved.write_text(run_kvcatch("inspect", socket_of, "--json").stdout)
    done = run_kvcatch("inspect", saved)
    assert done.returncode == 0, done.stderr
    assert "big-4 is refused at capacity" in " ".join(done.stdout.split())
    done = run_kvcatch("diagnose", saved)
    assert done.returncode == 2
    assert "kvcatch inspect" in done.stderr


def test_diagnose_names_them_too(socket_of: str, run_kvcatch: Any) -> None:
    done = run_kvcatch("diagnose", socket_of, "--window", "2", "--interval", "0.4", "--json")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["gate"] == "capacity"
    assert data["engine"] == "vLLM 0.32.0"
    (inside,) = data["inside"].values()
    assert (inside["head"]["request"], inside["head"]["required_blocks"]) == ("big-4", 57)
    done = run_kvcatch("diagnose", socket_of, "--window", "1", "--interval", "0.3")
    text = " ".join(done.stdout.split())
    assert "big-4 is refused at capacity: ceil(900 / 16) = 57 blocks > 40 free" in text
    assert "who holds blocks" in text


def test_record_keeps_what_the_plugin_says(
    socket_of: str, tmp_path: Path, run_kvcatch: Any
) -> None:
    file = tmp_path / "incident.jsonl.gz"
    done = run_kvcatch("record", socket_of, "-o", file, "--duration", "1.5", "--interval", "0.3")
    assert done.returncode == 0, done.stderr
    done = run_kvcatch("diagnose", file)
    text = " ".join(done.stdout.split())
    assert "capacity" in text
    assert "big-4 is refused at capacity: ceil(900 / 16) = 57 blocks > 40 free" in text


def test_sockets_that_do_not_answer(tmp_path: Path, run_kvcatch: Any) -> None:
    for command in (["inspect"], ["diagnose", "--window", "1"]):
        done = run_kvcatch(*command, f"unix:{tmp_path / 'none.sock'}")
        assert done.returncode == 2
        assert "none.sock" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "x"}, "not a page"),
        ({"version": 99}, "version 99"),
        ({"holdings": None}, "holdings is not a list"),
        ({"holdings": [{"request": 3}]}, r"holdings\[0\].request = 3"),
        ({"limits": {}}, "limits.num_blocks"),
        ({"head": {"request": "x"}}, "head.gate"),
        ({"queue": {"running": True}}, "queue.running = True"),
    ],
)
def test_pages_that_are_refused(busy: Any, change: dict[str, Any], why: str) -> None:
    page = busy.pages.snapshot()
    assert read_inside(json.dumps(page), "here")["model"] == "model"
    with pytest.raises(MetricsError, match=why):
        read_inside(json.dumps({**page, **change}), "here")
    with pytest.raises(MetricsError, match="not JSON"):
        read_inside(b"{", "here")


class _Iteration:
    def __init__(self) -> None:
        self.time_to_first_tokens_iter = [0.05, 400.0]
        self.inter_token_latencies_iter = [0.01, 0.02, float("nan")]
        self.finished_requests: list[Any] = []
        self.num_generation_tokens = 5
        self.num_prompt_tokens = 40


def test_front_end_page() -> None:
    pages = FrontEndPages("model")
    totals = pages.engines.setdefault(1, Totals(1))
    totals.record(None, _Iteration())
    totals.record(None, _Iteration())
    totals.record(object(), None)  # a shape it does not know: counted, not raised
    assert totals.faults == 1
    found = pages.page("/metrics")
    assert found is not None
    (sample,) = Reader("socket").read(found[1], 0.0)
    assert sample.ttft_seconds_sum == pytest.approx(2 * 400.05)
    assert (sample.started_total, sample.itl_count) == (4, 4)
    assert sample.generated_tokens_total == 10
    assert (
        b'time_to_first_token_seconds_bucket{engine="1",le="0.05",model_name="model"} 2.0'
        in found[1]
    )
    assert pages.page("/nothing") is None
