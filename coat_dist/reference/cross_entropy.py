"""Softmax cross entropy over a vocabulary in pieces: statistics of a block of logits, and their
gradient.

A block holds all rows (tokens) and some columns (vocabulary entries): a tensor-parallel rank's, or
a chunk of those. Results must not depend on how columns are cut into blocks, and no block knows
another's maximum. So an exponential is split into parts that depend on its own logit only::

    exp(x) = mantissa(x) * 2**exponent(x)      exponent = round(x / ln 2), mantissa in [0.70, 1.42]

The sum of a row is kept relative to 2 to the row's largest exponent. Blocks are then merged by
multiplying with powers of two, which is exact, where the usual exp(max - new max) rounds. Mantissas
are fp32 and sums are fp64, so the order in which blocks are added shows in the 53rd bit only, far
below the fp32 of the loss.

A block may hold raw products, of which a model makes its logits element by element::

    logit = scale * x                                  softcap 0
    logit = softcap * tanh(scale * x / softcap)        else

Statistics are those of the logits, gradients those of the raw products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_CHUNK = 2**18
"""Logits converted to fp64 at a time: 2 MiB a temporary, which caches hold. 2**22 takes 2.5
times as long on a CPU.
"""
_LOWEST = torch.finfo(torch.float32).min


class LogitStats(NamedTuple):
    """What a block of logits contributes to each row's loss. ``sum(exp(logits)) = total *
    2**exponent``.
    """

    exponent: torch.Tensor
    """fp32 ``[rows]``, whole numbers; the lowest fp32 where no logit is finite."""
    total: torch.Tensor
    """fp64 ``[rows]``; NaN where a logit is NaN or +infinity, 0 where all are -infinity."""
    label: torch.Tensor
    """fp32 ``[rows]``: the label's logit, 0 where the label lies outside this block."""


def logit_stats(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offset: int,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> LogitStats:
    """Statistics of a block in one read.

    The logarithm of ``total * 2**exponent`` has fp32 accuracy for logits up to 2**22. Beyond that
    its error is at most 2**-22 of the largest logit, up to 2e38, where the exponent leaves fp32's
    range and saturates.

    Args:
        logits: ``[rows, columns]``, any floating dtype.
        labels: int64 ``[rows]``, entries of the whole vocabulary; any value.
        offset: the entry that column 0 stands for.
        scale, softcap: make logits of ``logits``, as the module's docstring says.
    """
    rows, columns = logits.shape
    exponent = logits.new_empty(rows, dtype=torch.float32)
    total = logits.new_empty(rows, dtype=torch.float64)
    for part in _parts(logits):
        x, _ = _transform(logits[part], scale, softcap)
        n, mantissa = _split(x)
        exponent[part] = n.amax(-1)
        total[part] = _terms(x, n, mantissa, exponent[part]).sum(-1, dtype=torch.float64)
    local, here = _local(labels, offset, columns)
    label, _ = _transform(logits.gather(1, local[:, None]).squeeze(1), scale, softcap)
    return LogitStats(exponent, total, torch.where(here, label, 0.0))


def merge(exponent: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponent and total of all blocks together, ``[rows]`` each, from ``[blocks, rows]``."""
    largest = exponent.amax(0)
    return largest, (total * pow2(exponent - largest)).sum(0)


def logit_grad(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offset: int,
    exponent: torch.Tensor,
    inverse: torch.Tensor,
    boost: torch.Tensor | None,
    dloss: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Gradient of a block: ``(boost * softmax - onehot(label)) * dloss``, times the derivative of
    the logit, in fp32 up to the last rounding.

    Args:
        logits, labels, offset, scale, softcap: as for :func:`logit_stats`.
        exponent: fp32 ``[rows]``, of the whole row.
        inverse: fp32 ``[rows]``, 1 / total of the whole row, so that ``softmax = exp(logit) /
            2**exponent * inverse``.
        boost: fp32 ``[rows]``; None = 1. Not 1 where the loss has a term in the logarithm of the
            sum.
        dloss: fp32 ``[rows]``.
        out: where to write, of the logits' shape and dtype; may be ``logits`` itself. None = a new
            tensor.

    Returns:
        ``out``.
    """
    out = torch.empty_like(logits) if out is None else out
    local, here = _local(labels, offset, logits.shape[1])
    for part in _parts(logits):
        x, slope = _transform(logits[part], scale, softcap)
        softmax = _terms(x, *_split(x), exponent[part]) * inverse[part, None]
        if boost is not None:
            softmax *= boost[part, None]
        softmax.scatter_add_(1, local[part, None], -here[part, None].float())
        out[part] = softmax * dloss[part, None] * slope
    return out


def pow2(n: torch.Tensor) -> torch.Tensor:
    """2**n as fp64, exactly, for whole numbers n <= 0; 0 below 2**-1022."""
    return ((n.double().clamp(min=-1023).long() + 1023) << 52).view(torch.float64)


def _transform(
    x: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Logits of raw products, fp32, and their derivatives."""
    if not softcap:
        return x.float() * scale, scale
    tanh = torch.tanh(x.double() * (scale / softcap))  # in fp64: see _split
    return (softcap * tanh).float(), (scale * (1 - tanh * tanh)).float()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponent and mantissa of exp(x), fp32. What is not a finite number has the lowest exponent
    and any mantissa.
    """
    t = x.double() * (1 / math.log(2))
    n = t.round().clamp(_LOWEST, -_LOWEST).float()
    # Beyond 2**24 the exponent has no room for whole numbers, and t - n leaves the range that a
    # mantissa may have. In fp64: torch's fp32 exp2 on CPU has other last bits in a vector than in
    # what is left over at its end.
    mantissa = torch.exp2((t - n.double()).clamp(-1, 1)).float()
    return torch.where(x.isfinite(), n, _LOWEST), mantissa


def _terms(
    x: torch.Tensor, n: torch.Tensor, mantissa: torch.Tensor, exponent: torch.Tensor
) -> torch.Tensor:
    """exp(x) / 2**exponent: fp32, 0 below 2**-126; NaN for NaN and +infinity."""
    shift = (n - exponent[:, None]).clamp(min=-127)
    scale = ((shift.int() + 127) << 23).view(torch.float32)
    terms = torch.where(x == -torch.inf, 0.0, mantissa * scale)
    return torch.where(x < torch.inf, terms, torch.nan)


def _local(labels: torch.Tensor, offset: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label in a block (any column where it lies outside), and whether it lies
    inside.
    """
    local = labels - offset
    return local.clamp(0, columns - 1), (local >= 0) & (local < columns)


def _parts(rows: torch.Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    return [slice(first, first + step) for first in range(0, len(rows), step)]
