"""Patch a built transformers model in place: its layers keep parameters and names, and run the FP8
flow.

Two tiers. Blocks whose code is known (``recognize.py``) are *fused*: an attention with the
projections around it, an MLP; in layers that read as Llama's with the norm before them and the
residual connection. All other blocks run their own code, around linears in the flow, which share
the codes of an input. What stays in BF16 stands in the report with the reason.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import ActivationConfig, CoatConfigError
from ..extras import need
from ..flow.core.frozen import FrozenWeight, replace
from ..patching.plan import Plan
from ..patching.reasons import has_plain_weight, module_of
from ..patching.report import PatchReport, check_unpatched, condensed
from ..patching.settings import (
    REFUSED,
    Config,
    Rows,
    bf16_layers,
    check_bf16_layers,
    check_honoured,
    coat_block,
)
from .adapters import base_of
from .blocks import RECOGNIZERS, blocks_of, fuses, parts_of, why_called
from .experts import Experts
from .layer import AttentionKind, DecoderLayer, Sides
from .loss import ChunkedLM, LossHead, why_plain
from .modules import (
    AdaptedProjection,
    Part,
    PartProjection,
    Stack,
    UnfusedNorm,
    why_parts_act,
)
from .recognize import is_causal_lm, layer_norms, norm_kind
from .recompute import RecomputedLayer
from .sinks import SinkAttention, has_sinks

BLOCKS = "self_attn", "mlp"
"""Of layers that ``layer_norms`` knows."""


def is_transformers_model(model: Any) -> bool:
    """Whether there is a model of transformers in ``model``, be it in PEFT's or torch's
    wrappers.
    """
    return isinstance(model, nn.Module) and any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )


def patch_model(model: nn.Module, config: Config | ActivationConfig) -> PatchReport:
    """Let the layers of a built transformers model run the FP8 flow while it trains; all or nothing
    changes.

    Call it before DDP or ``fully_shard``; ``deepspeed.initialize`` does it by itself where the
    block asks for it. Evaluation and generation run the model's own forward.

    Args:
        model: a model of transformers, also inside PEFT's wrappers.
        config: what ``deepspeed.initialize`` takes, with a ``"coat"`` block; or that block as
            ``CoatConfig``, or its ``"activation"`` as ``ActivationConfig``.

    Returns:
        What was patched, which is also ``model.coat_patch_report``. With ``"enabled": "auto"`` it
        may be nothing, and the model stays as it is.

    Raises:
        CoatConfigError: ``config`` has no block; an option that needs Megatron; nothing could be
            patched (lists why); ``bf16_layers`` out of range; a model that is patched already;
            ``frozen_weights`` where none is.
    """
    plan = plan_model(model, config)
    if plan.patched:
        plan.apply(model)
        _freeze(plan)
    return plan.report


def plan_model(model: nn.Module, config: Config | ActivationConfig) -> Plan:
    """What :func:`patch_model` will do, with its arguments and errors. The model may be on the meta
    device.
    """
    need("transformers", "hf", "coat_dist.patch_model")
    if not isinstance(config, ActivationConfig):
        config = coat_block(config).activation
    check_unpatched(model)
    check_honoured(REFUSED["transformers"], config)
    plan = Plan(config)
    stacks = layer_lists(model)
    check_bf16_layers(config, max(map(len, stacks.values()), default=0))
    for layers in stacks.values():
        kept = bf16_layers(config, len(layers))
        for i, (name, layer) in enumerate(layers):
            recompute = config.recompute is None or i < config.recompute
            _plan_layer(plan, name, layer, "bf16_layers" if i in kept else None, recompute)
    plan.fill_report()
    if not plan.patched:
        why = PatchReport.summary([plan.report]) if stacks else "no layers of transformers"
        if config.enabled == "auto":
            plan.report.warn(f"all of {type(model).__name__} stays BF16: {why}")
            return plan
        raise CoatConfigError(
            f"model: got a {type(model).__name__} with nothing to patch ({why}), accepted: models "
            'of docs/hugging-face.md, or "coat": {"activation": {"enabled": false}} (or "auto"), '
            "which keeps 8-bit moments"
        )
    _plan_adapters(plan, model)
    inside = {id(m) for layers in stacks.values() for _, layer in layers for m in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            _plan_norm(plan, module)
    for parent in {stack.rpartition(".")[0] for stack in stacks}:
        plan.swap(model.get_submodule(parent), Stack, Part(config))
    _plan_loss(plan, model)
    check_honoured(_not_in_this(plan), config)
    return plan


def layer_lists(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """What transformers calls layers, with their names, by the name of the list that holds them;
    and lists of several modules of a class without such layers in them.
    """
    modules = dict(model.named_modules())
    layers = {n for n, m in modules.items() if _is_checkpointed(m)}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            classes = {type(m) for m in module}
            known = any(map(_is_checkpointed, module.modules()))
            if len(classes) == 1 and nn.Linear not in classes and not known:
                layers |= {f"{name}.{i}" for i in range(len(module))}
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    outer = None
    for name, module in modules.items():
        if name in layers and not (outer is not None and name.startswith(outer)):
            outer = f"{name}."
            found.setdefault(name.rpartition(".")[0], []).append((name, module))
    return found


def _is_checkpointed(module: Any) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _routes(layer: nn.Module) -> bool:
    """Whether a layer routes tokens to experts. Recomputed from rounded values, some tokens would
    go to other experts than in forward.
    """
    names = (name.rpartition(".")[2] for name, _ in layer.named_modules())
    return any(name in ("experts", "router") for name in names)


def _plan_layer(plan: Plan, name: str, layer: Any, whole: str | None, recompute: bool) -> None:
    """Plan a layer, or with a reason in ``whole`` leave all of its blocks in BF16."""
    entries = [
        plan.add(block_name, layer, block, RECOGNIZERS, whole)
        for block_name, block in blocks_of(layer, name)
    ]
    fused = {id(entry.module) for entry in entries if fuses(entry)}
    report = plan.report if any(entry.why is None for entry in entries) else None
    part = Part(plan.settings, name, report, recompute=recompute)
    if plan.settings.boundaries == "fp8" and report is not None:
        part = part._replace(compress=not _routes(layer))
        if not part.compress:
            report.note("boundaries: layers that route tokens to experts keep their inputs whole")
    uncalled: list[nn.Module] = []
    before: dict[str, str] = {}
    norms = layer_norms(layer)
    if norms is not None:
        pairs = zip(BLOCKS, norms.before, strict=True)
        before = {block: norm for block, norm in pairs if id(layer._modules[block]) in fused}
    if norms is not None and before:
        why = why_called(layer, *before.values())
        if why is None:
            sides = Sides.of(layer, norms, *(block in before for block in BLOCKS))
            part = part._replace(kind=sides, parts=parts_of(layer, *before, *before.values()))
            uncalled = [layer._modules[norm] for norm in before.values()]
            why = why_parts_act(layer, part)
        if why is not None:
            plan.report.unfused[name] = why
    chosen = plan.settings.boundaries == "fp8" or plan.settings.recompute is not None
    mixin = RecomputedLayer if chosen and _is_checkpointed(layer) else DecoderLayer
    plan.swap(layer, mixin, part)
    if whole is None:
        for module in layer.modules():
            _plan_norm(plan, module, called=all(module is not norm for norm in uncalled))
            if has_sinks(module):
                plan.swap(module, SinkAttention, Part(plan.settings))


def _plan_adapters(plan: Plan, model: nn.Module) -> None:
    """Plan LoRA of PEFT around linears that will be in FP8."""
    swapped = {id(module) for entry in plan.patched for module, *_ in entry.changes}
    adapted = [m for m in model.modules() if base_of(m) is not m and id(base_of(m)) in swapped]
    for module in adapted:
        plan.swap(module, AdaptedProjection, Part(plan.settings))
    if adapted:
        plan.report.note(f"{len(adapted)} linears with adapters of PEFT")


def _plan_norm(plan: Plan, module: nn.Module, called: bool = True) -> None:
    """Plan an RMSNorm that is called, or one that a fused layer computes itself."""
    kind = norm_kind(module)
    if kind is None:
        return
    part = Part(plan.settings, kind=kind)
    if called:
        plan.swap(module, UnfusedNorm, part)
    else:
        plan.set(module, "coat", part)


def _plan_loss(plan: Plan, model: nn.Module) -> None:
    settings = plan.settings
    for name, module in model.named_modules():
        head = module._modules.get("lm_head")  # not by what PEFT passes on
        if not isinstance(head, nn.Module):
            continue
        label = f"{name}.lm_head".lstrip(".")
        if settings.loss == "plain":
            why: str | None = "loss: plain"
        elif not is_causal_lm(module):
            why = _unknown_forward(module)
        elif not has_plain_weight(head):
            # RoBERTa's head is a module that holds its linear.
            weight = getattr(head, "weight", head)
            why = f"a {type(weight).__name__} as weight of lm_head"
        else:
            why = why_plain(module)
        plan.report.loss[label] = settings.loss if why is None else f"plain: {why}"
        if why is None:
            plan.swap(head, LossHead, Part(settings))
            plan.swap(module, ChunkedLM, Part(settings, label, plan.report))


def frozen_weights(plan: Plan) -> dict[int, bool]:
    """Weights of linears and experts in the flow that do not train, by identity, and which of them
    are ``[experts, in, out]``. Not those of experts with adapters, which compute with BF16 weights.
    """
    found = {}
    for entry in plan.entries:
        for module, _, value in entry.changes:
            if not isinstance(value, type):
                continue
            adapted = issubclass(value, Experts) and module is not entry.module
            if adapted or not issubclass(value, (Experts, PartProjection)):
                continue
            for name, p in module.named_parameters(recurse=False):
                if not (name.endswith("bias") or p.requires_grad or hasattr(p, "ds_id")):
                    found[id(p)] = getattr(module, "is_transposed", False)
    return found


def _freeze(plan: Plan) -> None:
    """Quantize frozen weights one after the other, each where it lies; without the key those that
    were loaded as codes of another format.
    """
    weights, left = frozen_weights(plan), []
    wanted = plan.settings.frozen_weights == "fp8"
    for entry in plan.entries:
        for name, p in entry.module.named_parameters(prefix=entry.name):
            if id(p) in weights:
                transposed = weights.pop(id(p))  # another module may share it
                loaded = isinstance(p, FrozenWeight)
                if (wanted or loaded) and getattr(p, "format", None) != plan.settings.format:
                    replace(p, FrozenWeight.of(p, plan.settings.format, transposed))
            elif not (p.requires_grad or isinstance(p, FrozenWeight)) and p.dim() > 1:
                left.append(name)
    others = ", ".join(condensed(left)) or "no others"
    if wanted:
        plan.report.note(
            f"frozen weights in the flow are FP8 codes alone; frozen in BF16: {others}"
        )


def _unknown_forward(model: nn.Module) -> str:
    """Why a model keeps its own loss whose forward does not ask for ``loss_function``."""
    package = module_of(model.forward).partition(".")[0]
    return "a loss inside forward" if package == "transformers" else f"a forward of {package}"


def _not_in_this(plan: Plan) -> Rows:
    """What this model cannot honour."""
    rows: dict[str, tuple[tuple, str]] = {}
    layers = [entry.layer for entry in plan.patched if _is_checkpointed(entry.layer)]
    why = "where layers are not transformers' GradientCheckpointingLayer"
    if not layers:
        rows["recompute"] = ((None,), why)
    if all(map(_routes, layers)):
        rows["boundaries"] = (("bf16",), f"{why}, or route tokens to experts")
    if not frozen_weights(plan):
        rows["frozen_weights"] = (("bf16",), "no weight in the flow is frozen")
    losses = plan.report.loss
    plain = [f"{name}: {how}" for name, how in losses.items() if how.startswith("plain")]
    if plain or not losses:
        why = f"where the loss stays the model's own: {'; '.join(plain) or 'no lm_head'}"
        rows["z_loss"] = ((0,), why)
    for entry in plan.entries:
        for module, _, value in entry.changes:
            if isinstance(getattr(value, "kind", None), AttentionKind):
                eager = module.config._attn_implementation == "eager"
                if not (eager or module.attention_dropout):
                    return rows
    why = "FP8 needs fused attention, without dropout and other than eager"
    return rows | {"attention": (("bf16",), why)}
