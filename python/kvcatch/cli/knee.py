"""``kvcatch serve --find-knee``: measure, print, propose a water level."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.table import Table

from kvcatch.cli.common import make_console

if TYPE_CHECKING:
    from kvcatch.engine.engine import Engine
    from kvcatch.engine.knee import Knee, KneeLevel, KneeLoad

__all__ = ["measure_knee"]


def measure_knee(
    engine: Engine,
    *,
    seconds: float,
    prompt_tokens: int | None,
    output_tokens: int | None,
    as_json: bool,
) -> None:
    """Run the load on an idle engine with a line per level on stderr, then print the answer on stdout.

    Raises:
        InvalidArgument: requests of these lengths can never run.
    """
    from kvcatch.engine.knee import KneeLoad, find_knee

    load = KneeLoad.for_engine(
        engine, seconds=seconds, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    notes = make_console(stderr=True)
    notes.print(
        f"requests of {load.prompt_tokens} + about {load.output_tokens} tokens, 1 to "
        f"{load.max_concurrency} at once, for about {load.seconds:g} s"
    )

    def progress(level: KneeLevel) -> None:
        notes.print(
            f"{level.concurrency} at once: {level.utilisation:.0%} of the pool, first token after "
            f"{level.ttft() * 1e3:.0f} ms"
        )

    knee, levels = find_knee(engine, load, progress)
    if as_json:
        _print_json(load, knee, levels)
    else:
        _print(knee, levels)


def _print_json(load: KneeLoad, knee: Knee, levels: list[KneeLevel]) -> None:
    facts = {
        "prompt_tokens": load.prompt_tokens,
        "output_tokens_mean": load.output_tokens,
        "knee": knee.to_dict(),
        "levels": [level.to_dict() for level in levels],
    }
    print(json.dumps(facts, indent=2))  # noqa: T201


def _print(knee: Knee, levels: list[KneeLevel]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("at once", "requests", "pool used", "TTFT median", "TTFT p95", "preemptions"):
        table.add_column(name, justify="right")
    for level in levels:
        table.add_row(
            str(level.concurrency),
            str(len(level.points)),
            f"{level.utilisation:.0%}",
            f"{level.ttft() * 1e3:,.0f} ms",
            f"{level.ttft(0.95) * 1e3:,.0f} ms",
            str(level.preemptions),
        )
    console = make_console()
    console.print(table)
    if knee.utilisation is None or knee.water_level is None:
        console.print(f"no water level proposed: {knee.reason}")
        return
    console.print(
        f"TTFT climbs from {knee.utilisation:.0%} of the pool used (90 % interval {knee.low:.0%} to "
        f"{knee.high:.0%}), x {knee.rise:.1f} to the highest; {knee.num_points} requests"
    )
    console.print(f"proposed: --water-level {knee.water_level:g}")
