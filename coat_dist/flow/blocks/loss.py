"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, from logits or from
hidden states.

Both functions use the same operations (``reference/cross_entropy.py``), so they give the same loss
for the same logits.

**Logits in chunks.** With a vocabulary of 128 k and BF16, logits of a sequence of 8192 tokens are
2 GiB, and a loss that keeps them and their fp32 softmax is the peak of a step.
:func:`linear_cross_entropy` makes logits of a part of the vocabulary at a time. Forward keeps per
token what a log-sum-exp needs: an exponent (a power of two near the largest logit), the sum of
exponentials below it, and the label's logit. These merge exactly: sums are fp64 and exponents are
whole numbers, so neither the chunks nor the ranks of the vocabulary show in the loss. Backward
makes each chunk again, turns it into its gradient in place, and multiplies it into the gradients of
x and weight. That is one product more than with ``keep``, and no tensor of tokens times vocabulary
exists.

**Over ranks.** Forward has two collectives: the maximum of the exponents, and one sum of what they
scale, the totals and the label's logit, which is zero on all ranks but one. Backward has one, the
sum of dx.

**Labels.** -100 has loss and gradient zero. A label outside the vocabulary is an error on a CPU; on
a GPU, where looking would cost a synchronization, its token's loss and gradient are NaN, so that it
cannot train wrongly unnoticed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ...ops import LogitStats, exact_mm, logit_grad, logit_stats, merge, pow2
from ..core.products import check_input
from ..function import Function, outside_of_graphs, shaped
from ..parallel.tensor_parallel import TensorParallel

IGNORE_INDEX = -100
_BLOCK = 2**26
"""Most logits of :func:`linear_cross_entropy` that exist at a time: 128 MiB in BF16. Not tuned."""
_ALIGN = 64
"""A chunk's columns are a multiple of this, but for the last: rows of logits then start on whole
cache lines.
"""


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp: TensorParallel, *, z_loss: float = 0.0
) -> torch.Tensor:
    """Loss per token, fp32, of the shape of ``labels``: ``log(sum(exp(logits))) - logits[label]``.

    Exponentials are fp32, their sum over the vocabulary is fp64, so the loss does not depend on the
    number of ranks. Saves an alias of the logits and 16 bytes a token.

    Args:
        logits: ``[..., v / tp]``, any floating dtype; rank r holds columns r * v / tp and up.
        labels: ``[...]``, integer; tokens labelled -100 have loss and gradient zero.
        z_loss: adds ``z_loss * log(sum(exp(logits)))**2`` to a token's loss (PaLM, arXiv
            2204.02311, section 5).

    Raises:
        ValueError: shapes that do not fit; on CPU also a label outside the vocabulary. On a GPU,
            where looking would cost a synchronization, such a token's loss and gradient are NaN.
    """
    _check(labels, logits.shape[:-1], logits.shape[-1] * tp.size, z_loss)
    return _CrossEntropy.apply(logits, labels, tp, z_loss)


# A graph break: torch.compile cannot trace GEMMs that add to an fp32 tensor (pytorch 163880)
@outside_of_graphs
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp: TensorParallel,
    *,
    bias: torch.Tensor | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    exact: bool = False,
    keep: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """:func:`vocab_parallel_cross_entropy` of ``x @ weight.T + bias``, without holding all logits
    unless told to.

    Forward makes the logits of ``chunk`` vocabulary entries at a time and keeps their statistics.
    Backward makes each chunk again (one GEMM more than with ``keep``), turns it into its gradient
    in place, and multiplies it into the gradients of x and weight. Saves an alias of x and 16 bytes
    a token (with sequence parallelism, of all ranks' tokens). Gradients are right for any gradient
    of the loss per token.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        weight: this rank's ``[v / tp, h]``, of the dtype of x.
        labels: ``[...]``, integer, for the whole sequence; tokens labelled -100 have loss and
            gradient zero.
        bias: this rank's ``[v / tp]``, of the dtype of x.
        z_loss: see :func:`vocab_parallel_cross_entropy`.
        chunk: vocabulary entries a rank makes logits of at a time. None = as many as make 2**26
            logits (128 MiB in BF16).
        exact: sum products in fp64, as :func:`~coat_dist.flow.invariant_linear` does: loss and
            gradients are then the same bits for every number of ranks and every chunk. Slow on
            GPUs.
        keep: keep the logits for backward, ``v / tp`` of x's dtype a token, instead of making them
            again. Equal bits.
        scale: logits are ``scale * (x @ weight.T + bias)``, with the factor in fp32.
        softcap: above 0, logits are ``softcap * tanh(logits / softcap)`` of these, in fp32 too.

    Returns:
        Loss per token, fp32, of the shape of ``labels``, the same on every rank.

    Raises:
        ValueError: a shape, dtype or chunk that does not fit; names the argument. For labels as
            above.
    """
    check_input(x, weight)
    for name, t, shape in (
        ("weight", weight, list(weight.shape)),
        ("bias", bias, [weight.shape[0]]),
    ):
        if t is not None and (t.dtype != x.dtype or list(t.shape) != shape):
            raise ValueError(
                f"{name}: got {t.dtype} {list(t.shape)}, accepted: {x.dtype} (the dtype of x) "
                f"{shape}"
            )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(
            f"chunk: got {chunk!r}, accepted: a positive number of vocabulary entries, or None"
        )
    tokens = torch.Size([x.shape[0] * (tp.size if tp.sharded else 1), *x.shape[1:-1]])
    _check(labels, tokens, weight.shape[0] * tp.size, z_loss)
    width = _width(weight.shape[0], labels.numel()) if chunk is None else chunk
    keep = (
        keep
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (x, weight, bias))
    )
    if not (math.isfinite(scale) and scale and 0 <= softcap < math.inf):
        raise ValueError(
            f"scale, softcap: got {scale}, {softcap}, accepted: a finite number other than 0, a "
            "finite number from 0"
        )
    transform = float(scale), float(softcap)
    return _LinearCrossEntropy.apply(
        x, weight, bias, labels, tp, z_loss, width, exact, keep, transform
    )


