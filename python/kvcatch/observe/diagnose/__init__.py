"""From a window of samples to the gate that kept requests out, with evidence, arithmetic and advice.

>>> from kvcatch.observe.diagnose import diagnose
>>> diagnose([]).worst.gate
'not_enough_evidence'
"""

from kvcatch.observe.diagnose.diagnose import diagnose, diagnose_replica
from kvcatch.observe.diagnose.findings import (
    conservation,
    fill_share,
    leak_slope,
    smallest_useful_prefix,
)
from kvcatch.observe.diagnose.verdict import DIAGNOSES, Diagnosis, Evidence, Span, Verdict, runbook

__all__ = [
    "DIAGNOSES",
    "Diagnosis",
    "Evidence",
    "Span",
    "Verdict",
    "conservation",
    "diagnose",
    "diagnose_replica",
    "fill_share",
    "leak_slope",
    "runbook",
    "smallest_useful_prefix",
]
