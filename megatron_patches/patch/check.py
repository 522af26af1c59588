"""Second step of :func:`~megatron_patches.patch_model`: refuse what the settings rule out, before anything changes.

Under pipeline parallelism every rank sees its own stage only. What class and configuration of the model tell is refused
in every stage, so that no rank waits for one that has raised.
"""

from __future__ import annotations

from torch import nn

from coat_dist.config import ActivationConfig

from ..layers.attention import why_no_fp8_attention
from ..layers.cuda_graphs import layers_to_graph, why_no_graphs
from ..layers.loss import why_plain_loss
from .blocks import configs_of, language_models, layers_of, pipelined
from .plan import Plan

__all__ = ["check_model", "check_plan"]


def check_model(model: nn.Module, settings: ActivationConfig) -> None:
    """Raises ValueError where there is nothing to plan: no transformer layer, patched already, or switched off."""
    if not settings.enabled:
        raise ValueError("activation.enabled: got false, accepted: true for a model that is to be patched")
    for name, module in model.named_modules():
        if getattr(type(module), "coat_patched", False):
            raise ValueError(f"model: patched already ({name or type(module).__name__}); call unpatch_model first")
    if not any(layers_of(model)) and not pipelined(model):
        kinds = ", ".join(type(m).__name__ for m in (model if isinstance(model, nn.ModuleList) else [model]))
        raise ValueError(f"model: got {kinds}, which holds no Megatron transformer layer")


def check_plan(plan: Plan, model: nn.Module, settings: ActivationConfig) -> None:
    """Raises ValueError, with the report, where the plan is not what the settings ask for."""
    if plan.nothing:
        asked = plan.report.left.values() or [plan.why_nothing]  # a stage of a pipeline may have no layers to leave
        if set(asked) == {"bf16_layers"}:
            raise ValueError(
                f"activation.bf16_layers: got {list(settings.bf16_layers)}, every layer, and nothing to patch is left; "
                f"accepted: fewer layers, or activation.enabled false\n{plan.report}"
            )
        why = f" ({plan.why_nothing})" if plan.why_nothing and not any(layers_of(model)) else ""
        raise ValueError(f"model: nothing to patch{why}\n{plan.report}")
    if settings.z_loss and _loss_stays_plain(plan, model):
        accepted = "0, or a model whose loss is chunked"
        raise ValueError(f"activation.z_loss: got {settings.z_loss}, accepted: {accepted}\n{plan.report}")
    if settings.tp_invariant and (plan.report.left or settings.bf16_layers):
        raise ValueError(f"activation.tp_invariant: got true, accepted: false with BF16 blocks\n{plan.report}")
    if settings.cuda_graphs:
        for config in configs_of(model):
            if (reason := why_no_graphs(config)) is not None:
                raise ValueError(f"activation.cuda_graphs: got true, accepted: false with {reason}")
        if not layers_to_graph(plan.blocks)[0]:
            why = "accepted: false where no layer has attention and MLP patched"
            raise ValueError(f"activation.cuda_graphs: got true, {why}\n{plan.report}")
    if settings.attention == "fp8":
        for block in plan.blocks:
            reason = why_no_fp8_attention(block.layer.self_attention) if block.kind == "self_attention" else None
            if reason is not None:
                stack = block.layer_name.rpartition("layers.")[0].rstrip(".").removesuffix("decoder").rstrip(".")
                where = f"layer {block.layer.layer_number}" + (f" of {stack}" if stack else "")
                raise ValueError(f'activation.attention: got "fp8", accepted: "bf16" with {reason} ({where})')


def _loss_stays_plain(plan: Plan, model: nn.Module) -> bool:
    """Whether some language model has a loss that is not chunked, here or in another pipeline stage."""
    models = [m for _, m in language_models(model)]
    if pipelined(model) and any(why_plain_loss(m) is not None for m in models):
        return True
    return not models or len(plan.chunked) < sum(getattr(m, "output_layer", None) is not None for m in models)
