"""``kvcatch record`` and ``kvcatch replay-metrics``: keep an engine's metrics, and serve them back."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer

from kvcatch.cli.common import Ticker, app, fail, make_console, one_line_errors
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcatch.observe.record import Recorder
    from kvcatch.observe.scrape import Scraper

INSIDE_S = 10.0
"""Between two looks at the plugin's page; the metrics are kept at every interval."""


@app.command()
def record(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL|unix:PATH",
            help="Of the engine, of its metrics page, or of the plugin inside it.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="gzip where it ends in .gz; what is there is replaced.",
        ),
    ],
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long; else until Ctrl-C.", min=0)
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1)
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For an answer.", min=0.1)
    ] = 5.0,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME@VERSION", help="Noted in the recording.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="KVCATCH_TOKEN", help="That the endpoint wants."),
    ] = None,
) -> None:
    """Keep an engine's metrics in a compact recording, for diagnose and replay-metrics.

    A scrape that fails is noted in it, and recording goes on. Ctrl-C or SIGTERM ends it well. From the
    plugin inside vLLM it also keeps, every ten seconds, who is refused and who holds the blocks.

    Example: kvcatch record http://127.0.0.1:8000 -o incident.jsonl.gz --duration 600
    """
    with one_line_errors():
        from kvcatch.observe.limits import EngineVersion
        from kvcatch.observe.scrape import Scraper, metrics_url

        if engine is not None:
            EngineVersion.parse(engine)
        endpoint = metrics_url(url)
        scraper = Scraper(timeout_s=timeout, token=token)
        rows, failed = asyncio.run(_record(scraper, endpoint, output, duration, interval, engine))
        text = f"{rows} rows in {output}, {output.stat().st_size:,} bytes"
        make_console().print(f"{text}; {failed} scrapes failed" if failed else text, soft_wrap=True)


async def _record(
    scraper: Scraper,
    endpoint: str,
    output: Path,
    duration: float | None,
    interval: float,
    engine: str | None,
) -> tuple[int, int]:
    """Rows written, and scrapes that failed."""
    from kvcatch.observe.errors import MetricsError
    from kvcatch.observe.record import Recorder
    from kvcatch.observe.scrape import shown_url

    async with scraper:
        first = await scraper.fetch(endpoint)
        if first.body is None:
            fail(first.error or f"{endpoint}: no answer", 2)
        if engine is None and (version := await scraper.version(endpoint, "vllm")) is not None:
            engine = "vllm@" + ".".join(map(str, version.low or ()))
        start = time.time()
        try:
            with (
                Recorder(output, shown_url(endpoint), start, engine) as recorder,
                Ticker() as ticker,
            ):
                _end_by_sigterm()
                try:
                    recorder.add(0.0, first.body)
                    has_plugin = b"\nkvcatch_vllm_max_num_seqs" in first.body
                    if has_plugin:
                        await _inside(scraper, recorder, endpoint, 0.0)
                    await _loop(
                        scraper,
                        recorder,
                        endpoint,
                        duration,
                        interval,
                        ticker,
                        has_plugin=has_plugin,
                    )
                except asyncio.CancelledError:
                    make_console(stderr=True).print("stopped")
                return recorder.rows, recorder.failed
        except MetricsError as error:
            fail(str(error), 2)
        except OSError as error:
            # What was written before can be read: a recording may break off.
            raise OSError(error.errno, error.strerror, str(output)) from None


def _end_by_sigterm() -> None:
    """From here on SIGTERM ends the recording as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or another thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _inside(scraper: Scraper, recorder: Recorder, endpoint: str, at: float) -> None:
    """Keep what the plugin says; that it did not answer is noted."""
    from kvcatch.observe.errors import MetricsError
    from kvcatch.observe.inside import read_inside
    from kvcatch.observe.scrape import page_url

    page = await scraper.fetch(page_url(endpoint, "/snapshot"))
    try:
        if page.body is None:
            raise MetricsError(page.error or f"{endpoint}: no answer")
        recorder.inside(at, read_inside(page.body, endpoint))
    except MetricsError as error:
        recorder.fail(at, str(error))


async def _loop(
    scraper: Scraper,
    recorder: Recorder,
    endpoint: str,
    duration: float | None,
    interval: float,
    ticker: Ticker,
    *,
    has_plugin: bool,
) -> None:
    from kvcatch.observe.errors import MetricsError

    start, number, told = time.monotonic(), 0, 0.0
    while True:
        number += 1
        due = number * interval
        if duration is not None and due > duration:
            return
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        at = time.monotonic() - start
        page = await scraper.fetch(endpoint)
        failed = f", {recorder.failed:,} scrapes failed" if recorder.failed else ""
        ticker.say(f"{recorder.rows:,} rows{failed}")
        if page.body is None:
            recorder.fail(at, page.error or "no answer")
            continue
        try:
            recorder.add(at, page.body)
        except MetricsError as error:
            recorder.fail(at, str(error))
            continue
        is_last = duration is not None and due + interval > duration
        if has_plugin and (at - told >= INSIDE_S or is_last):
            told = at
            await _inside(scraper, recorder, endpoint, at)


@app.command("replay-metrics")
def replay_metrics(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording, compact or raw.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.", min=0, max=65535)] = 9108,
    speed: Annotated[
        float, typer.Option(metavar="FACTOR", help="Seconds of the recording per second.")
    ] = 1.0,
    loop: Annotated[bool, typer.Option("--loop", help="Begin again at its end.")] = False,
) -> None:
    """Serve a recording as the metrics page it was read from, for dashboards and tests.

    At its end the last page stays. Ctrl-C ends it. A moment whose scrape failed answers 503.

    Example: kvcatch replay-metrics incident.jsonl.gz --port 9108 --speed 10
    """
    with one_line_errors():
        from kvcatch.observe.replay import Replay, make_server

        if not 0 < speed < 1e6:
            raise InvalidArgument(f"speed = {speed}: must be more than 0")
        with Ticker() as ticker:
            ticker.say(f"reading {file}")
            replay = Replay(file, speed=speed, loop=loop)
        server = make_server(replay, host, port)
        shown = f"[{host}]" if ":" in host else host
        made = f"http://{shown}:{server.server_address[1]}/metrics"
        make_console().print(f"{replay.rows} rows, {replay.seconds:,.0f} s, at {made}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()
