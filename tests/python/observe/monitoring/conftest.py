"""A real Prometheus on loopback, with backfilled incidents and live targets."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent / "exporter", HERE.parents[1] / "engine"):
    sys.path.insert(0, str(folder))
