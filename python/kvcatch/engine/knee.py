"""Where TTFT begins to climb as the pool fills: a change point with its confidence, and the load that finds it."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvcatch.engine.engine import Engine
    from kvcatch.engine.request import Request

__all__ = ["Knee", "KneeLevel", "KneeLoad", "KneePoint", "find_knee", "fit_knee"]

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


def fit_knee(points: Sequence[KneePoint], *, seed: int = 0) -> Knee:
    """Fit a bent line to log TTFT over utilisation and say whether the bend is one.

    The model is ``a + b u + c ramp(u)`` by least squares. The ramp is 0 up to ``k``, climbs by one slope from there,
    and is flat again from ``m``, which may be the end: in a closed loop no more than so many requests wait. ``k`` and
    ``m`` come from a grid. A bend counts when

    * its F statistic, the largest over the grid, is beyond that of straight lines whose residuals are those
      of the straight fit with random signs (wild bootstrap: the scatter may grow with utilisation), p <= 0.05;
    * it turns up, and TTFT rises by half or more from there to the highest utilisation;
    * the 90 % interval of ``k``, from the same bootstrap around the bent fit, is not wider than 0.3.

    Args:
        points: one per request.
        seed: of the bootstrap; the same points and seed give the same answer.

    Raises:
        InvalidArgument: a utilisation outside 0..1 or a TTFT that is not above 0.
    """
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
    bent = _Bent(u, _grid(u))
    rng = np.random.default_rng(seed)
    signs = rng.choice((-1.0, 1.0), size=(ROUNDS, count))

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


# --- the load --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeLoad:
    """A closed loop of synthetic requests whose concurrency rises.

    All prompts are of one length, so that their TTFTs compare, and of random tokens, so that none finds another's
    blocks; output lengths vary by half about their mean, so that the requests do not end together.

    Attributes:
        prompt_tokens: of every request.
        output_tokens: mean of every request.
        seconds: for all levels together.
        max_concurrency: of the last level.
        seed: of the prompts and lengths.

    Raises:
        InvalidArgument: a value that is not positive.
    """

    prompt_tokens: int
    output_tokens: int
    seconds: float = 120.0
    max_concurrency: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "seconds", "max_concurrency"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} = {getattr(self, name)}: must be above 0")

    @classmethod
    def for_engine(
        cls,
        engine: Engine,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        seconds: float = 120.0,
    ) -> KneeLoad:
        """A load that fills the engine's pool before ``max_num_seqs`` keeps requests out, where that is possible.

        Args:
            engine: it will run on.
            prompt_tokens: ``None``: as many as are left beside the output.
            output_tokens: ``None``: a quarter of what a request may hold.
            seconds: for all levels together.

        Raises:
            InvalidArgument: a request would be longer than ``max_model_len``.
        """
        config = engine.config
        share = -(-config.capacity * 3 // (2 * config.max_num_seqs))
        total = min(config.max_model_len * 4 // 5, max(2 * config.block_size, share))
        output = output_tokens or max(2, total // 4)
        prompt = prompt_tokens or max(1, total - output)
        longest = prompt + output + output // 2
        if longest > config.max_model_len:
            raise InvalidArgument(
                f"prompt {prompt} + output up to {longest - prompt} = {longest} tokens: more than "
                f"max_model_len {config.max_model_len}"
            )
        fit = max(1, config.capacity // (prompt + output))
        most = max(2, min(2 * fit, 2 * config.max_num_seqs))
        return cls(
            prompt_tokens=prompt,
            output_tokens=output,
            seconds=seconds,
            max_concurrency=most,
        )

    def levels(self) -> list[int]:
        """Concurrencies: each about 1.4 times the one before."""
        found = [1]
        while found[-1] < self.max_concurrency:
            found.append(min(self.max_concurrency, max(found[-1] + 1, found[-1] * 7 // 5)))
        return found


@dataclass(slots=True)
class KneeLevel:
    """What one concurrency gave.

    Attributes:
        concurrency: requests under way.
        points: of its requests.
        preemptions: during it.
    """

    concurrency: int
    points: list[KneePoint] = field(default_factory=list)
    preemptions: int = 0

    @property
    def utilisation(self) -> float:
        """Median at arrivals."""
        return float(np.median([point.utilisation for point in self.points]))

    def ttft(self, quantile: float = 0.5) -> float:
        """A quantile of TTFT in seconds."""
        return float(np.quantile([point.ttft for point in self.points], quantile))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "concurrency": self.concurrency,
            "requests": len(self.points),
            "utilisation_median": self.utilisation,
            "ttft_seconds_median": self.ttft(),
            "ttft_seconds_p95": self.ttft(0.95),
            "preemptions": self.preemptions,
        }


def find_knee(
    engine: Engine, load: KneeLoad, progress: Callable[[KneeLevel], None] | None = None
) -> tuple[Knee, list[KneeLevel]]:
    """Put a rising load on an idle engine, without HTTP, and fit the knee.

    The time is split evenly over the levels. What is under way at the end is aborted; of that, requests without
    a first token do not count.

    Args:
        engine: idle; nobody else may use it meanwhile.
        load: what to put on it.
        progress: called after each level that has measured anything by then.

    Raises:
        InvalidArgument: the engine is not idle.
    """
    if not engine.is_idle:
        raise InvalidArgument(f"{engine!r}: must be idle")
    levels = load.levels()
    measured: list[KneeLevel] = []
    loop = _ClosedLoop(engine, load)
    try:
        loop.warm_up()
        start = engine.clock()
        for number, concurrency in enumerate(levels):
            end = start + load.seconds * (number + 1) / len(levels)
            level = loop.run(concurrency, end)
            measured.append(level)
            if level.points and progress is not None:
                progress(level)
    finally:
        for name in list(engine.requests):
            engine.abort(name)
    measured = [level for level in measured if level.points]
    points = [point for level in measured for point in level.points]
    return fit_knee(points, seed=load.seed), measured


@dataclass(slots=True)
class _UnderWay:
    """A request, the utilisation it met once it met one, and the level it arrived in until its TTFT is noted."""

    request: Request
    level: KneeLevel | None
    utilisation: float | None = None


class _ClosedLoop:
    """Keeps a number of requests under way; whenever one ends the next begins."""

    def __init__(self, engine: Engine, load: KneeLoad) -> None:
        self._engine, self._load = engine, load
        self._rng = random.Random(load.seed)
        self._lengths = self._output_lengths()
        self._under_way: list[_UnderWay] = []

    def warm_up(self) -> None:
        """One request of two tokens: the first step of a process is not like the others."""
        request = self._engine.add(self._prompt(), self._params(2))
        while not request.is_finished:
            self._engine.step()

    def run(self, concurrency: int, end: float) -> KneeLevel:
        """One level, until ``end`` on the engine's clock and a request per place; twice as long at most."""
        engine = self._engine
        level = KneeLevel(concurrency)
        before = sum(engine.scheduler.preemptions.values())
        limit = end + max(0.0, end - engine.clock())
        while (now := engine.clock()) < limit:
            if now >= end and len(level.points) >= concurrency:
                break
            while len(self._under_way) < concurrency:
                self._add(level)
            engine.step()
            self._note()
        level.preemptions = sum(engine.scheduler.preemptions.values()) - before
        return level

    def _add(self, level: KneeLevel) -> None:
        request = self._engine.add(self._prompt(), self._params(next(self._lengths)))
        self._under_way.append(_UnderWay(request, level))

    def _note(self) -> None:
        """Each TTFT as soon as it is known, in the level of its arrival; a request that ended makes room."""
        pool = self._engine.pool
        used = min(1.0, (pool.num_active + pool.num_reserved) / pool.num_blocks)
        for one in self._under_way:
            request = one.request
            if one.utilisation is None:
                one.utilisation = used
            if one.level is not None and request.first_token is not None:
                ttft = max(request.first_token - request.arrived, 1e-9)
                one.level.points.append(KneePoint(one.utilisation, ttft))
                one.level = None
        self._under_way = [one for one in self._under_way if not one.request.is_finished]

    def _prompt(self) -> list[int]:
        most = self._engine.runner.vocab_size
        return [self._rng.randrange(most) for _ in range(self._load.prompt_tokens)]

    def _params(self, output: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)

    def _output_lengths(self) -> Iterator[int]:
        mean = self._load.output_tokens
        while True:
            yield self._rng.randint(max(1, mean - mean // 2), mean + mean // 2)
