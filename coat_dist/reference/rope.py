"""Split of a query-key-value projection into heads, with rotary position embedding of queries and
keys, and RMSNorms of their heads before it.

The projection's output is ``[s, b, groups * (per_group + 2) * size]``: for each group of
grouped-query attention its queries, then its key, then its value (Megatron-core's interleaved
layout); or all queries, all keys and all values (``blocks``, transformers' three projections side
by side). With ``batch_first`` the first two dimensions are ``[b, s]`` everywhere but in the table.
Rotation turns pairs (a, b) of the first ``rot`` elements of a head by an angle that depends on the
position:

    a' = a * cos_a - b * sin_a
    b' = b * cos_b + a * sin_b

Pairs are ``(i, i + rot / 2)``, or ``(2i, 2i + 1)`` where the table is interleaved. Elements beyond
``rot`` pass unchanged (``rotary_percent``), and so do values.

Arithmetic is fp32, each product and each sum rounded, and the result is rounded once to the dtype
of the heads. For fp32 heads that is Megatron-core's ``apply_rotary_pos_emb`` and its gradient, to
the bit; for BF16 heads it is that function of the same numbers in fp32, rounded. Megatron's BF16
code also rounds cosines, sines and products to BF16.

With :class:`HeadNorms` each head of queries and keys is normalized and multiplied by its weight
before it is rotated, without a rounding between. Values are then a view of the projection's output,
which backward needs.

Sources: Su et al., RoFormer (arXiv 2104.09864), equation 34; ``mscale`` is YaRN's attention factor
(arXiv 2309.00071, section 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .norm import norm_apply, norm_backward, norm_stats
from .quantize import amax


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: ``groups`` of ``per_group`` queries, one key and one value, each of
    ``size`` elements.
    """

    groups: int
    per_group: int
    size: int
    blocks: bool = False
    """A token's elements are all queries, then all keys, then all values, instead of one group
    after the other.
    """
    batch_first: bool = False
    """Tensors are ``[b, s, ...]`` instead of ``[s, b, ...]``."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.groups * self.per_group, self.groups, self.groups

    @property
    def width(self) -> int:
        """Elements that a token has in the projection's output."""
        return self.groups * (self.per_group + 2) * self.size

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a projection's output: queries, keys and values. Without ``blocks`` queries are
        ``[..., groups, per_group, size]``.
        """
        slots = mixed.unflatten(-1, (-1, self.size))
        if self.blocks:
            return slots.split(self.counts, 2)
        q, *rest = slots.unflatten(2, (self.groups, -1)).split((self.per_group, 1, 1), 3)
        return q, *(t.squeeze(3) for t in rest)

    def check(self, shape: Sequence[int], table: RopeTable | None) -> None:
        """Raises ValueError where a projection's output of ``shape``, or a table, does not fit
        these heads.
        """
        if len(shape) != 3 or shape[2] != self.width:
            leading = "b, s" if self.batch_first else "s, b"
            raise ValueError(
                f"qkv: got shape {list(shape)}, accepted: [{leading}, {self.width}] for {self}"
            )
        if table is None:
            return
        s, b, rot = table.cos.shape
        length, batch = (shape[1], shape[0]) if self.batch_first else shape[:2]
        if rot > self.size or s != length or b not in (1, batch):
            accepted = f"[{length}, 1 or {batch}, at most {self.size}]"
            raise ValueError(f"rope table: got shape {[s, b, rot]}, accepted: {accepted}")


class HeadNorms(NamedTuple):
    """RMSNorms over the elements of each head: of queries, and of keys."""

    weights: torch.Tensor
    """``[2, size]``, contiguous."""
    eps: Sequence[float]
    """Two."""


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines, fp32 ``[s, 1 or b, rot]``, one for every rotated element; rot is even."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def pair(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two elements of every pair of ``x`` ``[..., rot]``, each ``[..., rot / 2]``."""
        return (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)  # type: ignore[return-value]

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`pair`."""
        return torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)


def rope_table(freqs: torch.Tensor, interleaved: bool = False, mscale: float = 1.0) -> RopeTable:
    """The table for angles as Megatron-core hands them to attention.

    Args:
        freqs: angles in radians, ``[s, 1 or b, 1, rot]``, any floating dtype; both elements of a
            pair have theirs.
        interleaved: pairs are neighbours (``rotary_interleaved``).
        mscale: factor on cosines and sines.

    Raises:
        ValueError: another shape, or an odd number of rotated elements.
    """
    if freqs.dim() != 4 or freqs.shape[2] != 1 or freqs.shape[3] % 2:
        raise ValueError(
            f"freqs: got shape {list(freqs.shape)}, accepted: [s, 1 or b, 1, an even number]"
        )
    angles = freqs.float().squeeze(2)
    return RopeTable(angles.cos() * mscale, angles.sin() * mscale, interleaved)


def split_rope(
    mixed: torch.Tensor, heads: Heads, table: RopeTable | None, norms: HeadNorms | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, queries and keys rotated.

    Args:
        mixed: ``[s, b, heads.width]``, bfloat16 or float32; ``[b, s, heads.width]`` with
            ``batch_first``.
        table: None leaves the rotation out.
        norms: None leaves them out.

    Returns:
        q ``[s, b, groups * per_group, size]``, k and v ``[s, b, groups, size]`` (``[b, s, ...]``
        with ``batch_first``),
        contiguous, in mixed's dtype: the layout that SDPA reads without copies and whose output is
        an alias of what the projection that follows takes. None shares memory with mixed; with
        ``norms`` v is a view of it.

    Raises:
        ValueError: a shape that does not fit.
    """
    heads.check(mixed.shape, table)
    q, k, v = heads.split(mixed)
    outs = []
    for i, x in enumerate((q.flatten(2, -2), k)):
        y = x.float()
        if norms is not None:
            stats = norm_stats(x, "rmsnorm", norms.eps[i])
            y = norm_apply(x, stats, norms.weights[i], None)
        outs.append(_rotate(y, table, heads).to(x.dtype))
    fresh = torch.contiguous_format
    q, k = (t.clone(memory_format=fresh) for t in outs)
    if norms is None:
        v = v.clone(memory_format=fresh)
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
    """Gradients of :func:`split_rope`'s arguments from those of its outputs, of any strides.

    Args:
        mixed: with ``norms``, what forward was given.

    Returns:
        dmixed ``[s, b, heads.width]``, contiguous, in dq's dtype; its amax (fp32 scalar); with
        ``norms`` the gradient of their weights, fp32 ``[2, size]``, else None.
    """
    leading, grads, sums = dq.shape[:2], [], []
    for i, dy in enumerate((dq, dk)):
        dx = _rotate(dy.float(), table, heads, back=True)
        if norms is not None and mixed is not None:
            x = heads.split(mixed)[i].reshape(dy.shape)
            stats = norm_stats(x, "rmsnorm", norms.eps[i])
            dx, total, _ = norm_backward(dx, x, "rmsnorm", stats, norms.weights[i], bias=False)
            sums.append(total)
        grads.append(dx.to(dy.dtype))
    dq, dk = grads
    if heads.blocks:
        dmixed = torch.cat((dq, dk, dv), 2).flatten(2)
    else:
        parts = (
            dq.reshape(*leading, heads.groups, heads.per_group, heads.size),
            dk.unsqueeze(3),
            dv.unsqueeze(3),
        )
        dmixed = torch.cat(parts, 3).view(*leading, heads.width)
    return dmixed, amax(dmixed), torch.stack(sums) if sums else None


def _rotate(
    x: torch.Tensor, table: RopeTable | None, heads: Heads, back: bool = False
) -> torch.Tensor:
    """The rotation; ``back``: its gradient, which is the rotation with the two sines exchanged and
    negated.
    """
    if table is None:
        return x
    rot, angles = table.cos.shape[-1], torch.stack((table.cos, table.sin))
    if heads.batch_first:
        angles = angles.transpose(1, 2)
    (cos_a, cos_b), (sin_a, sin_b) = (table.pair(t) for t in angles.unsqueeze(3))
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    a, b = table.pair(x[..., :rot])
    turned = table.join(a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    return torch.cat((turned, x[..., rot:]), -1)
