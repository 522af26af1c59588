"""The MLPs of a patched model: the one behind a layer's norm, and experts."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from coat_dist import flow

from .linear import Patch, check_whole
from .norm import describe
from .residual import Residual

__all__ = ["ExpertMLP", "NormMLP", "SharedExperts"]


class NormMLP(MLP):
    """Applies the layer's ``pre_mlp_layernorm``, fc1, the activation and fc2 in one step, in FP8.

    ``linear_fc1`` and ``linear_fc2`` hold the weights as before; they are not called, so forward hooks on them do not
    fire.
    """

    coat_patched = True
    coat: Patch

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, b, h]`` → ``[s, b, h]`` (s/TP on both sides under sequence parallelism), and fc2's bias.

        As in Megatron the bias is handed on, to be added with dropout and residual.
        """
        if per_token_scale is not None:
            raise ValueError("per_token_scale: got a tensor, accepted: None in a patched layer (it is for experts)")
        if self.coat.recompute:
            y, alias = tensor_parallel.checkpoint(self._norm_mlp, False, hidden_states, self._anchor(hidden_states))
        else:
            y, alias = self._norm_mlp(hidden_states)
        if self.coat.residual:
            Residual(hidden_states, alias).send_with(y)
        bias = self.linear_fc2.bias
        # An alias: a checkpoint around this makes what is returned its own output. The parameter itself then would be
        # no leaf any more, and backward never end.
        return y, None if bias is None else bias.view_as(bias)

    def _anchor(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """A tensor that makes a checkpoint's output take part in backward, where only parameters inside need it to.

        The checkpoint sees what it is called with, and everything below the MLP may be frozen. The parameters
        themselves would do, but then hooks on them (of ZeRO, of DistributedDataParallel) would run twice.
        """
        assert self.coat.norm is not None
        fc1, norm = self.linear_fc1, self.coat.norm
        inside = fc1.weight, fc1.bias, self.linear_fc2.weight, *norm.parameters(recurse=False)
        if hidden_states.requires_grad or not any(p is not None and p.requires_grad for p in inside):
            return None
        return torch.empty(0, requires_grad=True)

    def _norm_mlp(
        self, hidden_states: torch.Tensor, _anchor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output without fc2's bias, and the input's alias where it is wanted."""
        _wait_for_parameters(linear_fc1=self.linear_fc1, linear_fc2=self.linear_fc2)
        assert self.coat.norm is not None
        check_whole("pre_mlp_layernorm", self.coat.norm)
        y, alias = flow.norm_mlp(
            hidden_states,
            describe(self.coat.norm),
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            _activation(self),
            self.coat.tp_now(self.linear_fc1),
            self.coat.settings,
            self.linear_fc1.bias,
            residual=True,
        )
        return y, alias if self.coat.residual else None


class ExpertMLP(MLP):
    """One expert: fc1, the activation and fc2 in FP8. The norm comes before the router and stays as it is.

    Experts that are split over ranks leave communication to Megatron's token dispatcher: each rank works by itself.
    """

    coat_patched = True
    coat: Patch

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[tokens, h]`` → the same, times the router's ``per_token_scale`` ``[tokens]``; any number of tokens.

        Megatron multiplies the activation by it, before fc2; here the output is multiplied, which is the same but for
        rounding. fc2's bias is handed on where there is no scale, and added, scaled, where there is, as in Megatron.
        """
        _wait_for_parameters(linear_fc1=self.linear_fc1, linear_fc2=self.linear_fc2)
        y = flow.mlp(
            hidden_states,
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            _activation(self),
            self.coat.tp_now(self.linear_fc1),
            self.coat.settings,
            self.linear_fc1.bias,
        )
        bias = self.linear_fc2.bias
        if per_token_scale is None:
            return y, bias
        y = flow.scale_rows(y, per_token_scale, self.coat.settings)
        if bias is not None:
            y = y + (bias * per_token_scale.unsqueeze(-1)).to(y.dtype)
        return y, None


class SharedExperts(SharedExpertMLP, ExpertMLP):
    """Megatron's shared experts, whose ``forward`` calls that of an MLP (:class:`ExpertMLP`) and applies their gate."""

    coat_patched = True


def _activation(mlp: NormMLP | ExpertMLP) -> str:
    """The flow's name of the activation.

    Raises:
        ValueError: another function was set since the model was patched.
    """
    for given in (mlp.config.activation_func, mlp.activation_func):  # Megatron reads the one or the other, by the gate
        if given is not mlp.coat.function:
            name, accepted = (getattr(f, "__name__", f) for f in (given, mlp.coat.function))
            raise ValueError(
                f"activation_func: got {name}, accepted: {accepted}, which it was when the model was patched; "
                "call unpatch_model first"
            )
    return mlp.coat.activation


def _wait_for_parameters(**modules: torch.nn.Module) -> None:
    """What Megatron's DistributedDataParallel does before a module's forward, for modules that are not called.

    With ``overlap_param_gather`` its forward pre-hooks wait for the all-gather of the module's parameters and start
    the next one.

    Raises:
        ValueError: a module that only computes what it should when it is called: sharded alone, or not Megatron's.
    """
    for name, module in modules.items():
        check_whole(name, module)
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                f"{name}: got class {type(module).__name__}, accepted: the linear that was there when the model was "
                "patched (a patched MLP uses its weight without calling it); unpatch_model first"
            )
        for hook in tuple(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == DistributedDataParallel.__module__:
                hook(module)
