from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from kvcatch.cli import app
from kvcatch.errors import InvalidArgument, KvcatchError, MissingExtra
from kvcatch.sweep import (
    Grid,
    Row,
    SweepResult,
    _check_reachable,
    run_point,
    sweep,
    sweep_on_ray,
)
from kvcatch.workload import ReplaySettings, Workload, generate, replay

if TYPE_CHECKING:
    from conftest import RunKvcatch

SMALL = Grid(num_blocks=(1200, 2000), laws=("full_prompt", "worst_case"), watermarks=(0.0, 0.05))


@pytest.fixture(scope="module")
def work() -> Workload:
    return generate("chat", 60)


def facts(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.to_dict().items() if name != "seconds"}


class TestGrid:
    def test_all_combinations_once(self) -> None:
        points = SMALL.points()
        # worst_case has no watermark: once per pool.
        assert len(points) == 2 * (2 + 1)
        assert len(set(points)) == len(points)

    def test_equal_memory_at_every_block_size(self) -> None:
        grid = Grid(num_blocks=(), kv_tokens=(32_000,), block_sizes=(16, 64))
        assert [(point.num_blocks, point.block_size) for point in grid.points()] == [
            (2000, 16),
            (500, 64),
        ]

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"num_blocks": ()}, "num_blocks or in kv_tokens"),
            ({"kv_tokens": (1600,)}, "num_blocks or in kv_tokens"),
            ({"num_blocks": (1,)}, "num_blocks = 1"),
            ({"block_sizes": (0,)}, "block_size = 0"),
            ({"policies": ("fifo",)}, "fifo"),
            ({"laws": ("guaranteed_no_evict",)}, "guaranteed_no_evict"),
            ({"watermarks": (float("nan"),)}, "watermark = nan"),
            ({"watermarks": (0.1, 0.1)}, "given twice"),
            ({"max_num_seqs": (0,)}, "max_num_seqs = 0"),
            ({"laws": ()}, "laws is empty"),
            ({"seed": -1}, "seed = -1"),
            ({"num_blocks": tuple(range(2, 30_000))}, "at most 20000"),
        ],
    )
    def test_an_impossible_grid_is_refused(self, fields: dict[str, Any], word: str) -> None:
        with pytest.raises(InvalidArgument, match=word):
            Grid(**fields)


class TestSweep:
    def test_a_row_is_the_replay(self, work: Workload) -> None:
        point = Grid(num_blocks=(1200,)).points()[0]
        row = run_point(work, Grid(num_blocks=(1200,)), point)
        result = replay(work, point.pool(), ReplaySettings())
        assert (row.steps, row.preemptions, row.hit_tokens) == (
            result.steps,
            result.preemptions,
            result.hit_tokens,
        )
        assert 0 < row.utilisation <= 1

    def test_processes_give_the_same_rows_as_one(self, work: Workload) -> None:
        alone = SweepResult.sorted(work, SMALL, list(sweep(work, SMALL, 1)))
        shared = SweepResult.sorted(work, SMALL, list(sweep(work, SMALL, 2)))
        assert alone.is_complete
        assert [facts(row) for row in shared.rows] == [facts(row) for row in alone.rows]

    def test_closing_stops_the_workers(self, work: Workload) -> None:
        rows = sweep(work, SMALL, 2)
        next(rows)
        begin = time.monotonic()
        rows.close()  # type: ignore[attr-defined]
        assert time.monotonic() - begin < 10

    def test_workers(self, work: Workload) -> None:
        with pytest.raises(InvalidArgument, match="workers = 0"):
            sweep(work, SMALL, 0)

    def test_csv_and_json_hold_the_same(self, work: Workload) -> None:
        result = SweepResult.sorted(work, SMALL, list(sweep(work, SMALL, 1)))
        rows = list(csv.DictReader(io.StringIO(result.to_csv())))
        data = result.to_dict()["rows"]
        assert [{name: str(value) for name, value in row.items()} for row in data] == rows

    def test_a_bigger_pool_takes_no_longer(self, work: Workload) -> None:
        grid = Grid(num_blocks=(600, 1200, 2400), laws=("worst_case",))
        steps = [row.steps for row in sweep(work, grid, 1)]
        assert steps == sorted(steps, reverse=True)


class TestRay:
    def test_without_ray_the_extra_is_named(self, work: Workload) -> None:
        try:
            import ray  # noqa: F401
        except ImportError:
            with pytest.raises(MissingExtra, match=r"kvcatch\[ray\]"):
                sweep_on_ray(work, SMALL)
        else:
            pytest.skip("Ray is installed")

    def test_an_address_that_nobody_answers_is_refused_in_seconds(self) -> None:
        with pytest.raises(KvcatchError, match=r"no Ray at 127\.0\.0\.1:1: "):
            _check_reachable("127.0.0.1:1")
        with pytest.raises(InvalidArgument, match="HOST:PORT"):
            _check_reachable("nowhere")

    @pytest.mark.slow
    def test_a_local_cluster_gives_the_same_rows(self, work: Workload) -> None:
        pytest.importorskip("ray", reason="the ray extra is not installed")
        alone = SweepResult.sorted(work, SMALL, list(sweep(work, SMALL, 1)))
        spread = SweepResult.sorted(work, SMALL, list(sweep_on_ray(work, SMALL)))
        assert [facts(row) for row in spread.rows] == [facts(row) for row in alone.rows]


