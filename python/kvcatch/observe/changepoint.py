"""Where TTFT begins to climb over utilisation: a change point with its confidence.

The engine's own measurement and what is read from recordings are fitted by the same code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["MIN_POINTS", "Knee", "KneePoint", "fit_curve", "fit_knee"]

MIN_POINTS: Final = 20
"""Fewer say nothing."""
MIN_SPAN: Final = 0.2
"""Utilisation must have varied by so much."""
MIN_RISE: Final = 1.5
"""TTFT at the highest utilisation over TTFT at the knee: less is no knee."""
MAX_P_VALUE: Final = 0.05
MAX_WIDTH: Final = 0.3
"""A wider interval of the knee proposes nothing."""
CANDIDATES: Final = 41
ROUNDS: Final = 400


@dataclass(frozen=True, slots=True)
class KneePoint:
    """One request of the measurement.

    Attributes:
        utilisation: share of the pool that was active or reserved after the first step it could have entered in:
            those before it have taken by then what had just become free.
        ttft: seconds to its first token.
    """

    utilisation: float
    ttft: float


@dataclass(frozen=True, slots=True)
class Knee:
    """What the points say.

    Attributes:
        utilisation: of the change point; ``None`` where it cannot be told.
        low: 5 % quantile of the change point, which is the water level proposed.
        high: 95 % quantile.
        p_value: how often a straight line with the same scatter looks as bent.
        rise: TTFT at the highest utilisation over TTFT at the change point, by the fit.
        num_points: points that were fitted.
        reason: why it cannot be told; empty where it can.
    """

    utilisation: float | None
    low: float | None
    high: float | None
    p_value: float | None
    rise: float | None
    num_points: int
    reason: str = ""

    @property
    def water_level(self) -> float | None:
        """The level to hold, rounded down to 1 %; ``None`` where it cannot be told."""
        if self.reason or self.low is None:
            return None
        return max(0.01, int(self.low * 100 + 1e-9) / 100)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "water_level": self.water_level}


def fit_knee(points: Sequence[KneePoint], *, seed: int = 0, run_length: int = 1) -> Knee:
    """Fit a bent line to log TTFT over utilisation and say whether the bend is one.

    The model is ``a + b u + c ramp(u)`` by least squares. The ramp is 0 up to ``k``, climbs by one slope from there,
    and is flat again from ``m``, which may be the end: in a closed loop no more than so many requests wait. ``k`` and
    ``m`` come from a grid. A bend counts when

    * its F statistic, the largest over the grid, is beyond that of straight lines whose residuals are those
      of the straight fit with random signs (wild bootstrap: the scatter may grow with utilisation), p <= 0.05;
    * it turns up, and TTFT rises by half or more from there to the highest utilisation;
    * the 90 % interval of ``k``, from the same bootstrap around the bent fit and half a step of the grid wider on
      either side, is not wider than 0.3.

    Args:
        points: one per request.
        seed: of the bootstrap; the same points and seed give the same answer.
        run_length: neighbouring points that share a sign, where points in order of time depend on each other.

    Raises:
        InvalidArgument: a utilisation outside 0..1, a TTFT that is not above 0, a run that is not positive.
    """
    if run_length < 1:
        raise InvalidArgument(f"run_length = {run_length}: must be 1 or more")
    for point in points:
        if not 0 <= point.utilisation <= 1 or not 0 < point.ttft < float("inf"):
            raise InvalidArgument(f"{point}: utilisation must be within 0..1 and ttft above 0")
    count = len(points)

    def unknown(reason: str, **known: float | None) -> Knee:
        fields: dict[str, Any] = dict.fromkeys(("utilisation", "low", "high", "p_value", "rise"))
        return Knee(**{**fields, **known}, num_points=count, reason=reason)

    if count < MIN_POINTS:
        return unknown(f"{count} requests measured: at least {MIN_POINTS} are needed")
    u = np.array([point.utilisation for point in points])
    y = np.log([point.ttft for point in points])
    low, high = (float(edge) for edge in np.quantile(u, (0.02, 0.98)))
    if high - low < MIN_SPAN:
        return unknown(
            f"utilisation stayed between {low:.2f} and {high:.2f}: another limit than the pool "
            "keeps requests out; take fewer blocks or longer requests"
        )
    grid = _grid(u)
    bent = _Bent(u, grid)
    rng = np.random.default_rng(seed)
    signs = rng.choice((-1.0, 1.0), size=(ROUNDS, -(-count // run_length)))
    signs = np.repeat(signs, run_length, axis=1)[:, :count]

    straight = bent.straight(y)
    (statistic,), (best,) = bent.best(y[None])
    null, _ = bent.best(straight + signs * (y - straight))
    p_value = float((1 + (null >= statistic).sum()) / (1 + ROUNDS))
    knee = float(bent.starts[best])
    fitted = bent.fit(y, best)
    top, at = float(u.max()), float(np.exp(bent.value(y, best, knee)))
    rise = float(np.exp(bent.value(y, best, top))) / at
    _, found = bent.best(fitted + signs * (y - fitted))
    first, last = (float(edge) for edge in np.quantile(bent.starts[found], (0.05, 0.95)))
    # A knee between two candidates is found at one of them.
    half = float(grid[1] - grid[0]) / 2
    first, last = max(0.0, first - half), min(1.0, last + half)
    known = {"p_value": p_value, "rise": rise}
    if p_value > MAX_P_VALUE:
        return unknown(f"a straight line explains TTFT as well (p = {p_value:.2f})", **known)
    if bent.turn(y, best) <= 0 or rise < MIN_RISE:
        return unknown(
            f"TTFT does not climb: x {rise:.2f} from {knee:.0%} to {top:.0%} of the pool", **known
        )
    known |= {"utilisation": knee, "low": first, "high": last}
    if last - first > MAX_WIDTH:
        return unknown(f"the bend is somewhere between {first:.0%} and {last:.0%}", **known)
    return unknown("", **known)


def fit_curve(points: Sequence[KneePoint], at: Sequence[float]) -> list[float]:
    """TTFT in seconds of the best bent fit at some utilisations, for plots; ``points`` must vary in utilisation."""
    u = np.array([point.utilisation for point in points])
    y = np.log([point.ttft for point in points])
    bent = _Bent(u, _grid(u))
    _, (best,) = bent.best(y[None])
    return [float(np.exp(bent.value(y, best, value))) for value in at]


def _grid(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Candidates with a tenth of the points, at least 5, on either side."""
    ordered = np.sort(u)
    side = max(5, len(u) // 10)
    return np.linspace(ordered[side], ordered[-side - 1], CANDIDATES)


class _Bent:
    """Least squares for every ramp at once; ``u`` is fixed, ``y`` may be many rows.

    Attributes:
        starts: where each candidate ramp begins.
        ends: where it ends.
    """

    def __init__(self, u: NDArray[np.float64], grid: NDArray[np.float64]) -> None:
        self._u = u
        edges = np.append(grid, max(u.max(), grid[-1]))
        start, end = np.triu_indices(len(edges), 1)
        self.starts, self.ends = edges[start], edges[end]
        self._line, _ = np.linalg.qr(np.stack((np.ones_like(u), u), axis=1))
        ramps = np.clip(u[None], self.starts[:, None], self.ends[:, None])
        rest = ramps - (ramps @ self._line) @ self._line.T
        # A ramp that is a line where the points are adds nothing: its direction stays 0.
        norms = np.linalg.norm(rest, axis=1, keepdims=True)
        self._directions = np.divide(rest, norms, out=np.zeros_like(rest), where=norms > 1e-9)

    def straight(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """The straight fit, [..., points]."""
        fitted: NDArray[np.float64] = (y @ self._line) @ self._line.T
        return fitted

    def best(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The largest F statistic of every row, and the candidate it belongs to."""
        residuals = rows - self.straight(rows)
        total = (residuals**2).sum(axis=1)
        gains = (residuals @ self._directions.T) ** 2
        best = gains.argmax(axis=1)
        gain = gains[np.arange(len(rows)), best]
        left = np.maximum(total - gain, 1e-12 * np.maximum(total, 1e-300))
        return gain / left * (rows.shape[1] - 3), best

    def fit(self, y: NDArray[np.float64], candidate: int) -> NDArray[np.float64]:
        """The bent fit at the points."""
        direction = self._directions[candidate]
        fitted: NDArray[np.float64] = self.straight(y) + (y @ direction) * direction
        return fitted

    def turn(self, y: NDArray[np.float64], candidate: int) -> float:
        """By how much the slope grows where the ramp begins."""
        return float(self._coefficients(y, candidate)[2])

    def value(self, y: NDArray[np.float64], candidate: int, at: float) -> float:
        """The bent fit anywhere."""
        a, b, c = self._coefficients(y, candidate)
        return float(a + b * at + c * self._ramp(np.array(at), candidate))

    def _coefficients(self, y: NDArray[np.float64], candidate: int) -> NDArray[np.float64]:
        ramp = self._ramp(self._u, candidate)
        design = np.stack((np.ones_like(self._u), self._u, ramp), axis=1)
        found, *_ = np.linalg.lstsq(design, y, rcond=None)
        return np.asarray(found, np.float64)

    def _ramp(self, at: NDArray[np.float64], candidate: int) -> NDArray[np.float64]:
        start = self.starts[candidate]
        return np.asarray(np.clip(at, start, self.ends[candidate]) - start, np.float64)
