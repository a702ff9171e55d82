"""What fits: blocks of the pool, blocks of a request, how many requests at once, the longest one.

from kvcatch.geometry import read_model
from kvcatch.ledger import Gpu, Pool, plan

ledger = plan(read_model("llama-3.1-8b"), Pool(gpus=(Gpu.named("h200"),)), engine="vllm@0.32")
ledger.num_blocks, ledger.max_concurrency, ledger.max_servable_length
"""

from kvcatch.ledger.engines import DEFAULT_ENGINE, ENGINES, Engine
from kvcatch.ledger.gpus import GIB, GPUS, Gpu, parse_bytes
from kvcatch.ledger.ledger import Binding, Ledger, RankLedger
from kvcatch.ledger.lengths import LengthDistribution, prefill_steps
from kvcatch.ledger.memory import Memory
from kvcatch.ledger.plan import Pool, Run, plan
from kvcatch.ledger.report import Figure, figures, to_dict

__all__ = [
    "DEFAULT_ENGINE",
    "ENGINES",
    "GIB",
    "GPUS",
    "Binding",
    "Engine",
    "Figure",
    "Gpu",
    "Ledger",
    "LengthDistribution",
    "Memory",
    "Pool",
    "RankLedger",
    "Run",
    "figures",
    "parse_bytes",
    "plan",
    "prefill_steps",
    "to_dict",
]
