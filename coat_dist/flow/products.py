"""FP8 products, with and without a sum over ranks, and what they can multiply."""

from __future__ import annotations

import torch

from ..config import ActivationConfig
from ..formats import QuantizedTensor
from ..ops import code_products, scale_and_round, scaled_mm
from .parallel.overlap import Rows, scattered_product
from .parallel.tensor_parallel import Pending, TensorParallel

__all__ = ["check_input", "gemm", "summed_gemm"]


def gemm(
    a: QuantizedTensor | Rows,
    b: QuantizedTensor,
    dtype: torch.dtype,
    settings: ActivationConfig,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b.T`` where every rank has all of the summed dimension; ``[m, n]`` of ``dtype``, in
    ``out`` if given. Rows that are still coming are multiplied as they come.
    """
    if isinstance(a, Rows):
        return a.multiply(
            lambda part, out: scaled_mm(part, b, dtype, fast_accum, out), b.codes.shape[0], dtype
        )
    # fp32 sums of tensor cores depend on the shape, and so on the number of ranks.
    if settings.tp_invariant:
        found = scale_and_round(code_products(a, b), a.scales, b.scales, dtype)
        return found if out is None else out.copy_(found)
    return scaled_mm(a, b, dtype, fast_accum, out)


def summed_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    dtype: torch.dtype,
    tp: TensorParallel,
    settings: ActivationConfig,
    fast_accum: bool = False,
) -> Pending[torch.Tensor]:
    """``a @ b.T`` where the summed dimension is split over ranks; the sum over ranks is under way.

    Returns:
        The sum, ``[m, n]``, or this rank's rows of it, ``[m / tp, n]``, with sequence parallelism.
    """
    reduce = tp.start_reduce_scatter if tp.sharded else tp.start_sum
    # Codes first, scales last: then the sum over ranks is exact.
    if settings.tp_invariant and tp.size > 1:
        a_scales = tp.own_rows(a.scales) if a.layout == "row" else a.scales
        b_scales = b.scales
        return reduce(code_products(a, b)).then(
            lambda sums: scale_and_round(sums, a_scales, b_scales, dtype)
        )
    m, n = a.codes.shape[0], b.codes.shape[0]
    if (
        tp.sharded
        and m % tp.size == 0
        and (peers := tp.peers(m // tp.size * n, dtype.itemsize, a.codes.device))
    ):
        return scattered_product(
            peers, a, lambda part, out: scaled_mm(part, b, dtype, fast_accum, out), n, dtype
        )
    return reduce(gemm(a, b, dtype, settings, fast_accum))


def check_input(x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> None:
    """Refuse what the flow cannot multiply.

    Raises:
        ValueError: x is neither bfloat16 nor float32, or ``weight`` is not ``[out, x.shape[-1]]``
            of such a type.
    """
    for what, t in (("x", x), (name, weight)):
        if t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{what}: got {t.dtype}, accepted: torch.bfloat16, torch.float32")
    if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: got shape {list(weight.shape)} for x of shape {list(x.shape)}, accepted: "
            "[out, x.shape[-1]]"
        )
