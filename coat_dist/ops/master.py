"""Master weights divided and joined on their own, for checkpoints and small tensors.

There is no kernel: a step with FP8 moments does both inside its own kernel.
"""

from __future__ import annotations

from ..reference.master import join, split

__all__ = ["join", "split"]
