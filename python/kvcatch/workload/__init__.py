"""Workloads: trace readers, seeded generators and the closed-loop replay."""

from kvcatch.workload.generators import WORKLOADS, generate
from kvcatch.workload.readers import read_trace
from kvcatch.workload.replay import Order, ReplayResult, ReplaySettings, replay
from kvcatch.workload.request import Request, Workload

__all__ = [
    "WORKLOADS",
    "Order",
    "ReplayResult",
    "ReplaySettings",
    "Request",
    "Workload",
    "generate",
    "read_trace",
    "replay",
]
