"""Mixtures of experts in a model description: keys, and logged losses of the routers."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ExpertsConfig"]


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
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits. Sigmoids of the chosen experts are divided by their sum."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type of the router's logits and probabilities; null = bfloat16 logits, softmax in fp32."""
    moe_shared_expert_intermediate_size: int | None = Field(default=None, gt=0)
    """Inner size of an expert that every token goes to, beside the chosen ones; null = there is none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learnt projection of its input (Qwen2-MoE)."""
    moe_layer_freq: Annotated[int, Field(gt=0)] | list[Literal[0, 1]] = 1
    """Layers 0, n, 2n, ... have experts, the others an MLP of ffn_hidden_size. A list says 1 or 0 for each layer."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Factor of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equation 4), per layer and rank."""
    moe_z_loss_coeff: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor of the z loss of the router's logits (ST-MoE, arXiv 2202.08906, equation 5); null = none."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How Megatron sorts tokens by expert, on one rank. "alltoall" needs a GPU. With ``--expert-parallel`` it is taken
    whatever stands here."""
    moe_grouped_gemm: bool = False
    """All experts of a layer in one product each for fc1 and fc2; no package is needed. Parameters are stored as
    Megatron's ``GroupedMLP`` has them, so a checkpoint is for the one or the other."""

    @model_validator(mode="after")
    def _known_experts(self) -> ExpertsConfig:
        if self.num_moe_experts is None:
            for key in ExpertsConfig.model_fields:
                if key in self.model_fields_set and key != "num_moe_experts":
                    given = json.dumps(getattr(self, key))
                    raise ValueError(f"{key}: got {given} without num_moe_experts, accepted: absent")
            return self
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "moe_shared_expert_gate: got true without moe_shared_expert_intermediate_size, accepted: false"
            )
        softmax_of_one = self.moe_router_topk == 1 and self.moe_router_score_function == "softmax"
        if softmax_of_one and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_pre_softmax: got false with moe_router_topk 1, accepted: true (the softmax over one expert "
                "has no gradient)"
            )
        return self

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        frequency = self.moe_layer_freq
        return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0

    def router_losses(self, num_layers: int, tp: int, accumulation: int, stages: int = 1) -> dict[str, torch.Tensor]:
        """Losses of this rank's routers since the last call, without their factors.

        Means over layers with experts and micro-batches; the mean over all ranks is what Megatron logs.

        Args:
            num_layers: of the model.
            tp: tensor-parallel ranks, each of which has a part of the load-balancing loss.
            accumulation: micro-batches of a step.
            stages: of a pipeline, each of which adds up those of its own layers.
        """
        shares = {
            "load_balancing_loss": tp if self.moe_aux_loss_coeff else 0,
            "z_loss": int(bool(self.moe_z_loss_coeff)),
        }
        if self.num_moe_experts is None or not any(shares.values()):
            return {}
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        kept, found = get_moe_layer_wise_logging_tracker(), {}
        count = sum(map(self.has_experts, range(num_layers))) * accumulation
        for key, share in shares.items():
            if share:
                values = kept[key]["values"] if key in kept else torch.zeros(1)
                found["router_z_loss" if key == "z_loss" else key] = values.sum() * (share * stages / count)
                values.zero_()
        return found
