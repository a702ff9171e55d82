"""The suite that all backends share, on the GPU: tests/python/kernels/test_backends_attention.py."""

from test_backends_attention import *  # noqa: F403
