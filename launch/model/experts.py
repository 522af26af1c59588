"""Mixtures of experts in a model description: keys, checks, Megatron's options, sizes."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ExpertsConfig"]

_YOUNGER = (
    "moe_router_score_function",
    "moe_router_dtype",
    "moe_shared_expert_gate",
    "moe_z_loss_coeff",
)
"""Keys that descriptions in older checkpoints lack."""


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
    moe_layer_freq: int | list[int] = 1
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
    expert_model_parallel_size: int = 1
    """Accepted: 1. How many ranks divide the experts is no matter of the model: ``--expert-parallel``."""

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
        frequency = self.moe_layer_freq
        if isinstance(frequency, list) and not (set(frequency) <= {0, 1} and 1 in frequency):
            raise ValueError(f"moe_layer_freq: got {frequency}, accepted: 1 or 0 for each layer, at least one 1")
        if isinstance(frequency, int) and frequency < 1:
            raise ValueError(
                f"moe_layer_freq: got {frequency}, accepted: an integer of at least 1, or a list of 1 and 0"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "moe_shared_expert_gate: got true without moe_shared_expert_intermediate_size, accepted: false"
            )
        one = self.moe_router_topk == 1 and self.moe_router_score_function == "softmax"
        if one and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_pre_softmax: got false with moe_router_topk 1, accepted: true (the softmax over one expert "
                "has no gradient)"
            )
        if self.expert_model_parallel_size != 1:
            raise ValueError(
                f"expert_model_parallel_size: got {self.expert_model_parallel_size}, accepted: 1, and "
                "--expert-parallel (ranks that divide the experts are no matter of the model)"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Plain values that say what this model is; of a dense one, no keys of experts. Keys that are younger than
        some checkpoints appear where they say something."""
        values = self.model_dump(exclude=set(ExpertsConfig.model_fields) if self.num_moe_experts is None else None)
        usual = {key: ExpertsConfig.model_fields[key].default for key in _YOUNGER}
        return {key: value for key, value in values.items() if key not in usual or value != usual[key]}

    def check_dispatcher(self) -> str | None:
        """Why the token dispatcher cannot run on this machine, or None."""
        if self.moe_token_dispatcher_type == "alltoall" and not torch.cuda.is_available():
            return 'model.moe_token_dispatcher_type: got "alltoall" without a GPU, accepted: "allgather"'
        return None

    def expert_options(self, ffn_hidden_size: int, ep: int = 1) -> dict[str, Any]:
        """Arguments of ``TransformerConfig`` with ``ep`` ranks that divide the experts; none for a dense model."""
        if self.num_moe_experts is None:
            return {}
        options = {key: getattr(self, key) for key in ExpertsConfig.model_fields}
        if ep > 1:
            options |= {"expert_model_parallel_size": ep, "moe_token_dispatcher_type": "alltoall"}
        return options | {
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size or ffn_hidden_size,
            "moe_router_load_balancing_type": "aux_loss",
        }

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        frequency = self.moe_layer_freq
        return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0

    def expert_layers(self, num_layers: int) -> int:
        """Number of layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(num_layers))

    def expert_weights(self, hidden_size: int, ffn_hidden_size: int, gated: bool, *, active: bool) -> int:
        """Weights of the router, the experts, the shared expert and its gate in a layer.

        ``active``: of the experts, those that one token meets.
        """
        assert self.num_moe_experts is not None
        experts = self.moe_router_topk if active else self.num_moe_experts
        inner = experts * (self.moe_ffn_hidden_size or ffn_hidden_size)
        inner += self.moe_shared_expert_intermediate_size or 0
        return hidden_size * (self.num_moe_experts + inner * (3 if gated else 2) + self.moe_shared_expert_gate)

    def router_losses(self, num_layers: int, tp: int, accumulation: int, stages: int = 1) -> dict[str, torch.Tensor]:
        """What Megatron has added up since the last call, of this rank: losses of the routers without their factors.

        Means over layers with experts and micro-batches; the mean over all ranks is what Megatron logs.

        Args:
            num_layers: of the model.
            tp: tensor-parallel ranks, each of which has a part of the load-balancing loss.
            accumulation: micro-batches of a step.
            stages: of a pipeline, each of which adds up those of its own layers.
        """
        wanted = {
            "load_balancing_loss": ("load_balancing_loss", tp if self.moe_aux_loss_coeff else 0),
            "router_z_loss": ("z_loss", 1 if self.moe_z_loss_coeff else 0),
        }
        if self.num_moe_experts is None or not any(parts for _, parts in wanted.values()):
            return {}
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        kept, found = get_moe_layer_wise_logging_tracker(), {}
        for key, (theirs, parts) in wanted.items():
            if parts:
                values = kept[theirs]["values"] if theirs in kept else torch.zeros(1)
                found[key] = values.sum() * (parts * stages / (self.expert_layers(num_layers) * accumulation))
                values.zero_()
        return found
