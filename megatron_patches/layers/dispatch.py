"""Megatron's alltoall dispatcher of tokens, with FP8 on the wire."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from coat_dist import flow
from coat_dist.config import ActivationConfig

__all__ = ["FP8AlltoAllDispatcher", "may_send_fp8"]


class FP8AlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens to experts as codes and row scales; probabilities, and what experts send back, as they are."""

    coat_settings: ActivationConfig
    tokens_per_expert: Any

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[rows, h]`` and probabilities ``[rows]`` that other ranks' experts get, to those that ours get."""
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        received, sent = self.output_splits, self.input_splits
        tokens = flow.dispatch_rows(permutated_local_input_tokens, self.ep_group, received, sent, self.coat_settings)
        return tokens, all_to_all(self.ep_group, permuted_probs, received, sent)


def may_send_fp8(dispatcher: Any, settings: ActivationConfig) -> bool:
    """Whether tokens go to experts of other ranks, by Megatron's alltoall dispatcher, and FP8 is wanted."""
    divided = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.ep_size > 1
    return settings.dispatches_fp8 and divided and not dispatcher.drop_and_pad
