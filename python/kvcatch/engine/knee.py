"""Where TTFT begins to climb as the pool fills: a load that finds it. The fit is the observer's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.engine.sampling import SamplingParams
from kvcatch.errors import InvalidArgument
from kvcatch.observe.changepoint import Knee, KneePoint, fit_knee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcatch.engine.engine import Engine
    from kvcatch.engine.request import Request

__all__ = ["Knee", "KneeLevel", "KneeLoad", "KneePoint", "find_knee", "fit_knee"]


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
