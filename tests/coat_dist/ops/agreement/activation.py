"""Activations: what is saved is the same to the byte; exponentials differ in the last bits of fp32,
so a result's code may be the neighbour.
"""

import functools
import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8
from coat_dist.reference.activation import ACTIVATIONS
from coat_dist.reference.quantize import tensor_scale
from tests.support.devices import DEVICE, on_device

from . import SCALES, SHORT, agree, check_top, close, compare, pair, same, tiles

KINDS = tuple(
    itertools.product((E4M3, E5M2), SCALES, (True, False), (torch.float32, torch.bfloat16))
)
"""Format, scales, exact or not, dtype of the input: too many to try all of them with every
activation.
"""
SAVED = None, INT8, E3M4
"""Formats of the saved pre-activation; None is the activation's."""
WAYS = (None, None), (1, SHORT), (0, None), (2, (32, 2, True, 4)), (0, SHORT)
"""What may be held in registers, and tiles."""
FIXED = E4M3, 32, "e8m0", True


def dealt(hand, act, turn, turns, variants):
    """``variants`` items of ``hand`` for one of the ``turns`` of an activation. They are dealt out
    in a circle over all activations, also where these are checked one by one. ``variants`` is odd,
    to share no divisor with 16 kinds.
    """
    first = (list(ACTIVATIONS).index(act) * turns + turn) * variants
    return [hand[i % len(hand)] for i in range(first, first + variants)]


def check_passes(act, sizes, rows, variants):
    """With and without a bias, over tails of rows, columns and groups; ``variants`` of the rest."""
    saved = itertools.cycle(SAVED)
    for turn, (f, biased) in enumerate(itertools.product(sizes, (False, True))):
        for grad_fmt, (scale, size), exact, dtype in dealt(
            KINDS, act, turn, 2 * len(sizes), variants
        ):
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(rows, width) * 4).to(DEVICE, dtype)
            x[0, ::3] = 0
            # Large where x is not: a bias that reached rows or columns outside would raise the
            # amax.
            bias = (torch.randn(width, 2) * 3).to(DEVICE, dtype)[:, 0] if biased else None
            given = x, act, E4M3, size, scale, exact, bias, next(saved)
            _, (pre8, top) = agree("activation_compress", *given, rtol=1e-5)
            t8 = tensor_scale(top, E4M3)
            for source, b in ((x, bias), (pre8, None)):
                for turned in (False, True):
                    agree("activation_quantize", source, act, E4M3, t8, turned, b, codes=close)
            da = torch.randn(rows, f).to(DEVICE, dtype)
            _, amax = agree("activation_grad_amax", da, pre8, act, rtol=1e-5)
            rest = grad_fmt, tensor_scale(amax, grad_fmt), E4M3, t8
            sums = torch.float32 if biased else None
            atol = 1e-5 * amax.item() * rows
            got, _ = agree(
                *("activation_backward", da, pre8, act, *rest, sums),
                codes=close,
                rtol=1e-5,
                atol=atol,
            )
            wide = da.new_empty(width, rows + 8, dtype=grad_fmt.dtype)
            part = wide.narrow(1, 4, rows)
            pair("activation_backward")[0](da, pre8, act, *rest, d8_t=part)
            same(part.contiguous(), got.d8_t.codes)


def same_nan(got, wanted):
    assert torch.equal(got.float().isnan(), wanted.float().isnan())


def check_bad_values():
    """NaN and infinity reach the amax and the codes."""
    one = torch.ones((), device=DEVICE)
    for act, bad, where in itertools.product(
        ACTIVATIONS, (torch.inf, -torch.inf, torch.nan), ("pre", "bias", "da")
    ):
        parts = ACTIVATIONS[act].parts
        x, bias, da = torch.randn(5, 48 * parts), torch.randn(48 * parts), torch.randn(5, 48)
        {"pre": x[2], "bias": bias, "da": da[2]}[where][7] = bad
        x, bias, da = x.to(DEVICE), bias.to(DEVICE), da.to(DEVICE)
        _, (pre8, _) = agree("activation_compress", x, act, *FIXED, bias, INT8, rtol=1e-5)
        agree("activation_grad_amax", da, pre8, act, rtol=1e-5)
        rest = da, pre8, act, E4M3, one, E4M3, one, torch.float32
        got, wanted = (function(*rest) for function in pair("activation_backward"))
        compare(got[:3], wanted[:3], same_nan)
        assert torch.equal(got.dbias.isfinite(), wanted.dbias.isfinite())


