"""The terminal screen of ``kvcatch watch``. Needs the extra ``watch``."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from kvcatch.errors import MissingExtra
from kvcatch.watch.draw import curve_lines, fleet_lines, verdict_lines
from kvcatch.watch.view import clock, rows, span

try:
    from textual.app import App
    from textual.binding import Binding
    from textual.message import Message
    from textual.widget import Widget
except ImportError as error:
    raise MissingExtra("the screen of watch needs textual: pip install kvcatch[watch]") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.pilot import Pilot

    from kvcatch.watch.fleet import Fleet
    from kvcatch.watch.view import Row

__all__ = ["WatchApp", "picture", "svg"]

HELP = "up/down choose  left/right scroll  home/end  +/- zoom  n next unwell  q quit"
_FONT = re.compile(r"@font-face\s*\{[^}]*\}")


class Lines(Widget):
    """Lines of text made anew at each refresh, for the size there is."""

    class Clicked(Message):
        """Somebody clicked on a line.

        Attributes:
            line: Its number from the top.
        """

        def __init__(self, line: int) -> None:
            super().__init__()
            self.line = line

    def __init__(self, make: Callable[[int, int], list[Text]], name: str) -> None:
        super().__init__(id=name)
        self._make = make

    def render(self) -> Text:
        """The lines."""
        width, height = self.size
        lines = self._make(width, height)[:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n").join(lines)

    def on_click(self, event: events.Click) -> None:
        """Tell the application which line it was."""
        self.post_message(self.Clicked(event.y))


class WatchApp(App[None]):
    """The screen over a fleet.

    Args:
        fleet: What is watched; it is looked at while the screen is up.
        at_s: Where to begin in a recording; None: at its end.

    Attributes:
        fleet: What is watched.
        at_s: The moment shown; None: now, or the end of a recording.
        seconds: How much of the past the curves show.
        chosen: Number of the row shown in full.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "kvcatch watch"
    CSS = """
    Screen { background: $background; overflow: hidden; }
    #title, #help { height: 1; }
    #title { background: $panel; }
    #help { color: $text-muted; }
    #verdict { margin: 1 0 0 0; }
    #curves { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,escape", "quit", "Quit", priority=True),
        Binding("up,k", "choose(-1)", "Up"),
        Binding("down,j", "choose(1)", "Down"),
        Binding("pageup", "choose(-10)", "Page up"),
        Binding("pagedown", "choose(10)", "Page down"),
        Binding("left,h", "scroll_time(-1)", "Earlier"),
        Binding("right,l", "scroll_time(1)", "Later"),
        Binding("shift+left,ctrl+left,H", "scroll_time(-10)", "Much earlier"),
        Binding("shift+right,ctrl+right,L", "scroll_time(10)", "Much later"),
        Binding("home", "first", "First"),
        Binding("end", "last", "Last"),
        Binding("plus,equals_sign", "zoom(0.5)", "Closer"),
        Binding("minus", "zoom(2)", "Wider"),
        Binding("n", "next_unwell", "Next unwell"),
    ]

    def __init__(self, fleet: Fleet, at_s: float | None = None) -> None:
        super().__init__()
        self.fleet, self.at_s = fleet, at_s
        self.chosen = 0
        self._first = 0
        self._found: list[Row] = rows(fleet, at_s)
        whole = span(fleet)
        interval = fleet.rules.interval_s
        self._least_s = 10 * interval
        self.seconds = max(120 * interval, fleet.rules.window_s)
        if not fleet.is_live and whole is not None:
            self.seconds = max(whole[1] - whole[0], self._least_s)
        self._task: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        """The parts of the screen, from the top."""
        yield Lines(self._title, "title")
        yield Lines(self._fleet_lines, "fleet")
        yield Lines(lambda w, h: verdict_lines(self.row, w, h), "verdict")
        yield Lines(lambda w, h: curve_lines(self.row, self.end_s, self.seconds, w, h), "curves")
        yield Lines(lambda w, h: [Text(HELP)], "help")

    @property
    def row(self) -> Row | None:
        """The row shown in full."""
        return self._found[self.chosen] if self._found else None

    @property
    def end_s(self) -> float:
        """Time at the right edge of the curves."""
        if self.at_s is not None:
            return self.at_s
        if self.fleet.is_live:
            return self.fleet.now_s()
        whole = span(self.fleet)
        return whole[1] if whole else 0.0

    def on_mount(self) -> None:
        """Begin to look and to draw."""
        self._arrange()
        if not self.fleet.is_live:
            return
        self._task = asyncio.create_task(self.fleet.run())
        self._task.add_done_callback(self._ended)
        self.set_interval(min(max(self.fleet.rules.interval_s, 0.5), 2.0), self.redraw)
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        except (NotImplementedError, RuntimeError, ValueError):
            return  # Windows, or not the main thread

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._handle_exception(error if isinstance(error, Exception) else Exception(error))

    async def on_unmount(self) -> None:
        """Stop to look."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=2.0)

    def on_resize(self) -> None:
        """Give the parts their shares of the new size."""
        self._arrange()

    def _arrange(self) -> None:
        height = self.size.height
        listed = max(2, min(len(self._found) + 1, height // 4))
        self.query_one("#fleet").styles.height = listed
        self.query_one("#verdict").styles.height = max(3, min(8, (height - listed) // 6))

    def redraw(self) -> None:
        """Draw what is known now."""
        key = self.row.key if self.row else None
        count = len(self._found)
        self._found = rows(self.fleet, self.at_s)
        keys = [row.key for row in self._found]
        if key in keys:
            self.chosen = keys.index(key)
        self.chosen = min(self.chosen, max(len(keys) - 1, 0))
        if len(keys) != count:
            self._arrange()
        for part in self._parts():
            part.refresh()

    def _parts(self) -> Iterator[Lines]:
        yield from self.query(Lines)

    def _title(self, width: int, height: int) -> list[Text]:
        fleet, whole = self.fleet, span(self.fleet)
        down = sum(endpoint.error is not None for endpoint in fleet.endpoints)
        kind = "endpoint" if fleet.is_live else "recording"
        left = f"kvcatch watch  {len(fleet.endpoints)} {kind}{'s' * (len(fleet.endpoints) > 1)}"
        left += f", {down} unreachable" if down else ""
        if fleet.is_live and self.at_s is None:
            right = f"{clock(fleet.now_s())} live"
        elif fleet.is_live:
            right = f"{clock(self.at_s)}, {fleet.now_s() - self.end_s:,.0f} s ago; end: live"
        else:
            right = f"{clock(self.end_s)} of {clock(whole[1])}" if whole else "empty"
        return [Text(f"{left}{right:>{max(width - len(left), 1)}}", "bold", no_wrap=True)]

    def _fleet_lines(self, width: int, height: int) -> list[Text]:
        shown = max(height - 1, 1)
        self._first = min(max(self._first, self.chosen - shown + 1), self.chosen)
        self._first = max(0, min(self._first, len(self._found) - shown))
        return fleet_lines(self._found, self.chosen, self._first, width, height)

    def on_lines_clicked(self, message: Lines.Clicked) -> None:
        """A click on a row chooses it."""
        sender = message._sender
        if getattr(sender, "id", None) == "fleet" and message.line > 0:
            self.chosen = min(self._first + message.line - 1, max(len(self._found) - 1, 0))
            self.redraw()

    def action_choose(self, by: int) -> None:
        """Show the row so many further down."""
        self.chosen = max(0, min(self.chosen + by, len(self._found) - 1))
        self.redraw()

    def action_next_unwell(self) -> None:
        """Show the next row that is not healthy."""
        count = len(self._found)
        for step in range(1, count + 1):
            number = (self.chosen + step) % count
            if not self._found[number].is_well:
                self.chosen = number
                break
        self.redraw()

    def action_scroll_time(self, steps: int) -> None:
        """Go so many steps later; past the end is now, or the end of a recording."""
        whole = span(self.fleet)
        if whole is not None:
            step = max(self.fleet.rules.interval_s, self.seconds / 120)
            at = (whole[1] if self.at_s is None else self.at_s) + steps * step
            self.at_s = None if at >= whole[1] else max(at, whole[0])
        self.redraw()

    def action_first(self) -> None:
        """Go to the first moment that is kept."""
        whole = span(self.fleet)
        self.at_s = whole[0] if whole else None
        self.redraw()

    def action_last(self) -> None:
        """Go to now, or to the end of a recording."""
        self.at_s = None
        self.redraw()

    def action_zoom(self, factor: float) -> None:
        """Show so many times as much of the past."""
        most = max(self.fleet.rules.history_s, self._least_s)
        self.seconds = min(max(self.seconds * factor, self._least_s), most)
        self.redraw()


def svg(app: WatchApp) -> str:
    """The screen as a picture that loads nothing from elsewhere."""
    return _FONT.sub("", app.export_screenshot(title="kvcatch watch"))


async def picture(app: WatchApp, after_s: float, size: tuple[int, int] = (100, 30)) -> str:
    """Run the screen unseen, and draw it: a recording at once, running engines after a while."""
    drawn = ""

    async def draw(pilot: Pilot[object]) -> None:
        nonlocal drawn
        await pilot.pause()
        if app.fleet.is_live:
            await asyncio.sleep(after_s)
            app.redraw()
            await pilot.pause()
        drawn = svg(app)
        app.exit()

    await app.run_async(headless=True, size=size, auto_pilot=draw)
    return drawn
