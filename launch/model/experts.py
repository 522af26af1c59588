"""Mixtures of experts in a model description: keys, checks, Megatron's options, sizes."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ExpertsConfig", "scale_aux_loss"]


class ExpertsConfig(BaseModel):
    """The keys of a model with experts, named as in Megatron's ``TransformerConfig``. Without ``num_moe_experts`` the
    model is dense and takes none of the others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_moe_experts: int | None = Field(default=None, gt=0)
    """Experts of a layer; null = a dense model."""
    moe_router_topk: int = Field(default=2, gt=0)
    """Experts that a token goes to."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice; false = over the chosen ones."""
    moe_ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner size of an expert; null = ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = Field(default=None, gt=0)
    """Inner size of an expert that every token goes to, beside the chosen ones; null = there is none."""
    moe_layer_freq: int = Field(default=1, gt=0)
    """Layers 0, n, 2n, ... have experts, the others an MLP of ffn_hidden_size."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Factor of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equation 4), per layer and rank."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How Megatron sorts tokens by expert. "alltoall" needs a GPU."""
    moe_grouped_gemm: bool = False
    """All experts of a layer in one product each for fc1 and fc2; no package is needed. Parameters are stored as
    Megatron's ``GroupedMLP`` has them, so a checkpoint is for the one or the other."""
    expert_model_parallel_size: int = 1
    """Accepted: 1. Every data-parallel rank holds all experts; ZeRO shards their states."""

    @model_validator(mode="after")
    def _known_experts(self) -> ExpertsConfig:
        if self.num_moe_experts is None:
            for key in ExpertsConfig.model_fields:
                if key in self.model_fields_set and key != "num_moe_experts":
                    given = json.dumps(getattr(self, key))
                    raise ValueError(f"{key}: got {given} without num_moe_experts, accepted: absent")
            return self
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk: got {self.moe_router_topk}, accepted: 1 to num_moe_experts ({self.num_moe_experts})"
            )
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_pre_softmax: got false with moe_router_topk 1, accepted: true (the softmax over one expert "
                "has no gradient)"
            )
        if self.expert_model_parallel_size != 1:
            raise ValueError(
                f"expert_model_parallel_size: got {self.expert_model_parallel_size}, accepted: 1 (every data-parallel "
                "rank holds all experts, and ZeRO shards their states)"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Plain values that say what this model is; of a dense one, no keys of experts."""
        return self.model_dump(exclude=set(ExpertsConfig.model_fields) if self.num_moe_experts is None else None)

    def check_dispatcher(self) -> str | None:
        """Why the token dispatcher cannot run on this machine, or None."""
        if self.moe_token_dispatcher_type == "alltoall" and not torch.cuda.is_available():
            return 'model.moe_token_dispatcher_type: got "alltoall" without a GPU, accepted: "allgather"'
        return None

    def expert_options(self, ffn_hidden_size: int) -> dict[str, Any]:
        """Arguments of ``TransformerConfig``; none for a dense model."""
        if self.num_moe_experts is None:
            return {}
        options = {key: getattr(self, key) for key in ExpertsConfig.model_fields}
        return options | {
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size or ffn_hidden_size,
            "moe_router_load_balancing_type": "aux_loss",
        }

    def expert_layers(self, num_layers: int) -> int:
        """Layers that have experts."""
        return -(-num_layers // self.moe_layer_freq) if self.num_moe_experts else 0

    def expert_weights(self, hidden_size: int, ffn_hidden_size: int, gated: bool, *, active: bool) -> int:
        """Weights of the router, the experts and the shared expert of a layer; ``active``: those one token meets."""
        assert self.num_moe_experts is not None
        experts = self.moe_router_topk if active else self.num_moe_experts
        inner = experts * (self.moe_ffn_hidden_size or ffn_hidden_size)
        inner += self.moe_shared_expert_intermediate_size or 0
        return hidden_size * (self.num_moe_experts + inner * (3 if gated else 2))


def scale_aux_loss(accumulation: int) -> None:
    """Divide the load-balancing loss by the micro-batches of a step, as DeepSpeed does with the loss itself.

    Megatron adds its gradient inside backward, out of reach of the engine, times this factor.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / accumulation, device=device))
