"""The residual connection of a patched layer, whose gradient the norm's backward adds to its own.

Megatron takes ``residual = hidden_states`` before the norm and adds it after the linear layers: two
uses of one tensor, whose gradients autograd sums in a pass of its own. The flow's functions return
an alias of their input instead, whose gradient reaches the same backward as theirs. It is made
inside attention or the MLP and needed in the function that adds bias, dropout and residual, which
Megatron builds by calling ``layer.self_attn_bda`` or ``layer.mlp_bda``. So:

* :class:`Residual` travels from one to the other as an attribute of the output tensor, and lives no
  longer than that.
* :class:`AliasedAdd` stands in for ``get_bias_dropout_add``. It uses the alias if the residual it
  is given *is* the tensor that the alias was made of. A module hook that replaces inputs or outputs
  (ZeRO-3's do) ends the fusion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

_ATTRIBUTE = "coat_residual"


@dataclass
class Residual:
    """A block's input, and its alias once the norm's linear has made one."""

    x: torch.Tensor
    alias: torch.Tensor | None = None

    @torch.compiler.disable  # a graph break: torch.compile's tensors lose attributes
    def send_with(self, out: torch.Tensor) -> None:
        """Attach this to ``out``, the block's output, where there is an alias that takes part in
        backward.
        """
        if self.alias is not None and self.alias is not self.x:
            setattr(out, _ATTRIBUTE, self)

    @staticmethod
    @torch.compiler.disable
    def receive(out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The alias of ``residual`` that came with ``out``, which loses it, or ``residual``
        where none did.
        """
        sent = getattr(out, _ATTRIBUTE, None)
        if sent is None:
            return residual
        delattr(out, _ATTRIBUTE)
        return sent.alias if sent.x is residual else residual


class AliasedAdd:
    """Called as ``get_bias_dropout_add`` is: ``(training, fused)`` → function of output and
    bias, residual, dropout.
    """

    original = staticmethod(get_bias_dropout_add)

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = self.original(training, fused)

        def bias_dropout_add(
            x_with_bias: tuple[torch.Tensor, Any], residual: torch.Tensor, prob: float
        ) -> Any:
            return add(x_with_bias, Residual.receive(x_with_bias[0], residual), prob)

        return bias_dropout_add
