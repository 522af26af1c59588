"""DeepSpeed's ZeRO step without the passes that CoatAdamW makes itself: methods overridden on one
instance.

ZeRO-1 and 2 make three passes over the fp32 gradients before the optimizer sees them: a check for
infinities, the norm, and a multiplication that unscales and clips. The norm is needed, but not its
copy of every gradient in fp64. The check is not, because ZeRO then looks at the norm, which is
non-finite if any gradient that it counts is; those that it does not count (copies of a parameter on
other ranks of a model-parallel group) can be looked at with it. The multiplication is not needed,
because the step reads every gradient anyway.

ZeRO also has the host wait for the GPU: at the end of backward (``step_gradients.py``, which has
all that happens to gradients before), and in each norm. The GPU then idles until the host has
started what comes next. One wait is left, for the norm: the host has to know whether the step is
skipped. After the update ZeRO copies its fp32 partition to the 16-bit one; the step writes both.

The entries of ``attach.py`` whose names begin with "step" leave this out, only with a verified
DeepSpeed (:data:`VERIFIED`). Results are the same bits, with two exceptions: the norm on a GPU,
whose fp64 sums have another order; and clipping with ``bf16_remainder``, where DeepSpeed rounds the
clipped gradients to bf16 and the step, which clips in fp32, does not.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.zero_partitions import base_optimizer
from ...ranks import rank_and_world

logger = logging.getLogger("coat_dist")

_FILES = ("runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py", "runtime/utils.py")

VERIFIED = {"0.19.8": "bd01c9d9d4a1d1cfc9b19c2c4e5489b6ffc3f2002ca61158e164c0abd190e116"}
"""The hash of ``_FILES`` of each DeepSpeed version that was read and that the tests run. To add
one: read what ``step*.py`` and ``master_weights.py`` rely on, install that version and run
``tests/coat_dist``.
"""


def build_hash() -> str:
    """Hash of the installed DeepSpeed's ``_FILES``."""
    import deepspeed

    folder = Path(deepspeed.__file__).parent
    digests = (hashlib.sha256((folder / name).read_bytes()).digest() for name in _FILES)
    return hashlib.sha256(b"".join(digests)).hexdigest()


@functools.cache
def is_verified_build() -> bool:
    """Whether the installed DeepSpeed's ZeRO is one that was read; rank 0 warns once where it is
    not.
    """
    verified = build_hash() in VERIFIED.values()
    if not verified and rank_and_world()[0] == 0:
        import deepspeed

        logger.warning(
            "DeepSpeed %s is not a verified build (%s): engine.step() keeps all of DeepSpeed's "
            "passes over gradients "
            "and weights and takes 2 to 3.4 times as long; results are the same. docs/support.md "
            "says how to add one",
            deepspeed.__version__,
            ", ".join(VERIFIED),
        )
    return verified


