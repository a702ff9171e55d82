"""Threads of the CPU, decided before torch loads.

libgomp reads its environment once, when torch brings it in. After each parallel loop its workers spin, waiting for
the next one (``OMP_WAIT_POLICY`` unset or ``ACTIVE``). With the pool's own threads, a server's or another process on
the same cores, the spinners take the time the work needs: a step of 62 ms was seen to take 1.2 s. ``PASSIVE`` lets
them sleep at once, and then a lone process on idle cores pays for waking them, about 0.1 ms a loop with some hundred
loops a step. ``GOMP_SPINCOUNT`` lies between: they spin for that many looks and sleep then. A batch-8 step took 82 ms
with 0, 63 with 4,000 and 47 with 30,000; beside another process that keeps one of two cores busy 113, 90 and 226. So
whoever runs a model calls :func:`set_threads` first, and what was set is said.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvcatch.errors import InvalidArgument

__all__ = ["Threads", "available_cpus", "set_threads"]

WAIT_POLICY = "PASSIVE"
SPIN_COUNT = 4000
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Threads:
    """What torch computes with.

    Attributes:
        num_threads: Threads of one operation.
        wait_policy: ``OMP_WAIT_POLICY`` as torch saw it, or will.
        late: torch was loaded already, so the policy is what it was then.
        spin_count: ``GOMP_SPINCOUNT``, which goes before the policy; None where it is not set.
    """

    num_threads: int
    wait_policy: str
    late: bool
    spin_count: str | None = None

    def __str__(self) -> str:
        spin = "" if self.spin_count is None else f", GOMP_SPINCOUNT={self.spin_count}"
        late = " (torch was loaded before it could be set)" if self.late else ""
        return f"{self.num_threads} threads, OMP_WAIT_POLICY={self.wait_policy}{spin}{late}"


def available_cpus() -> int:
    """CPUs this process may use: its affinity, capped by the control group's quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cpus, _quota(Path("/sys/fs/cgroup/cpu.max")) or cpus))


def set_threads(num_threads: int | None = None) -> Threads:
    """Choose thread count and wait policy; call it before anything imports torch.

    What the environment already says (``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT``, ``OMP_NUM_THREADS``) is kept, except
    that an explicit ``num_threads`` wins; a stated policy is left without a spin count. Where torch is loaded already
    the count still takes effect, the policy does not.

    Args:
        num_threads: threads of one operation; by default ``OMP_NUM_THREADS``, else every CPU the process may use.

    Raises:
        InvalidArgument: not 1..1024.
    """
    if num_threads is None:
        stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        num_threads = int(stated) if stated.isdecimal() and int(stated) else available_cpus()
    elif isinstance(num_threads, bool) or not 1 <= num_threads <= MAX_THREADS:
        raise InvalidArgument(f"{num_threads} threads: must be within 1..{MAX_THREADS}")
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        policy = os.environ.get("OMP_WAIT_POLICY", "unset")
        return Threads(num_threads, policy, late=True, spin_count=os.environ.get("GOMP_SPINCOUNT"))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = WAIT_POLICY
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    policy = os.environ["OMP_WAIT_POLICY"]
    return Threads(num_threads, policy, late=False, spin_count=os.environ.get("GOMP_SPINCOUNT"))


def _quota(path: Path) -> int | None:
    """Whole CPUs of a control group (version 2), rounded up; None where there is no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()[:2]
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
