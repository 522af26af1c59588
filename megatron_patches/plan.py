"""What to patch in a model and what not, decided before anything changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from coat_dist.config import ActivationConfig

from .fields import patch_reason
from .loss import loss_reason
from .reasons import (
    attention_reason,
    experts_reason,
    has_experts,
    hooks_reason,
    layer_reason,
    mlp_reason,
    output_reason,
    shared_experts_reason,
)
from .report import PatchReport

__all__ = ["NORMS", "Block", "layers_of", "pipelined", "plan_blocks", "plan_outputs"]

_Reason = Callable[[Any, ActivationConfig], str | None]
_REASONS: dict[str, _Reason] = {
    "self_attention": attention_reason,
    "mlp": mlp_reason,
    "mlp.experts": experts_reason,
    "mlp.shared_experts": shared_experts_reason,
}
NORMS = {"self_attention": "input_layernorm", "mlp": "pre_mlp_layernorm"}
"""The norm that a block applies itself, by the block."""


@dataclass(frozen=True)
class Block:
    """A part of a layer that is patched as a whole or not at all."""

    layer_name: str
    layer: Any
    kind: str
    """One of "self_attention", "mlp", "mlp.experts", "mlp.shared_experts"; also its name in the layer."""

    @property
    def name(self) -> str:
        return f"{self.layer_name}.{self.kind}"

    def reason(self, settings: ActivationConfig) -> str | None:
        """Why it stays BF16, for itself; None if it need not."""
        return _REASONS[self.kind](self.layer, settings) or hooks_reason(self.layer, self.kind, settings)

    def modules(self) -> dict[str, Any]:
        """The modules whose class a patch changes, by their name in the layer."""
        if self.kind == "mlp.experts":
            count = len(self.layer.mlp.experts.local_experts)
            paths = [f"mlp.experts.local_experts.{i}" for i in range(count)]
        elif self.kind == "self_attention":
            paths = [NORMS[self.kind], self.kind, "self_attention.linear_qkv", "self_attention.linear_proj"]
        else:
            paths = [NORMS[self.kind], self.kind] if self.kind in NORMS else [self.kind]
        return {path: self.layer.get_submodule(path) for path in paths}


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every layer of every transformer block. One layer may have several names."""
    for name, block in model.named_modules():
        if isinstance(block, TransformerBlock):
            for i, layer in enumerate(block.layers):
                yield f"{name}.layers.{i}".lstrip("."), layer


def pipelined(model: nn.Module) -> bool:
    return any(getattr(config, "pipeline_model_parallel_size", 1) > 1 for config in _configs(model))


def plan_blocks(model: nn.Module, settings: ActivationConfig, report: PatchReport) -> list[Block]:
    """What to patch; the report says what and what not."""
    layers, staged = list(layers_of(model)), pipelined(model)
    if not layers and not staged:
        kinds = ", ".join(type(m).__name__ for m in (model if isinstance(model, nn.ModuleList) else [model]))
        raise ValueError(f"model: got {kinds}, which holds no Megatron transformer layer")
    everywhere = None  # what keeps layers of all stages from being patched
    for config in _configs(model):
        all_bf16 = len(_bf16_layers(settings, config.num_layers)) == config.num_layers
        everywhere = everywhere or patch_reason(config) or ("bf16_layers" if all_bf16 else None)
    blocks = []
    for name, layer in layers:
        keep = None
        if layer.layer_number - 1 in _bf16_layers(settings, layer.config.num_layers):
            keep = "bf16_layers"
        whole = keep or layer_reason(layer, settings)
        for block in _blocks_of(name, layer):
            reason = whole or block.reason(settings)
            if reason is None:
                blocks.append(block)
            else:
                report.left[block.name] = reason
        if not whole and has_experts(layer):
            report.left[f"{name}.mlp.router"] = "routing is not quantized"
        if not whole and any(True for _ in layer.cross_attention.parameters()):
            report.left[f"{name}.cross_attention"] = "cross-attention"
    report.left |= _shared_reasons(model, blocks)
    blocks = [b for b in blocks if b.name not in report.left]
    report.patched += [b.name for b in blocks]
    for name, module in model.named_modules():
        known = any(module is layer or module is getattr(layer, "_orig_mod", None) for _, layer in layers)
        if isinstance(module, BaseTransformerLayer) and not known:
            report.left[name] = "outside the decoder's layers (multi-token prediction)"
    if not blocks and (everywhere or not staged):
        why = f" ({everywhere})" if everywhere and not layers else ""
        raise ValueError(f"model: nothing to patch{why}\n{report}")
    if not blocks:
        report.notes.append("no block is patched in this pipeline stage")
    return blocks


