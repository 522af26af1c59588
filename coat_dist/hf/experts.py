"""Experts of transformers models, all of a layer in one call of the flow.

transformers 5 keeps the weights of all experts of a layer in two parameters, ``[experts, out, in]``
or transposed. It writes the loop over experts in the model, and hands the call to one of several
implementations (``experts_implementation``) that compute the same. The decorator which does so
leaves the facts in attributes of the module; they say what the experts compute, whichever model
they are of. What lies between the products is a method or a function; it is called once with random
numbers in training mode, and compared with the activations of the flow. The flow reads the same
parameters where they lie.

Routers, their losses and shared experts are outside of these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import flow
from ..patching.reasons import PLAIN, module_of, original_class, own_code, why_not_fp8
from .modules import Block, fits, opaque
from .recognize import activation_of

INTEGRATION = "transformers.integrations.moe"
IMPLEMENTATIONS = "eager", "grouped_mm", "batched_mm", "sonicmoe", "deepgemm"
"""transformers' own, which compute the same."""


class ExpertsKind(NamedTuple):
    """What the experts of a layer compute."""

    weights: tuple[str, str]
    """The parameters of their first and second product."""
    biases: tuple[str, ...]
    activation: str | None
    """The flow's name of it; None of one that the flow does not have."""
    transposed: bool
    """Whether weights are ``[experts, in, out]``."""


def experts_in(module: Any) -> nn.Module:
    """The module itself, or what PEFT has wrapped to adapt parameters of it."""
    while isinstance(base := module._modules.get("base_layer"), nn.Module):
        module = base
    return module


def experts_kind(module: Any) -> ExpertsKind | None:
    """What the experts of a layer compute, in a class of transformers that holds the weights of all
    of them; None of other modules.
    """
    if module_of(getattr(original_class(module), "forward", None)) != INTEGRATION:
        return None
    first, act = "up_proj", getattr(module, "act_fn", None)
    if getattr(module, "has_gate", True):
        first, act = "gate_up_proj", module._apply_gate
    biases = (f"{first}_bias", "down_proj_bias") if module.has_bias else ()
    modes = [(part, part.training) for part in module.modules()]
    module.train()  # from_pretrained leaves it in eval mode, in which dropout and noise are off
    activation = activation_of(act)
    for part, training in modes:
        part.training = training
    return ExpertsKind((first, "down_proj"), biases, activation, module.is_transposed)


def why_not_experts(module: Any, kind: ExpertsKind) -> str | None:
    """Why experts of this kind stay in BF16."""
    implementation = module.config._experts_implementation
    if getattr(module, "has_post_expert_norm", False):
        return "a norm behind each expert"
    if implementation not in IMPLEMENTATIONS:
        return f"experts_implementation {implementation!r}"
    if kind.activation is None:
        return "an activation that the flow does not have"
    for name in kind.weights:
        weight = module._parameters.get(name)
        if not _is_plain(weight):
            return f"a {type(weight).__name__} as {name}"
        if (reason := why_not_fp8(weight)) is not None:
            return reason
    return own_code("experts", module, ())


def _is_plain(weight: Any) -> bool:
    """Whether it is a weight that the flow reads, be it a parameter or computed by an adapter."""
    return type(weight) in (*PLAIN, torch.Tensor, FakeTensor)


class Experts(Block):
    """All experts of a layer, and the sum of what a token's experts give, each times its
    probability.
    """

    def coat_expert_weights(self: Any) -> list[Any]:
        """Parameters that are multiplied in FP8."""
        return [getattr(self, name) for name in self.coat.kind.weights]

    @opaque
    def coat_forward(
        self: Any,
        plain: Callable[..., Any],
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        kind: ExpertsKind = self.coat.kind
        first, second = (getattr(self, name) for name in kind.weights)
        ready = fits(hidden_states) and hidden_states.dim() == 2 and self.coat_ready()
        if not (ready and _is_plain(first) and _is_plain(second)):
            return plain(self, hidden_states, top_k_index, top_k_weights)
        biases = (getattr(self, name) for name in kind.biases)
        return flow.routed_mlp(
            hidden_states,
            top_k_index,
            top_k_weights,
            first,
            second,
            kind.activation or "",
            self.coat.settings,
            kind.transposed,
            *biases,
        )
