"""Linear modules of a patched model. Each replaces the class of a built Megatron module and touches no parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import nn
from torch.distributed.tensor import DTensor

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.formats import QuantizedTensor

from .norm import describe
from .residual import Residual

__all__ = ["FP8RowParallelLinear", "InvariantColumnParallelLinear", "NormColumnParallelLinear", "Patch", "check_whole"]


@dataclass(frozen=True)
class Patch:
    """What a patched module needs besides its own attributes; kept as its ``coat`` attribute.

    The norm is held here, out of ``nn.Module``'s sight, so that it stays registered under its own layer only.
    """

    settings: ActivationConfig
    tp: flow.TensorParallel
    """As it was when the model was patched; a forward pass asks :meth:`tp_now`."""
    norm: nn.Module | None = None
    activation: str = ""
    """Of an MLP, the flow's name of its activation, found when the model is patched. Functions are told apart by
    identity, and profilers put others in their places while they run."""
    function: Any = None
    """The function that has this name: what ``config.activation_func`` must still be."""
    residual: bool = False
    """Whether the block's output carries its :class:`~megatron_patches.residual.Residual`."""
    recompute: bool = False
    """Whether the MLP checkpoints itself, in the layer's place: so the residual's alias leaves the checkpoint too."""

    def tp_now(self, linear: Any) -> flow.TensorParallel:
        """``tp`` with the sequence parallelism that ``linear``, one of Megatron's, has at this moment.

        Megatron's ``set_model_to_sequence_parallel`` switches that flag on built models, and so does ``GPTModel``
        around an output layer that is asked for the last token's logits only.
        """
        return self.tp.with_sequence_parallel(linear.sequence_parallel)


def check_whole(name: str, module: nn.Module) -> None:
    """For modules whose parameters are used without calling them.

    Raises:
        ValueError: ``fully_shard`` is around the module alone, and gathers its parameters only when it is called.
    """
    if isinstance(module.weight, DTensor):
        raise ValueError(
            f"{name}: got fully_shard on this module alone, accepted: fully_shard on the whole layer (a patched block "
            "uses these parameters outside of the module that holds them)"
        )


class NormColumnParallelLinear(ColumnParallelLinear):
    """``linear_qkv``: applies the layer's ``input_layernorm`` to its input, then the column-parallel linear in FP8."""

    coat_patched = True
    coat: Patch

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        heads: flow.Heads | None = None,
        table: flow.RopeTable | None = None,
        residual: Residual | None = None,
        **_: object,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], None]:
        """``[s, b, h]`` (s/TP under sequence parallelism) → ``[s, b, out/TP]``, or with ``heads`` queries, keys and
        values, rotated by ``table``. ``residual`` gets its alias where ``input_`` is its x."""
        if weight is not None or runtime_gather_output:
            raise ValueError("linear_qkv: got weight or runtime_gather_output, accepted: neither in a patched layer")
        assert self.coat.norm is not None
        check_whole("input_layernorm", self.coat.norm)
        norm, tp, settings = describe(self.coat.norm), self.coat.tp_now(self), self.coat.settings
        if heads is not None:
            alias = residual is not None and residual.x is input_
            outs = flow.norm_qkv(input_, norm, self.weight, self.bias, heads, table, tp, settings, residual=alias)
            if residual is not None and alias:
                *outs, residual.alias = outs  # type: ignore[assignment]
            return tuple(outs), None
        return flow.norm_linear(input_, norm, self.weight, self.bias, tp, settings), None


class FP8RowParallelLinear(RowParallelLinear):
    """``linear_proj``: the row-parallel linear in FP8. The bias, if any, is handed on or added in BF16 as before."""

    coat_patched = True
    coat: Patch

    def forward(
        self, input_: torch.Tensor, compressed: QuantizedTensor | None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, in/TP]`` → ``[s, b, h]`` (s/TP under sequence parallelism). ``compressed``: see flow.linear."""
        y = flow.linear(input_, self.weight, self.coat.tp_now(self), self.coat.settings, compressed)
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
        y = flow.invariant_linear(input_, self.weight if weight is None else weight, self.coat.tp_now(self))
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, None
