"""Megatron's token dispatchers: with FP8 on the wire, and without copies where no token leaves the
rank.

Where experts are not divided over ranks, rows that are sorted by expert are all that they want.
Megatron (without Transformer Engine) copies tokens twice more on each way, adds them up with atomic
additions, and waits for the numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from coat_dist import flow
from coat_dist.config import ActivationConfig
from coat_dist.ops import one_by_one
from coat_dist.patching.classes import Patched

from .attached import Patch


class FP8AlltoAllDispatcher(Patched):
    """Sends tokens to experts as codes and row scales; probabilities, and what experts send
    back, as they are.
    """

    coat: Patch
    tokens_per_expert: Any

    def token_dispatch(
        self: Any, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[rows, h]`` and probabilities ``[rows]`` that other ranks' experts get, to
        those that ours get.
        """
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        received, sent = self.output_splits, self.input_splits
        tokens = flow.dispatch_rows(
            permutated_local_input_tokens, self.ep_group, received, sent, self.coat.settings
        )
        return tokens, all_to_all(self.ep_group, permuted_probs, received, sent)


def may_send_fp8(dispatcher: Any, settings: ActivationConfig) -> bool:
    """Whether tokens go to experts of other ranks, by Megatron's alltoall dispatcher, and FP8 is
    wanted.
    """
    divided = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.ep_size > 1
    return settings.dispatches_fp8 and divided and not dispatcher.drop_and_pad


_OTHERWISE = (
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "moe_latent_size",
)
"""Settings with which a token does not go to ``moe_router_topk`` experts, or others want the
dispatcher's steps.
"""


class LocalDispatcher(Patched):
    """The steps that ``MoELayer`` calls, one after the other, for experts that are all on this
    rank.
    """

    def dispatch_preprocess(
        self: Any, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[s, b, h]``, bool and floating ``[tokens, experts]`` → rows sorted by expert, and
        their probabilities.
        """
        self.hidden_shape = hidden_states.shape
        self.coat_order = flow.token_order(routing_map, self.config.moe_router_topk)
        self.tokens_per_expert = counts = routing_map.sum(0)
        self.coat_copied = None
        weight = self.config.hidden_size * (
            self.config.moe_ffn_hidden_size or self.config.ffn_hidden_size
        )
        if counts.is_cuda and one_by_one(self.coat_order.token.shape[0], counts.shape[0], weight):
            # Copied before the tokens are, so that the host, which will wait for it, does not wait
            # for them.
            self.tokens_per_expert = torch.empty_like(counts, device="cpu", pin_memory=True)
            self.tokens_per_expert.copy_(counts, non_blocking=True)
            self.coat_copied = torch.cuda.Event()
            self.coat_copied.record()
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        return flow.permute(tokens, self.coat_order), probs.t().reshape(-1).index_select(
            0, self.coat_order.chosen
        )

    def token_dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens, probs

    def dispatch_postprocess(
        self: Any, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.coat_copied is not None:
            self.coat_copied.synchronize()
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return tokens, counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, ``[s, b, h]``."""
        order, self.coat_order = self.coat_order, None
        return flow.unpermute(hidden_states, order).view(self.hidden_shape)


def may_stay_local(dispatcher: Any) -> bool:
    """Whether a dispatcher of Megatron's has nothing to send and every token goes to as many
    experts.
    """
    known = MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
    if type(dispatcher) not in known or dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
        return False
    return not any(getattr(dispatcher.config, key, None) for key in _OTHERWISE)
