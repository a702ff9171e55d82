"""The terminal screen, driven by keys at 80 x 24, over live endpoints and over recordings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from watch_make import body

from kvcatch.watch import Fleet, Rules, read_recordings, rows, state
from kvcatch.watch.draw import curve_lines, number, seconds
from kvcatch.watch.fleet import Endpoint
from kvcatch.watch.plot import braille
from kvcatch.watch.screen import WatchApp, picture, svg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.pilot import Pilot
    from watch_make import FakeEngine

    Make = Callable[..., FakeEngine]

FAST = Rules(interval_s=0.1, window_s=5, history_s=60, diagnose_s=0.2)


def shown(app: WatchApp) -> list[str]:
    """What the terminal shows."""
    width, height = app.size
    lines = [strip.text for strip in app.screen._compositor.render_strips()]
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    return lines


def made_fleet(endpoints: int, looks: int = 30, **options: object) -> Fleet:
    """A fleet whose samples are there already, as of a recording of one look a second."""
    fleet = Fleet(Rules(window_s=20, history_s=100))
    for index in range(endpoints):
        endpoint = Endpoint(f"http://host{index}:8000", fleet.rules, fleet.budget)
        for at in range(looks):
            endpoint.read(body(at, **options).encode(), float(at))  # type: ignore[arg-type]
        fleet.endpoints.append(endpoint)
    return fleet


def drive(
    app: WatchApp, steps: Callable[[Pilot[None]], object], size: tuple[int, int] = (80, 24)
) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(pilot)  # type: ignore[misc]

    asyncio.run(run())


def test_everything_is_on_80_by_24() -> None:
    app = WatchApp(made_fleet(3))

    async def steps(pilot: Pilot[None]) -> None:
        text = "\n".join(shown(app))
        assert "3 recordings" in text
        assert "max_num_seqs" in text
        assert "KV 4% = blocks that requests reference, of all blocks but the null block" in text
        assert "waiting 12 = capacity 10 + deferred 2" in text
        assert "blocks: available 960, head at most 126" in text
        assert "its own size unknown" in text
        assert "q quit" in shown(app)[-1]
        row = next(line for line in shown(app) if line.startswith("> "))
        assert row.split()[2:] == ["max_num_seqs", "4%", "4", "12", "20", "500", "ms", "25%"]
        assert any("⠀" < sign <= "⣿" for sign in text)

    drive(app, steps)


def test_keys_choose_scroll_zoom_and_quit() -> None:
    app = WatchApp(made_fleet(12))

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("down", "down")
        assert app.row is not None
        assert app.row.endpoint == "http://host2:8000"
        await pilot.press(*["down"] * 20)
        assert app.row.endpoint == "http://host11:8000"
        assert any(line.startswith("> ") and "host11" in line for line in shown(app))
        await pilot.press("left", "left")
        assert app.at_s == 27.0
        assert "27.0 s of 29.0 s" in shown(app)[0]
        assert app.row.figures["preemptions"] == 20
        await pilot.press("right", "right")
        assert app.at_s is None
        await pilot.press("home")
        assert app.at_s == 0.0
        assert app.row.gate == "not_enough_evidence"
        await pilot.press("shift+right")
        assert app.at_s == 10.0
        await pilot.press("end")
        assert app.at_s is None
        before = app.seconds
        await pilot.press("minus")
        assert app.seconds == 2 * before
        await pilot.press("plus", "plus")
        assert app.seconds == before / 2
        await pilot.press("up")
        assert app.row.endpoint == "http://host10:8000"
        await pilot.press("q")
        assert not app.is_running or app._exit

    drive(app, steps)
    assert app.return_code == 0


def test_ctrl_c_ends_it() -> None:
    app = WatchApp(made_fleet(1))

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+c")

    drive(app, steps)
    assert app.return_code == 0


def test_a_click_chooses_a_row() -> None:
    app = WatchApp(made_fleet(3))

    async def steps(pilot: Pilot[None]) -> None:
        await pilot.click("#fleet", offset=(5, 2))
        assert app.chosen == 1

    drive(app, steps)


@pytest.mark.parametrize("size", [(20, 8), (40, 12), (80, 24), (200, 60)])
def test_any_size_is_drawn(size: tuple[int, int]) -> None:
    app = WatchApp(made_fleet(2, ranks=3))

    async def steps(pilot: Pilot[None]) -> None:
        shown(app)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert any("engine=2" in line or "engine=0" in line for line in shown(app))

    drive(app, steps, size)


def test_signs_that_a_terminal_acts_on_are_not_passed_on() -> None:
    app = WatchApp(made_fleet(1, model="\x1b[31m\x07[bold]evil[/bold]", ranks=2))

    async def steps(pilot: Pilot[None]) -> None:
        assert not any("\x1b" in line or "\x07" in line for line in shown(app))

    drive(app, steps)


def test_live_one_dies_and_the_other_goes_on(make_engine: Make) -> None:
    first, second = make_engine(), make_engine(waiting=2, running=1, usage=0.5)
    fleet = Fleet.of_urls([first.url, second.url], FAST, timeout_s=0.5)
    app = WatchApp(fleet)

    async def until(pilot: Pilot[None], done: Callable[[], bool]) -> None:
        for _ in range(300):
            if done():
                app.redraw()
                await pilot.pause()
                return
            await asyncio.sleep(0.05)
        pytest.fail("not so within 15 s:\n" + "\n".join(shown(app)))

    async def steps(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: all(endpoint.looks >= 8 for endpoint in fleet.endpoints))
        assert "2 endpoints" in shown(app)[0]
        assert "live" in shown(app)[0]
        assert any("max_num_seqs" in line for line in shown(app))
        first.stop()
        await until(pilot, lambda: fleet.endpoints[0].error is not None)
        text = "\n".join(shown(app))
        assert "2 endpoints, 1 unreachable" in text
        assert "unreachable since" in text
        looks = fleet.endpoints[1].looks
        await until(pilot, lambda: fleet.endpoints[1].looks > looks + 5)
        await pilot.press("left", "left", "left")
        assert app.at_s is not None
        assert "s ago; end: live" in shown(app)[0]
        first.start()
        await until(pilot, lambda: fleet.endpoints[0].error is None)
        await pilot.press("end")
        assert "1 restart in view" in "\n".join(shown(app))

    drive(app, steps)


@pytest.mark.parametrize(
    ("name", "at_s", "gate"),
    [
        ("kvfull", 16.0, "capacity"),
        ("seqcap", 8.0, "max_num_seqs"),
        ("headofline", 11.0, "head_of_line"),
    ],
)
def test_real_recordings(recordings: Path, name: str, at_s: float, gate: str) -> None:
    fleet = read_recordings([recordings / f"{name}.jsonl.gz"])
    app = WatchApp(fleet, at_s)

    async def steps(pilot: Pilot[None]) -> None:
        assert app.row is not None
        assert app.row.gate == gate
        assert gate in "\n".join(shown(app))

    drive(app, steps)


def test_the_picture_loads_nothing() -> None:
    drawn = asyncio.run(picture(WatchApp(made_fleet(1)), 0.0))
    assert drawn.startswith("<svg")
    assert "max_num_seqs" in drawn
    assert "url(http" not in drawn
    assert "@font-face" not in drawn
    assert svg is not None


class TestPlot:
    def test_a_level_line(self) -> None:
        import numpy as np

        half = np.full(4, 0.0)
        assert ["".join(sign for sign, _ in line) for line in braille([half], 2, 1, 1.0)] == ["⣀⣀"]
        full = np.full(4, 1.0)
        assert ["".join(sign for sign, _ in line) for line in braille([full], 2, 1, 1.0)] == ["⠉⠉"]

    def test_unknown_is_a_gap(self) -> None:
        import numpy as np

        values = np.array([0.0, np.nan, np.nan, np.nan, 1.0, 1.0])
        drawn = braille([values], 3, 2, 1.0)
        assert ["".join(sign for sign, _ in line) for line in drawn] == ["  ⠉", "⡀  "]
        assert [who for _, who in drawn[1]] == [0, -1, -1]

    def test_a_step_is_joined(self) -> None:
        import numpy as np

        drawn = braille([np.array([0.0, 1.0])], 1, 1, 1.0)
        assert drawn[0][0][0] == chr(0x2800 + 0x40 + 0x08 + 0x10 + 0x20)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "?"),
        (0, "0"),
        (9999, "9999"),
        (12345, "12k"),
        (9_999_000, "9999k"),
        (2e8, "200M"),
        (3e12, "3000G"),
    ],
)
def test_counts_fit(value: float | None, text: str) -> None:
    assert number(value) == text


def test_lengths_of_time() -> None:
    assert [seconds(value) for value in (None, 0.0125, 2.0)] == ["?", "12 ms", "2.0 s"]


HEAD = (
    'kvcatch_num_blocks{{model_name="m"}} 200\nkvcatch_available_blocks{{model_name="m"}} 12\n'
    'kvcatch_blocks{{model_name="m",state="active"}} 68\n'
    'kvcatch_block_size_tokens{{model_name="m"}} 16\nkvcatch_max_model_len_tokens{{model_name="m"}} 3200\n'
    'kvcatch_requests_running{{model_name="m"}} 3\nkvcatch_requests_waiting{{model_name="m"}} 4\n'
    'kvcatch_head_refused{{gate="worst_case",model_name="m"}} 1\n{head}'
)


@pytest.mark.parametrize(
    ("head", "needs", "says"),
    [
        (
            'kvcatch_head_required{model_name="m",unit="blocks"} 62\n',
            62,
            "blocks: available 12, head needs 62",
        ),
        (
            'kvcatch_head_required{model_name="m",unit="sequences"} 1\n',
            None,
            "blocks: available 12, head at most 200",
        ),
        ("", None, "blocks: available 12, head at most 200"),
    ],
)
def test_what_the_head_needs_where_the_engine_says_so(
    head: str, needs: int | None, says: str
) -> None:
    fleet = Fleet(Rules(window_s=20, history_s=100))
    endpoint = Endpoint("http://host:8000", fleet.rules, fleet.budget)
    for at in range(10):
        endpoint.read(HEAD.format(head=head).encode(), float(at))
    fleet.endpoints.append(endpoint)
    (row,) = rows(fleet, 9.0)
    data = row.to_dict()
    assert (data["head_needs_blocks"], data["longest_request_blocks"]) == (needs, 200)
    assert data["gate"] == "worst_case"
    found = state(fleet, 9.0, row.key, 10.0)
    assert set(found["curves"]["head"]) == {needs}
    drawn = [line.plain for line in curve_lines(row, 9.0, 10.0, 100, 25)]
    assert any(line.startswith(says) for line in drawn)
