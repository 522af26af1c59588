"""What a stack of patched layers holds at the worst moment of forward and backward, from shapes
alone.

An allocator's peak is compared with this sum: if it is larger, there is an unaccounted copy. It
holds for one GPU, bf16 weights, one micro-batch and no ``.grad`` before
(``zero_grad(set_to_none=True)``), so that each layer's backward adds its weights' gradients to what
is held. Where ``.grad`` exists (accumulation), all gradients are there from the start instead, and
one more of this layer's while it is added.

Counted beyond what is there before forward (weights, the input, the gradient that the caller hands
in):

* y, the output of the last layer, which the caller holds: 2 h a token;
* what this layer and those before it still hold for backward (docs/flow.md, "What is saved");
* the gradient of the residual stream, 2 h a token: one tensor for both branches. Of the last
  layer's MLP it is the caller's own;
* gradients of weights, of this layer as far as it got and of all layers after it: 2 bytes an
  element;
* what the function that runs has made and not yet dropped (:func:`launch.plan.layer.coat_moments`).

The worst moment lies in the last layer's backward if a layer saves more bytes than its weights'
gradients have (many tokens), otherwise in the first layer's. It is never in forward: what forward
holds at most, in the last layer's MLP, is fc1's output and the activation's codes beside what is
saved; backward holds the activation's gradient and more codes.

Left out, below 1 % where layers are large: fp32 sums of a norm's gradient, scalars, the allocator's
rounding (512 bytes, or the rest of a cached block below 1 MiB), workspaces of cuBLAS (kept from the
warm-up).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from coat_dist.config import ActivationConfig
from launch.model.gpt import ModelConfig
from launch.plan.layer import Sizes, coat_moments, coat_saved

__all__ = ["Peak", "expected_peak", "saved_bytes"]


ACCOUNTED: dict[str, Any] = {
    "qk_norm": False,
    "norm_placement": "pre",
    "num_moe_experts": None,
    "linear_bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Keys of a model whose other values make a layer hold more than is counted here."""


@dataclass(frozen=True)
class Peak:
    """The worst moment: what runs, in which layer (1 is the first), and all bytes held by then."""

    moment: str
    layer: int
    bytes: int


def saved_bytes(model: ModelConfig, settings: ActivationConfig) -> tuple[int, int, int]:
    """Bytes a token that a layer saves: of norm and qkv, of attention, of norm and MLP."""
    qkv, attention, mlp = coat_saved(model, settings, Sizes.of(model))
    return round(qkv), attention, round(mlp)


def expected_peak(model: ModelConfig, tokens: int, settings: ActivationConfig) -> Peak:
    """The worst moment of ``model.num_layers`` patched layers.

    Raises:
        ValueError: the model has what is not accounted for; names the key.
    """
    for key, accepted in ACCOUNTED.items():
        if (given := getattr(model, key)) != accepted:
            raise ValueError(
                f"{key}: got {json.dumps(given)}, accepted: {json.dumps(accepted)} (nothing else "
                "is accounted for)"
            )
    layers, stream = model.num_layers, 2 * model.hidden_size * tokens
    saved = tokens * sum(saved_bytes(model, settings))
    moments = list(coat_moments(model, tokens, settings, Sizes.of(model)))
    gradients = max(one.gradients for one in moments)
    peaks = []
    for layer in range(layers, 0, -1):
        before = stream + layer * saved + (layers - layer) * gradients
        for one in moments:
            # The last layer's MLP: the caller's gradient.
            callers = layer == layers and not one.released
            held = before + (0 if callers else stream) - one.released + one.gradients + one.made
            peaks.append(Peak(one.name, layer, held))
    return max(peaks, key=lambda p: p.bytes)
