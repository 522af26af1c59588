"""torch's allocator on GPUs, set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["expandable_segments"]

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch 2.11 to 2.13 look; the first is the name of today, the others are older and still read."""


def expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let segments of the allocator grow, unless the user has said whether they should.

    Without it memory that is free lies in pieces that no large tensor fits into, and a run dies far from the GPU's
    size. Other settings that the user has made stay; CUDA's own allocator, which has no segments, is left alone.
    """
    given = [name for name in _NAMES if environment.get(name)]
    if any("expandable_segments" in environment[name] or "cudaMallocAsync" in environment[name] for name in given):
        return
    name = given[0] if given else _NAMES[0]
    before = f"{environment[name]}," if given else ""
    environment[name] = f"{before}expandable_segments:True"
