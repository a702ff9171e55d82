"""TTFT over utilisation, with the fit and the water level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcatch.observe.changepoint import MIN_POINTS, fit_curve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcatch.observe.knee import KneeReport

__all__ = ["write_knee_plot"]


def write_knee_plot(path: Path, reports: Sequence[KneeReport]) -> None:
    """Draw every replica's points into one file, a panel each; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4 * len(reports)), layout="constrained")
    for axes, report in zip(
        np.ravel(figure.subplots(len(reports), squeeze=False)), reports, strict=True
    ):
        knee, points = report.knee, report.points()
        used = [point.utilisation for point in points]
        axes.scatter(used, [point.ttft for point in points], s=12, alpha=0.5, label="interval")
        if len(points) >= MIN_POINTS and max(used) > min(used) and knee.p_value is not None:
            at = np.linspace(min(used), max(used), 200).tolist()
            axes.plot(at, fit_curve(points, at), color="tab:orange", label="bent fit")
        if knee.low is not None and knee.high is not None:
            axes.axvspan(knee.low, knee.high, color="tab:gray", alpha=0.2, label="90 % interval")
        if knee.water_level is not None:
            axes.axvline(knee.water_level, color="tab:red", label=f"level {knee.water_level:g}")
        axes.set_xlabel("utilisation met on arrival, share of the pool")
        axes.set_ylabel("TTFT, s")
        if points:
            axes.set_yscale("log")
            axes.legend()
        axes.set_title(f"{report.engine} {report.replica}".strip())
    figure.savefig(path)