class _CrossEntropy(Function):
    saves = "logits", "labels", "exponent", "inverse"

    @staticmethod
    def forward(ctx: Any, logits, labels, tp: TensorParallel, z_loss: float) -> torch.Tensor:
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        stats = logit_stats(rows, flat, tp.rank * rows.shape[1])
        loss, exponent, inverse = _loss(stats, flat, rows.shape[1] * tp.size, tp, z_loss)
        ctx.save_for_backward(*_CrossEntropy.Saved(logits, labels, exponent, inverse))
        ctx.tp, ctx.z_loss = tp, z_loss
        return shaped(loss, *labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor):
        (logits, labels, exponent, inverse), _ = _CrossEntropy.saved(ctx)
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        first, vocabulary = ctx.tp.rank * rows.shape[1], ctx.tp.size * rows.shape[1]
        factors = _factors(dloss, flat, vocabulary, exponent, inverse, ctx.z_loss)
        out = logit_grad(rows, flat, first, exponent, inverse, *factors)
        return out.view(logits.shape), None, None, None


class _LinearCrossEntropy(Function):
    """Chunks are cut from the vocabulary, not from the tokens. A chunk's part of dweight is then
    complete, is rounded once, and goes straight to its place; what is summed over chunks is dx, in
    fp32, tokens x h. Cut from the tokens, it would be dweight, v / tp x h in fp32: more wherever a
    rank has more vocabulary entries than tokens.
    """

    saves = "x", "weight", "bias", "labels", "exponent", "inverse"

    @staticmethod
    def forward(
        ctx: Any,
        x,
        weight,
        bias,
        labels,
        tp: TensorParallel,
        z_loss: float,
        width: int,
        exact: bool,
        keep: bool,
        transform: tuple[float, float],
    ) -> torch.Tensor:
        rows, flat = tp.all_rows(x), labels.reshape(-1).long()
        size = weight.shape[0]
        chunks = range(0, size, width)
        exponents = torch.empty(len(chunks), len(rows), dtype=torch.float32, device=x.device)
        totals = torch.empty_like(exponents, dtype=torch.float64)
        label = torch.zeros_like(exponents[0])
        kept: list[torch.Tensor] = []
        for i, start in enumerate(chunks):
            logits = _logits(rows, weight, bias, slice(start, start + width), exact)
            stats = logit_stats(logits, flat, tp.rank * size + start, *transform)
            exponents[i], totals[i] = stats.exponent, stats.total
            label += stats.label
            if keep:
                kept.append(logits)
            del logits  # before the next chunk is made
        stats = LogitStats(*merge(exponents, totals), label)
        loss, exponent, inverse = _loss(stats, flat, size * tp.size, tp, z_loss)
        saved = _LinearCrossEntropy.Saved(x, weight, bias, labels, exponent, inverse)
        ctx.save_for_backward(*saved, *kept)
        ctx.tp, ctx.z_loss, ctx.width, ctx.exact = tp, z_loss, width, exact
        ctx.transform = transform
        return shaped(loss, *labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor):
        saved, kept = _LinearCrossEntropy.saved(ctx)
        x, weight, bias, labels, exponent, inverse = saved
        tp, width, exact = ctx.tp, ctx.width, ctx.exact
        rows, flat = tp.all_rows(x), labels.reshape(-1).long()
        size = weight.shape[0]
        factors = _factors(dloss, flat, size * tp.size, exponent, inverse, ctx.z_loss)
        dx = dweight = dbias = None
        if _LinearCrossEntropy.needs(ctx, "x"):
            dx = _Sum(rows.shape, rows.dtype, rows.device, exact, several=width < size)
        if _LinearCrossEntropy.needs(ctx, "weight"):
            dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if _LinearCrossEntropy.needs(ctx, "bias"):
            dbias = torch.empty_like(bias)
        for i, start in enumerate(range(0, size, width)):
            part = slice(start, start + width)
            logits = kept[i] if kept else _logits(rows, weight, bias, part, exact)
            out = None if kept else logits  # another backward may read what is kept
            first = tp.rank * size + start
            grad = logit_grad(logits, flat, first, exponent, inverse, *factors, out, *ctx.transform)
            if dx is not None:
                dx.add(grad, weight[part])
            if dweight is not None and exact:
                dweight[part] = exact_mm(grad.t(), rows.t()).float()
            elif dweight is not None:
                torch.mm(grad.t(), rows, out=dweight[part])
            if dbias is not None:
                dbias[part] = grad.sum(0, dtype=torch.float64 if exact else torch.float32)
            del logits, grad, out
        return dx.finish(tp).view(x.shape) if dx is not None else None, dweight, dbias, *[None] * 7


