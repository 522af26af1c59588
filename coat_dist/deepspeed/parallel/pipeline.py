"""An engine whose model is one stage of a pipeline: what it refuses, and what it does over all
stages.

``megatron_patches.train_batch`` runs the micro-batches of a step by Megatron's schedules, which
accumulate gradients in the parameters; :func:`reduce_gradients` hands them to ZeRO-1, and
``engine.step()`` does the rest. A stage's own ``forward`` and ``backward`` would compute a part of
a model, so calling them is an error.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...checkpoint.zero_partitions import members
from ...config import refuse
from ...ranks import gather
from ..step.step import by_what_the_norm_counts

TIED = "/tied"
"""End of the name of the parameter group of a weight that two stages hold
(``coat_dist.optim.param_groups``).
"""


def stages(mpu: Any) -> int:
    """Number of pipeline stages that an mpu of this project reports; 1 for any other mpu, and
    without one.
    """
    if not getattr(mpu, "coat_mpu", False):
        return 1
    return mpu.get_pipeline_model_parallel_world_size()


def attach_stage(engine: Any) -> None:
    """Let gradients be reduced after all micro-batches; CoatConfigError where FP8 moments would let
    a tied weight's copies drift apart.
    """
    zero = engine.optimizer
    name_tied(zero)
    # They reduce within `engine.backward`, and cost time in each.
    for hook in getattr(zero, "_grad_acc_hooks", []):
        hook.remove()
    if not has_groups_of_norms(zero):
        _accumulate_in_fp32(zero)


def has_groups_of_norms(zero: Any) -> bool:
    """Whether ZeRO makes a norm of each of its groups. BF16_Optimizer sums all gradients of a
    rank at once.
    """
    return hasattr(zero, "scaled_global_norm")


def _refusal(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"engine.{name}: called on a pipeline stage, {what}; accepted: "
        "megatron_patches.train_batch(engine, data_iterator, forward_step), or eval_batch for an "
        "evaluation"
    )


def refuse_part(name: str, engine: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """In place of ``engine.forward`` and ``backward``, for ``name``."""
    raise _refusal(name, "which is a part of a model")


def name_tied(zero: Any) -> None:
    """Let both copies of a tied embedding draw the noise of one name: shards have none otherwise,
    and would draw by the number of groups before them. Refuse one among other weights.
    """
    for params, options in zip(members(zero), zero.optimizer.param_groups, strict=True):
        tied = any(getattr(p, "shared_embedding", False) for p in params)
        if not tied or options.get("moments") != "fp8":
            continue
        if len(params) > 1:
            refuse(
                "model_parameters",
                "got a group with FP8 moments that holds the tied embedding among other weights, "
                "whose copies on two pipeline stages would drift apart",
                '"moments": "fp32", or a group of its own (coat_dist.param_groups makes one)',
            )
        options["param_names"] = [TIED]


def norm_over_stages(engine: Any) -> None:
    """Let ZeRO-1's gradient norm be that of the whole model.

    ZeRO sums each of its groups over ranks, and stages need not have the same groups: one may hold
    no vectors. Sums over stages are made in fp64, as ZeRO sums within a rank, so that the norm is
    that of one stage.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups, mask_nan_or_inf_with_val_inplace
    from deepspeed.runtime.zero.utils import get_norm_dtype

    mpu = engine.mpu
    over_stages = mpu.get_pipeline_model_parallel_group()
    over_tensors = mpu.get_tensor_model_parallel_group()
    own = [
        str(g.get("name", i)).removesuffix(TIED)
        for i, g in enumerate(engine.optimizer.optimizer.param_groups)
    ]
    every = gather(own, over_stages)
    labels = sorted(
        {x for one in every for x in one},
        key=lambda x: (max(o.index(x) for o in every if x in o), x),
    )
    places = [labels.index(label) for label in own]

    def scaled_global_norm(zero: Any, norm_type: float = 2) -> torch.Tensor:
        squares: list[list[torch.Tensor]] = [[] for _ in labels]
        for i, place in enumerate(places):
            counted, _ = by_what_the_norm_counts(
                zero, zero.averaged_gradients[i], zero.params_in_partition[i]
            )
            squares[place] += [
                torch.linalg.vector_norm(gradient.to(get_norm_dtype())) for gradient in counted
            ]
        nothing = torch.zeros((), dtype=get_norm_dtype(), device=zero.device)
        sums = torch.stack([torch.stack(one).pow(2.0).sum() if one else nothing for one in squares])
        dist.all_reduce(sums, group=over_stages)
        totals = sums.float()
        dist.all_reduce(totals, group=zero.dp_process_group)
        if over_tensors.size() > 1:
            dist.all_reduce(totals, group=over_tensors)
        norms = totals.pow(0.5)
        mask_nan_or_inf_with_val_inplace(norms, device=norms.device)
        return combine_grad_norm_groups(list(norms.unbind()), norm_type=norm_type)

    engine.optimizer.scaled_global_norm = types.MethodType(scaled_global_norm, engine.optimizer)


def _accumulate_in_fp32(zero: Any) -> None:
    """BF16_Optimizer (``grad_accum_dtype: "fp32"``): add each gradient to its fp32 sum as soon
    as it is there.
    """
    for i, params in enumerate(zero.bf16_groups):
        for j, param in enumerate(params):

            def add(param: Any, i: int = i, j: int = j) -> None:
                if not hasattr(param, "coat_collected"):
                    zero._update_hp_grad(param, i, j, clear_lp_grads=False)
                    param.grad = None

            param.coat_add_gradient = add
            zero._grad_acc_hooks.append(param.register_post_accumulate_grad_hook(add))


def accumulated(param: Any) -> torch.Tensor | None:
    """The sum of a parameter's gradients over the micro-batches so far; changing it in place
    changes the step.
    """
    return param._hp_grad if hasattr(param, "coat_add_gradient") else param.grad


def accumulate(param: Any, gradient: torch.Tensor) -> None:
    """Add a micro-batch's gradient, as backward does, unless the parameter has
    ``coat_collected``.
    """
    if hasattr(param, "coat_add_gradient"):
        param.grad = gradient
        param.coat_add_gradient(param)
    else:
        param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def reduce_gradients(engine: Any) -> None:
    """Give ZeRO the gradients that a whole step's micro-batches have left, and count these;
    ``engine.step()`` follows.

    Gradients are sums over micro-batches of losses that were divided by their number.
    """
    zero = engine.optimizer
    if hasattr(zero, "reduce_gradients"):
        zero.set_gradient_accumulation_boundary(True)
        zero.setup_buckets()
        zero.reduce_gradients()
    else:
        engine.buffered_allreduce_fallback()
    engine.coat_reduced = True
    engine.micro_steps += engine.gradient_accumulation_steps() - 1  # `step` counts the last one


def step_reduced_gradients(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``engine.step``: RuntimeError where :func:`reduce_gradients` was not called
    before it.
    """
    if not vars(engine).pop("coat_reduced", False):
        raise _refusal("step", "whose gradients nothing has reduced")
    return type(engine).step(engine, *args, **kwargs)
