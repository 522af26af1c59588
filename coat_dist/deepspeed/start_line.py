"""One line at start: the optimizer, the bytes a parameter of its states, the blocks in the FP8 flow."""

from __future__ import annotations

import sys
from typing import Any

from ..checkpoint.zero_partitions import base_optimizer, partitions
from ..optim.state import has_remainder
from ..ranks import rank_and_world

__all__ = ["print_start_line"]


def print_start_line(engine: Any) -> None:
    """Print on rank 0, to stderr, what a new engine runs."""
    if rank_and_world()[0] == 0:
        print(f"coat_dist: {_optimizer(engine)}; {_flow(engine.module)}", file=sys.stderr, flush=True)


def _optimizer(engine: Any) -> str:
    if base_optimizer(engine.optimizer) is None:
        basic = getattr(engine, "basic_optimizer", None)
        return "no optimizer, this engine evaluates" if basic is None else f"optimizer {type(basic).__name__}"
    elements, size = 0, 0.0
    for part in partitions(engine.optimizer):
        each = 8.0 if part.group["moments"] == "fp32" else 2 * (1 + 3 / part.group["group_size"])
        elements += part.flat.numel()
        size += part.flat.numel() * (each + 2 * has_remainder(part.group))
    return f"CoatAdamW, {size / max(1, elements):.2f} bytes a parameter of states (AdamW: 8)"


def _flow(model: Any) -> str:
    reports = [vars(m)["coat_patch_report"] for m in model.modules() if "coat_patch_report" in vars(m)]
    patched, left = (sum(len(getattr(report, name)) for report in reports) for name in ("patched", "left"))
    return f"FP8 flow in {patched} of {patched + left} blocks" if patched else "no layers in the FP8 flow"
