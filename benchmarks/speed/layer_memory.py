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
* what the function that runs has made and not yet dropped (:func:`moments`).

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
from typing import Any, NamedTuple

from coat_dist import CoatConfig
from coat_dist.config import ActivationConfig
from launch.memory.layer import saved, widths
from launch.memory.run import Run
from launch.model.gpt import ModelConfig

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


def of_layers(model: ModelConfig, settings: ActivationConfig) -> Run:
    """The planner's run of these layers on one GPU."""
    return Run(model=model, settings={}, coat=CoatConfig(activation=settings))


def saved_bytes(model: ModelConfig, settings: ActivationConfig) -> tuple[int, int, int]:
    """Bytes a token that a layer saves: of norm and qkv, of attention, of norm and MLP."""
    qkv, attention, mlp = saved(of_layers(model, settings), True)
    return round(qkv), round(attention), round(mlp)


class Moment(NamedTuple):
    """One of the largest moments of a layer's backward: bytes of what the layer saved that are
    released by then, of weights' gradients that exist, of everything else that the running function
    has made.
    """

    name: str
    released: int
    gradients: int
    made: int


def moments(model: ModelConfig, tokens: int, settings: ActivationConfig) -> list[Moment]:
    """The moments of a patched layer's backward, in its order. Those that can be the largest of a
    whole step are in :func:`launch.memory.layer.moments`, too.
    """
    h, q, w, f, wide = widths(of_layers(model, settings))
    _, attention, mlp = (tokens * one for one in saved_bytes(model, settings))
    # Q, k, v and the output read back to bf16.
    rounded = 2 * (q + w) if settings.attention == "fp8" else 0
    fc2, fc1, proj, qkv = 2 * h * f, 2 * h * wide, 2 * h * q, 2 * h * w
    both, three, all_four = fc1 + fc2, fc1 + fc2 + proj, fc1 + fc2 + proj + qkv
    return [
        # Transposed codes of the output's gradient, for fc2; the gradient of the activation (bf16)
        # becomes codes, of fc1's output in both orders, beside the activation's, transposed.
        Moment("activation backward", 0, 0, tokens * (h + 2 * f + 2 * wide + f)),
        # The same but for the activation's gradient; fc2's is made.
        Moment("gradient of fc2", 0, fc2, tokens * (h + 2 * wide + f)),
        # Codes of both orders, the transposed weight's, dy (bf16).
        Moment("dgrad of fc1", 0, fc2, tokens * (2 * wide + 2 * h) + h * wide),
        # Transposed codes; dy and dx (bf16).
        Moment("norm backward", 0, fc2, tokens * (wide + 4 * h)),
        # Transposed codes, also of y; dx (bf16).
        Moment("gradient of fc1", 0, both, tokens * (wide + h + 2 * h)),
        # Transposed codes, also of the input; dx (bf16).
        Moment("gradient of proj", mlp, three, tokens * (h + 3 * q + (2 * q if rounded else 0))),
        # Gradients of the output, of q, k and v (bf16); cuDNN sums the gradient of q in fp32.
        Moment("attention backward", mlp, three, tokens * (2 * q + 2 * w + 4 * q + rounded)),
        # Gradients of q, k and v, which autograd holds until the function returns, and put together
        # (bf16); codes of both orders.
        Moment("quantization for qkv", mlp + attention, three, tokens * (2 * w + 2 * w + 2 * w)),
        # Those gradients; transposed codes, also of y; dx (bf16).
        Moment("gradient of qkv", mlp + attention, all_four, tokens * (3 * w + h + 2 * h)),
    ]


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
    kept = tokens * sum(saved_bytes(model, settings))
    found = moments(model, tokens, settings)
    gradients = found[-1].gradients
    peaks = []
    for layer in range(layers, 0, -1):
        before = stream + layer * kept + (layers - layer) * gradients
        for one in found:
            # The last layer's MLP: the caller's gradient.
            callers = layer == layers and not one.released
            held = before + (0 if callers else stream) - one.released + one.gradients + one.made
            peaks.append(Peak(one.name, layer, held))
    return max(peaks, key=lambda p: p.bytes)
