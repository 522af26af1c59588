"""What Megatron's schedules and ``finalize_model_grads`` do around a step's micro-batches, under
DeepSpeed.

For every way of driving an engine (``engine(...)``, ``backward``, ``step``; ``train_batch``), by
Megatron's functions:

- losses of routers and of multi-token prediction are added inside backward, out of reach of the
  engine: before each backward their scale becomes fp16's loss scale /
  ``gradient_accumulation_steps`` (``forward_step_calc_loss``). With several stages Megatron's
  schedule does it. After a step the scale is 1 again, for other models of the process;
- before a step the bias of routers (``moe_router_enable_expert_bias``) moves by the tokens that
  experts have had, and what is counted for a step (those tokens, ``global_aux_loss``) begins again
  (``finalize_model_grads``).

Elsewhere: DeepSpeed reduces gradients, ``replicated_grads.py`` sums them over tensor-parallel
ranks, ``pipeline.py`` those of tied embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.transformer.moe.router import Router
from torch import nn
from torch.utils._pytree import tree_leaves

from coat_dist.config import CoatConfigError

from ..compat import loss_scalers, reset_counts
from ..patch.blocks import language_models

_REDUCES = "accepted: None under DeepSpeed, which reduces and scales gradients"


def check_config(model: nn.Module) -> None:
    """Refuse fields of ``TransformerConfig`` that Megatron's schedules honour and an engine of
    DeepSpeed cannot.

    Raises:
        CoatConfigError: names the field.
    """
    for config in {id(one.config): one.config for _, one in language_models(model)}.values():
        if config.calculate_per_token_loss:
            raise CoatConfigError(
                "config.calculate_per_token_loss: got True, accepted: False under DeepSpeed, which "
                "takes means over "
                "micro-batches and ranks"
            )
        for name in (
            "finalize_model_grads_func",
            "grad_sync_func",
            "param_sync_func",
            "grad_scale_func",
        ):
            if getattr(config, name, None) is not None:
                raise CoatConfigError(f"config.{name}: got a function, {_REDUCES}")


def has_step_jobs(engine: Any) -> bool:
    """Whether an engine's model has routers, or predicts several tokens.

    Raises:
        CoatConfigError: :func:`check_config` refuses the model.
    """
    check_config(engine.module)
    predicts = any(
        getattr(one.config, "mtp_num_layers", None) for _, one in language_models(engine.module)
    )
    return predicts or any(isinstance(module, Router) for module in engine.module.modules())


def attach_step_jobs(engine: Any) -> None:
    """Let a new engine do these jobs."""
    routers = [module for module in engine.module.modules() if isinstance(module, Router)]
    _set_scale(torch.ones(1, device=engine.device))
    for router in routers:
        # DeepSpeed has cast it, and a checkpoint may be loaded before a forward.
        router._maintain_float32_expert_bias()
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        _scale_before_backward(engine)
    step = engine.step

    def step_and_finalize(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            _finalize(routers)
            _set_scale(torch.ones(1, device=engine.device))
        return step(*args, **kwargs)

    engine.step = step_and_finalize


def _scale_before_backward(engine: Any) -> None:
    """Also where a program calls ``loss.backward()``, or runs another engine between forward and
    backward.
    """

    def set_scale(*_: Any) -> None:
        loss_scale = engine.optimizer.loss_scale if engine.fp16_enabled() else 1.0
        _set_scale(
            torch.full(
                (1,), loss_scale / engine.gradient_accumulation_steps(), device=engine.device
            )
        )

    forward, backward = engine.forward, engine.backward

    def forward_and_watch(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(set_scale)
        return output

    def set_scale_and_backward(*args: Any, **kwargs: Any) -> Any:
        set_scale()
        return backward(*args, **kwargs)

    engine.forward, engine.backward = forward_and_watch, set_scale_and_backward


def _set_scale(scale: torch.Tensor) -> None:
    # set_loss_scale copies into the tensor that is there: of no dimension after a backward without
    # a scale.
    for scaler in loss_scalers():
        scaler.main_loss_backward_scale = scale.clone()


@torch.no_grad()
def _finalize(routers: list[Router]) -> None:
    for config in {id(router.config): router.config for router in routers}.values():
        mine = nn.ModuleList(router for router in routers if router.config is config)
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([mine], config)
        reset_counts(config, mine)
