"""What a stack of patched layers holds at the worst moment of forward and backward, from shapes alone.

An allocator's peak is compared with this sum: if it is larger, there is a copy that nobody knows of. It holds for one
GPU, bf16 weights, one micro-batch and no ``.grad`` before (``zero_grad(set_to_none=True)``), so that each layer's
backward adds its weights' gradients to what is held. Where ``.grad`` exists (accumulation), all gradients are there
from the start instead, and one more of this layer's while it is added.

Counted beyond what is there before forward (weights, the input, the gradient that the caller hands in):

* y, the output of the last layer, which the caller holds: 2 h a token;
* what this layer and those before it still hold for backward (docs/flow.md, "What is saved");
* the gradient of the residual stream, 2 h a token: one tensor for both branches. Of the last layer's MLP it is the
  caller's own;
* gradients of weights, of this layer as far as it got and of all layers after it: 2 bytes an element;
* what the function that runs has made and not yet dropped (:func:`_moments`).

The worst moment lies in the last layer's backward if a layer saves more bytes than its weights' gradients have (many
tokens), otherwise in the first layer's. It is never in forward: what forward holds at most, in the last layer's MLP, is
fc1's output and the activation's codes beside what is saved; backward holds the activation's gradient and more codes.

Left out, below 1 % where layers are large: fp32 sums of a norm's gradient, scalars, the allocator's rounding (512
bytes, or the rest of a cached block below 1 MiB), workspaces of cuBLAS (kept from the warm-up).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coat_dist.config import ActivationConfig
from coat_dist.reference.activation import ACTIVATIONS
from launch.model.gpt import ModelConfig

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
    h, f = model.hidden_size, ACTIVATIONS[model.activation].parts * model.ffn_hidden_size
    heads = 2 * (model.num_attention_heads + model.kv_heads) * model.head_channels  # q, k, v and the output
    norm = _grouped(h, settings) + 4  # and rstd
    attention = _grouped(heads, settings) if settings.attention == "fp8" else 2 * heads
    return norm, attention + 4 * model.num_attention_heads, norm + _grouped(f, settings)


def expected_peak(model: ModelConfig, tokens: int, settings: ActivationConfig) -> Peak:
    """The worst moment of ``model.num_layers`` patched layers.

    Raises:
        ValueError: the model has what is not accounted for; names the key.
    """
    for key, accepted in ACCOUNTED.items():
        if (given := getattr(model, key)) != accepted:
            raise ValueError(
                f"{key}: got {json.dumps(given)}, accepted: {json.dumps(accepted)} (nothing else is accounted for)"
            )
    layers, stream = model.num_layers, 2 * model.hidden_size * tokens
    saved = tokens * sum(saved_bytes(model, settings))
    gradients = max(done for _, _, done, _ in _moments(model, tokens, settings))
    peaks = []
    for layer in range(layers, 0, -1):
        before = stream + layer * saved + (layers - layer) * gradients
        for name, released, done, made in _moments(model, tokens, settings):
            callers = layer == layers and not released  # the last layer's MLP: the caller's gradient
            peaks.append(Peak(name, layer, before + (0 if callers else stream) - released + done + made))
    return max(peaks, key=lambda p: p.bytes)


def _moments(model: ModelConfig, tokens: int, settings: ActivationConfig) -> Iterator[tuple[str, int, int, int]]:
    """The largest moments of a layer's backward, in its order: name; bytes of what the layer saved that are released by
    then; of weights' gradients that exist by then, with the one that is being made; of everything else that the
    function that runs holds.
    """
    h, parts = model.hidden_size, ACTIVATIONS[model.activation].parts
    q = model.num_attention_heads * model.head_channels
    w = q + 2 * model.kv_heads * model.head_channels
    f, wide = model.ffn_hidden_size, parts * model.ffn_hidden_size  # of the activation, of fc1's output
    qkv_saved, attention_saved, mlp_saved = (tokens * n for n in saved_bytes(model, settings))
    rounded = 2 * (q + w) if settings.attention == "fp8" else 0  # q, k, v and the output read back to bf16
    fc2, fc1, proj, qkv = 2 * h * f, 2 * h * wide, 2 * h * q, 2 * h * w
    mlp = fc1 + fc2

    # Of the output's gradient codes transposed, for fc2; the gradient of the activation (bf16) becomes codes, of fc1's
    # output in both orders, beside the activation's, transposed.
    yield "activation backward", 0, 0, tokens * (h + 2 * f + 2 * wide + f)
    # The same but for the activation's gradient; fc2's is made.
    yield "gradient of fc2", 0, fc2, tokens * (h + 2 * wide + f)
    # Codes of both orders, the transposed weight's, dy (bf16).
    yield "dgrad of fc1", 0, fc2, tokens * (2 * wide + 2 * h) + h * wide
    # Transposed codes; dy and dx (bf16).
    yield "norm backward", 0, fc2, tokens * (wide + 4 * h)
    # Transposed codes, also of y; dx (bf16).
    yield "gradient of fc1", 0, mlp, tokens * (wide + h + 2 * h)
    # Transposed codes, also of the input; dx (bf16).
    yield "gradient of proj", mlp_saved, mlp + proj, tokens * (h + q + 2 * q + (2 * q if rounded else 0))
    # Gradients of the output, of q, k and v (bf16); cuDNN sums the gradient of q in fp32.
    yield "attention backward", mlp_saved, mlp + proj, tokens * (2 * q + 2 * w + 4 * q + rounded)
    # Gradients of q, k and v, which autograd holds until the function returns, and put together (bf16); codes of both
    # orders.
    released = mlp_saved + attention_saved
    yield "quantization for qkv", released, mlp + proj, tokens * (2 * w + 2 * w + 2 * w)
    # Those gradients; transposed codes, also of y; dx (bf16).
    yield "gradient of qkv", released, mlp + proj + qkv, tokens * (2 * w + w + h + 2 * h)


def _grouped(elements: int, settings: ActivationConfig) -> int:
    """Bytes of so many elements in per-group FP8, with their scales."""
    return elements + -(-elements // settings.group_size) * (1 if settings.scale == "e8m0" else 2)
