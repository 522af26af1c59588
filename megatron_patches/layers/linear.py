"""Linear modules of a patched model: Megatron's column- and row-parallel linears in FP8."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from coat_dist import flow
from coat_dist.formats import QuantizedTensor
from coat_dist.patching.classes import Patched

from .attached import Patch, check_uncalled, eager_under_zero3
from .norm import describe
from .residual import Residual


class NormColumnParallelLinear(Patched):
    """``linear_qkv``: applies the layer's ``input_layernorm``, if any, then the column-parallel
    linear in FP8.
    """

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


class FP8RowParallelLinear(Patched):
    """``linear_proj``: the row-parallel linear in FP8. The bias, if any, is handed on or added
    in BF16 as before.
    """

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


class InvariantColumnParallelLinear(Patched):
    """``output_layer`` with ``tp_invariant``: BF16, with sums that do not depend on the
    tensor-parallel size.
    """

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
