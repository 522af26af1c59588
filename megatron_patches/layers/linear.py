"""Linear modules of a patched model. Each replaces the class of a built Megatron module and
touches no parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from coat_dist import flow
from coat_dist.formats import QuantizedTensor

from ..patch.hooks import why_own_forward
from .attached import Patch, check_uncalled, eager_under_zero3
from .norm import describe
from .residual import Residual

__all__ = [
    "FP8RowParallelLinear",
    "InvariantColumnParallelLinear",
    "NormColumnParallelLinear",
    "whole_shape",
    "why_bf16_linear",
    "why_bf16_output_layer",
    "why_not_invariant_bias",
]

_ALIGNMENT = 16
"""FP8 tensor cores take dimensions that are multiples of 16; others would be copied into padding
every time.
"""


class NormColumnParallelLinear(ColumnParallelLinear):
    """``linear_qkv``: applies the layer's ``input_layernorm``, if any, then the column-parallel
    linear in FP8.
    """

    coat_patched = True
    coat: Patch

    def coat_flow_weights(self) -> list[torch.nn.Parameter]:
        """Parameters that only the flow reads, for :mod:`coat_dist.deepspeed.step.fp8_gather`."""
        return [self.weight]

    @eager_under_zero3
    def forward(
        self,
        input_: torch.Tensor,
        heads: flow.Heads | None = None,
        table: flow.RopeTable | None = None,
        residual: Residual | None = None,
        **_: object,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → ``[s, b, out/TP]``, or with ``heads``
        queries, keys and values, rotated by ``table``. Where ``input_`` is ``residual.x``,
        ``residual.alias`` is set.
        """
        norm, tp, settings = None, self.coat.tp_now(self), self.coat.settings
        if self.coat.norm is not None:
            check_uncalled("input_layernorm", self.coat.norm)
            norm = describe(self.coat.norm)
        if heads is not None:
            alias = residual is not None and residual.x is input_
            outs = flow.norm_qkv(
                input_, norm, self.weight, self.bias, heads, table, tp, settings, residual=alias
            )
            if residual is not None and alias:
                *outs, residual.alias = outs  # type: ignore[assignment]
            return tuple(outs), None
        return flow.norm_linear(input_, norm, self.weight, self.bias, tp, settings), None


class FP8RowParallelLinear(RowParallelLinear):
    """``linear_proj``: the row-parallel linear in FP8. The bias, if any, is handed on or added
    in BF16 as before.
    """

    coat_patched = True
    coat: Patch
    coat_flow_weights = NormColumnParallelLinear.coat_flow_weights

    @eager_under_zero3
    def forward(
        self, input_: torch.Tensor, compressed: QuantizedTensor | None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, in/TP]`` → ``[s, b, h]`` (s/TP under sequence parallelism). ``compressed``:
        see flow.linear.
        """
        y = flow.linear(input_, self.weight, self.coat.tp_now(self), self.coat.settings, compressed)
        if self.bias is None or self.skip_bias_add:
            return y, self.bias
        return y + self.bias, None


def whole_shape(weight: Any) -> torch.Size:
    """The shape of a weight, also of one that ZeRO-3 has divided."""
    return getattr(weight, "ds_shape", weight.shape)


def why_bf16_linear(name: str, linear: Any, kind: type[Any], expert: bool = False) -> str | None:
    """Why a linear of Megatron cannot be replaced, or its weight not be used by a patched MLP.

    A subclass of ``kind`` may compute something else. An ``expert`` leaves communication to the
    token dispatcher.
    """
    if type(linear) is not kind:
        return f"{name} class {type(linear).__name__}"
    if (reason := why_own_forward(name, linear)) is not None:
        return reason
    for attribute in ("gather_output", "explicit_expert_comm", "disable_grad_reduce"):
        if not (expert and attribute == "explicit_expert_comm") and getattr(
            linear, attribute, False
        ):
            return f"{name} with {attribute}"
    if not getattr(linear, "input_is_parallel", True):
        return f"{name} with input_is_parallel=False"
    rows, columns = whole_shape(linear.weight)
    if rows % _ALIGNMENT or columns % _ALIGNMENT:
        return f"{name} is {rows} x {columns} a rank, not multiples of {_ALIGNMENT}"
    return None


def why_not_invariant_bias(name: str, linear: Any) -> str | None:
    """Why ``tp_invariant`` cannot have this row-parallel linear."""
    if linear.bias is None:
        return None
    return f"tp_invariant with a bias of {name}, whose gradient is a BF16 sum over a rank's tokens"


class InvariantColumnParallelLinear(ColumnParallelLinear):
    """``output_layer`` with ``tp_invariant``: BF16, with sums that do not depend on the
    tensor-parallel size.
    """

    coat_patched = True
    coat: Patch

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → ``[s, b, out/TP]``, or ``[s, b,
        out]`` where gathered.
        """
        y = flow.invariant_linear(
            input_, self.weight if weight is None else weight, self.coat.tp_now(self)
        )
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, None


def why_bf16_output_layer(output_layer: Any) -> str | None:
    """Why neither ``tp_invariant`` nor the chunked loss can replace an output layer."""
    if type(output_layer) is not ColumnParallelLinear:
        return f"output_layer class {type(output_layer).__name__}"
    if (reason := why_own_forward("output_layer", output_layer)) is not None:
        return reason
    if output_layer.bias is not None:
        return "output_layer has a bias"
    if output_layer.config.defer_embedding_wgrad_compute:
        return "config.defer_embedding_wgrad_compute=True"
    return None