class _Sum:
    """The gradient of x, summed over chunks and then over ranks: fp64 where exact, else fp32 (BF16
    over ranks, as Megatron does), and on a GPU without a wider buffer where there is one chunk.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        several: bool,
    ) -> None:
        self.exact, self.dtype, self.total = exact, dtype, None
        if exact or several:
            self.total = torch.zeros(
                shape, dtype=torch.float64 if exact else torch.float32, device=device
            )

    def add(self, grad: torch.Tensor, weight: torch.Tensor) -> None:
        if self.total is None and grad.is_cuda:
            self.total = grad @ weight
        elif self.total is None:
            # Without BF16 instructions, torch on CPU takes a hundred times as long for this product
            # in BF16.
            self.total = (grad.float() @ weight.float()).to(self.dtype)
        elif self.exact:
            self.total += exact_mm(grad, weight.t())
        elif grad.is_cuda and grad.dtype != torch.float32:
            torch.addmm(self.total, grad, weight, out_dtype=torch.float32, out=self.total)
        else:
            self.total.addmm_(grad.float(), weight.float())

    def finish(self, tp: TensorParallel) -> torch.Tensor:
        assert self.total is not None
        total = self.total if self.exact else self.total.to(self.dtype)
        total = tp.reduce_scatter_rows(total) if tp.sharded else tp.sum(total)
        return total.float().to(self.dtype) if self.exact else total


def _logits(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part: slice, exact: bool
) -> torch.Tensor:
    b = None if bias is None else bias[part]
    if not exact:
        return F.linear(rows, weight[part], b)
    out = exact_mm(rows, weight[part])
    return (out if b is None else out + b.double()).float().to(rows.dtype)


def _loss(
    stats: LogitStats, labels: torch.Tensor, vocabulary: int, tp: TensorParallel, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, and what backward needs of each row: exponent and 1 / total over all ranks. Two
    collectives.
    """
    exponent = tp.max_(stats.exponent.clone())
    # One fp64 tensor, one reduction: sums of exponentials and the label's logit (zero on every rank
    # but one).
    sums = torch.stack([stats.total * pow2(stats.exponent - exponent), stats.label.double()])
    total, label = tp.sum(sums)
    log_sum = total.log() + exponent.double() * math.log(2)
    loss = log_sum - label
    if z_loss:
        loss = loss + z_loss * log_sum.square()
    loss = loss.float().masked_fill(labels == IGNORE_INDEX, 0.0)
    loss = loss.masked_fill(_out_of_range(labels, vocabulary), torch.nan)
    return loss, exponent, total.reciprocal().float()


def _factors(
    dloss: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: int,
    exponent: torch.Tensor,
    inverse: torch.Tensor,
    z_loss: float,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """``boost`` and ``dloss`` of ``logit_grad``: d loss / d logits = softmax * (1 + 2 z log_sum)
    - onehot.
    """
    dloss = dloss.reshape(-1).float().masked_fill(labels == IGNORE_INDEX, 0.0)
    dloss = dloss.masked_fill(_out_of_range(labels, vocabulary), torch.nan)
    if not z_loss:
        return None, dloss
    return 1 + 2 * z_loss * (exponent * math.log(2) - inverse.log()), dloss


def _check(labels: torch.Tensor, shape: torch.Size, vocabulary: int, z_loss: float) -> None:
    if labels.shape != shape or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels: got {labels.dtype} {list(labels.shape)}, accepted: integers {list(shape)}"
        )
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: got {z_loss}, accepted: a finite number from 0")
    if labels.device.type == "cpu":
        wrong = labels[_out_of_range(labels, vocabulary)]
        if wrong.numel():
            raise ValueError(
                f"labels: got {wrong[0].item()}, accepted: 0 to {vocabulary - 1}, or "
                f"{IGNORE_INDEX} to ignore"
            )


def _out_of_range(labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return ((labels < 0) | (labels >= vocabulary)) & (labels != IGNORE_INDEX)


def _width(columns: int, rows: int) -> int:
    """Columns a chunk: as few chunks as ``_BLOCK`` allows, of even widths."""
    most = max(1, _BLOCK // max(rows, 1))
    chunks = -(-columns // most)
    even = -(-columns // max(chunks, 1))
    return max(1, even if chunks <= 1 else -(-even // _ALIGN) * _ALIGN)
