"""The MLP of a patched layer, which applies the norm before it too, and what it has in common
with experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP

from coat_dist import flow
from coat_dist.config import ActivationConfig

from ..patch.hooks import CALL, INPUT_OR_ITS_GRADIENT, OUTPUT, why_bf16_hooks
from .activations import activation_name
from .attached import Patch, check_uncalled, eager_under_zero3, wait_for_fc1
from .linear import whole_shape, why_bf16_linear, why_not_invariant_bias
from .norm import describe, why_bf16_norm
from .residual import Residual

__all__ = ["NormMLP", "checked_activation", "why_bf16_mlp", "why_bf16_products"]

_HOOKS = {
    "pre_mlp_layernorm": OUTPUT,
    "mlp": INPUT_OR_ITS_GRADIENT,  # its input is what was the norm's
    "mlp.linear_fc1": CALL,
    "mlp.linear_fc2": CALL,
}
"""What a patch changes for hooks: the norm hands its input on, fc1 and fc2 are not called."""


class NormMLP(MLP):
    """Applies the layer's ``pre_mlp_layernorm``, if any, fc1, the activation and fc2 in one step,
    in FP8.

    ``linear_fc1`` and ``linear_fc2`` hold the weights as before; they are not called, so forward
    hooks on them do not fire.
    """

    coat_patched = True
    coat: Patch

    def coat_flow_weights(self) -> list[torch.nn.Parameter]:
        """Parameters that only the flow reads, for :mod:`coat_dist.deepspeed.step.fp8_gather`."""
        return [self.linear_fc1.weight, self.linear_fc2.weight]

    @eager_under_zero3
    def forward(
        self, hidden_states: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, h]`` → ``[s, b, h]`` (s/TP on both sides under sequence parallelism), and fc2's
        bias.

        As in Megatron the bias is handed on, to be added with dropout and residual.
        """
        if self.coat.recompute:
            y, alias = tensor_parallel.checkpoint(
                self._norm_mlp, False, hidden_states, self._anchor(hidden_states)
            )
        else:
            y, alias = self._norm_mlp(hidden_states)
        if self.coat.residual:
            Residual(hidden_states, alias).send_with(y)
        bias = self.linear_fc2.bias
        # An alias of the bias: a checkpoint around this module makes what it returns an output of
        # its own. The parameter itself would then no longer be a leaf, and backward would not end.
        return y, None if bias is None else bias.view_as(bias)

    def _anchor(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """An empty input that requires grad, where nothing but parameters inside the checkpoint
        does; else None.

        Without one, the checkpoint's output would take no part in backward. If the parameters
        themselves were inputs, hooks on them (of ZeRO, of DistributedDataParallel) would run twice.
        """
        fc1, norm = self.linear_fc1, self.coat.norm
        of_norm = () if norm is None else norm.parameters(recurse=False)
        inside = fc1.weight, fc1.bias, self.linear_fc2.weight, *of_norm
        if hidden_states.requires_grad or not any(
            p is not None and p.requires_grad for p in inside
        ):
            return None
        return torch.empty(0, requires_grad=True)

    def _norm_mlp(
        self, hidden_states: torch.Tensor, _anchor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output without fc2's bias, and the input's alias, or None where the residual does not
        need it.
        """
        before_fc2 = wait_for_fc1(self)
        fc1, fc2 = self.linear_fc1.weight, self.linear_fc2.weight
        tp, bias = self.coat.tp_now(self.linear_fc1), self.linear_fc1.bias
        activation, settings = checked_activation(self, self.activation_func), self.coat.settings
        if self.coat.norm is None:
            return flow.mlp(
                hidden_states, fc1, fc2, activation, tp, settings, bias, before_fc2
            ), None
        check_uncalled("pre_mlp_layernorm", self.coat.norm)
        norm = describe(self.coat.norm)
        weights = fc1, fc2, activation, tp, settings, bias
        y, alias = flow.norm_mlp(
            hidden_states, norm, *weights, residual=True, before_fc2=before_fc2
        )
        return y, alias if self.coat.residual else None


def why_bf16_mlp(layer: Any, settings: ActivationConfig) -> str | None:
    """Why the MLP of a ``TransformerLayer`` and its norm cannot become :class:`NormMLP`."""
    mlp = layer.mlp
    if type(mlp) is not MLP:
        return f"MLP class {type(mlp).__name__}"
    reason = why_bf16_norm(layer.pre_mlp_layernorm) or why_bf16_products(mlp)
    if reason is None and settings.tp_invariant:
        reason = why_not_invariant_bias("linear_fc2", mlp.linear_fc2)
        if (
            reason is None
            and (width := whole_shape(mlp.linear_fc2.weight)[1]) % settings.group_size
        ):
            reason = (
                f"tp_invariant with {width} FFN elements a rank, no multiple of group_size "
                f"{settings.group_size}"
            )
    return reason or why_bf16_hooks(layer, _HOOKS)


def why_bf16_products(mlp: Any, expert: bool = False) -> str | None:
    """Why fc1, the activation and fc2 of an MLP or expert cannot run the flow."""
    reason = why_bf16_linear("linear_fc1", mlp.linear_fc1, ColumnParallelLinear, expert)
    reason = reason or why_bf16_linear("linear_fc2", mlp.linear_fc2, RowParallelLinear, expert)
    if reason is not None:
        return reason
    try:
        activation_name(mlp.config)
    except ValueError as problem:
        return str(problem)
    # Megatron reads the one or the other, by the gate.
    if mlp.activation_func is not mlp.config.activation_func:
        return "an activation_func that is not config.activation_func"
    return None


def checked_activation(mlp: Any, *functions: Any) -> str:
    """The flow's name of a patched MLP's or expert's activation.

    Args:
        functions: the places where Megatron reads it besides ``mlp.config.activation_func``, by the
            gate.

    Raises:
        ValueError: another function was set since the model was patched.
    """
    for given in (mlp.config.activation_func, *functions):
        if given is not mlp.coat.function:
            name, accepted = (getattr(f, "__name__", f) for f in (given, mlp.coat.function))
            raise ValueError(
                f"activation_func: got {name}, accepted: {accepted}, which it was when the model "
                "was patched; "
                "call unpatch_model first"
            )
    return mlp.coat.activation
