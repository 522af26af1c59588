"""Rotation: the same in every bit. With norms of heads: but for the last bits."""

import itertools

import torch

from coat_dist.reference.rope import HeadNorms, Heads, rope_table
from tests.support.devices import DEVICE, on_device

from . import agree as agree_nearly
from . import compare, pair

SMALL = (
    *(Heads(2, 3, 24), Heads(3, 1, 22), Heads(2, 3, 24, True)),
    *(Heads(2, 3, 24, False, True), Heads(2, 3, 24, True, True)),
    Heads(1, 9, 256, True, True),
)
LARGE = (
    *(Heads(2, 3, 24), Heads(3, 1, 22), Heads(32, 1, 128), Heads(8, 4, 128), Heads(1, 71, 64)),
    *(Heads(8, 4, 128, True, True), Heads(3, 1, 22, True), Heads(2, 3, 24, False, True)),
)


def strided(t):
    """The same values as SDPA's backward may lay them out: heads first, or not even dense."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[-1]] = t
    return (
        wide[..., : t.shape[-1]],
        t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        t.mT.contiguous().mT,
    )


def agree(name, dtype, *arguments):
    """As the runner's. Triton's interpreter truncates where a GPU rounds to BF16, so there:
    truncated.
    """
    kernel, definition = pair(name)
    if dtype == torch.float32 or arguments[0].is_cuda:
        wanted = [t for t in definition(*arguments) if t is not None]
    else:
        wide = definition(*(t.float() if isinstance(t, torch.Tensor) else t for t in arguments))
        wide = [truncated(t) for t in wide if t is not None]
        wanted = [t.to(dtype) if t.dim() else t for t in wide]
    got = [t for t in kernel(*arguments) if t is not None]
    assert all(t.is_contiguous() for t in got)
    compare(got, wanted)
    return wanted


def truncated(t):
    return (t.view(torch.int32) & -0x10000).view(torch.float32)


def check_rope(h, s, b):
    for dtype, interleaved in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        for rot, batch in ((h.size, 1), (h.size // 4 * 2, b), (0, 1)):
            table = None
            if rot:
                angles = torch.randn(s, batch, 1, rot, device=DEVICE).mul(300)
                table = rope_table(angles, interleaved, 1.3)
            leading = (b, s) if h.batch_first else (s, b)
            mixed = torch.randn(*leading, h.width, device=DEVICE).mul(3).exp().to(dtype)
            mixed.view(-1)[::5] = 0
            if mixed.is_cuda or dtype == torch.float32:  # the interpreter misreads BF16's denormals
                mixed.view(-1)[3] = 1e-39
            if batch > 1:
                mixed.view(-1)[-2] = torch.inf  # in a value: it must not spread
                mixed.view(-1)[7] = torch.nan
            parts = agree("split_rope", dtype, mixed, h, table)
            norms = HeadNorms(torch.randn(2, h.size, device=DEVICE), (1e-2, 1e-5))
            near = {"rtol": 1e-4 if dtype == torch.float32 else 2**-6, "atol": 1e-3}
            agree_nearly("split_rope", mixed, h, table, norms, **near)
            given = h, table, norms, torch.randn_like(mixed)
            for gradients in zip(*(strided(p) for p in parts), strict=True):
                agree("split_rope_backward", dtype, *gradients, h, table)
                for gradient in gradients:
                    gradient.normal_()
                agree_nearly("split_rope_backward", *gradients, *given, **near)


ROWS = {
    str(heads): (check_rope, heads, *on_device((9, 2), (2, 2))) for heads in on_device(LARGE, SMALL)
}
