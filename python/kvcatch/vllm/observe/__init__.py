"""What vLLM's engine core knows and never says: who is refused by which gate, and who holds the blocks.

``install`` is called by the plugin where the switch ``observe`` is on. Nothing here raises into vLLM:
a hook that fails is logged once and counted, and vLLM goes on.
"""

from kvcatch.vllm.observe.install import install, uninstall

__all__ = ["install", "uninstall"]
