"""Why a block of a Megatron layer cannot run the FP8 flow; each function returns the reason, or None."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule

from coat_dist.config import ActivationConfig

from .activations import activation_name
from .attention import PATCHED, SDPA
from .compat import field_or
from .fields import patch_reason
from .norm import EXACT, FOLDED, describe

__all__ = [
    "attention_reason",
    "experts_reason",
    "fp8_attention_reason",
    "has_experts",
    "hooks_reason",
    "layer_reason",
    "mlp_reason",
    "output_reason",
    "shared_experts_reason",
]

_ALIGNMENT = 16
"""FP8 tensor cores take dimensions that are multiples of 16; others would be copied into padding every time."""

# Hooks of modules whose calls a patch changes: those that would not run, or see other values.
_INPUT, _OUTPUT = ("_forward_pre_hooks",), ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_BLOCK = ("_forward_pre_hooks", "_backward_hooks")  # they see its input, which now is the norm's, or its gradient
_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "self_attention": {
        "input_layernorm": _OUTPUT, "self_attention": _BLOCK, "self_attention.linear_qkv": _INPUT + _OUTPUT
    },
    "mlp": {"pre_mlp_layernorm": _OUTPUT, "mlp": _BLOCK, "mlp.linear_fc1": _INPUT + _OUTPUT,
            "mlp.linear_fc2": _INPUT + _OUTPUT},
    "mlp.shared_experts": {f"mlp.shared_experts.{fc}": _INPUT + _OUTPUT for fc in ("linear_fc1", "linear_fc2")},
}  # fmt: skip
# FP8 attention is not core_attention's call, and hands its output to linear_proj in FP8 beside.
_FP8_ATTENTION = {"self_attention.core_attention": _INPUT + _OUTPUT, "self_attention.linear_proj": _INPUT}
_KNOWN_HOOKS = ("megatron.core.distributed.", "deepspeed.")
"""Packages whose hooks gather parameters, which patched modules see to (see ``NormMLP``)."""

_ROW_BIAS = "tp_invariant with a bias of {}, whose gradient is a BF16 sum over a rank's tokens"


def layer_reason(layer: nn.Module, settings: ActivationConfig) -> str | None:
    """What holds for both blocks of ``layer``."""
    if type(layer) is not TransformerLayer:
        wrapped = "fully_shard" if isinstance(layer, FSDPModule) else None
        wrapped = "torch.compile" if isinstance(layer, OptimizedModule) else wrapped
        return f"layer class {type(layer).__name__}" + (f" (patch before {wrapped})" if wrapped else "")
    if (reason := patch_reason(layer.config)) is not None:
        return reason
    for key in ("hidden_dropout", "attention_dropout"):  # random states of ranks differ
        if settings.tp_invariant and getattr(layer.config, key):
            return f"tp_invariant with config.{key}={getattr(layer.config, key)}"
    for parameter in layer.parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            return f"{str(parameter.dtype).removeprefix('torch.')} parameters"
    return None


def attention_reason(layer: Any, settings: ActivationConfig) -> str | None:
    """For input_layernorm, linear_qkv and linear_proj of a ``TransformerLayer``."""
    attention = layer.self_attention
    if isinstance(attention, MultiLatentAttention):
        return "multi-latent attention"
    if type(attention) not in PATCHED:
        return f"self-attention class {type(attention).__name__}"
    reason = (
        _norm_reason(layer.input_layernorm)
        or _linear_reason("linear_qkv", attention.linear_qkv, ColumnParallelLinear)
        or _linear_reason("linear_proj", attention.linear_proj, RowParallelLinear)
    )
    if reason is None and attention.linear_qkv.skip_bias_add and attention.linear_qkv.bias is not None:
        return "linear_qkv hands its bias on"
    if reason is None and settings.tp_invariant and attention.linear_proj.bias is not None:
        return _ROW_BIAS.format("linear_proj")
    if reason is None and settings.tp_invariant:
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(attention, name)
            if norm is not None and any(True for _ in norm.parameters()) and type(norm) not in EXACT:
                return f"tp_invariant with {name} of class {type(norm).__name__}"
    return reason


def fp8_attention_reason(attention: Any) -> str | None:
    """Why a self-attention that can be patched cannot keep its tensors in FP8."""
    core = attention.core_attention
    if type(core) is not SDPA:
        return f"core attention class {type(core).__name__}"
    if core.dropout:
        return f"attention_dropout {core.dropout}"
    if attention.checkpoint_core_attention:
        return "recompute_modules 'core_attn', which keeps q, k and v in BF16"
    for key in ("attention_output_gate", "flash_decode", "test_mode"):
        if field_or(attention.config, key, False):
            return f"config.{key}=True"
    return None


def mlp_reason(layer: Any, settings: ActivationConfig) -> str | None:
    """For pre_mlp_layernorm and the MLP of a ``TransformerLayer``."""
    mlp = layer.mlp
    if type(mlp) is not MLP:
        return f"MLP class {type(mlp).__name__}"
    reason = _norm_reason(layer.pre_mlp_layernorm) or _products_reason(mlp)
    if reason is None and settings.tp_invariant and mlp.linear_fc2.bias is not None:
        return _ROW_BIAS.format("linear_fc2")
    if reason is None and settings.tp_invariant and (width := mlp.linear_fc2.weight.shape[1]) % settings.group_size:
        return f"tp_invariant with {width} FFN elements a rank, no multiple of group_size {settings.group_size}"
    return reason


def has_experts(layer: Any) -> bool:
    """Whether the MLP of a ``TransformerLayer`` is a mixture of experts, of the class that is known here."""
    return type(getattr(layer, "mlp", None)) is MoELayer


def experts_reason(layer: Any, settings: ActivationConfig) -> str | None:
    """For the experts of a ``TransformerLayer``, all of them together."""
    experts = layer.mlp.experts
    if type(experts) is not SequentialMLP:
        return f"experts class {type(experts).__name__} (a grouped product)"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    for expert in experts.local_experts:
        if type(expert) is not MLP:
            return f"expert class {type(expert).__name__}"
        if (reason := _products_reason(expert, expert=True)) is not None:
            return reason
    return None


def shared_experts_reason(layer: Any, settings: ActivationConfig) -> str | None:
    """For the shared experts of a ``TransformerLayer`` that has some."""
    shared = layer.mlp.shared_experts
    if type(shared) is not SharedExpertMLP:
        return f"shared experts class {type(shared).__name__}"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    if shared.config.moe_shared_expert_overlap:
        return "config.moe_shared_expert_overlap=True"
    return _products_reason(shared)


def _products_reason(mlp: Any, expert: bool = False) -> str | None:
    """For fc1, activation and fc2."""
    reason = _linear_reason("linear_fc1", mlp.linear_fc1, ColumnParallelLinear, expert)
    reason = reason or _linear_reason("linear_fc2", mlp.linear_fc2, RowParallelLinear, expert)
    if reason is not None:
        return reason
    try:
        activation_name(mlp.config)
    except ValueError as problem:
        return str(problem)
    if mlp.activation_func is not mlp.config.activation_func:  # Megatron reads the one or the other, by the gate
        return "an activation_func that is not config.activation_func"
    return None


def hooks_reason(layer: Any, kind: str, settings: ActivationConfig) -> str | None:
    """For the block ``kind`` of ``layer``: hooks that a program has registered and that patching would make useless."""
    hooked = _HOOKS.get(kind)
    if hooked is None:
        count = len(layer.mlp.experts.local_experts)
        fcs = ("linear_fc1", "linear_fc2")
        hooked = {f"mlp.experts.local_experts.{i}.{fc}": _INPUT + _OUTPUT for i in range(count) for fc in fcs}
    if kind == "self_attention" and settings.attention == "fp8":
        hooked = hooked | _FP8_ATTENTION
    for path, tables in hooked.items():
        module = layer.get_submodule(path)
        for table in tables:
            for hook in getattr(module, table).values():
                if not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS):
                    kind = table.strip("_").removesuffix("s").replace("_", " ")
                    return f"{path} has a {kind}, which would not run or see other values"
    return None


def output_reason(output_layer: Any) -> str | None:
    """For the output layer, which ``tp_invariant`` and the chunked loss replace."""
    if type(output_layer) is not ColumnParallelLinear:
        return f"output_layer class {type(output_layer).__name__}"
    if output_layer.bias is not None:
        return "output_layer has a bias"
    if output_layer.config.defer_embedding_wgrad_compute:
        return "config.defer_embedding_wgrad_compute=True"
    return None


def _norm_reason(norm: nn.Module) -> str | None:
    if type(norm) not in FOLDED:
        return f"norm class {type(norm).__name__}"
    try:
        describe(norm)
    except ValueError as problem:
        return str(problem)
    return None


def _linear_reason(name: str, linear: Any, kind: type[Any], expert: bool = False) -> str | None:
    """``expert``: communication is the token dispatcher's, none of the linear's."""
    if type(linear) not in (kind,):  # exactly: a subclass may compute something else
        return f"{name} class {type(linear).__name__}"
    for attribute in ("gather_output", "explicit_expert_comm", "disable_grad_reduce"):
        if not (expert and attribute == "explicit_expert_comm") and getattr(linear, attribute, False):
            return f"{name} with {attribute}"
    if not getattr(linear, "input_is_parallel", True):
        return f"{name} with input_is_parallel=False"
    rows, columns = linear.weight.shape
    if rows % _ALIGNMENT or columns % _ALIGNMENT:
        return f"{name} is {rows} x {columns} a rank, not multiples of {_ALIGNMENT}"
    return None
