"""One AdamW step on the tensors of a parameter group: contiguous ones with FP8 moments, any with fp32 moments."""

from __future__ import annotations

from collections.abc import Sequence

from ..reference import adamw as reference
from ..reference.adamw import AdamWStep, AdamWTensors, FP32Tensors
from ..reference.moments import MomentCodec
from .dispatch import use_kernels

__all__ = ["AdamWStep", "AdamWTensors", "FP32Tensors", "adamw_fp32_steps", "adamw_steps"]


def adamw_steps(
    tensors: Sequence[AdamWTensors], codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_steps`. At least one tensor."""
    if use_kernels(tensors[0].param):
        from ..kernels.adamw import adamw_steps as steps  # needs triton, which a machine without a GPU may lack
    else:
        steps = reference.adamw_steps
    steps(tensors, codec_m, codec_v, numbers)


def adamw_fp32_steps(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_fp32_steps`. At least one tensor."""
    if use_kernels(tensors[0].param):
        from ..kernels.adamw_fp32 import adamw_fp32_steps as steps
    else:
        steps = reference.adamw_fp32_steps
    steps(tensors, numbers)
