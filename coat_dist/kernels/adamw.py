"""One AdamW step with FP8 moments in one pass over memory: the kernel of ``reference/adamw.py``.

A program takes a tile of [ROWS, group_size] elements: decode, update, reduce each row, encode. Per
parameter it moves the fp32 parameter twice, the gradient once and 2.05 bytes of moments twice, so
it is bound by memory as long as its arithmetic stays short. With exact ``log2``, ``exp2``, division
and square root it does not; with the hardware's approximations, which err by some 2**-22 against
the 2**-4 of a code, it does (86 % of the bandwidth of a copy: docs/optimizer.md). That also takes
counting instructions: magnitudes scale in the exponent, and signs are bits.

The order of work follows what is shared: the inverse root of v serves the update and the ratio of
m, and the square root in which v is decoded serves m. Noise costs two integer operations an element
(``dither``), and rounding with it an addition before the conversion to FP8, which rounds to
nearest.

Against the definition: ``a`` and ``k`` differ by one step where what they round is within
arithmetic error of a step; where both are equal, codes are equal except for values within about
2**-13 of the middle between two codes, which may take the neighbour. Parameters agree within 2**-22
of themselves and 4e-5 of the update's terms, if eps is at least 1e-15: below, where v is not a
normal number, its root here is smaller than it should be. Where a square overflows (gradients above
1.8e19) and ``over_root`` is set, a parameter is NaN at once; by the definition in the next step,
with all of its group.

With a remainder the parameter is a bfloat16 and its 16 low bits (``kernels/master.py``): 4 bytes
read and written as of an fp32 one, and the same fp32 master weight, bit for bit. With a copy 2
bytes more are written, instead of a pass that would read 4 and write 2.

Small tensors share a launch: ``kernels/table.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ..reference.adamw import AdamWStep, AdamWTensors
from ..reference.adamw_batch import written
from ..reference.moments import MomentCodec
from .adamw_fp32 import adamw_fp32_steps
from .adamw_numbers import (
    load_numbers,
    next_moments,
    numbers_of_counts,
    step_constants,
    step_scalars,
)
from .approximations import inverse_root, reciprocal, square_root
from .fp8 import TINY
from .launch import fast_launch
from .master import load_master, store_master
from .moments import constants, decode, dither, encode, mix
from .table import Kind, launches, sort

__all__ = ["adamw_fp32_steps", "adamw_steps"]

# H200, 2**29 parameters, ms by tile/warps: 1024/4 2.07, 1024/2 2.09, 1024/1 2.34, 512/1 2.07, 512/2
# 2.10, 512/4 2.41
TILE_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def _update_tile(
    first_row,
    base_row,
    param,
    grad,
    m_q,
    m_a,
    m_k,
    v_q,
    v_a,
    v_k,
    n,
    groups,
    seed,
    phase,
    low,
    copy,
    rate,
    grad_factor,
    lr,
    decay,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    inverse_bias1,
    inverse_sqrt_bias2,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
):
    """Rows ``first_row`` (int64: tensors have more than 2**31 elements, tiles do not) to
    ``first_row + ROWS``; for their noise ``base_row`` is the number of the first.
    """
    GROUP: tl.constexpr = STEP.group
    ROWS: tl.constexpr = STEP.rows
    M: tl.constexpr = STEP.m
    V: tl.constexpr = STEP.v
    STOCHASTIC_M: tl.constexpr = KIND.seeded and STEP.stochastic_m
    STOCHASTIC_V: tl.constexpr = KIND.seeded and STEP.stochastic_v
    first = first_row * GROUP
    row = tl.arange(0, ROWS)
    offset = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = row < tl.minimum(groups - first_row, ROWS).to(tl.int32)
    in_tile, inside = in_row[:, None], offset < tl.minimum(n - first, ROWS * GROUP).to(tl.int32)
    param += first
    grad += first
    m_q += first
    v_q += first
    m_a += first_row
    v_a += first_row
    m_k += first_row
    v_k += first_row

    p = load_master(param + offset, low + first + offset, inside, KIND.low)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    m = decode(
        tl.load(m_q + offset, mask=in_tile, other=0),
        tl.load(m_a + row, mask=in_row, other=0.0),
        tl.load(m_k + row, mask=in_row, other=1),
        M,
        True,
        FAST,
    )
    old_a = tl.load(v_a + row, mask=in_row, other=0.0)
    old_k = tl.load(v_k + row, mask=in_row, other=1)
    v, root = decode(tl.load(v_q + offset, mask=in_tile, other=0), old_a, old_k, V, False, FAST)
    if M.over_root:
        m = m * root
    if STEP.lr_is_tensor:
        lr = tl.load(lr).to(tl.float32)
        rate = lr * inverse_bias1
        decay = 1.0 - lr * weight_decay
    m, v = next_moments(g, m, v, grad_factor, beta1, rest1, beta2, rest2, STEP)
    if M.over_root:
        inverse = inverse_root(tl.maximum(v, TINY, propagate_nan=tl.PropagateNan.ALL), FAST)
        root = v * inverse
    else:
        root = square_root(v, FAST)
    p = p * decay - rate * (m * reciprocal(root * inverse_sqrt_bias2 + eps, FAST))
    store_master(
        p,
        param + offset,
        low + first + offset,
        copy + first + offset,
        inside,
        KIND.low,
        KIND.copied,
    )

    noise_m = 0.0
    noise_v = 0.0
    # A tile never straddles a multiple of 2**32 rows: it has a power of two.
    if STOCHASTIC_M or STOCHASTIC_V:
        number = first_row + base_row
        key = mix((number >> 32).to(tl.uint32) ^ seed.to(tl.uint32))
        start = mix((number.to(tl.uint32) + row.to(tl.uint32)) ^ key)
        if STOCHASTIC_M:
            noise_m = dither(mix(start ^ 0x5BD1E995), phase, M, GROUP)
        if STOCHASTIC_V:
            noise_v = dither(start, phase, V, GROUP)
    if M.over_root:
        m = m * inverse
    q, a, k = encode(m, old_a, old_k, noise_m, M, True, STOCHASTIC_M, FAST)
    tl.store(m_q + offset, q, mask=in_tile)
    tl.store(m_a + row, a, mask=in_row)
    tl.store(m_k + row, k, mask=in_row)
    q, a, k = encode(v, old_a, old_k, noise_v, V, False, STOCHASTIC_V, FAST)
    tl.store(v_q + offset, q, mask=in_tile)
    tl.store(v_a + row, a, mask=in_row)
    tl.store(v_k + row, k, mask=in_row)


@fast_launch
@triton.jit(do_not_specialize=["seed", "step", "base_row"])
def _adamw_kernel(
    param,
    grad,
    m_q,
    m_a,
    m_k,
    v_q,
    v_a,
    v_k,
    n,
    groups,
    seed,
    step,
    base_row,
    low,
    copy,
    of_count,
    rate,
    grad_factor,
    lr,
    decay,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    inverse_bias1,
    inverse_sqrt_bias2,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
):
    if STEP.counted:
        rate, inverse_bias1, inverse_sqrt_bias2, step = load_numbers(of_count)
    _update_tile(
        tl.program_id(0).to(tl.int64) * STEP.rows,
        base_row,
        param,
        grad,
        m_q,
        m_a,
        m_k,
        v_q,
        v_a,
        v_k,
        n,
        groups,
        seed + (step >> 3),
        step & 7,
        low,
        copy,
        rate,
        grad_factor,
        lr,
        decay,
        weight_decay,
        beta1,
        rest1,
        beta2,
        rest2,
        eps,
        inverse_bias1,
        inverse_sqrt_bias2,
        STEP,
        KIND,
        FAST,
    )


@fast_launch
@triton.jit(do_not_specialize=["step"])
def _adamw_table_kernel(
    table,
    grads,
    tensor_of_tile,
    step,
    of_counts,
    rate,
    grad_factor,
    lr,
    decay,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    inverse_bias1,
    inverse_sqrt_bias2,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
):
    """The same for many tensors; ``table.sort`` says what their table holds."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_tile + tile)
    row = table + tensor * 13
    if STEP.counted:
        rate, inverse_bias1, inverse_sqrt_bias2, step = load_numbers(of_counts + tensor * 4)
    n = tl.multiple_of(tl.load(row + 8), 16)
    _update_tile(
        (tile - tl.load(row)) * STEP.rows,
        0,
        tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(KIND.param)), 16),
        tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(KIND.grad)), 16),
        tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.uint8)), 16),
        tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.bfloat16)), 16),
        tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.uint8)), 16),
        tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.uint8)), 16),
        tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(tl.bfloat16)), 16),
        tl.multiple_of(tl.load(row + 7).to(tl.pointer_type(tl.uint8)), 16),
        n,
        tl.load(row + 9),
        tl.load(row + 10) + (step >> 3),
        step & 7,
        tl.multiple_of(tl.load(row + 11).to(tl.pointer_type(tl.int16)), 16),
        tl.multiple_of(tl.load(row + 12).to(tl.pointer_type(KIND.copy)), 16),
        rate,
        grad_factor,
        lr,
        decay,
        weight_decay,
        beta1,
        rest1,
        beta2,
        rest2,
        eps,
        inverse_bias1,
        inverse_sqrt_bias2,
        STEP,
        KIND,
        FAST,
    )


