"""Blocks of Megatron layers: for each, the modules that change class, or why it stays BF16.

:data:`RECOGNIZERS` are asked in their order; the first that knows a block fills in its entry of the
plan. Only exact classes are replaced: a subclass of a Megatron module may compute anything. Reasons
of Megatron's settings are in ``config/``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule

from coat_dist.config import ActivationConfig
from coat_dist.patching.plan import Entry, Plan, Recognizer
from coat_dist.patching.reasons import (
    CALL,
    INPUT,
    INPUT_OR_ITS_GRADIENT,
    OUTPUT,
    own_code,
    refusal,
    why_not_fp8,
)

from ..config.config_check import why_bf16_config
from ..groups import tensor_parallel
from ..layers.activations import activation_name
from ..layers.attached import Patch
from ..layers.attention import (
    AttentionKind,
    CompactSelfAttention,
    PatchedSelfAttention,
    needs_own_forward,
)
from ..layers.core_attention import SDPA
from ..layers.dispatch import FP8AlltoAllDispatcher, LocalDispatcher, may_send_fp8, may_stay_local
from ..layers.experts import ExpertMLP, SharedExperts
from ..layers.grouped import FP8GroupedMLP, GroupedExperts, grouped_activation
from ..layers.linear import FP8RowParallelLinear, NormColumnParallelLinear
from ..layers.mlp import Activation, NormMLP
from ..layers.norm import FOLDABLE, AllHeadsNorm, Folded, Norm, describe
from ..layers.post_norm import PostNormTransformerLayer
from ..layers.residual import AliasedAdd


def _self_attention(entry: Entry) -> bool:
    layer, attention, settings = entry.layer, entry.module, entry.settings
    if attention is not layer.self_attention:
        return False
    entry.why = _why_not_attention(layer, settings)
    if entry.why is None:
        qkv, proj = attention.linear_qkv, attention.linear_proj
        tp = tensor_parallel(qkv)
        kind = AttentionKind.of(attention, tp)
        if kind.why_unfused is not None:
            entry.unfused[entry.name] = kind.why_unfused
        norm = _fold_norm(entry, "input_layernorm")
        residual = _alias_residual(entry, "self_attn_bda", norm, kind.why_split)
        entry.swap(qkv, NormColumnParallelLinear, Patch(settings, tp, norm))
        entry.swap(proj, FP8RowParallelLinear, Patch(settings, tensor_parallel(proj)))
        entry.swap(attention, PatchedSelfAttention, Patch(settings, tp, None, residual, kind))
    return True


def _mlp(entry: Entry) -> bool:
    layer, mlp, settings = entry.layer, entry.module, entry.settings
    if mlp is not layer.mlp:
        return False
    entry.why = _why_not_mlp(layer, settings)
    if entry.why is None:
        norm = _fold_norm(entry, "pre_mlp_layernorm")
        residual = _alias_residual(entry, "mlp_bda", norm)
        kind = _activation(mlp)._replace(recompute=layer.recompute_mlp)
        tp = tensor_parallel(mlp.linear_fc1)
        entry.swap(mlp, NormMLP, Patch(settings, tp, norm, residual, kind))
        entry.set(layer, "recompute_mlp", False)
    return True


def _grouped_experts(entry: Entry) -> bool:
    experts = entry.module
    if type(experts) not in (GroupedMLP, GroupedExperts):
        return False
    entry.why = _why_not_grouped(experts, entry.settings)
    if entry.why is None:
        kind = Activation(grouped_activation(experts.config), experts.config.activation_func)
        entry.swap(experts, FP8GroupedMLP, Patch(entry.settings, kind=kind))
        _dispatch(entry)
    return True


def _experts(entry: Entry) -> bool:
    if entry.module is not entry.layer.mlp.experts:
        return False
    entry.why = _why_not_experts(entry.module, entry.settings)
    if entry.why is None:
        for expert in entry.module.local_experts:
            entry.swap(expert, ExpertMLP, Patch(entry.settings, kind=_activation(expert)))
        _dispatch(entry)
    return True


def _shared_experts(entry: Entry) -> bool:
    shared, settings = entry.module, entry.settings
    entry.why = _why_not_shared_experts(shared, settings)
    if entry.why is None:
        tp = tensor_parallel(shared.linear_fc1)
        entry.set(shared, "__class__", SharedExperts)
        entry.set(shared, "coat", Patch(settings, tp, kind=_activation(shared)))
    return True


RECOGNIZERS: tuple[Recognizer, ...] = (
    _self_attention,
    _mlp,
    _grouped_experts,
    _experts,
    _shared_experts,
)


def _fold_norm(entry: Entry, name: str) -> nn.Module | None:
    """The norm that the block is to apply itself, or None where none comes before it."""
    norm, flag = getattr(entry.layer, name), f"recompute_{name}"
    if isinstance(norm, IdentityOp):
        return None
    entry.swap(norm, Folded)
    if getattr(entry.layer, flag, False):
        # Megatron would free the norm's "output", which now is the layer's input. There is nothing
        # to recompute either.
        entry.set(entry.layer, flag, False)
        entry.notes.append(
            "recompute_modules 'layernorm' is off in patched blocks: they never keep a norm's "
            "output"
        )
    return norm


def _alias_residual(
    entry: Entry, name: str, norm: nn.Module | None, why_split: str | None = None
) -> bool:
    """Let the norm's backward add the residual's gradient, where Megatron's own function ``name``
    adds output and residual. Returns whether it does; where autograd does, the report says why.
    """
    add = getattr(entry.layer, name)
    why = None
    if norm is None:
        why = "no norm before the block"
    elif add is not get_bias_dropout_add:
        why = f"{name} {getattr(add, '__name__', type(add).__name__)}"
    why = why or why_split
    if why is None:
        entry.set(entry.layer, name, AliasedAdd())
    else:
        entry.unfused[f"{entry.name.rpartition('.')[0]}.{name}"] = why
    return why is None


def _activation(mlp: Any) -> Activation:
    return Activation(activation_name(mlp.config), mlp.config.activation_func)


def _dispatch(entry: Entry) -> None:
    """The dispatcher of tokens to patched experts."""
    dispatcher = entry.layer.mlp.token_dispatcher
    if may_send_fp8(dispatcher, entry.settings):
        entry.swap(dispatcher, FP8AlltoAllDispatcher, Patch(entry.settings))
        entry.notes.append("tokens travel to experts of other ranks in FP8")
    if may_stay_local(dispatcher):
        entry.swap(dispatcher, LocalDispatcher)


# Why a layer or a block stays BF16: a phrase for the report, or None.


def why_bf16_layer(layer: nn.Module, settings: ActivationConfig) -> str | None:
    """What keeps all blocks of ``layer`` in BF16, whatever they are."""
    if type(layer) not in (TransformerLayer, PostNormTransformerLayer):
        why = f"layer class {type(layer).__name__}"
        if isinstance(layer, FSDPModule):
            why += " (patch before fully_shard)"
        elif isinstance(layer, OptimizedModule):
            why += " (patch before torch.compile)"
        return why
    if (reason := why_bf16_config(layer.config)) is not None:
        return reason
    for key in ("hidden_dropout", "attention_dropout"):  # random states of ranks differ
        if settings.tp_invariant and getattr(layer.config, key):
            return f"tp_invariant with config.{key}={getattr(layer.config, key)}"
    for parameter in layer.parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            return f"{_name(parameter.dtype)} parameters"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not_attention(layer: Any, settings: ActivationConfig) -> str | None:
    attention = layer.self_attention
    if isinstance(attention, MultiLatentAttention):
        return "multi-latent attention"
    if type(attention) not in (SelfAttention, CompactSelfAttention):
        return f"self-attention class {type(attention).__name__}"
    qkv, proj = attention.linear_qkv, attention.linear_proj
    reason = (
        _why_not_norm(layer.input_layernorm)
        or _why_not_linear("linear_qkv", qkv, ColumnParallelLinear)
        or _why_not_linear("linear_proj", proj, RowParallelLinear)
    )
    if reason is not None:
        return reason
    if qkv.skip_bias_add and qkv.bias is not None:
        return "linear_qkv hands its bias on"
    if settings.tp_invariant:
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(attention, name)
            exact = norm is None or type(norm) in (Norm, AllHeadsNorm)
            if not exact and any(True for _ in norm.parameters()):
                return f"tp_invariant with {name} of class {type(norm).__name__}"
        if proj.bias is not None:
            return _invariant_bias("linear_proj")
    # What a patch changes for hooks: the norm hands its input on, so the block's input is what was
    # the norm's; linear_qkv applies the norm and returns heads.
    changed = {
        "input_layernorm": OUTPUT,
        "self_attention": INPUT_OR_ITS_GRADIENT,
        "self_attention.linear_qkv": CALL,
    }
    if settings.attention == "fp8":  # not called; takes its input in FP8 as well
        changed |= {"self_attention.core_attention": CALL, "self_attention.linear_proj": INPUT}
    return _why_hooked(layer, changed)


def _why_not_mlp(layer: Any, settings: ActivationConfig) -> str | None:
    mlp = layer.mlp
    if type(mlp) is not MLP:
        return f"MLP class {type(mlp).__name__}"
    reason = _why_not_norm(layer.pre_mlp_layernorm) or _why_not_products(mlp)
    if reason is not None:
        return reason
    if settings.tp_invariant:
        if mlp.linear_fc2.bias is not None:
            return _invariant_bias("linear_fc2")
        width = getattr(mlp.linear_fc2.weight, "ds_shape", mlp.linear_fc2.weight.shape)[1]
        if width % settings.group_size:
            return (
                f"tp_invariant with {width} FFN elements a rank, no multiple of group_size "
                f"{settings.group_size}"
            )
    # The norm hands its input on, fc1 and fc2 are not called.
    changed = {"pre_mlp_layernorm": OUTPUT, "mlp": INPUT_OR_ITS_GRADIENT}
    return _why_hooked(layer, changed | _uncalled(["mlp"]))


def _why_not_experts(experts: Any, settings: ActivationConfig) -> str | None:
    if type(experts) is not SequentialMLP:
        return f"experts class {type(experts).__name__}"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    for expert in experts.local_experts:
        if type(expert) is not MLP:
            return f"expert class {type(expert).__name__}"
        if (reason := _why_not_products(expert, expert=True)) is not None:
            return reason
    count = len(experts.local_experts)
    return _why_hooked(experts, _uncalled(f"local_experts.{i}" for i in range(count)))


def _why_not_grouped(experts: Any, settings: ActivationConfig) -> str | None:
    if (reason := own_code("experts", experts, ())) is not None:
        return reason
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    count, hidden = experts.num_local_experts, experts.config.hidden_size
    width = experts.weight2.numel() // (count * hidden)
    one = experts.weight2.new_empty((hidden, width), device="meta")
    if (reason := why_not_fp8(one)) is not None:
        return f"experts with {reason}"
    return refusal(grouped_activation, experts.config)


def _why_not_shared_experts(shared: Any, settings: ActivationConfig) -> str | None:
    if type(shared) is not SharedExpertMLP:
        return f"shared experts class {type(shared).__name__}"
    if settings.tp_invariant:
        return "tp_invariant with a mixture of experts"
    if shared.config.moe_shared_expert_overlap:
        return "config.moe_shared_expert_overlap=True"
    fcs: dict[str, tuple[str, ...]] = dict.fromkeys(("linear_fc1", "linear_fc2"), CALL)
    return _why_not_products(shared) or _why_hooked(shared, fcs)


def _why_not_products(mlp: Any, expert: bool = False) -> str | None:
    """Why fc1, the activation and fc2 of an MLP or expert cannot run the flow."""
    reason = _why_not_linear("linear_fc1", mlp.linear_fc1, ColumnParallelLinear, expert)
    reason = reason or _why_not_linear("linear_fc2", mlp.linear_fc2, RowParallelLinear, expert)
    reason = reason or refusal(activation_name, mlp.config)
    # Megatron reads the one or the other, by the gate.
    if reason is None and mlp.activation_func is not mlp.config.activation_func:
        return "an activation_func that is not config.activation_func"
    return reason


def _why_not_norm(norm: nn.Module) -> str | None:
    """Why the norm before a block cannot be folded into the block's first linear; None too where
    there is no norm.
    """
    if type(norm) is IdentityOp:
        return None
    if type(norm) not in FOLDABLE:
        return f"norm class {type(norm).__name__}"
    return refusal(describe, norm)


def _why_not_linear(name: str, linear: Any, kind: Any, expert: bool = False) -> str | None:
    """Why a linear of Megatron cannot be replaced, or its weight not be used by a patched MLP.

    An ``expert`` leaves communication to the token dispatcher.
    """
    if type(linear) is not kind:
        return f"{name} class {type(linear).__name__}"
    if (reason := own_code(name, linear, ())) is not None:
        return reason
    for attribute in ("gather_output", "explicit_expert_comm", "disable_grad_reduce"):
        allowed = expert and attribute == "explicit_expert_comm"
        if not allowed and getattr(linear, attribute, False):
            return f"{name} with {attribute}"
    if not getattr(linear, "input_is_parallel", True):
        return f"{name} with input_is_parallel=False"
    reason = why_not_fp8(linear.weight)
    return None if reason is None else f"{name} with {reason}"


def _invariant_bias(name: str) -> str:
    """A row-parallel linear that ``tp_invariant`` cannot have."""
    return f"tp_invariant with a bias of {name}, whose gradient is a BF16 sum over a rank's tokens"


def _uncalled(mlps: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """fc1 and fc2 of patched MLPs, which are not called."""
    return {f"{mlp}.{fc}": CALL for mlp in mlps for fc in ("linear_fc1", "linear_fc2")}


def _why_hooked(root: nn.Module, changed: dict[str, tuple[str, ...]]) -> str | None:
    """What a program put on the modules at these paths, in the tables of hooks that a patch
    changes.
    """
    for path, tables in changed.items():
        if (reason := own_code(path, root.get_submodule(path), tables)) is not None:
            return reason
    return None


def refuse_shared(plan: Plan, model: nn.Module) -> None:
    """Leave blocks in BF16 a module of which stands in several places: each place may want another
    patch of it, or none. A layer that stands in several places is one block.
    """
    places: dict[int, list[str]] = defaultdict(list)
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            places[id(child)].append(f"{name}.{key}".lstrip("."))
    for entry in plan.patched:
        for module, attribute, _ in entry.changes:
            found = places[id(module)]
            if attribute == "__class__" and len(found) > 1:
                entry.why = f"a {type(module).__name__} shared by {' and '.join(found)}"
                entry.changes.clear()
                break


def why_no_fp8_attention(attention: Any) -> str | None:
    """Why a self-attention that can be patched cannot keep its tensors in FP8."""
    core = attention.core_attention
    if type(core) is not SDPA:
        return f"core attention class {type(core).__name__}"
    if core.dropout:
        return f"attention_dropout {core.dropout}"
    if attention.checkpoint_core_attention:
        return "recompute_modules 'core_attn', which keeps q, k and v in BF16"
    return needs_own_forward(attention.config)


def why_bf16_output_layer(output_layer: Any) -> str | None:
    """Why neither ``tp_invariant`` nor the chunked loss can replace an output layer."""
    if type(output_layer) is not ColumnParallelLinear:
        return f"output_layer class {type(output_layer).__name__}"
    if (reason := own_code("output_layer", output_layer, ())) is not None:
        return reason
    if output_layer.bias is not None:
        return "output_layer has a bias"
    if output_layer.config.defer_embedding_wgrad_compute:
        return "config.defer_embedding_wgrad_compute=True"
    return None


def why_plain_loss(model: Any) -> str | None:
    """Why the loss of a language model stays plain, or None.

    In a pipeline stage without output layer only class and configuration are looked at, which are
    the same in the stage that has one.
    """
    if type(model) is not GPTModel:
        return f"model class {type(model).__name__}"
    reason = own_code("the model", model, ()) or why_bf16_config(model.config)
    if reason is not None:
        return reason
    output_layer = getattr(model, "output_layer", None)
    if output_layer is not None and (reason := why_bf16_output_layer(output_layer)) is not None:
        return reason
    if model.config.mtp_num_layers:
        return "multi-token prediction computes several losses"
    if model.fp16_lm_cross_entropy:
        return "fp16_lm_cross_entropy"
    if getattr(model.config, "use_mup", False):
        return "config.use_mup scales logits"
    if model.config.config_logger_dir:
        return "config.config_logger_dir asks for logits"
    if output_layer is None:
        return None
    if output_layer.gather_output and tensor_parallel(output_layer).size > 1:
        return "parallel_output=False gathers logits"
    weight = output_layer.weight
    if weight is None:
        weight = model.shared_embedding_or_output_weight()
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"{_name(weight.dtype)} parameters"
    return None
