"""One adapter per engine: a table of names, and what its numbers mean."""

from kvcatch.observe.engines.dynamo import DYNAMO
from kvcatch.observe.engines.kvcatch import KVCATCH
from kvcatch.observe.engines.lmcache import LMCACHE
from kvcatch.observe.engines.sglang import SGLANG
from kvcatch.observe.engines.table import Family, Metric
from kvcatch.observe.engines.tgi import TGI
from kvcatch.observe.engines.trtllm import TRTLLM
from kvcatch.observe.engines.vllm import VLLM

__all__ = ["FAMILIES", "Family", "Metric", "family_of"]

FAMILIES = {
    family.engine: family for family in (VLLM, KVCATCH, SGLANG, TRTLLM, TGI, DYNAMO, LMCACHE)
}
"""Every adapter by engine; ``kvcatch_vllm_`` is vLLM's, so it comes before ``kvcatch_``."""


def family_of(name: str) -> Family | None:
    """The engine that a series of this name belongs to."""
    for family in FAMILIES.values():
        if name.startswith(family.prefixes):
            return family
    return None
