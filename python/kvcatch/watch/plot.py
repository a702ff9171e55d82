"""Curves in a terminal: lines of braille signs, two by four dots each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["braille"]

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot, by column and by row from the top."""


def braille(
    series: Sequence[NDArray[np.float64]], width: int, height: int, top: float
) -> list[list[tuple[str, int]]]:
    """Draw curves from 0 to ``top`` over each other, the first one in front.

    Args:
        series: Two values per sign of width; NaN where nothing is known: nothing is drawn there.
        width: Signs per line.
        height: Lines.
        top: Value of the upper edge; larger ones are drawn there.

    Returns:
        Lines from the top, each of ``width`` signs with the number of the series drawn in it, -1 for none.
    """
    bits = [[0] * width for _ in range(height)]
    owner = [[-1] * width for _ in range(height)]
    dots = 4 * height
    for number in reversed(range(len(series))):
        before = -1
        for at, value in enumerate(series[number][: 2 * width]):
            if np.isnan(value):
                before = -1
                continue
            share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
            dot = round(share * (dots - 1))
            low, high = (dot, dot) if before < 0 else (min(before, dot), max(before, dot))
            if high > low:
                # Join it to the last one without drawing that one's level again.
                low, high = (low + 1, high) if dot == high else (low, high - 1)
            for level in range(low, high + 1):
                line, inside = divmod(dots - 1 - level, 4)
                bits[line][at // 2] |= _DOTS[at % 2][inside]
                owner[line][at // 2] = number
            before = dot
    return [
        [(chr(0x2800 + bit) if bit else " ", who) for bit, who in zip(*line, strict=True)]
        for line in zip(bits, owner, strict=True)
    ]