class TestCommand:
    ARGUMENTS = ("sweep", "--requests", 40, "--num-blocks", "800,1600", "--law",
                 "full_prompt,worst_case", "--workers", 1)  # fmt: skip

    def test_table(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*self.ARGUMENTS)
        assert done.returncode == 0, done.stderr
        assert "chat: 40 requests" in done.stdout
        assert done.stdout.count("worst_case") == 2
        assert max(map(len, done.stdout.splitlines())) <= 100

    def test_json_and_csv(self, run_kvcatch: RunKvcatch, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        done = run_kvcatch(*self.ARGUMENTS, "--json", "--csv", out, "--token-budget", 2048)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        assert data["complete"] is True
        assert data["token_budget"] == 2048
        assert len(data["rows"]) == len(out.read_text().splitlines()) - 1 == 4

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (("--num-blocks", "8,x"), "'x': not a whole number"),
            (("--num-blocks", "8,,9"), "an empty value"),
            (("--num-blocks", "-8"), "-8"),
            (("--num-blocks", "8", "--kv-tokens", "800"), "either in num_blocks or in kv_tokens"),
            (("--watermark", "nan"), "nan"),
            (("--watermark", "1"), "below 1"),
            (("--law", "none"), "'none'"),
            (("--policy", "none"), "'none'"),
            (("--order", "lifo"), "lifo"),
            (("--workers", "0"), "workers = 0"),
            (("--workers", "2", "--ray"), "exclude each other"),
            (("--token-budget", "0"), "token_budget = 0"),
            (("--csv", "/nowhere/x.csv"), "/nowhere"),
            (("--trace", "/nowhere/x.csv"), "/nowhere"),
            (("--requests", "0"), "--requests 0"),
            (("--requests", "many"), "--requests = 'many': not a whole number"),
            (("--workload", ""), "--workload ''"),
            (("--num-blocks", ""), "an empty value"),
            (("--policy", ""), "an empty value"),
            (("--law", "worst_case", "--watermark", "0,0.1"), "worst_case has none"),
            (
                ("--law", "worst_case,estimate", "--watermark", "0.1"),
                "worst_case and estimate have none",
            ),
            (("--block-siz", "8"), "--block-siz"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments: tuple[str, ...], word: str) -> None:
        done = CliRunner().invoke(app, ["sweep", *arguments])
        assert done.exit_code == 2, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert word in done.stderr

    @pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
    def test_no_worker_outlives_a_parent_that_is_killed(
        self, kvcatch_command: list[str], end: signal.Signals
    ) -> None:
        marks = ",".join(str(i / 100) for i in range(60))
        process = subprocess.Popen(
            [*kvcatch_command, "sweep", "--requests", "1000", "--num-blocks", "2000",
             "--watermark", marks, "--workers", "2", "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stderr is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            process.kill()
            pytest.skip("no /proc to look into")
        process.stderr.readline()
        workers = [
            pid for pid in children.read_text().split()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]  # fmt: skip
        assert len(workers) == 2
        process.send_signal(end)
        process.wait(timeout=30)
        process.stderr.close()
        for _ in range(200):
            alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
            if not alive:
                break
            time.sleep(0.1)
        assert not alive

    def test_a_csv_that_cannot_be_written_loses_no_row(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*self.ARGUMENTS, "--json", "--csv", "/dev/full")
        assert done.returncode == 2
        assert done.stderr.splitlines() == ["kvcatch: /dev/full: No space left on device"]
        assert len(json.loads(done.stdout)["rows"]) == 4

    def test_a_law_without_a_watermark_is_named(self, run_kvcatch: RunKvcatch) -> None:
        done = run_kvcatch(*self.ARGUMENTS, "--watermark", "0,0.02")
        assert "worst_case: no watermark, so replayed without one" in done.stdout

    @pytest.mark.slow
    def test_ctrl_c_keeps_what_is_done(self, kvcatch_command: list[str], tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        marks = ",".join(str(i / 100) for i in range(60))
        process = subprocess.Popen(
            [*kvcatch_command, "sweep", "--requests", "1000", "--num-blocks", "2000",
             "--watermark", marks, "--workers", "2", "--json", "--csv", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        # Progress comes after 2 s and then every 5: the first that has rows done.
        for line in process.stderr:
            assert " of 60 replays, " in line
            if not line.startswith("kvcatch: 0 of"):
                break
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        data = json.loads(output)
        assert 0 < len(data["rows"]) < 60
        assert data["complete"] is False
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].startswith(
            f"kvcatch: interrupted: {len(data['rows'])} of 60"
        )
        assert len(out.read_text().splitlines()) == len(data["rows"]) + 1
