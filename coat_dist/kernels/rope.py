"""Split into heads with rotary embedding: the functions of ``reference/rope.py``, to the bit.

One kernel does both directions, one read and one write of every element. A program takes one token:
its cosines and sines are loaded once, into registers, and serve all of its heads. They are fp32,
two a rotated element, and would otherwise be read more often than the heads themselves. Both
elements of a pair are loaded as tiles of their own, so nothing is exchanged between threads;
interleaved pairs are neighbours in memory and reach it with stride 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference.rope import Heads, RopeTable
from .fp8 import amax_buffer, atomic_amax, magnitude_bits
from .launch import fast_launch, next_power_of_2

__all__ = ["split_rope", "split_rope_backward"]


@triton.jit
def _load(mixed, q, k, v, at, at_q, at_k, at_v, column, is_q, is_k, inside, INVERSE: tl.constexpr):
    """A tile of heads: from the mixed layout, or (INVERSE) from queries, keys and values. Its
    dtype stays.
    """
    if INVERSE:
        value = tl.where(
            is_q,
            tl.load(q + at_q + column, mask=inside & is_q, other=0.0),
            tl.where(
                is_k,
                tl.load(k + at_k + column, mask=inside & is_k, other=0.0),
                tl.load(v + at_v + column, mask=inside & ~(is_q | is_k), other=0.0),
            ),
        )
    else:
        value = tl.load(mixed + at + column, mask=inside, other=0.0)
    return value


@triton.jit
def _store(
    mixed, q, k, v, at, at_q, at_k, at_v, column, is_q, is_k, inside, value, INVERSE: tl.constexpr
):
    if INVERSE:
        tl.store(mixed + at + column, value, mask=inside)
    else:
        tl.store(q + at_q + column, value, mask=inside & is_q)
        tl.store(k + at_k + column, value, mask=inside & is_k)
        tl.store(v + at_v + column, value, mask=inside & ~(is_q | is_k))


@fast_launch
@triton.jit
def _split_rope_kernel(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    amax,
    inner,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    k_h,
    v_s,
    v_b,
    v_h,
    table_s,
    table_b,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
    BS: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
):
    """``inner``: the size of the second dimension."""
    token = tl.program_id(0).to(tl.int64)
    s, b = token // inner, token % inner
    if BATCH_FIRST:
        s, b = b, s
    SLOTS: tl.constexpr = GROUPS * (PER_GROUP + 2)
    pair = tl.arange(0, BH)[None, :]
    first, second = pair * STEP, pair * STEP + GAP
    rest = 2 * HALF + tl.arange(0, BT)[None, :]
    if HALF > 0:
        at_table = s * table_s + b * table_b
        cos_a = tl.load(cos + at_table + first, mask=pair < HALF, other=0.0)
        cos_b = tl.load(cos + at_table + second, mask=pair < HALF, other=0.0)
        sin_a = tl.load(sin + at_table + first, mask=pair < HALF, other=0.0)
        sin_b = tl.load(sin + at_table + second, mask=pair < HALF, other=0.0)
    top = tl.zeros((BS,), tl.int32)
    for start in range(0, SLOTS, BS):
        slot = start + tl.arange(0, BS)[:, None]
        if BLOCKS:
            is_q, is_k = (
                slot < GROUPS * PER_GROUP,
                (slot >= GROUPS * PER_GROUP) & (slot < GROUPS * (PER_GROUP + 1)),
            )
            query, group = slot, (slot - GROUPS * PER_GROUP) % GROUPS
        else:
            group, member = slot // (PER_GROUP + 2), slot % (PER_GROUP + 2)
            is_q, is_k = member < PER_GROUP, member == PER_GROUP
            query = group * PER_GROUP + member
        at = (token * SLOTS + slot) * SIZE
        at_q = s * q_s + b * q_b + query.to(tl.int64) * q_h
        at_k = s * k_s + b * k_b + group.to(tl.int64) * k_h
        at_v = s * v_s + b * v_b + group.to(tl.int64) * v_h
        if HALF > 0:
            inside = (slot < SLOTS) & (pair < HALF)
            x = _load(mixed, q, k, v, at, at_q, at_k, at_v, first, is_q, is_k, inside, INVERSE)
            y = _load(mixed, q, k, v, at, at_q, at_k, at_v, second, is_q, is_k, inside, INVERSE)
            a, c = x.to(tl.float32), y.to(tl.float32)
            if INVERSE:
                turned_x, turned_y = a * cos_a + c * sin_b, c * cos_b - a * sin_a
            else:
                turned_x, turned_y = a * cos_a - c * sin_a, c * cos_b + a * sin_b
            x = tl.where(is_q | is_k, turned_x, a).to(x.dtype)
            y = tl.where(is_q | is_k, turned_y, c).to(y.dtype)
            _store(mixed, q, k, v, at, at_q, at_k, at_v, first, is_q, is_k, inside, x, INVERSE)
            _store(mixed, q, k, v, at, at_q, at_k, at_v, second, is_q, is_k, inside, y, INVERSE)
            if INVERSE:
                bits = tl.maximum(
                    magnitude_bits(x.to(tl.float32)), magnitude_bits(y.to(tl.float32))
                )
                top = tl.maximum(top, tl.max(tl.where(inside, bits, 0), 1))
        if 2 * HALF < SIZE:
            inside = (slot < SLOTS) & (rest < SIZE)
            x = _load(mixed, q, k, v, at, at_q, at_k, at_v, rest, is_q, is_k, inside, INVERSE)
            _store(mixed, q, k, v, at, at_q, at_k, at_v, rest, is_q, is_k, inside, x, INVERSE)
            if INVERSE:
                top = tl.maximum(
                    top, tl.max(tl.where(inside, magnitude_bits(x.to(tl.float32)), 0), 1)
                )
    if INVERSE:
        atomic_amax(amax, top)


def split_rope(
    mixed: torch.Tensor, heads: Heads, table: RopeTable | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`coat_dist.reference.rope.split_rope`."""
    heads.check(mixed.shape, table)
    leading = mixed.shape[:2]
    q, k, v = (
        torch.empty(*leading, n, heads.size, dtype=mixed.dtype, device=mixed.device)
        for n in heads.counts
    )
    _launch(mixed.contiguous(), q, k, v, None, heads, table)
    return q, k, v


