"""An fp32 master weight as a bfloat16 weight and the 16 bits that its rounding drops.

With ``u`` the bit pattern of an fp32 number x:

    split:  p = bfloat16 with the pattern (u + 0x8000) >> 16, low = the lower half of u, as int16
    join:   u = (pattern of p << 16) + low, as low counts from -32768 to 32767

Both are integer arithmetic, and ``join(split(x))`` is x bit for bit for every x but NaN: zeros of
both signs, subnormals, infinities, and numbers beyond bfloat16's largest (whose p is infinite, as a
cast would make it). So a bfloat16 weight of 2 bytes and a remainder of 2 bytes replace a bfloat16
weight and an fp32 master of 4.

**p is not quite torch's cast.** p is x rounded to nearest, and half-way cases go away from zero;
``x.bfloat16()`` sends them to the neighbour whose last bit is even. The two differ where x lies
exactly between two bfloat16 numbers and the one nearer to zero is even: 1 of 2**17 bit patterns,
and there by one step. Rounding to even cannot do it: 65537 fp32 numbers round to an even bfloat16,
one more than 16 bits can tell apart.

**NaN** becomes the one quiet NaN 0x7fc00000, low 0: sign and payload are not kept.

**A remainder whose weight was overwritten** (weights loaded, ``param.copy_``) does no harm beyond
rounding: whatever ``low`` meets p, ``join`` is a number that rounds back to p, at most half a step
of p away. The pairs that no ``split`` makes and that would read as NaN (zero with a negative
``low``, infinity with a positive one) join to p itself.

Transformer Engine's FusedAdam keeps weights this way with ``store_param_remainders``.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(p, low)``, bfloat16 and int16 of the shape of the fp32 tensor ``x``."""
    bits = torch.where(x.isnan(), _NAN, x.view(torch.int32))
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(p: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor that ``split`` divided into ``p`` (bfloat16) and ``low`` (int16 of its
    shape).
    """
    impossible = (p == 0) & (low < 0) | p.isinf() & (low > 0)
    low = torch.where(impossible, 0, low.to(torch.int32))
    return ((p.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
