"""Transformer layers whose norms come after attention and MLP (OLMo-2): x + norm(f(x)) instead
of x + f(norm(x)).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from .norm import Norm

_NORMS = {"self_attn_bda": "post_self_attn_layernorm", "mlp_bda": "post_mlp_layernorm"}
"""The norm of what an addition of bias, dropout and residual adds, by the addition's name."""


class NormedAdd:
    """Called as ``get_bias_dropout_add`` is; normalizes the block's output, bias included,
    before it is added.
    """

    def __init__(
        self, add: Callable[[bool, bool], Callable[..., torch.Tensor]], norm: nn.Module
    ) -> None:
        self.add = add
        self.norm = norm

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = self.add(training, fused)

        def bias_dropout_add(
            x_with_bias: tuple[torch.Tensor, Any], residual: torch.Tensor, prob: float
        ) -> Any:
            x, bias = x_with_bias
            return add((self.norm(x if bias is None else x + bias), None), residual, prob)

        return bias_dropout_add


class PostNormTransformerLayer(TransformerLayer):
    """A ``TransformerLayer`` with ``post_self_attn_layernorm`` and ``post_mlp_layernorm``.

    Args:
        affine: of these norms; ``input_layernorm`` and ``pre_mlp_layernorm`` are what the
            submodules say, none.
    """

    def __init__(self, *args: Any, affine: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron adds with gradients on, also inside no_grad and inference_mode: a norm would save
        # its input there.
        self.bias_dropout_add_exec_handler = nullcontext
        for add, name in _NORMS.items():
            norm = Norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon, affine)
            setattr(self, name, norm)
            setattr(self, add, NormedAdd(getattr(self, add), norm))


def post_norms(layer: Any) -> list[str]:
    """Names of the norms of ``layer`` that come after a block, and stay BF16."""
    return list(_NORMS.values()) if isinstance(layer, PostNormTransformerLayer) else []
