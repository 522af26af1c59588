"""Kernels run on the GPU where there is one that they run on, and on the CPU in Triton's interpreter elsewhere."""

import pytest

from tests.support import devices

devices.prepare()  # before anything imports Triton, which reads the environment while it defines kernels


def pytest_collection_modifyitems(items):
    """Mark as ``long`` what starts processes and what interprets kernels; `make test-fast` leaves both out."""
    for item in items:
        starts = any(hasattr(item.module, name) for name in ("run_ranks", "start_ranks", "Program", "subprocess"))
        interprets = not devices.ON_GPU and {"agreement", "edges", "plain"} & set(item.fixturenames)
        if starts or interprets:
            item.add_marker(pytest.mark.long)