def plan_outputs(
    model: nn.Module, settings: ActivationConfig, report: PatchReport
) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Name and module of output layers, and the language models whose loss is to be chunked.

    What is refused is refused in every pipeline stage, as far as class and configuration of the model tell.
    """
    models = [(n, m) for n, m in model.named_modules() if isinstance(m, LanguageModule)]
    last = [(n, m) for n, m in models if getattr(m, "output_layer", None) is not None]
    outputs = [(f"{n}.output_layer".lstrip("."), m.output_layer) for n, m in last if isinstance(m, GPTModel)]
    chunked = [m for n, m in last if _chunked(n, m, settings, report)]
    if settings.z_loss:
        elsewhere = pipelined(model) and any(loss_reason(m) is not None for _, m in models)
        if not models or len(chunked) < len(last) or elsewhere:
            accepted = "0, or a model whose loss is chunked"
            raise ValueError(f"activation.z_loss: got {settings.z_loss}, accepted: {accepted}\n{report}")
    if settings.tp_invariant:
        report.left |= {name: reason for name, m in outputs if (reason := output_reason(m)) is not None}
        if report.left or settings.bf16_layers:
            raise ValueError(f"activation.tp_invariant: got true, accepted: false with BF16 blocks\n{report}")
        report.patched += [name for name, _ in outputs]
    return outputs, chunked


def _chunked(name: str, model: Any, settings: ActivationConfig, report: PatchReport) -> bool:
    """Whether a language model's loss is to be chunked; says so in the report."""
    reason = "activation.loss" if settings.loss == "plain" else loss_reason(model)
    report.loss[f"{name}.output_layer".lstrip(".")] = "chunked" if reason is None else f"plain ({reason})"
    if reason is None and model.config.cross_entropy_loss_fusion:
        report.notes.append("cross_entropy_loss_fusion has no effect: the loss is chunked")
    return reason is None


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of Megatron's models and transformer blocks in ``model``, none of them twice."""
    kinds = (LanguageModule, TransformerBlock)
    return list({id(m.config): m.config for m in model.modules() if isinstance(m, kinds)}.values())


def _blocks_of(name: str, layer: Any) -> list[Block]:
    """What can be patched in a ``TransformerLayer``."""
    kinds = ["self_attention", "mlp"]
    if has_experts(layer):
        kinds = ["self_attention", "mlp.experts"] + ["mlp.shared_experts"] * (layer.mlp.shared_experts is not None)
    return [Block(name, layer, kind) for kind in kinds]


def _bf16_layers(settings: ActivationConfig, layers: int) -> set[int]:
    """Indices, from 0 over all pipeline stages, of the layers that stay BF16; ``layers`` is how many there are.

    Raises:
        ValueError: an index out of range.
    """
    wrong = [i for i in settings.bf16_layers if not -layers <= i < layers]
    if wrong:
        accepted = f"{-layers} to {layers - 1} for {layers} layers"
        raise ValueError(f"activation.bf16_layers: got {wrong[0]}, accepted: {accepted}")
    return {i % layers for i in settings.bf16_layers}


def _shared_reasons(model: nn.Module, blocks: list[Block]) -> dict[str, str]:
    """Why blocks that could be patched by themselves stay BF16 all the same, by name: they share modules.

    A module that is used in two places can be patched if both want the same of it. Norms of patched blocks all hand
    their input on. Everything else belongs to one norm: two layers can share an attention if they share its norm too. A
    place outside of ``blocks`` wants the module as it was.
    """
    places: dict[int, dict[tuple[int, str], str]] = defaultdict(dict)  # of a module: parent and attribute → name
    for name, parent in model.named_modules():
        for key, child in parent.named_children():
            places[id(child)][id(parent), key] = f"{name}.{key}".lstrip(".")
    left: dict[str, str] = {}
    while True:
        rest = [b for b in blocks if b.name not in left]
        users: dict[int, list[Block]] = defaultdict(list)
        known: dict[int, set[tuple[int, str]]] = defaultdict(set)
        for block in rest:
            for path, module in block.modules().items():
                parent, _, key = path.rpartition(".")
                users[id(module)].append(block)
                known[id(module)].add((id(block.layer.get_submodule(parent)), key))
        more = {}
        for block in rest:
            for path, module in block.modules().items():
                others = [name for place, name in places[id(module)].items() if place not in known[id(module)]]
                if path not in NORMS.values():
                    others += [b.name for b in users[id(module)] if _ids(b) != _ids(block)]
                if others:
                    more[block.name] = f"{path} shared with {others[0]}"
                    break
        if not more:
            return left
        left |= more


def _ids(block: Block) -> list[int]:
    return [id(m) for m in block.modules().values()]
