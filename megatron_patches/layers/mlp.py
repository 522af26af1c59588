"""The MLP of a patched layer, which applies the norm before it too, and what it has in common
with experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel

from coat_dist import flow
from coat_dist.patching.classes import Patched

from .attached import Patch, check_uncalled, eager_under_zero3, wait_for_fc1
from .norm import describe
from .residual import Residual


class Activation(NamedTuple):
    """What an MLP or experts compute between their two products."""

    name: str
    """The flow's name of it, found when the model is patched. Functions are told apart by identity,
    and profilers put others in their places while they run.
    """
    function: Any
    """The function that has this name: what ``config.activation_func`` must still be."""
    recompute: bool = False
    """Whether the MLP checkpoints itself, in the layer's place: so the residual's alias leaves
    the checkpoint too.
    """


class NormMLP(Patched):
    """Applies the layer's ``pre_mlp_layernorm``, if any, fc1, the activation and fc2 in one step,
    in FP8.

    ``linear_fc1`` and ``linear_fc2`` hold the weights as before; they are not called, so forward
    hooks on them do not fire.
    """

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
        if self.coat.kind.recompute:
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


def checked_activation(mlp: Any, *functions: Any) -> str:
    """The flow's name of a patched MLP's or expert's activation.

    Args:
        functions: the places where Megatron reads it besides ``mlp.config.activation_func``, by the
            gate.

    Raises:
        ValueError: another function was set since the model was patched.
    """
    for given in (mlp.config.activation_func, *functions):
        if given is not mlp.coat.kind.function:
            name, accepted = (getattr(f, "__name__", f) for f in (given, mlp.coat.kind.function))
            raise ValueError(
                f"activation_func: got {name}, accepted: {accepted}, which it was when the model "
                "was patched; "
                "call unpatch_model first"
            )
    return mlp.coat.kind.name
