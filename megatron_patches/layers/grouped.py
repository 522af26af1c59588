"""Experts in grouped products (``moe_grouped_gemm``): Megatron's ``GroupedMLP`` without the package
``grouped_gemm``, and its patched form.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP

from coat_dist import flow
from coat_dist.patching.classes import Patched

from .activations import activation_name
from .attached import Patch, eager_under_zero3
from .mlp import checked_activation


def grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    """Rows of each expert times its matrix, with autograd.

    One grouped product of torch in BF16 on a GPU of compute capability 8.0 or above; elsewhere one
    product an expert.

    Args:
        x: ``[tokens, k]``, sorted by expert.
        weights: ``[experts, k, n]``.
        tokens_per_expert: int ``[experts]``; they add up to ``tokens``.

    Returns:
        ``[tokens, n]``.
    """
    aligned = not any(size % 8 for size in weights.shape[1:])
    if x.is_cuda and x.numel() and x.dtype == weights.dtype == torch.bfloat16 and aligned:
        offsets = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0).int()
        return torch._grouped_mm(x, weights, offs=offsets)
    parts = x.split(tokens_per_expert.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


class GroupedExperts(GroupedMLP):
    """Megatron's ``GroupedMLP`` with :func:`grouped_matmul` in place of the package
    ``grouped_gemm``.

    The same parameters, state dicts and distributed checkpoints. ``weight1`` ``[h, experts * f]``
    (twice that with a gate) holds the memory of ``[experts, h, f]``, ``weight2`` that of
    ``[experts, f, h]``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Its product is not used here.
        with mock.patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"):
            super().__init__(*args, **kwargs)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """``[tokens, h]``, sorted by expert → the same; as in Megatron the probabilities weight
        the activation.
        """
        x, probs = _probs_on_input(self.config, permuted_local_hidden_states, permuted_probs)
        w1 = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        w2 = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        given = grouped_matmul(x, w1, tokens_per_expert), probs.unsqueeze(-1)
        if not self.activation_recompute:
            return grouped_matmul(
                self.activation_func_with_probs(*given), w2, tokens_per_expert
            ), None
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        y = grouped_matmul(
            checkpoint.checkpoint(self.activation_func_with_probs, *given), w2, tokens_per_expert
        )
        checkpoint.discard_output_and_register_recompute(y)
        return y, None


class FP8GroupedMLP(Patched):
    """fc1, the activation and fc2 of all local experts in FP8, each in one grouped product.

    Experts that are split over ranks leave communication to Megatron's token dispatcher.
    """

    coat: Patch

    @eager_under_zero3
    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """``[tokens, h]``, sorted by expert → the same, times the router's ``permuted_probs``
        ``[tokens]``.

        Megatron multiplies the activation by them, before fc2; here the output is multiplied, which
        is the same but for rounding.
        """
        x, probs = _probs_on_input(self.config, permuted_local_hidden_states, permuted_probs)
        args = (
            x,
            tokens_per_expert,
            self.weight1,
            self.weight2,
            checked_activation(self),
            self.coat.settings,
        )
        return flow.grouped_mlp(*args, probs), None


def grouped_activation(config: Any) -> str:
    """The flow's name of the activation. ``GroupedMLP`` has no fused form, in which GELU is the
    tanh approximation.
    """
    if config.activation_func is F.gelu:
        return "geglu" if config.gated_linear_unit else "gelu"
    return activation_name(config)


def _probs_on_input(
    config: Any, x: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``config.moe_apply_probs_on_input``: the input times the probabilities, and ones in their
    place.
    """
    if not getattr(config, "moe_apply_probs_on_input", False):
        return x, probs
    assert config.moe_router_topk == 1, (
        "moe_apply_probs_on_input: got True, accepted: with moe_router_topk 1 only"
    )
    return (probs.unsqueeze(-1) * x).to(x.dtype), torch.ones_like(probs)
