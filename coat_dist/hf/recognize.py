"""What a transformers module computes, recognized by the code of its ``forward``.

Names do not say it: a Granite layer reads like Llama's by its attributes and multiplies the
residual. So the code of each forward, without annotations, docstrings and renamed arguments, is
compared by digest with code that was read. A module whose forward is unknown stays as it is, and
the report says so.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..ops import ACTIVATIONS, activation_apply
from ..patching.reasons import original_class, own_forward

_RENAMED = re.compile(r"(?<![.\w'\"])past_key_values?\b")
"""An argument that transformers 5.24 calls ``cache``, where it is a name: no attribute and no
string.
"""


class Attention(NamedTuple):
    """How an attention differs from Llama's."""

    window: str | None = None
    """Where its sliding window stands: "self", or "config"."""
    norms: tuple[str, ...] = ()
    """Names of the RMSNorms of queries and keys, over the channels of each head."""
    scaled: bool = False
    """Queries are multiplied by a factor of their positions, ``get_llama_4_attn_scale``."""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")


_NORMS = "q_norm", "k_norm"
_FORMS: dict[Attention, tuple[str, ...]] = {
    # Llama, Mistral, Qwen2, Qwen3
    Attention(): (
        "fd3aba4fff74",
        "dcf697ead0e7",
        "37fce64c5201",
        "ffbb2851d273",
        "876b2d653554",
    ),
    Attention("config"): ("2ff6cd2af2f1", "af459b206859", "f033a28d9122", "5d43b6b3567e"),
    Attention("self"): (
        "38e82a8a2b4b",
        "35cff832b1c1",
        "1c7954496145",
        "fb90e9fd0035",
        "baee97480023",  # Qwen2.5-VL
        "c25da48b9768",
    ),
    Attention("self", norms=_NORMS): (
        "e2f0978b8f29",
        "bc2f92c309e3",
        "b6b997416056",
        "85562f9ba28a",
        "a1b04ba3d9e0",  # Gemma 3
        "a8021bb89302",
    ),
    # Qwen3-VL, Ministral 3, Phi-3
    Attention(norms=_NORMS): ("2a34dc049973", "d505d9fe461b"),
    Attention("config", scaled=True): ("2c00b0ea37fe", "41e75a14057d"),
    Attention("config", projections=("qkv_proj",)): (
        "38a5ba830f24",
        "bf95479160e6",
        "ebe81f6f7263",
        "fc2913930974",
    ),
}
ATTENTIONS = {digest: form for form, digests in _FORMS.items() for digest in digests}
"""Attentions that run in one piece with the norm before them, in layers that give it: since
transformers 5.24, 5.4, 5.1, 5.0 and 4.56; those of Gemma 3, Ministral 3, Qwen2.5-VL and Qwen3-VL
since 5.24 and 5.17.
"""


class LayerNorms(NamedTuple):
    """Norms of a decoder layer by name: those before its attention and its MLP, and those of what
    the two return, if there are any.
    """

    before: tuple[str, str]
    after: tuple[str, ...] = ()


_BEFORE = "input_layernorm", "post_attention_layernorm"
_LAYERS: dict[LayerNorms, tuple[str, ...]] = {
    LayerNorms(_BEFORE): (
        "dc2a7e8a52a4",  # Llama and 66 others of transformers 5.24
        "1515b3d2da53",
        "c587ea7a11e2",  # Mixtral, Qwen3-VL
        "24f6048b2749",
        "3e993d5c4d70",  # Phi-3
        "f61a807f3265",
    ),
    # Gemma 2 and 3, GLM-4
    LayerNorms(
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ): ("4a0590a311f3",),
    LayerNorms(_BEFORE, ("post_self_attn_layernorm", "post_mlp_layernorm")): ("5b74769c58e3",),
}
DECODER_LAYERS = {digest: norms for norms, digests in _LAYERS.items() for digest in digests}
"""x + attention(norm(x)), then x + mlp(norm(x)), or the same with a norm of what attention and MLP
return; in Phi-3 with dropout of both. Those with four norms since transformers 5.24 and 5.17.
"""
MLPS = {
    "d9e9fc411102": (("gate_proj", "up_proj"), "down_proj", True),  # Llama and 126 others
    "2e97b5598c8f": (("gate_proj", "up_proj"), "down_proj", True),  # Qwen2.5-VL's vision tower
    "cc9ee1739c1f": (("gate_up_proj",), "down_proj", True),  # Phi-3, GLM-4
    "750aa64fe91b": (("fc1",), "fc2", False),  # CLIP and 84 others
    "9a58e0fdb527": (("up_proj",), "down_proj", False),  # Arcee
    "f9b286ac75a9": (("linear_fc1",), "linear_fc2", False),  # Qwen3-VL's vision tower
}
"""MLPs by the linears of their first product, that of their second, and whether the first has a
gate: last(act(gate) * up), or last(act(first)).
"""
NORMS = {
    "075c8d198279": "rms",
    "2c29d28177de": "rounded",  # OLMo-2
    "f3c969785666": "rounded",  # Helium
    "3a91e9aaa215": "rounded",  # Gemma 4
    "072c442d528d": "centered",
}
"""RMSNorms. "rms" rounds, then multiplies by its weight (Llama); "rounded" rounds last, and may
have no weight; "centered" multiplies by one more than its weight, and rounds last (Gemma).
"""
ROTATIONS = {
    "6e071d28b2d6": "halves",  # Llama
    "05566310caba": "halves",
    "f636c01aa515": "halves",  # Phi-3
    "d6f74b351c18": "halves",
    "10f40802a80f": "neighbours",  # GLM
    "3f1b942702e4": "neighbours",
}
"""``apply_rotary_pos_emb`` of the first channels of a head or all of them, in the dtype of the
heads: of pairs (i, i + rot / 2), or (2 i, 2 i + 1). Since transformers 5.24 and 4.56.
"""


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """Digest of what a function computes: its arguments and its body, without annotations and
    docstring.

    "" where its source cannot be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    tree = _Plain().visit(tree)
    text = "\n".join([ast.unparse(tree.args), *map(ast.unparse, tree.body)])
    text = _RENAMED.sub("cache", text)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Plain(ast.NodeTransformer):
    """Takes away what does not compute."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # noqa: N802
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def _forward(module: nn.Module) -> str:
    """Of the class that ``module`` had before it was patched; "" where its forward was replaced
    on the instance.
    """
    if own_forward(module) is not None:
        return ""
    return fingerprint(original_class(module).forward)


