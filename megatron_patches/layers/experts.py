"""The experts of a patched layer, those that tokens are routed to and those that all tokens
share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from coat_dist import flow
from coat_dist.config import ActivationConfig

from ..patch.hooks import CALL, why_bf16_hooks
from .attached import Patch, eager_under_zero3, wait_for_fc1
from .grouped import GROUPED, why_bf16_grouped
from .mlp import NormMLP, checked_activation, why_bf16_products

__all__ = [
    "ExpertMLP",
    "SharedExperts",
    "has_experts",
    "why_bf16_experts",
    "why_bf16_shared_experts",
]


class ExpertMLP(MLP):
    """One expert: fc1, the activation and fc2 in FP8. The norm comes before the router and stays as
    it is.

    Experts that are split over ranks leave communication to Megatron's token dispatcher: each rank
    works by itself.
    """

    coat_patched = True
    coat: Patch
    coat_flow_weights = NormMLP.coat_flow_weights

    @eager_under_zero3
    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[tokens, h]`` → the same, times the router's ``per_token_scale`` ``[tokens]``; any
        number of tokens.

        Megatron multiplies the activation by it, before fc2. Here the output is multiplied: the
        same but for rounding. As in Megatron, fc2's bias is returned if there is no scale;
        otherwise it is scaled and added.
        """
        before_fc2 = wait_for_fc1(self)
        y = flow.mlp(
            hidden_states,
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            checked_activation(self, self.activation_func),
            self.coat.tp_now(self.linear_fc1),
            self.coat.settings,
            self.linear_fc1.bias,
            before_fc2,
        )
        bias = self.linear_fc2.bias
        if per_token_scale is None:
            return y, bias
        y = flow.scale_rows(y, per_token_scale, self.coat.settings)
        if bias is not None:
            y = y + (bias * per_token_scale.unsqueeze(-1)).to(y.dtype)
        return y, None


class SharedExperts(SharedExpertMLP, ExpertMLP):
    """Megatron's shared experts, whose ``forward`` calls that of an MLP (:class:`ExpertMLP`) and
    applies their gate.
    """

    coat_patched = True


def has_experts(layer: Any) -> bool:
    """Whether the MLP of a ``TransformerLayer`` is a mixture of experts, of the class that is
    known here.
    """
    return type(getattr(layer, "mlp", None)) is MoELayer


def why_bf16_experts(layer: Any, settings: ActivationConfig) -> str | None:
    """Why the experts of a ``TransformerLayer``, all of them together, cannot become
    :class:`ExpertMLP`, or what ``grouped.py`` has for grouped products.
    """
    experts = layer.mlp.experts
    if type(experts) in GROUPED:
        return why_bf16_grouped(experts, settings)
    if type(experts) is not SequentialMLP:
        return f"experts class {type(experts).__name__}"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    for expert in experts.local_experts:
        if type(expert) is not MLP:
            return f"expert class {type(expert).__name__}"
        if (reason := why_bf16_products(expert, expert=True)) is not None:
            return reason
    return why_bf16_hooks(
        layer, _hooked(f"mlp.experts.local_experts.{i}" for i in range(len(experts.local_experts)))
    )


def why_bf16_shared_experts(layer: Any, settings: ActivationConfig) -> str | None:
    """Why the shared experts of a ``TransformerLayer`` that has some cannot become
    :class:`SharedExperts`.
    """
    shared = layer.mlp.shared_experts
    if type(shared) is not SharedExpertMLP:
        return f"shared experts class {type(shared).__name__}"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    if shared.config.moe_shared_expert_overlap:
        return "config.moe_shared_expert_overlap=True"
    return why_bf16_products(shared) or why_bf16_hooks(layer, _hooked(["mlp.shared_experts"]))


def _hooked(mlps: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What a patch changes for hooks: fc1 and fc2 are not called."""
    return {f"{mlp}.{fc}": CALL for mlp in mlps for fc in ("linear_fc1", "linear_fc2")}
