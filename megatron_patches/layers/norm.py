"""Norms: the module that models built here use, and the classes of norms in a patched layer.

A patched layer fuses the norm with the linear that follows. Its ``input_layernorm`` and
``pre_mlp_layernorm`` keep their parameters, names and state-dict keys, and return their input as it
is (:class:`Folded`); the linear applies them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from coat_dist import flow
from coat_dist.patching.classes import Patched

from ..groups import tensor_parallel

_KINDS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as ``config.normalization`` says; works under
    sequence parallelism.

    Statistics are taken in fp32, the output has the input's dtype. ``weight`` and ``bias`` are
    ``[hidden_size]`` of ``config.params_dtype``; RMSNorm has no bias. They carry
    ``sequence_parallel`` as Megatron's own do, and never ``tensor_model_parallel``: they are
    replicated over tensor-parallel ranks.

    Args:
        affine: False for a norm without parameters (OLMo).
        normalization: "RMSNorm" or "LayerNorm", where it is not ``config.normalization``.
    """

    reduce_grad_over_tp = False
    """Sum parameter gradients over tensor-parallel ranks inside backward; set by
    ``install_replicated_grad_hooks``.
    """
    partial_by_heads = False
    """Whether each rank applies the norm to its own heads (norms on queries and keys). Then
    gradients are summed over ranks without sequence parallelism too.
    """
    exact = False
    """Sum parameter gradients so that they do not depend on how tokens are spread over ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        affine: bool = True,
        normalization: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma: got True, accepted: False")
        self.config = config
        self.hidden_size = hidden_size
        self.eps = eps
        self.kind = _KINDS[normalization or config.normalization]
        self.weight = self.bias = None
        if affine:
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            start = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
            self.weight = nn.Parameter(start)
            if self.kind == "layernorm":
                self.bias = nn.Parameter(torch.zeros_like(start))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., hidden_size]`` → the same shape and dtype."""
        return flow.norm(x, describe(self), tensor_parallel(self), exact=self.exact)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.hidden_size}, eps={self.eps}, affine={self.weight is not None}"


class AllHeadsNorm(Norm):
    """RMSNorm over all heads of queries or keys together (OLMo-2). Ranks hold, and normalize, their
    own heads' part.

    ``weight`` is ``[heads * head_size / TP]``, divided along dimension 0 as the rows of linear_qkv
    are: each rank's gradient is whole.

    Args:
        hidden_size: channels of a head, as Megatron's attention hands it to norms on queries and
            keys.
        heads: of the whole model.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(config, heads * hidden_size // tensor_parallel(self).size, eps)
        assert self.weight is not None
        del self.weight.sequence_parallel  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., heads / TP, head_size]``, whole tokens → the same shape and dtype."""
        y = flow.split_norm(x.flatten(-2), describe(self), tensor_parallel(self), exact=self.exact)
        return y.view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def describe(module: Any) -> flow.Norm:
    """The norm module as the flow describes it. Raises ValueError where it computes something
    else.
    """
    if getattr(module, "zero_centered_gamma", False):
        raise ValueError("layernorm_zero_centered_gamma")
    if module.eps is None:
        raise ValueError("norm eps None")
    if len(getattr(module, "normalized_shape", (0,))) != 1:
        raise ValueError(f"norm over {len(module.normalized_shape)} dimensions")
    kind: Any = getattr(
        module, "kind", "rmsnorm" if isinstance(module, nn.RMSNorm) else "layernorm"
    )
    bias = getattr(module, "bias", None)
    return flow.Norm(kind, module.eps, module.weight, bias, reduce_grad=_reduces_now(module))


def _reduces_now(module: Any) -> bool:
    """Whether each rank has a part of the gradient only, at this moment: sequence parallelism
    can be switched.
    """
    if not getattr(module, "reduce_grad_over_tp", False):
        return False
    return module.partial_by_heads or module.config.sequence_parallel


class Folded(Patched):
    """A norm that the following linear applies. Called itself, it returns its input."""

    def forward(self, x: torch.Tensor, /, **_: Any) -> torch.Tensor:
        return x


class Exact(Patched):
    """A norm that stays BF16, with gradients that do not depend on the tensor-parallel size; of
    all heads, with sums in fp64, forward too.
    """

    exact = True


FOLDABLE = Norm, nn.RMSNorm, nn.LayerNorm, FusedLayerNorm
"""Classes of norms that the following linear can apply."""
