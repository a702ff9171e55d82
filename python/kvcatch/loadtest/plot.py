"""TTFT by concurrency, with the predicted first refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.loadtest.predict import Prediction
    from kvcatch.loadtest.ramp import Ramp

__all__ = ["check_plot", "write_plot"]

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before any load is made.

    Raises:
        InvalidArgument: a suffix that is no picture's, or no such folder.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"plot {path}: must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"plot {path}: no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("matplotlib is not installed: pip install 'kvcatch[report]'") from error


def write_plot(path: Path, ramp: Ramp, prediction: Prediction | None) -> None:
    """Draw the ramp into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    entered = [(p.number, p.ttft * 1e3) for p in ramp.probes if p.ttft is not None]
    if entered:
        axes.plot(*zip(*entered, strict=True), "o-", label="TTFT of the request added")
    if ramp.first_refusal is not None:
        axes.axvline(ramp.first_refusal, color="tab:red", label="first to wait")
    if prediction is not None and prediction.first_refusal is not None:
        axes.axvline(prediction.first_refusal, color="tab:gray", ls="--", label="predicted")
    axes.set_xlabel("requests under way")
    axes.set_ylabel("TTFT, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
