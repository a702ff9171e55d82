"""The suite that all backends share, on the GPU: tests/python/kernels/test_backends_write.py."""

from test_backends_write import *  # noqa: F403
