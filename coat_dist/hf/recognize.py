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

from torch import nn

from ..patching.reasons import original_class, own_forward

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "activation_of",
    "attention_kind",
    "fingerprint",
    "gate",
    "is_causal_lm",
    "is_decoder_layer",
    "norm_kind",
    "shares_input",
]

_RENAMED = re.compile(r"(?<![.\w'\"])past_key_values?\b")
"""An argument that transformers 5.24 calls ``cache``, where it is a name: no attribute and no
string.
"""


class Attention(NamedTuple):
    """How an attention differs from Llama's."""

    window: str | None = None
    """Where its sliding window stands: "self", or "config"."""
    normed: bool = False
    """Queries and keys pass norms over the channels of each head, ``q_norm`` and ``k_norm``."""


ATTENTIONS = {  # of Llama, Mistral, Qwen2, Qwen3
    **dict.fromkeys(
        ("fd3aba4fff74", "dcf697ead0e7", "37fce64c5201", "ffbb2851d273", "876b2d653554"),
        Attention(),
    ),
    **dict.fromkeys(
        ("2ff6cd2af2f1", "af459b206859", "f033a28d9122", "5d43b6b3567e"), Attention("config")
    ),
    **dict.fromkeys(
        ("38e82a8a2b4b", "35cff832b1c1", "1c7954496145", "fb90e9fd0035"), Attention("self")
    ),
    **dict.fromkeys(
        ("e2f0978b8f29", "bc2f92c309e3", "b6b997416056", "85562f9ba28a"), Attention("self", True)
    ),
}
"""Attentions that run in one piece with the norm before them: since transformers 5.24, 5.4, 5.1,
5.0 and 4.56.
"""
SELF_ATTENTIONS = {
    *ATTENTIONS,
    *("a1505232e26d", "ee9ce464a9ce", "f736cceac29e", "09682fb48d52"),  # OLMo-2
    *("cfd5975cb071", "1a0e97573788", "9aff017528fc", "3444045c163f"),  # OLMo-3
    *("f58ee7b386cc", "fbc9e1e0e088", "52276ee49ca3", "cc1037eaf686", "a9ceea19769c"),  # Gemma-2
    *("a1b04ba3d9e0", "a8021bb89302", "9e50177f2be0", "d57fb9689796", "d8a2be2c9209"),  # Gemma-3
    *("38a5ba830f24", "bf95479160e6", "ebe81f6f7263", "fc2913930974"),  # Phi-3
    *("73b23898e279", "039191cb5df4", "a7debe700979", "0670bc8dd791"),  # SmolLM3
    *("a983391ce478", "b0a70ef33d93", "944603227592", "334ae36d5ec8"),  # Cohere
    *("b153fd4a2f88", "033d23aea77f", "5afefc22ed04", "aac95540bf5c"),  # OLMo
}
"""Attentions whose projections of queries, keys and values read one input, and whose ``o_proj``
reads the rest.
"""
DECODER_LAYERS = {"dc2a7e8a52a4", "1515b3d2da53"}
"""x + attention(norm(x)), then x + mlp(norm(x)): Llama and 66 others of transformers 5.24."""
GATED_MLPS = {"d9e9fc411102"}
"""down(act(gate(x)) * up(x)): Llama and 126 others."""
JOINED_MLPS = {"cc9ee1739c1f"}
"""The same with gate and up in one weight, ``gate_up_proj``: Phi-3, GLM-4."""
NORMS = {"075c8d198279": "rms", "2c29d28177de": "rms", "072c442d528d": "centered"}
"""RMSNorms. "rms" multiplies by its weight (Llama, and OLMo-2, which rounds last); "centered" by
one more (Gemma).
"""
ROTATIONS = {"6e071d28b2d6", "05566310caba"}
"""``apply_rotary_pos_emb`` of pairs (i, i + d / 2) over whole heads, in the dtype of the heads."""
ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "quick_gelu": "quick_geglu",
}
"""``hidden_act`` of a gated MLP in a configuration, and the flow's activation."""


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


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether it is x + attention(norm(x)), then x + mlp(norm(x))."""
    return _forward(module) in DECODER_LAYERS


def attention_kind(module: nn.Module) -> Attention | None:
    """What is special of an attention that runs in the flow from norm to heads; None of others."""
    kind = ATTENTIONS.get(_forward(module))
    if kind is None:
        return None
    original = original_class(module).forward
    rotate = inspect.unwrap(original).__globals__.get("apply_rotary_pos_emb")
    return kind if rotate is not None and fingerprint(rotate) in ROTATIONS else None


def shares_input(module: nn.Module) -> bool:
    """Whether queries, keys and values of an attention are linear in one tensor, its input."""
    return _forward(module) in SELF_ATTENTIONS


def gate(module: nn.Module) -> tuple[str, ...] | None:
    """Names of the weights of a gated MLP's first product, ("gate_proj", "up_proj") or
    ("gate_up_proj",); else None.
    """
    found = _forward(module)
    if found in GATED_MLPS:
        return ("gate_proj", "up_proj")
    return ("gate_up_proj",) if found in JOINED_MLPS else None


def activation_of(mlp: Any) -> str | None:
    """The flow's name of a gated MLP's activation; None of others."""
    from transformers.activations import ACT2FN

    config = getattr(mlp, "config", None)
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    act = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return found if found is not None and type(act) is type(ACT2FN[name]) else None


def norm_kind(module: nn.Module) -> str | None:
    """ "rms" or "centered" of an RMSNorm, "layer" of torch's LayerNorm over one dimension; else
    None.
    """
    if type(module) is nn.LayerNorm:
        return "layer" if len(module.normalized_shape) == 1 and module.elementwise_affine else None
    return NORMS.get(_forward(module))


def is_causal_lm(module: nn.Module) -> bool:
    """Whether a model's forward names ``lm_head`` and ``loss_function``. What it does between them
    is seen while it runs.
    """
    forward = inspect.unwrap(original_class(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return own_forward(module) is None and {"lm_head", "loss_function"} <= set(names)
