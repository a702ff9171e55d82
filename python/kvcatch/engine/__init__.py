"""A serving engine small enough to read: continuous batching over the pool, on a real model.

    from kvcatch.engine import LLM, SamplingParams

    LLM().generate("The sky is", SamplingParams(max_tokens=16, temperature=0))[0].text

``scheduler.py`` decides a step (tokens and blocks, no tensors), ``runner.py`` carries it out on the
model, ``engine.py`` is the loop of the two, ``llm.py`` and ``aio.py`` are its faces for one caller and
for many. Importing this needs numpy alone.
"""

from kvcatch.engine.aio import AsyncEngine, EngineDied
from kvcatch.engine.build import build_engine
from kvcatch.engine.config import EngineConfig
from kvcatch.engine.engine import Engine, Rejected
from kvcatch.engine.llm import LLM, GeneratedOutput
from kvcatch.engine.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineDied",
    "GeneratedOutput",
    "Rejected",
    "SamplingParams",
    "build_engine",
]