def may_leave_out_passes(zero: Any) -> bool:
    """Whether passes of ``engine.optimizer`` may be left out: not those of ZeRO-3, of
    BF16_Optimizer, of an unverified DeepSpeed, without a CoatAdamW, or under settings with which
    ZeRO does not look at the norm.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if (
        type(zero) is not DeepSpeedZeroOptimizer
        or base_optimizer(zero) is None
        or not is_verified_build()
    ):
        return False
    return bool(not zero.cpu_offload and zero.compute_grad_norm and zero.check_grad_overflow)


# The norm, and the check for infinities. Loss scaling (fp16) reacts to the check itself, ahead of
# the norm; without it, the norm does all the work. A pipeline's stage has another norm
# (``pipeline.py``).


def leave_to_the_norm(zero: Any, partition_gradients: bool = True) -> None:
    """In place of ``check_overflow``: ZeRO then looks at the norm."""
    zero.overflow = False


def some_are_not_counted(zero: Any) -> bool:
    """Whether some rank's norm does not count all of its gradients. The same on all ranks, which
    then meet in the collectives of ZeRO's check: the size of a group is, and all of them hold the
    same parameters.
    """
    from deepspeed.comm import pg_utils

    replicated = any(_in_a_pipeline(p) for params in zero.bit16_groups for p in params)
    return replicated or pg_utils.is_parallel(zero.model_parallel_group)


def gradient_norm(zero: Any, gradients: Any, params: Any) -> torch.Tensor:
    """In place of ``get_grad_norm_direct``: the same norm over ranks, fp32, -1 where it is not
    finite. ZeRO converts each gradient to fp64 first, and has the host wait where it looks for what
    is not finite.
    """
    from deepspeed import comm
    from deepspeed.runtime.zero.utils import get_norm_dtype

    zero.coat_norm_known = None
    counted, others = by_what_the_norm_counts(zero, gradients, params)
    total = torch.zeros((), dtype=torch.float32, device=zero.device)
    # On a GPU one kernel for all of them, which converts each element as it reads it; `vector_norm`
    # makes a copy first.
    if counted:
        total = (
            torch.stack(torch._foreach_norm(counted, 2.0, get_norm_dtype())).pow(2.0).sum().float()
        )
    if others:
        norms = torch.stack(torch._foreach_norm(others, 2.0, get_norm_dtype()))
        total = torch.where(norms.isfinite().all(), total, torch.inf)
    comm.all_reduce(total, group=zero.dp_process_group)
    zero._model_parallel_all_reduce(tensor=total, op=comm.ReduceOp.SUM)
    norm = total.pow(0.5)
    return torch.where(norm.isfinite(), norm, -1.0)


def by_what_the_norm_counts(
    zero: Any, gradients: Any, params: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A rank's gradients of one group: those that its norm counts, and those that another rank's
    does.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    counted: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    gradients = (g for g in gradients if not getattr(g, "_zero_padding", False))
    # What follows the last gradient is padding, too.
    for gradient, param in zip(gradients, params, strict=False):
        own = is_model_parallel_parameter(param) or zero.model_parallel_rank == 0
        (counted if own and not _in_a_pipeline(param) else others).append(gradient.detach())
    return counted, others


def _in_a_pipeline(param: torch.nn.Parameter) -> bool:
    from deepspeed.runtime.constants import PIPE_REPLICATED

    return bool(getattr(param, PIPE_REPLICATED, False))


def overflow_outside_the_norm(zero: Any) -> torch.Tensor:
    """In place of ``has_overflow_partitioned_grads_serial``, which looks at all of a rank's
    gradients: only those that ``get_grad_norm_direct`` does not count. These are few: norms and
    biases that tensor-parallel ranks share.
    """
    found = torch.zeros(1, dtype=torch.float32, device=zero.device)
    for i, params in enumerate(zero.params_in_partition):
        for gradient in by_what_the_norm_counts(zero, zero.averaged_gradients[i], params)[1]:
            found += zero._has_inf_or_nan(gradient)
    return found.bool()


# Unscaling and clipping.


def unscale_and_clip_in_the_step(zero: Any, gradients: list, total_norm: Any) -> None:
    """In place of ``unscale_and_clip_grads``: the same factor, computed the same way, handed to
    CoatAdamW, which multiplies each gradient by it as it reads it.
    """
    # The first group, after our norm.
    if total_norm.is_cuda and vars(zero).get("coat_norm_known", ...) is None:
        zero.coat_norm_known = torch.cuda.Event()
        zero.coat_norm_known.record()
    if zero.clip_grad == 0.0 and zero.loss_scale == 1.0:
        zero.optimizer.grad_factor = None
        return
    scale = zero.loss_scale
    if zero.clip_grad > 0.0:
        scale = (
            torch.clamp((total_norm / zero.loss_scale + 1e-6) / zero.clip_grad, min=1.0)
            * zero.loss_scale
        )
    zero.optimizer.grad_factor = torch.as_tensor(
        1.0 / scale, dtype=torch.float32, device=zero.device
    )


def norm_known(engine: Any) -> torch.cuda.Event | None:
    """After an ``engine.step()`` that changed the weights: when the GPU knew the gradient norm, and
    all that was computed before the step. The optimizer's work comes later. None after any other
    call, and where nothing is known before the end of it: on a CPU, under ZeRO-3, with fp16, in a
    pipeline, without CoatAdamW.
    """
    return getattr(engine.optimizer, "coat_norm_known", None) if engine.was_step_applied() else None


# Weights. ZeRO-1 and 2 read their fp32 partition once more to write the 16-bit one; CoatAdamW
# writes both, same bits.


def step_with_copy(zero: Any, group_no: int) -> None:
    """The step of one group, whose fp32 partition is copied to the 16-bit one in the same pass."""
    # What ZeRO copies next is `single_partition_of_fp32_groups[group_no]`. Until the end of ZeRO's
    # step the 16-bit partition itself stands there, and torch does not copy a tensor onto itself.
    masters, weights = zero.single_partition_of_fp32_groups, zero.get_bit16_param_group(group_no)[0]
    zero.optimizer.copies = {masters[group_no]: weights}
    try:
        type(zero)._optimizer_step(zero, group_no)
    finally:
        del zero.optimizer.copies
    masters[group_no].grad = None  # ZeRO would clear that of the tensor which it finds
    masters[group_no] = weights


def step_and_restore(zero: Any, closure: Any = None) -> None:
    masters = list(zero.single_partition_of_fp32_groups)
    try:
        type(zero).step(zero, closure)
    finally:
        zero.single_partition_of_fp32_groups[:] = masters
