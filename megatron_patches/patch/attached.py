"""What is attached to a patched module, as its attribute ``coat``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from coat_dist import flow
from coat_dist.config import ActivationConfig

__all__ = ["Patch"]


@dataclass(frozen=True)
class Patch:
    """What a patched module needs besides its own attributes; kept as its ``coat`` attribute.

    The norm is held here, out of ``nn.Module``'s sight, so that it stays registered under its own layer only.
    """

    settings: ActivationConfig
    tp: flow.TensorParallel
    """As it was when the model was patched; a forward pass asks :meth:`tp_now`."""
    norm: nn.Module | None = None
    activation: str = ""
    """Of an MLP, the flow's name of its activation, found when the model is patched. Functions are told apart by
    identity, and profilers put others in their places while they run."""
    function: Any = None
    """The function that has this name: what ``config.activation_func`` must still be."""
    residual: bool = False
    """Whether the block's output carries its :class:`~megatron_patches.layers.residual.Residual`."""
    graphs: Any = None
    """Of a layer that runs as CUDA graphs, the :class:`~coat_dist.flow.graphs.cuda_graphs.GraphedFunction`."""
    recompute: bool = False
    """Whether the MLP checkpoints itself, in the layer's place: so the residual's alias leaves the checkpoint too."""

    def tp_now(self, linear: Any) -> flow.TensorParallel:
        """``tp`` with the sequence parallelism that ``linear``, one of Megatron's, has at this moment.

        Megatron's ``set_model_to_sequence_parallel`` switches that flag on built models, and so does ``GPTModel``
        around an output layer that is asked for the last token's logits only.
        """
        return self.tp.with_sequence_parallel(linear.sequence_parallel)
