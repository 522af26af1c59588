"""One AdamW step on a flat tensor."""

from __future__ import annotations

import torch

from ..reference import adamw as reference
from ..reference.adamw import AdamWStep, adamw_fp32_step
from ..reference.moments import Moment, MomentCodec
from .dispatch import use_kernels

__all__ = ["AdamWStep", "adamw_fp32_step", "adamw_step"]


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: Moment,
    v: Moment,
    codec_m: MomentCodec,
    codec_v: MomentCodec,
    numbers: AdamWStep,
    seed: int | None = None,
) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_step`."""
    if use_kernels(param):
        from ..kernels.adamw import adamw_step as step  # needs triton, which a machine without a GPU may lack
    else:
        step = reference.adamw_step
    step(param, grad, m, v, codec_m, codec_v, numbers, seed)
