"""The HTML report of a bench: one file with tables and inline SVG plots, nothing loaded."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch._core import __version__
from kvcatch.bench import CACHE_COLUMNS, PLACEMENT_COLUMNS, BenchResult, Column
from kvcatch.errors import MissingExtra
from kvcatch.workload.measure import bucket_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcatch.workload.replay import ReplayResult

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7a6a00", "#555555")

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2530; background: #fff;
       max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.lead, figcaption, .note { color: #55606e; } .note { border-left: 3px solid #e69f00; padding-left:
.8rem; } .scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric:
tabular-nums; width: 100%; } th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px
solid #e3e7ec; white-space: nowrap; } th:first-child, td:first-child { text-align: left; } th {
color: #55606e; font-weight: 600; } figure { margin: 1rem 0 2rem; } figure svg { width: 100%;
height: auto; } dt { font-weight: 600; float: left; clear: left; width: 8rem; } dd { margin-left:
8.5rem; }
"""


def require_report() -> None:
    """Raise MissingExtra unless what the report needs is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "the HTML report needs matplotlib: pip install kvcatch[report]"
        ) from error


def html_report(result: BenchResult) -> str:
    """The whole report as one HTML document.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require_report()
    workload, config = result.workload, result.config
    parts = [
        f"<h1>kvcatch bench: {escape(workload.name)}</h1>",
        f'<p class="lead">{len(workload):,} requests, {workload.prompt_tokens:,} prompt tokens, '
        f"{workload.output_tokens:,} output tokens. {config.num_blocks:,} blocks of "
        f"{config.block_size} tokens, {config.settings.max_num_seqs} sequences at once, order "
        f"{escape(str(config.settings.order))}, watermark {config.settings.watermark:g}. "
        f"kvcatch {escape(__version__)}.</p>",
    ]
    notes = list(workload.notes)
    if not result.is_complete:
        notes.append("interrupted: not every policy was run")
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    parts += ["<h2>Placement</h2>", _table(result, PLACEMENT_COLUMNS)]
    parts += ["<h2>Cache, queue and cost</h2>", _table(result, CACHE_COLUMNS)]
    parts += [_figure(title, caption, draw, result) for title, caption, draw in _PLOTS]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>kvcatch bench: {escape(workload.name)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _table(result: BenchResult, columns: Sequence[Column]) -> str:
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    rows = "\n".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{escape(column.text(row))}</td>" for column in columns)
        + "</tr>"
        for name, row in result.policies.items()
    )
    words = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>"
        for column in columns
        if column.meaning
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr><th>policy</th>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n<dl>{words}</dl>"
    )


def _figure(
    title: str, caption: str, draw: Callable[[Any, BenchResult], None], result: BenchResult
) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    buffer = io.StringIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        draw(figure, result)
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    words = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<h2>{escape(title)}</h2>\n<figure>{svg}{words}</figure>"


def _colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def _bucket_low(name: str) -> int:
    return int(name.partition("-")[0])


def _draw_runs(figure: Any, result: BenchResult) -> None:
    axes = figure.subplots()
    for position, (name, row) in enumerate(result.policies.items()):
        buckets = row.runs_histogram
        highs = [2 * _bucket_low(bucket) - 1 for bucket in buckets]
        shares = np.cumsum(list(buckets.values())) / max(1, row.finished) * 100
        axes.plot([1, *highs], [0, *shares], marker="o", ms=3, color=_colour(position), label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("runs")
    axes.set_ylabel("% of sequences")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_free_runs(figure: Any, result: BenchResult) -> None:
    from matplotlib.colors import LogNorm

    grids = {name: _free_run_grid(row) for name, row in result.policies.items()}
    tallest = max(grid.shape[0] for grid in grids.values())
    most = max(10.0, *(float(grid.max(initial=1)) for grid in grids.values()))
    all_axes = figure.subplots(1, len(grids), squeeze=False, sharey=True)[0]
    image = None
    for axes, (name, grid) in zip(all_axes, grids.items(), strict=True):
        padded = np.zeros((tallest, grid.shape[1]))
        padded[: grid.shape[0]] = grid
        image = axes.imshow(
            np.ma.masked_equal(padded, 0),
            origin="lower",
            aspect="auto",
            interpolation="none",
            norm=LogNorm(1, most),
            extent=(0, result.policies[name].steps, -0.5, tallest - 0.5),
        )
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", nbins=3)
    marks = range(0, tallest, 2)
    all_axes[0].set_yticks(list(marks), [bucket_name(exponent) for exponent in marks], fontsize=8)
    all_axes[0].set_ylabel("length of the free run (blocks)")
    figure.colorbar(image, ax=list(all_axes), label="free runs")


def _free_run_grid(row: ReplayResult) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Free runs by power-of-two length (rows) and sample (columns)."""
    exponents = [
        _bucket_low(bucket).bit_length() - 1
        for sample in row.samples
        for bucket in sample["free_run_histogram"]
    ]
    grid = np.zeros((max(exponents, default=0) + 1, max(1, len(row.samples))))
    for column, sample in enumerate(row.samples):
        for bucket, runs in sample["free_run_histogram"].items():
            grid[_bucket_low(bucket).bit_length() - 1, column] = runs
    return grid


def _bars(
    figure: Any, result: BenchResult, series: Sequence[tuple[str, str]], label: str, form: str
) -> None:
    axes = figure.subplots()
    places = np.arange(len(result.policies))
    thickness = 0.8 / len(series)
    for position, (key, name) in enumerate(series):
        values = [getattr(row, key) for row in result.policies.values()]
        bars = axes.barh(
            places + position * thickness,
            values,
            thickness * 0.92,
            color=_colour(position),
            label=name,
        )
        axes.bar_label(bars, [format(value, form) for value in values], padding=3, fontsize=8)
    axes.set_yticks(places + thickness * (len(series) - 1) / 2, list(result.policies))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(label)
    if len(series) > 1:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_hits(figure: Any, result: BenchResult) -> None:
    series = (("hit_tokens", "all admissions"), ("first_admission_hit_tokens", "first admission"))
    _bars(figure, result, series, "tokens", ",d")


def _draw_preemptions(figure: Any, result: BenchResult) -> None:
    _bars(figure, result, (("preemptions", "preemptions"),), "sequences preempted", ",d")


def _draw_cost(figure: Any, result: BenchResult) -> None:
    series = (
        ("us_per_decode_token", "create, append, commit, free"),
        ("export_us_per_decode_token", "block tables and slots"),
    )
    _bars(figure, result, series, "µs per decode token", ".2f")


_PLOTS: Sequence[tuple[str, str, Callable[[Any, BenchResult], None]]] = (
    (
        "Runs per sequence",
        "Share of finished sequences with at most so many runs. Further left and up is better.",
        _draw_runs,
    ),
    (
        "Free runs over time",
        "How many runs of clean blocks there are of each length. Long runs (top) are room for "
        "the next prompt; a bright bottom is room in crumbs; white is no clean block at all.",
        _draw_free_runs,
    ),
    ("Hit tokens", "Prompt tokens found in the prefix cache. More is better.", _draw_hits),
    ("Preemptions", "Sequences thrown out and computed again. Fewer is better.", _draw_preemptions),
    ("Cost per token", "Bookkeeping time for each decode token. Less is better.", _draw_cost),
)
