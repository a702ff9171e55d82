"""Advice from traffic, its effects computed by replay on the pool."""

from kvcatch.advice.advise import Counsel, advise
from kvcatch.advice.answers import SETTINGS, Advice, NotAdvised, Tried
from kvcatch.advice.traffic import Lengths, Traffic, from_metrics, read_traffic
from kvcatch.advice.trial import Deployment, Effect

__all__ = [
    "SETTINGS",
    "Advice",
    "Counsel",
    "Deployment",
    "Effect",
    "Lengths",
    "NotAdvised",
    "Traffic",
    "Tried",
    "advise",
    "from_metrics",
    "read_traffic",
]
