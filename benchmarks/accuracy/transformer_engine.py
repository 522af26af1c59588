"""Transformer Engine's transformer layer on given tensors: the program that ``layer.py --peers`` starts.

    python -m benchmarks.accuracy.transformer_engine FOLDER

It runs in a process of its own, since Transformer Engine brings packages that are not those of this project, of which
nothing is imported here. Reads ``FOLDER/layer.pt`` and writes ``FOLDER/CASE--RECIPE.pt`` for every case and recipe.

Layouts are those of the project, and are checked by the caller, who compares the BF16 layer with the truth:
``layernorm_qkv.weight`` has for each group its queries, its key and its value (``qkv_weight_interleaved``), and
``fc1_weight`` the gate's rows before the other half's (``swiglu``).
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

PARAMETERS = {
    "norm1": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv": "self_attention.layernorm_qkv.weight",
    "proj": "self_attention.proj.weight",
    "norm2": "layernorm_mlp.layer_norm_weight",
    "fc1": "layernorm_mlp.fc1_weight",
    "fc2": "layernorm_mlp.fc2_weight",
}
"""Our names and Transformer Engine's, all of them."""
WARM_UP = 3
"""Passes before the one that counts: delayed scaling takes its scales from earlier ones, here of the same tensors."""


def build(te: Any, given: dict[str, Any]) -> torch.nn.Module:
    """The layer with the given weights.

    Raises:
        RuntimeError: it has other parameters than those that are given.
    """
    shape = given["shape"]
    layer = te.TransformerLayer(
        shape["hidden"],
        shape["ffn"],
        shape["heads"],
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=shape["eps"],
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=True,
        params_dtype=torch.bfloat16,
        device=given["device"],
    )
    found = dict(layer.named_parameters())
    if set(found) != set(PARAMETERS.values()):
        raise RuntimeError(f"Transformer Engine's layer has the parameters {sorted(found)}")
    with torch.no_grad():
        for ours, theirs in PARAMETERS.items():
            found[theirs].copy_(given["weights"][ours].view_as(found[theirs]))
    return layer


def run(layer: torch.nn.Module, x: torch.Tensor, dout: torch.Tensor, freqs: torch.Tensor, context: Any) -> dict:
    """Output and gradients by our names; x, dout ``[s, b, h]``."""
    parameters = dict(layer.named_parameters())
    leaf: Any = x.transpose(0, 1).contiguous().requires_grad_()
    for _ in range(WARM_UP + 1):
        layer.zero_grad(set_to_none=True)
        leaf.grad = None
        with context():
            y = layer(leaf, rotary_pos_emb=freqs)
        y.backward(dout.transpose(0, 1).contiguous())
    rows = {"output": y.detach().transpose(0, 1), "x": leaf.grad.transpose(0, 1)}
    return rows | {ours: parameters[theirs].grad for ours, theirs in PARAMETERS.items()}


def contexts(te: Any) -> dict[str, Any]:
    """By recipe, a function that makes the context of a forward pass.

    Every call makes new recipe objects: Transformer Engine keeps one history of amaxes for each object.
    """
    from transformer_engine.common import recipe

    recipes = {
        "current": recipe.Float8CurrentScaling(),
        "current, e4m3 gradients": recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3),
        "delayed": recipe.DelayedScaling(),
    }
    found = {name: partial(te.autocast, enabled=True, recipe=r) for name, r in recipes.items()}
    return {"bf16": contextlib.nullcontext, **found}


def main() -> None:
    import transformer_engine.pytorch as te

    folder = Path(sys.argv[1])
    given = torch.load(folder / "layer.pt")
    for case, (x, dout) in given["cases"].items():
        for name, context in contexts(te).items():
            torch.save(run(build(te, given), x, dout, given["freqs"], context), folder / f"{case}--{name}.pt")


if __name__ == "__main__":
    main()
