"""Cross entropy over a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .scaling import TensorParallel

__all__ = ["IGNORE_INDEX", "vocab_parallel_cross_entropy"]

IGNORE_INDEX = -100
_CHUNK = 2**24
"""Logits converted to fp32 at a time: 64 MiB."""


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Loss per token, fp32, of the shape of ``labels``.

    Exponentials are fp32, their sum over the vocabulary is fp64, so the loss does not depend on the number of ranks.
    Saves an alias of the logits and 16 bytes a token.

    Args:
        logits: ``[..., v / tp]``, any floating dtype; rank r holds columns r * v / tp and up.
        labels: ``[...]``, integer; tokens labelled -100 have loss and gradient zero.

    Raises:
        ValueError: shapes that do not fit; on CPU also a label outside the vocabulary. On a GPU, where looking would
            cost a synchronization, such a token's loss and gradient are NaN.
    """
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise ValueError(
            f"labels: got {labels.dtype} {list(labels.shape)}, accepted: integers {list(logits.shape[:-1])}"
        )
    vocabulary = logits.shape[-1] * tp.size
    if labels.device.type == "cpu":
        wrong = labels[_out_of_range(labels, vocabulary)]
        if wrong.numel():
            raise ValueError(
                f"labels: got {wrong[0].item()}, accepted: 0 to {vocabulary - 1}, or {IGNORE_INDEX} to ignore"
            )
    return _CrossEntropy.apply(logits, labels, tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, labels, tp: TensorParallel) -> torch.Tensor:
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        width = rows.shape[1]
        largest = tp.max_(rows.amax(-1).float())
        local, mine = _local_labels(flat, width, tp)
        # One fp64 tensor, one reduction: sums of exponentials and the label's logit (zero on every rank but one).
        sums = torch.empty(2, len(rows), dtype=torch.float64, device=rows.device)
        for part in _parts(rows):
            sums[0, part] = (rows[part].float() - largest[part, None]).exp().sum(-1, dtype=torch.float64)
        label_logit = rows.gather(1, local[:, None]).squeeze(1).float() - largest
        sums[1] = torch.where(mine, label_logit, 0.0)
        total, label_logit = tp.sum(sums)
        loss = (total.log() - label_logit).float().masked_fill(flat == IGNORE_INDEX, 0.0)
        loss = loss.masked_fill(_out_of_range(flat, width * tp.size), torch.nan)
        ctx.save_for_backward(logits, labels, largest, total.float())
        ctx.tp = tp
        return loss.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor):
        logits, labels, largest, total = ctx.saved_tensors
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        width = rows.shape[1]
        local, mine = _local_labels(flat, width, ctx.tp)
        dloss = dloss.reshape(-1).float().masked_fill(flat == IGNORE_INDEX, 0.0)
        dloss = dloss.masked_fill(_out_of_range(flat, width * ctx.tp.size), torch.nan)
        out = torch.empty_like(rows)
        for part in _parts(rows):
            softmax = (rows[part].float() - largest[part, None]).exp_().div_(total[part, None])
            softmax.scatter_add_(1, local[part, None], -mine[part, None].float())
            out[part] = softmax.mul_(dloss[part, None])
        return out.view(logits.shape), None, None


def _out_of_range(labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return ((labels < 0) | (labels >= vocabulary)) & (labels != IGNORE_INDEX)


def _local_labels(labels: torch.Tensor, width: int, tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label on this rank (any valid column where it is elsewhere), and whether it is here."""
    local = labels - tp.rank * width
    mine = (local >= 0) & (local < width)
    return local.clamp(0, width - 1), mine


def _parts(rows: torch.Tensor) -> list[slice]:
    step = max(1, _CHUNK // rows.shape[1])
    return [slice(first, first + step) for first in range(0, len(rows), step)]
