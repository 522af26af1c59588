"""Cached FP8 weights (``coat.activation.weights`` "cached") are dropped whenever DeepSpeed has changed the weights.

DeepSpeed writes weights through flat buffers, which leaves no trace in the parameters: a cache that looks at them alone
would keep old codes (``flow/weights.py``).
"""

from __future__ import annotations

from typing import Any

from ...flow.weights import invalidate_after, invalidate_weights

__all__ = ["drop_when_weights_change"]


def drop_when_weights_change(engine: Any) -> None:
    """Drop the cache now, since DeepSpeed has just broadcast the weights, and after each call that writes them."""
    invalidate_weights()
    invalidate_after(engine, "load_checkpoint", "load_module_state_dict")
    invalidate_after(engine.optimizer, "step", "load_state_dict", "update_lp_params")
