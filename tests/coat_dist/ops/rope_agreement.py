"""How the rope kernels must agree with their definitions: in every bit."""

import itertools

import torch

from coat_dist.kernels import rope
from coat_dist.reference import rope as reference
from coat_dist.reference.rope import Heads, rope_table

SMALL = (
    *(Heads(2, 3, 24), Heads(3, 1, 22)),
    *(
        Heads(2, 3, 24, blocks, first)
        for blocks, first in ((True, False), (False, True), (True, True))
    ),
)


def same(got, wanted):
    """Equal bits but for the payload of NaN."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0))


def strided(t):
    """The same values as SDPA's backward may lay them out: heads first, or not even dense."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[-1]] = t
    return (
        wide[..., : t.shape[-1]],
        t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        t.mT.contiguous().mT,
    )


def narrowed(definition, dtype, *arguments):
    """The definition's result. Triton's interpreter truncates where a GPU rounds to BF16, so
    there: truncated.
    """
    if dtype == torch.float32 or arguments[0].is_cuda:
        return definition(*arguments)
    wide = definition(*(t.float() if isinstance(t, torch.Tensor) else t for t in arguments))
    return [truncated(t).to(dtype) if t.dim() else truncated(t) for t in wide]


def truncated(t):
    return (t.view(torch.int32) & -0x10000).view(torch.float32)


def check_rope(device="cpu", heads=SMALL, shape=(2, 2)):
    s, b = shape
    for h, dtype, interleaved in itertools.product(
        heads, (torch.float32, torch.bfloat16), (False, True)
    ):
        for rot, batch in ((h.size, 1), (h.size // 4 * 2, b), (0, 1)):
            table = None
            if rot:
                table = rope_table(
                    torch.randn(s, batch, 1, rot, device=device).mul(300), interleaved, 1.3
                )
            leading = (b, s) if h.batch_first else (s, b)
            mixed = torch.randn(*leading, h.width, device=device).mul(3).exp().to(dtype)
            mixed.view(-1)[::5] = 0
            if mixed.is_cuda or dtype == torch.float32:  # the interpreter misreads BF16's denormals
                mixed.view(-1)[3] = 1e-39
            if batch > 1:
                mixed.view(-1)[-2] = torch.inf  # in a value: it must not spread
                mixed.view(-1)[7] = torch.nan
            parts = narrowed(reference.split_rope, dtype, mixed, h, table)
            for got, wanted in zip(rope.split_rope(mixed, h, table), parts, strict=True):
                same(got, wanted)
            for gradients in zip(*(strided(p) for p in parts), strict=True):
                wanted = narrowed(reference.split_rope_backward, dtype, *gradients, h, table)
                for got, exact in zip(
                    rope.split_rope_backward(*gradients, h, table), wanted, strict=True
                ):
                    same(got, exact)
