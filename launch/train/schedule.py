"""Learning rate as a pure function of the step, so that a restart needs no state of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then cosine, linear or constant."""

    lr: float
    """Peak learning rate, reached at step ``warmup_steps``."""
    min_lr: float = 0.0
    """Learning rate at and after ``decay_steps``."""
    warmup_steps: int = 0
    decay_steps: int = 1
    """Step at which ``min_lr`` is reached, counted from the start of training."""
    kind: Literal["cosine", "linear", "constant"] = "cosine"

    def __call__(self, step: int) -> float:
        """The learning rate of step ``step``, the first being 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        left = 1.0 - min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        share = left if self.kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
        return self.min_lr + (self.lr - self.min_lr) * share
