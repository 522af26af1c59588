"""Weight gradients of the flow into Megatron's ``main_grad``, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...config import ActivationConfig
from ...formats import QuantizedTensor
from .products import gemm

Product = Callable[[torch.Tensor | None], torch.Tensor]
"""Computes a block of a gradient, in the tensor that it is given."""
_CHUNK = 2**24
"""Elements of a weight's gradient on their way into ``main_grad`` at a time: 64 MiB."""


def into_main_grad(
    weight: Any, products: Callable[[torch.Tensor, bool], Iterator[tuple[torch.Tensor, Product]]]
) -> torch.Tensor | None:
    """``main_grad += wgrad``, by the protocol of Megatron's ``gradient_accumulation_fusion``.

    The product is fp32 and the sum is rounded once, to main_grad's dtype. ``torch._scaled_mm``
    cannot add to its output, so the product passes through a temporary of at most 64 MiB, block by
    block of the weight's rows: ``products(main_grad, False)`` gives parts of it, and the product of
    each. With True, where products are written straight to an fp32 main_grad, parts need not be
    small.

    ``weight.overwrite_main_grad`` replaces main_grad instead, and so does ``weight.coat_zeroed``,
    once: it says that main_grad is zero. ``weight.grad_added_to_main_grad`` is set where it is:
    DistributedDataParallel then discards what autograd is given, which only makes its hook run.
    That has no meaningful values, or zeros where ``weight.zero_out_wgrad`` asks for them. Without
    the attribute autograd gets None.
    """
    main_grad = getattr(weight, "main_grad", None)
    if (
        main_grad is None
        or main_grad.shape != weight.shape
        or main_grad.dtype not in (torch.float32, torch.bfloat16)
    ):
        given = "none" if main_grad is None else f"{main_grad.dtype} {list(main_grad.shape)}"
        raise ValueError(
            f"weight.main_grad: got {given}, accepted with wgrad 'main_grad' "
            "(gradient_accumulation_fusion): "
            f"torch.float32 or torch.bfloat16 {list(weight.shape)}, as Megatron's "
            "DistributedDataParallel makes it"
        )
    replace = getattr(weight, "overwrite_main_grad", False)
    if getattr(weight, "coat_zeroed", False):
        replace, weight.coat_zeroed = True, False
    straight = replace and main_grad.dtype == torch.float32
    for part, product in products(main_grad, straight):
        if straight:
            product(part)
        else:
            (part.copy_ if replace else part.add_)(product(None))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return (
        torch.zeros_like(weight)
        if getattr(weight, "zero_out_wgrad", False)
        else torch.empty_like(weight)
    )


def row_blocks(
    out: torch.Tensor,
    whole: bool,
    d8_t: QuantizedTensor,
    x8_t: QuantizedTensor,
    settings: ActivationConfig,
) -> Iterator[tuple[torch.Tensor, Product]]:
    """Blocks of rows of ``out``, of at most 64 MiB unless ``whole``, and of the product ``[out,
    in]`` in fp32.
    """
    # Whole tiles of the product.
    step = out.shape[0] if whole else max(128, _CHUNK // out.shape[1] // 128 * 128)
    for first in range(0, out.shape[0], step):
        rows = slice(first, first + step)
        part = QuantizedTensor(d8_t.codes[rows], d8_t.scales, d8_t.layout)
        yield out[rows], partial(gemm, part, x8_t, torch.float32, settings, False)
