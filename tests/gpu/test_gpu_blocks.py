"""The suite that all backends share, on the GPU: tests/python/kernels/test_backends_blocks.py."""

from test_backends_blocks import *  # noqa: F403
