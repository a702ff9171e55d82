"""kvcatch inside vLLM: a plugin that does nothing until ``KVCATCH_VLLM`` names what it should do.

vLLM loads :func:`register` in each of its processes through the entry point group
``vllm.general_plugins``. See ``docs/vllm.md``.
"""

from kvcatch.vllm.plugin import register, unregister

__all__ = ["register", "unregister"]
