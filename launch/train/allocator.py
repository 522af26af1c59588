"""torch's allocator on GPUs, set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch 2.11 to 2.13 look; the first is the name of today, the others are older and still
read.
"""


def expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let segments of the allocator grow, unless the user has set that, or CUDA's allocator, which
    has none.

    Without it free memory is in pieces that no large tensor fits into, and a run dies far from the
    GPU's size.
    """
    name = next((name for name in _NAMES if environment.get(name)), _NAMES[0])
    given = environment.get(name, "")
    if "expandable_segments" not in given and "cudaMallocAsync" not in given:
        environment[name] = f"{given},expandable_segments:True".removeprefix(",")
