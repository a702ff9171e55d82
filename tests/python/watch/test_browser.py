"""The page in a real browser: what it shows, that it goes on, and that it fits."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvcatch.watch import Fleet, Rules
from kvcatch.watch.web import WebServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from watch_make import FakeEngine

    Make = Callable[..., FakeEngine]

FAST = Rules(interval_s=0.2, window_s=5, history_s=60, diagnose_s=0.4)
HOSTILE = "<img src=x onerror=alert(1)>"


def until(page: Any, expression: str, bound_s: float = 30.0) -> None:
    """Wait for an expression; the browser's own way is refused by the page's content policy, as it should be."""
    end = time.monotonic() + bound_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never so: {expression}; {page.inner_text('body')[:800]}"
        page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def complaints(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what it complains of: errors, and whatever it asks of other hosts."""
    page = browser.new_page()
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("http://127.0.0.1", "data:"))
            else said.append(f"asks {request.url}")
        ),
    )
    page.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
    yield page, said
    page.close()


def test_the_page_shows_the_verdict_and_the_curves(
    make_engine: Make, complaints: tuple[Any, list[str]]
) -> None:
    page, said = complaints
    good, other = make_engine(), make_engine(model=HOSTILE)
    with WebServer(Fleet.of_urls([good.url, other.url], FAST, timeout_s=2)) as server:
        page.goto(server.url)
        until(
            page,
            "document.getElementById('verdict-gate').textContent.includes('max_num_seqs')",
        )
        for name in ("kv", "waiting", "blocks"):
            assert page.locator(f"#{name}").count() == 1
        until(
            page,
            "[...document.querySelectorAll('#kv path, #waiting path')]"
            ".filter(p => (p.getAttribute('d') || '').length > 10).length >= 2",
        )
        assert page.locator("#rows tr").count() >= 2
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{wide} px wide at {width}"
        assert page.locator("img").count() == 0
        assert said == []
        other.stop()
        until(
            page,
            "document.getElementById('rows').textContent.toLowerCase().match(/refused|unreachable|no answer/)",
        )
        before = good.asked
        page.wait_for_timeout(1500)
        assert good.asked > before
        assert said == []
    until(page, "!document.getElementById('trouble').hidden")
