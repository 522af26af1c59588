"""The engine and the loss of a run, built from its plan."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch

from coat_dist.config import ActivationConfig, CoatConfig
from coat_dist.deepspeed.optimizer_from_json import experts_apart
from coat_dist.deepspeed.parallel.experts import mark_experts
from coat_dist.settings import Settings
from launch.convert.fill import fill
from launch.data.packed import packed_documents
from launch.model.gpt import build_model
from launch.train.data_source import Batch
from launch.train.plan import Plan


def build_engine(
    p: Plan, note: Callable[[str], None], universal: bool = False, weights: Any = None
) -> Any:
    """Model, patches, gradient hooks and optimizer behind a DeepSpeed engine. Process groups are
    set up before.

    Args:
        universal: whether it will load a universal checkpoint.
        weights: initial ones, a :class:`launch.convert.weights.Weights`; None = random.
    """
    import megatron_patches
    from megatron_patches.parallel.pipeline import chunks_of

    a = p.args
    settings = {
        **p.settings,
        "checkpoint": {**(p.settings.get("checkpoint") or {}), "load_universal": universal},
    }
    # It would have the host wait twice a step.
    settings.setdefault("timers", {"throughput": {"enabled": False}})
    if p.coat is not None:
        settings["coat"] = p.coat  # parsed already
    stage = settings["zero_optimization"]["stage"]
    if a.eval_only and stage < 3 and a.pipeline_parallel * a.expert_parallel == 1:
        # The engine then holds weights alone, without an optimizer.
        flow = p.coat.activation if p.coat else ActivationConfig(enabled=False)
        settings |= {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 0},
            "optimizer": {"type": "CoatAdamW"},
            "coat": CoatConfig(activation=flow),
        }
    read = Settings.read(settings)
    with megatron_patches.zero_init(read):
        model = build_model(
            p.model,
            tp=a.tensor_parallel,
            ep=a.expert_parallel,
            sequence_parallel=a.sequence_parallel,
            **p.recompute,
        )
    mark_experts(model, a.expert_parallel)
    if weights is not None:
        for chunk in chunks_of(model):
            fill(chunk, weights)
        note(f"weights: {weights.kind} {weights.path}")
    optimizer = torch_adamw(model, settings) if settings["optimizer"]["type"] == "AdamW" else None
    if not a.eval_only:
        note(
            f"optimizer: {'torch AdamW, fp32 moments' if optimizer else 'CoatAdamW, FP8 moments'}; "
            f"layers: {'FP8 flow' if p.coat and p.coat.activation.enabled else 'BF16'}; "
            f"ZeRO-{stage}"
        )
    # Some of DeepSpeed's optimizers print while they are built.
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = megatron_patches.initialize(
            model=model, optimizer=optimizer, config=read, dist_init_required=False
        )
    if engine.coat_patch_report is not None:
        note(str(engine.coat_patch_report))
    return engine


def torch_adamw(model: torch.nn.Module, settings: dict[str, Any]) -> torch.optim.AdamW:
    """torch's AdamW over the same parameter groups as CoatAdamW: the baseline differs in the
    moments only.
    """
    from coat_dist import param_groups

    options = dict(settings["optimizer"].get("params") or {})
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    groups = experts_apart(param_groups(model, weight_decay=options.pop("weight_decay", 0.01)))
    return torch.optim.AdamW(groups, fused=torch.cuda.is_available(), **options)


def language_model_loss(
    tp: int, device: torch.device
) -> Callable[[Any, Batch | None], torch.Tensor]:
    """``loss(model, batch)``: mean cross entropy over the tokens that ``loss_mask`` keeps, fp32
    scalar. On a pipeline stage that is not the last it is what the stage sends to the next one.

    ``model`` is an engine, a model or one stage of it; ``batch`` is None where a stage needs no
    tokens. ``cu_seqlens`` of a batch are the starts of documents that do not attend to each other,
    in one row. A model with ``loss: "chunked"`` computes its losses itself.
    """
    from megatron.core import parallel_state

    from coat_dist.flow import TensorParallel, vocab_parallel_cross_entropy
    from megatron_patches.layers.loss import ChunkedLossGPTModel

    group = TensorParallel()
    if tp > 1:
        group = TensorParallel(parallel_state.get_tensor_model_parallel_group())

    def loss(model: Any, batch: Batch | None) -> torch.Tensor:
        if batch is None:
            return model(None, None, None)
        tokens, labels, mask, positions = (
            batch[key].to(device, non_blocking=True)
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        )
        more: dict[str, Any] = {}
        if "cu_seqlens" in batch:
            more["packed_seq_params"] = packed_documents(batch["cu_seqlens"], device)
        module = getattr(model, "module", model)
        chunked = isinstance(module, ChunkedLossGPTModel)
        if chunked and module.post_process:
            more["labels"] = labels
        output = model(tokens, positions, None, **more)
        if not module.post_process:
            return output
        if not chunked:
            output = vocab_parallel_cross_entropy(output, labels, group)
        return (output * mask).sum() / mask.sum().clamp(min=1)

    return loss