def split_rope_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, heads: Heads, table: RopeTable | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`coat_dist.reference.rope.split_rope_backward`."""
    dmixed = torch.empty(*dq.shape[:2], heads.width, dtype=dq.dtype, device=dq.device)
    amax = amax_buffer(dq.device)
    dq, dk, dv = (t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv))
    _launch(dmixed, dq, dk, dv, amax, heads, table)
    return dmixed, amax


def _launch(
    mixed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    amax: torch.Tensor | None,
    heads: Heads,
    table: RopeTable | None,
) -> None:
    outer, inner, _ = mixed.shape
    if not mixed.numel():
        return
    half = 0 if table is None else table.cos.shape[2] // 2
    cos, sin = (None, None) if table is None else (table.cos.contiguous(), table.sin.contiguous())
    interleaved = table is not None and table.interleaved
    slots = heads.groups * (heads.per_group + 2)
    # by position, batch and head
    strides = [
        t.stride()[:3] if not heads.batch_first else (t.stride(1), t.stride(0), t.stride(2))
        for t in (q, k, v)
    ]
    _split_rope_kernel[(outer * inner,)](
        mixed,
        q,
        k,
        v,
        cos,
        sin,
        amax,
        inner,
        *strides[0],
        *strides[1],
        *strides[2],
        0 if cos is None else cos.stride(0),
        0 if cos is None or cos.shape[1] == 1 else cos.stride(1),
        GROUPS=heads.groups,
        PER_GROUP=heads.per_group,
        SIZE=heads.size,
        HALF=half,
        STEP=2 if interleaved else 1,
        GAP=1 if interleaved else half,
        INVERSE=amax is not None,
        BLOCKS=heads.blocks,
        BATCH_FIRST=heads.batch_first,
        # A first choice, not measured yet: 16 heads of 128 elements are one 16-byte access a thread
        # and half head.
        BS=min(16, next_power_of_2(slots)),
        BH=next_power_of_2(max(half, 1)),
        BT=next_power_of_2(max(heads.size - 2 * half, 1)),
        # No fused multiply-add: the definition rounds products.
        num_warps=4,
        enable_fp_fusion=False,
    )
