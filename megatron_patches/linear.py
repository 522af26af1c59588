"""Linear modules of a patched model. Each replaces the class of a built Megatron module and touches no parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import nn

from coat_dist import flow
from coat_dist.config import ActivationConfig

from .norm import describe

__all__ = ["FP8RowParallelLinear", "InvariantColumnParallelLinear", "NormColumnParallelLinear", "Patch"]


@dataclass(frozen=True)
class Patch:
    """What a patched module needs besides its own attributes; kept as its ``coat`` attribute.

    The norm is held here, out of ``nn.Module``'s sight, so that it stays registered under its own layer only.
    """

    settings: ActivationConfig
    tp: flow.TensorParallel
    norm: nn.Module | None = None


class NormColumnParallelLinear(ColumnParallelLinear):
    """``linear_qkv``: applies the layer's ``input_layernorm`` to its input, then the column-parallel linear in FP8."""

    coat_patched = True
    coat: Patch

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → ``[s, b, out/TP]``."""
        if weight is not None or runtime_gather_output:
            raise ValueError("linear_qkv: got weight or runtime_gather_output, accepted: neither in a patched layer")
        assert self.coat.norm is not None
        y = flow.norm_linear(input_, describe(self.coat.norm), self.weight, self.bias, self.coat.tp, self.coat.settings)
        return y, None


class FP8RowParallelLinear(RowParallelLinear):
    """``linear_proj``: the row-parallel linear in FP8. The bias, if any, is handed on or added in BF16 as before."""

    coat_patched = True
    coat: Patch

    def forward(self, input_: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, in/TP]`` → ``[s, b, h]`` (s/TP under sequence parallelism)."""
        y = flow.linear(input_, self.weight, self.coat.tp, self.coat.settings)
        if self.bias is None or self.skip_bias_add:
            return y, self.bias
        return y + self.bias, None


class InvariantColumnParallelLinear(ColumnParallelLinear):
    """``output_layer`` with ``tp_invariant``: BF16, with sums that do not depend on the tensor-parallel size."""

    coat_patched = True
    coat: Patch

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → ``[s, b, out/TP]``, or ``[s, b, out]`` where gathered."""
        y = flow.invariant_linear(input_, self.weight if weight is None else weight, self.coat.tp)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, None
