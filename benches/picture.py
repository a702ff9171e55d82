"""Draw the README's picture from what `kvcatch bench --json` measured.

    kvcatch bench --trace mooncake_conversation.jsonl --requests 300 --num-blocks 60000 --json > bench.json
    python benches/picture.py bench.json docs/runs.svg

Needs the `report` extra (matplotlib).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"queue": "#b0b7c3", "sorted": "#b0b7c3", "buddy": "#b0b7c3", "bitmap": "#2f6fde"}
NOTES = {
    "queue": "vLLM's order",
    "sorted": "SGLang's",
    "buddy": "powers of two",
    "bitmap": "kvcatch",
}


def main(source: Path, target: Path) -> None:
    """Bars of runs per finished sequence (log scale), one for each placement."""
    result = json.loads(source.read_text())
    policies = {name: row for name, row in result["policies"].items() if name in COLOURS}
    names = sorted(policies, key=lambda name: policies[name]["runs_per_sequence"])
    runs = [policies[name]["runs_per_sequence"] for name in names]
    mpl.rcParams["svg.hashsalt"] = "kvcatch"
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure, axes = plt.subplots(figsize=(8.4, 2.5))
    axes.barh(names, runs, color=[COLOURS[name] for name in names], height=0.62)
    axes.set_xscale("log")
    axes.set_xlim(1, max(runs) * 3)
    for place, (name, value) in enumerate(zip(names, runs, strict=True)):
        axes.text(value * 1.06, place, f"{value:,.1f}  {NOTES[name]}", va="center", fontsize=10)
    axes.set_xlabel("runs of consecutive blocks per finished sequence (log scale; fewer is better)")
    axes.set_title(
        "Pieces a sequence lies in: 300 real requests, 60,000 blocks of 16 tokens", fontsize=11
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