def check_shape(rows, f, act):
    """No rows, and one row of one column, are shapes like any other."""
    x = torch.randn(rows, f * ACTIVATIONS[act].parts).to(DEVICE)
    da, bias = torch.randn(rows, f).to(DEVICE), torch.ones(x.shape[1]).to(DEVICE)
    _, (pre8, top) = agree("activation_compress", x, act, *FIXED, bias, INT8, rtol=1e-5)
    scale = tensor_scale(top, E4M3)
    agree("activation_quantize", x, act, E4M3, scale, False, bias, codes=close)
    rest = E4M3, scale, E4M3, scale, torch.float64
    got, _ = agree("activation_backward", da, pre8, act, *rest, codes=close, rtol=1e-5, atol=1e-5)
    assert got.dbias.dtype == torch.float64
    agree("activation_compress_rows", x, act, *FIXED, codes=close)


def check_rows(act, sizes, rows, variants=1):
    """With and without a bias, over tails of columns and groups; ``variants`` of the rest."""
    saved = itertools.cycle(SAVED)
    for turn, (f, biased) in enumerate(itertools.product(sizes, (False, True))):
        place = act, turn, 2 * len(sizes), variants
        for (fmt, (scale, size), exact, dtype), way in zip(
            dealt(KINDS, *place), dealt(WAYS, *place), strict=True
        ):
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(2, rows, width) * torch.exp(torch.randn(2, rows, 1))).to(DEVICE, dtype)
            x[0, 0, ::3] = 0
            # Large where x is not: a bias that reached columns outside would raise the amax.
            bias = (torch.randn(width) * 3).to(DEVICE, dtype) if biased else None
            rest = act, fmt, size, scale, exact, bias, next(saved)
            # Where gates are so large that they hardly change, products of codes are ties between
            # others.
            codes = functools.partial(close, share=3e-3 if exact else 2e-2)
            if act == "squared_relu":
                codes = None
            with tiles("activation_compress", *way):
                got, _ = agree("activation_compress_rows", x, *rest, codes=codes)
                alone = pair("activation_compress_rows")[0](x[1, -1], *rest)
            compare(alone.a8.codes.view(torch.uint8), got.a8.codes[1, -1].view(torch.uint8))
            compare(alone.a8.scales, got.a8.scales[1, -1])


def check_rows_of_bad_values(act, bad, chosen):
    """A value that is not finite spoils its row and no other."""
    x = torch.randn(3, 72 * ACTIVATIONS[act].parts).to(DEVICE)
    kernel, definition = pair("activation_compress_rows")
    with tiles("activation_compress", chosen=chosen):
        clean = kernel(x, act, *FIXED)
        x[1, 71] = bad
        got = kernel(x, act, *FIXED)
    check_top(got.a8)
    wanted = definition(x, act, *FIXED)
    compare(got.pre8, wanted.pre8)
    assert got.a8.scales[1].isnan() and got.a8.codes[1].float().isnan().all()
    assert torch.equal(got.a8.scales.isnan(), wanted.a8.scales.isnan())
    for part in ("codes", "scales"):
        a, b = (getattr(q.a8, part).view(torch.uint8)[[0, 2]] for q in (got, clean))
        assert torch.equal(a, b)


PASSES, TAILS = on_device((((2752,), 260, 1), (257, 3)), (((72,), 9, 3), (9, 1)))
ROWS = {
    **{f"{act}": (check_passes, act, *PASSES) for act in ACTIVATIONS},
    **{
        f"{act} without packets": (check_passes, act, (on_device(176, 33),), *TAILS)
        for act in ("swiglu", "gelu")
    },
    "not finite": (check_bad_values,),
    **{
        f"{act} of {rows} x {f}": (check_shape, rows, f, act)
        for rows, f, act in (
            *((0, 32, "swiglu"), (0, 32, "gelu"), (1, 1, "geglu"), (1, 1, "squared_relu")),
            *((17, 1, "gelu"), (70, 5, "geglu")),
        )
    },
    **{
        f"{act} by rows": (check_rows, act, *on_device(((2752,), 67), ((72, 101), 1)))
        for act in ACTIVATIONS
    },
    **{
        f"{act} by rows, tails": (check_rows, act, (101,), on_device(9, 1), on_device(5, 1))
        for act in ("swiglu", "squared_relu")
    },
    # On a GPU those of Llama 7B and 70B.
    "by long rows": (check_rows, "swiglu", *on_device(((11008, 28672), 40), ((1100,), 1))),
    **{
        f"{act} by rows, {bad}": (check_rows_of_bad_values, act, bad, chosen)
        for act in ACTIVATIONS
        for bad, chosen in ((torch.inf, None), (torch.nan, SHORT))
        if not ACTIVATIONS[act].limit < bad  # a clamped gate is finite
    },
}
