"""All public functions of the flow as ``x`` → outputs, for tests of what holds for each of them."""

from __future__ import annotations

import torch

from coat_dist.flow import (
    HeadNorms,
    Heads,
    attention,
    invariant_linear,
    linear,
    linear_cross_entropy,
    norm,
    norm_linear,
    norm_mlp,
    norm_qkv,
    rope_table,
    scale_rows,
    sdpa,
    vocab_parallel_cross_entropy,
)

from .common import ONE, Layer, settings

H = 64
HEADS = Heads(groups=2, per_group=2, size=16)
NAMES = (
    "norm",
    "norm_linear",
    "norm_qkv",
    "norm_qkv with norms of heads alone",
    "linear",
    "norm_mlp",
    "mlp",
    "scale_rows",
    "invariant_linear",
    "vocab_parallel_cross_entropy",
    "linear_cross_entropy",
    "exact linear_cross_entropy",
    "sdpa",
    "attention",
)


RESIDUAL = "norm_qkv", "norm_mlp"
"""Functions that also return an alias of x, the last of their outputs, with ``residual``."""


def layer_for_all(dtype=torch.float32, kind="layernorm"):
    return Layer.random(h=H, n=HEADS.width, kind=kind, dtype=dtype)


def leaves(layer: Layer, x):
    return [x, *layer.parameters().values()]


def catalogue(layer: Layer, residual=False, **changes):
    """{name: function of x ``[s, b, 64]`` that returns a tuple of its outputs}; parameters are
    ``layer``'s, whose ``weight`` is ``[HEADS.width, 64]``.
    """
    config = settings(**changes)

    def labels(x):
        return torch.arange(x.numel() // H, device=x.device).view(x.shape[:-1]) % H

    def qkv(x, rotated=True):
        freqs = torch.linspace(0, 30, x.shape[0] * 12, device=x.device).view(x.shape[0], 1, 1, 12)
        angles, norms = rope_table(freqs), None
        if not rotated:
            angles, norms = None, HeadNorms(layer.norm_weight[:32].view(2, 16), (1e-5, 1e-4))
        rest = HEADS, angles, ONE, config, residual, norms
        return norm_qkv(x, layer.norm, layer.weight, layer.bias, *rest)

    def mlp_behind_norm(x):
        weights = layer.norm, layer.fc1, layer.fc2, "swiglu"
        out = norm_mlp(x, *weights, ONE, config, layer.fc1_bias, residual=residual)
        return out if residual else (out,)

    def heads(x):
        q = x.reshape(*x.shape[:2], 4, 16)
        return q, q[:, :, :2] * 0.5, q[:, :, 2:] * 2

    return {
        "norm": lambda x: (norm(x, layer.norm, ONE),),
        "norm_linear": lambda x: (
            norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config),
        ),
        "norm_qkv": qkv,
        "norm_qkv with norms of heads alone": lambda x: qkv(x, rotated=False),
        "linear": lambda x: (linear(x, layer.weight, ONE, config),),
        "norm_mlp": mlp_behind_norm,
        "mlp": lambda x: (layer.mlp(x, config),),
        "scale_rows": lambda x: (scale_rows(x, x[..., 0], config),),
        "invariant_linear": lambda x: (invariant_linear(x, layer.weight, ONE),),
        "vocab_parallel_cross_entropy": lambda x: (
            vocab_parallel_cross_entropy(x, labels(x), ONE),
        ),
        "linear_cross_entropy": lambda x: (
            linear_cross_entropy(x, layer.back.t(), labels(x) % 48, ONE),
        ),
        "exact linear_cross_entropy": lambda x: (
            linear_cross_entropy(x, layer.fc1, labels(x), ONE, exact=True, chunk=50),
        ),
        "sdpa": lambda x: (sdpa(*heads(x)),),
        "attention": lambda x: (attention(*heads(x), config)[0],),
    }
