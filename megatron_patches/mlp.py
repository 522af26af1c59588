"""The gated MLP of a patched model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP

from coat_dist import flow

from .linear import Patch
from .norm import describe

__all__ = ["NormMLP", "activation_name"]


def activation_name(config: TransformerConfig) -> str:
    """The flow's name of the activation that ``config`` asks for.

    Raises:
        ValueError: the flow has no such activation; names the offending key.
    """
    if not config.gated_linear_unit:
        raise ValueError("gated_linear_unit False")
    if getattr(config, "activation_func_clamp_value", None) is not None:
        raise ValueError("activation_func_clamp_value set")
    if getattr(config, "glu_linear_offset", 0.0) != 0.0:
        raise ValueError("glu_linear_offset set")
    if getattr(config, "use_te_activation_func", False):
        raise ValueError("use_te_activation_func")
    function = config.activation_func
    if function is F.silu:
        return "swiglu"
    if function is F.gelu:  # Megatron's fused form of it is the tanh approximation
        return "geglu_tanh" if config.bias_activation_fusion else "geglu"
    if function is fast_gelu:
        return "geglu_tanh"
    raise ValueError(f"activation_func {getattr(function, '__name__', function)}")


class NormMLP(MLP):
    """Applies the layer's ``pre_mlp_layernorm``, fc1, the activation and fc2 in one step, in FP8.

    ``linear_fc1`` and ``linear_fc2`` hold the weights as before; they are not called, so forward hooks on them do not
    fire.
    """

    coat_patched = True
    coat: Patch

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` → ``[s, b, h]`` (s/TP on both sides under sequence parallelism). There is no bias."""
        if per_token_scale is not None:
            raise ValueError("per_token_scale: got a tensor, accepted: None in a patched layer (it is for experts)")
        _wait_for_parameters(self.linear_fc1, self.linear_fc2)
        assert self.coat.norm is not None
        y = flow.norm_mlp(
            hidden_states,
            describe(self.coat.norm),
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            activation_name(self.config),
            self.coat.tp,
            self.coat.settings,
        )
        return y, None


def _wait_for_parameters(*modules: torch.nn.Module) -> None:
    """What Megatron's DistributedDataParallel does before a module's forward, for modules that are not called.

    With ``overlap_param_gather`` its forward pre-hooks wait for the all-gather of the module's parameters and start
    the next one.
    """
    for module in modules:
        for hook in tuple(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == DistributedDataParallel.__module__:
                hook(module)
