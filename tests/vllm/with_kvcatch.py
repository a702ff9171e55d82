"""A pytest plugin (``-p with_kvcatch``) that installs kvcatch before any test of vLLM's is imported.

``KVCATCH_VLLM`` says what is installed. A plugin that refuses would make every test pass for the wrong
reason, so that ends the run.
"""

import os

from kvcatch.vllm import plugin

if os.environ.get("KVCATCH_VLLM"):
    plugin.register()
    if plugin._installed is None:
        raise SystemExit("kvcatch was not installed; see the log line above")