def adamw_steps(
    tensors: Sequence[AdamWTensors], codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_steps`."""
    first, lr = tensors[0], numbers.lr
    rate = 0.0 if isinstance(lr, torch.Tensor) else lr * numbers.inverse_bias1
    group, counted = codec_m.group_size, first.step_count is not None
    rows = TILE_ELEMENTS // group
    codecs = (constants(codec, first.param) for codec in (codec_m, codec_v))
    options = dict(
        STEP=step_constants(numbers, counted, group, rows, *codecs),
        FAST=first.param.is_cuda,
        num_warps=NUM_WARPS,
    )
    scalars = rate, *step_scalars(numbers, first.grad)
    found = launches(tensors, functools.partial(sort, rows=rows))
    of_counts = first.grad
    if counted:
        of_counts = numbers_of_counts(
            [tensors[i].step_count for i in (*found.order, *found.single)], numbers
        )
    if found.table is not None:
        grads = found.grads(tensors)
        for kind, tensor_of_tile in zip(found.kinds, found.table.tensor_of_tile, strict=True):
            _adamw_table_kernel[(len(tensor_of_tile),)](
                found.table.table,
                grads,
                tensor_of_tile,
                _int32(numbers.step),
                of_counts,
                *scalars,
                KIND=kind,
                **options,
            )
    for k, i in enumerate(found.single, len(found.order)):
        one = tensors[i]
        param, grad, m, v, seed, low, copy, _, base_row = one
        groups = len(m.a)
        _adamw_kernel[(-(-groups // rows),)](
            param,
            grad,
            *m,
            *v,
            param.numel(),
            groups,
            _int32(seed or 0),
            _int32(numbers.step),
            base_row,
            param if low is None else low,
            param if copy is None else copy,
            of_counts[k] if counted else of_counts,
            *scalars,
            KIND=Kind.of(one, seed is not None, False),
            **options,
        )
    # Kernels write by address, which torch does not see: autograd would take what it saved for
    # unchanged.
    increment_version(written(tensors))


def _int32(x: int) -> int:
    """The int32 of the same low 32 bits."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
