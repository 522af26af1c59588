"""What the rules of ``refusal_rules.py`` look at, and what one of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..config import CoatConfig, look_up
from ..optim import CoatAdamW
from ..ranks import rank_and_world

__all__ = ["Facts", "Rule"]


@dataclass(frozen=True)
class Facts:
    """What the rules look at."""

    config: Mapping[str, Any]
    """DeepSpeed's configuration, without what DeepSpeed reads as not given."""
    coat: CoatConfig | None
    optimizer: torch.optim.Optimizer | None
    """An object that is given beside the configuration."""
    tp: int
    cp: int
    pipeline: bool
    mpu: bool

    @property
    def ours(self) -> CoatAdamW | None:
        """The CoatAdamW that is given."""
        return self.optimizer if isinstance(self.optimizer, CoatAdamW) else None

    @property
    def compressed(self) -> bool:
        """The optimizer is a CoatAdamW, given or named in the configuration."""
        return self.ours is not None or self["optimizer.type"] == "CoatAdamW"

    @property
    def flow(self) -> bool:
        """Layers run the FP8 flow."""
        return self.coat is not None and self.coat.activation.enabled

    @property
    def stage(self) -> int:
        return self["zero_optimization.stage"] or 0

    world = property(lambda self: rank_and_world()[1])

    @property
    def bf16(self) -> str:
        """The name of the block that DeepSpeed reads; it passes over the older one beside the newer one."""
        return "bfloat16" if "bfloat16" in self.config and "bf16" not in self.config else "bf16"

    @property
    def half(self) -> str | None:
        """The block that turns 16-bit training on."""
        return next((block for block in (self.bf16, "fp16") if self[block + ".enabled"]), None)

    @property
    def only_evaluates(self) -> bool:
        """Stage 0 with the CoatAdamW that the configuration names: the engine is built without it, to be evaluated."""
        return self.compressed and self.optimizer is None and self.stage == 0 and self.half is not None

    @property
    def why_not_stage_0(self) -> str:
        if self.half == "fp16":
            return "DeepSpeed's optimizer of stage 0 hands out states and weights that nothing here was written for"
        return "stage 0 steps on zero gradients while the engine is built"

    @property
    def remainder(self) -> bool:
        """Master weights are going to be bfloat16 weights and remainders."""
        if not self.compressed:
            return False
        if self.ours is not None:
            kept = self.ours.param_groups[0]["master_weights"]  # all groups: deepspeed/master_weights.py
        else:  # if named in both places, it is refused elsewhere
            kept = self["optimizer.params.master_weights"] or (self.coat and self.coat.optimizer.master_weights)
        return kept == "bf16_remainder"

    @property
    def option(self) -> str:
        """What the user calls it."""
        return f'{"CoatAdamW " if self.ours is not None else "coat.optimizer."}master_weights "bf16_remainder"'

    def __getitem__(self, key: str) -> Any:
        """The configuration's value at a rule's key."""
        return look_up(self.config, key.replace("{bf16}", self.bf16))

    def fill(self, text: str) -> str:
        """A rule's text with these facts for what it has in braces."""
        return text.format(
            bf16=self.bf16,
            half=self.half,
            option=self.option,
            tp=self.tp,
            world=self.world,
            why_not_stage_0=self.why_not_stage_0,
        )


class Rule(NamedTuple):
    """One setting that is refused."""

    key: str
    """Dotted; ``{bf16}`` is the name of DeepSpeed's block."""
    accepted: str
    """What to write instead, and why where that is not plain; facts in braces."""
    refused: Callable[[Facts], object]
