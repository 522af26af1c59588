"""The experts of a patched layer, those that tokens are routed to and those that all tokens
share.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from coat_dist import flow
from coat_dist.patching.classes import Patched

from .attached import Patch, eager_under_zero3, wait_for_fc1
from .mlp import NormMLP, checked_activation


class ExpertMLP(Patched):
    """One expert: fc1, the activation and fc2 in FP8. The norm comes before the router and stays as
    it is.

    Experts that are split over ranks leave communication to Megatron's token dispatcher: each rank
    works by itself.
    """

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


class SharedExperts(SharedExpertMLP, ExpertMLP, MLP):
    """Megatron's shared experts, whose ``forward`` calls that of an MLP (:class:`ExpertMLP`) and
    applies their gate. So the mixin comes after the original class here.
    """

    coat_original = SharedExpertMLP
