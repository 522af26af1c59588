"""Split into heads with norms and rotary embedding: the functions of ``reference/rope.py``; to the
bit but for norms, whose sums are fp32 here.

One kernel does both directions, one read and one write of every element. A program takes one token:
its cosines and sines are loaded once, into registers, and serve all of its heads. They are fp32,
two a rotated element, and would otherwise be read more often than the heads themselves. A tile of
heads is loaded a second time with the elements of each pair exchanged, from the cache, so nothing
is exchanged between threads.

Backward of norms reads the heads as they were besides, and computes their sums again. There a
program takes every n-th token and keeps its part of the weights' gradients in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference.rope import HeadNorms, Heads, RopeTable
from .fp8 import amax_buffer, atomic_amax, dense, magnitude_bits
from .launch import fast_launch, next_power_of_2

PROGRAMS = 792
"""Largest number of programs of backward with norms: six on each of an H200's 132
multiprocessors.
"""


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _split_rope_kernel(
    mixed,
    before,
    q,
    k,
    v,
    cos,
    sin,
    gains,
    amax,
    partial,
    q_eps,
    k_eps,
    tokens,
    inner,
    q_i,
    q_j,
    q_h,
    k_i,
    k_j,
    k_h,
    v_i,
    v_j,
    v_h,
    table_i,
    table_j,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
):
    """A token is at (i, j) of the first two dimensions; ``inner``: the size of the second. Strides
    have the names of these dimensions and of heads, h. ``before``: with NORM and INVERSE, what
    forward had in ``mixed``. ALIGNED: bytes that divide the addresses of all heads of q, k and v.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    SLOTS: tl.constexpr = GROUPS * (PER_GROUP + 2)
    column = tl.arange(0, BN)[None, :]
    rotated = column < ROT
    if INTERLEAVED:
        first, partner = column % 2 == 0, column ^ 1
    else:
        first = column < ROT // 2
        partner = tl.where(first, column + ROT // 2, column - ROT // 2)
    if NORM:
        q_gain = tl.load(gains + column, mask=column < SIZE, other=0.0)
        k_gain = tl.load(gains + SIZE + column, mask=column < SIZE, other=0.0)
        q_other = tl.load(gains + partner, mask=rotated, other=0.0)
        k_other = tl.load(gains + SIZE + partner, mask=rotated, other=0.0)
    q_total, k_total = tl.zeros((BS, BN), tl.float32), tl.zeros((BS, BN), tl.float32)
    top = tl.zeros((BS,), tl.int32)
    for index in range(program, tokens, programs):
        token = tl.cast(index, tl.int64)
        i, j = token // inner, token % inner
        if ROT > 0:
            at_table = i * table_i + j * table_j
            cosine = tl.load(cos + at_table + column, mask=rotated, other=0.0)
            if INVERSE:
                sine = tl.load(sin + at_table + partner, mask=rotated, other=0.0)
                sine = tl.where(first, sine, -sine)
            else:
                sine = tl.load(sin + at_table + column, mask=rotated, other=0.0)
                sine = tl.where(first, -sine, sine)
        for start in range(0, SLOTS, BS):
            slot = start + tl.arange(0, BS)[:, None]
            if BLOCKS:
                is_q = slot < GROUPS * PER_GROUP
                is_k = (slot >= GROUPS * PER_GROUP) & (slot < GROUPS * (PER_GROUP + 1))
                query, group = slot, (slot - GROUPS * PER_GROUP) % GROUPS
            else:
                group, member = slot // (PER_GROUP + 2), slot % (PER_GROUP + 2)
                is_q, is_k = member < PER_GROUP, member == PER_GROUP
                query = group * PER_GROUP + member
            at = (token * SLOTS + slot) * SIZE
            head = tl.where(
                is_q,
                q + (i * q_i + j * q_j + query.to(tl.int64) * q_h),
                tl.where(
                    is_k,
                    k + (i * k_i + j * k_j + group.to(tl.int64) * k_h),
                    v + (i * v_i + j * v_j + group.to(tl.int64) * v_h),
                ),
            )
            # Behind the choice Triton no longer knows that addresses are multiples of 16 bytes.
            head = tl.multiple_of(head, (ALIGNED, ALIGNED))
            source, target = mixed + at, head
            if INVERSE:
                source, target = target, source
            here = (slot < SLOTS) & (column < SIZE)
            if NORM and not INVERSE:  # values stay where they are
                here = here & (is_q | is_k)
            turned = here & rotated & (is_q | is_k)
            given = tl.load(source + column, mask=here, other=0.0)
            value = given.to(tl.float32)
            other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
            if NORM:
                x = value
                if INVERSE:
                    x = tl.load(before + at + column, mask=here, other=0.0).to(tl.float32)
                spread = (tl.sum(x * x, 1) / SIZE)[:, None] + tl.where(is_q, q_eps, k_eps)
                rstd = tl.div_rn(tl.full((BS, 1), 1.0, tl.float32), tl.sqrt_rn(spread))
                gain = tl.where(is_q, q_gain, k_gain)
                if not INVERSE:
                    value = value * rstd * gain
                    other = other * rstd * tl.where(is_q, q_other, k_other)
            if ROT > 0:
                value = tl.where(turned, value * cosine + other * sine, value)
            if NORM and INVERSE:
                normalized, weighted = x * rstd, value * gain
                q_total += tl.where(is_q, value * normalized, 0.0)
                k_total += tl.where(is_k, value * normalized, 0.0)
                along = (tl.sum(weighted * normalized, 1) / SIZE)[:, None]
                value = tl.where(is_q | is_k, (weighted - normalized * along) * rstd, value)
            out = value.to(given.dtype)
            tl.store(target + column, out, mask=here)
            if INVERSE:
                bits = magnitude_bits(out.to(tl.float32))
                top = tl.maximum(top, tl.max(tl.where(here, bits, 0), 1))
    if INVERSE:
        atomic_amax(amax, top)
        if NORM:
            at_sums = partial + program * SIZE + column
            tl.store(at_sums, tl.sum(q_total, 0)[None, :], mask=column < SIZE)
            at_sums += programs * SIZE
            tl.store(at_sums, tl.sum(k_total, 0)[None, :], mask=column < SIZE)


def split_rope(
    mixed: torch.Tensor, heads: Heads, table: RopeTable | None, norms: HeadNorms | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`coat_dist.reference.rope.split_rope`."""
    heads.check(mixed.shape, table)
    leading, mixed = mixed.shape[:2], mixed.contiguous()
    q, k, v = (
        torch.empty(*leading, n, heads.size, dtype=mixed.dtype, device=mixed.device)
        for n in heads.counts
    )
    if norms is not None:
        v = heads.split(mixed)[2]
    _launch(mixed, None, (q, k, v), None, None, heads, table, norms)
    return q, k, v


def split_rope_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    heads: Heads,
    table: RopeTable | None,
    norms: HeadNorms | None = None,
    mixed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`coat_dist.reference.rope.split_rope_backward`."""
    dmixed = torch.empty(*dq.shape[:2], heads.width, dtype=dq.dtype, device=dq.device)
    amax, partial = amax_buffer(dq.device), None
    if norms is not None:
        programs = min(dq.shape[0] * dq.shape[1], PROGRAMS)
        partial = torch.empty(2, programs, heads.size, dtype=torch.float32, device=dq.device)
    given = tuple(t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv))
    _launch(dmixed, mixed, given, amax, partial, heads, table, norms)
    return dmixed, amax, None if partial is None else partial.sum(1)


def _launch(
    mixed: torch.Tensor,
    before: torch.Tensor | None,
    qkv: tuple[torch.Tensor, ...],
    amax: torch.Tensor | None,
    partial: torch.Tensor | None,
    heads: Heads,
    table: RopeTable | None,
    norms: HeadNorms | None,
) -> None:
    outer, inner, _ = mixed.shape
    if not mixed.numel():
        return
    cos, sin, rot, steps = None, None, 0, [0, 0]
    if table is not None:
        cos, sin, rot = table.cos.contiguous(), table.sin.contiguous(), table.cos.shape[2]
        steps = [cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0]
        if heads.batch_first:
            steps.reverse()
    gains, eps = norms or (None, (0.0, 0.0))
    slots, width = heads.groups * (heads.per_group + 2), next_power_of_2(heads.size)
    strides = [n for t in qkv for n in t.stride()[:3]]
    item = mixed.element_size()
    aligned = not any(n * item % 16 for n in (*strides, *(t.storage_offset() for t in qkv)))
    _split_rope_kernel[(outer * inner if partial is None else partial.shape[1],)](
        mixed,
        before,
        *qkv,
        cos,
        sin,
        dense(gains),
        amax,
        partial,
        *eps,
        outer * inner,
        inner,
        *strides,
        *steps,
        GROUPS=heads.groups,
        PER_GROUP=heads.per_group,
        SIZE=heads.size,
        ROT=rot,
        INTERLEAVED=table is not None and table.interleaved,
        NORM=norms is not None,
        INVERSE=amax is not None,
        BLOCKS=heads.blocks,
        # Measured on an H200: twice the heads and warps take 2 % longer, with norms 30 %.
        BS=min(max(1024 // width, 1), 16, next_power_of_2(slots)),
        BN=width,
        ALIGNED=16 if aligned else 1,
        # No fused multiply-add: the definition rounds products.
        num_warps=2,
        enable_fp_fusion=False,
    )