def layer_norms(module: nn.Module) -> LayerNorms | None:
    """The norms of a layer that is one of ``DECODER_LAYERS``, without dropout; None of others."""
    if any(isinstance(child, nn.Dropout) and child.p for child in module.children()):
        return None
    return DECODER_LAYERS.get(_forward(module))


def attention_kind(module: nn.Module) -> Attention | None:
    """What is special of an attention that runs in the flow from the norm before it to its output;
    None of others.
    """
    return ATTENTIONS.get(_forward(module))


def rotation_of(attention: nn.Module) -> str | None:
    """Which elements an attention's ``apply_rotary_pos_emb`` takes as pairs, "halves" or
    "neighbours"; None of rotations that the flow does not have.
    """
    scope = inspect.unwrap(original_class(attention).forward).__globals__
    return ROTATIONS.get(fingerprint(scope["apply_rotary_pos_emb"]))


class MLPKind(NamedTuple):
    """What an MLP computes."""

    first: tuple[str, ...]
    """The linears of its first product, gate and up, which may be one."""
    last: str
    activation: str | None
    """The flow's name of it; None of one that the flow does not have."""


def is_mlp(module: Any) -> bool:
    """Whether a module reads as an MLP that runs in one piece, whatever its activation."""
    return _forward(module) in MLPS


def mlp_kind(module: Any) -> MLPKind | None:
    """What an MLP that runs in one piece computes; None of other modules."""
    found = MLPS.get(_forward(module))
    if found is None:
        return None
    first, last, gated = found
    act = module._modules.get("act_fn") or module._modules.get("activation_fn")
    function = getattr(type(act), "forward", None)  # without hooks

    def activate(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1) if gated else (x, 1.0)
        return function(act, gate) * up  # type: ignore[misc]

    return MLPKind(first, last, activation_of(activate))


@torch.enable_grad()
@unset_fake_temporarily()
def activation_of(function: Any) -> str | None:
    """The flow's name of a function of what a first product gives; None of one that the flow does
    not have. It is called with random numbers, also where a model is planned on fake tensors.
    """
    seed = torch.Generator("cpu").manual_seed(0)
    x = torch.rand(2, 512, generator=seed, device="cpu", dtype=torch.float32) * 2 - 1
    x = 1000 * x**5  # many small numbers, and some beyond any limit
    try:
        found = function(x).float()
    except Exception:  # a function of other arguments, or with parameters on a GPU
        return None
    if found.requires_grad:  # parameters of the function are trained, which the flow would not do
        return None
    for name in ACTIVATIONS:
        wanted = activation_apply(x, name)
        if found.shape == wanted.shape and torch.allclose(found, wanted, 1e-4, 1e-5):
            return name
    return None


def norm_kind(module: nn.Module) -> str | None:
    """The kind of an RMSNorm (``NORMS``); None of other modules."""
    return NORMS.get(_forward(module))


def is_causal_lm(module: nn.Module) -> bool:
    """Whether a model's forward names ``lm_head`` and ``loss_function``. What it does between them
    is seen while it runs.
    """
    forward = inspect.unwrap(original_class(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return own_forward(module) is None and {"lm_head", "loss_function"} <= set(names)
