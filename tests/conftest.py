"""Kernels run on the GPU where there is one that they run on, and on the CPU in Triton's interpreter elsewhere."""

from tests.support import devices

devices.prepare()  # before anything imports Triton, which reads the environment while it defines kernels
