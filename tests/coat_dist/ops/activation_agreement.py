"""How the kernels of activations must agree with their definitions.

What is saved is the same to the byte; exponentials differ in the last bits of fp32, so a result's
code may be the neighbour.
"""

import itertools

import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8
from coat_dist.kernels import activation, activation_compress
from coat_dist.reference import activation as reference
from coat_dist.reference.activation import ACTIVATIONS
from coat_dist.reference.quantize import tensor_scale

from .codes import SCALES, SHORT, check_top, close, close_rows, same_groups, same_rows, tiles

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


def dealt(hand, act, turn, turns, variants):
    """``variants`` items of ``hand`` for one of the ``turns`` of an activation. They are dealt out
    in a circle over all activations, also where these are checked one by one. ``variants`` is odd,
    to share no divisor with 16 kinds.
    """
    first = (list(ACTIVATIONS).index(act) * turns + turn) * variants
    return [hand[i % len(hand)] for i in range(first, first + variants)]


def check_activation(
    device="cpu", sizes=(64, 176), rows=37, activations=tuple(ACTIVATIONS), variants=5
):
    """Every activation, with and without a bias, over tails of rows, columns and groups;
    ``variants`` of the rest.
    """
    saved = itertools.cycle(SAVED)
    for act, (turn, (f, biased)) in itertools.product(
        activations, enumerate(itertools.product(sizes, (False, True)))
    ):
        for grad_fmt, (scale, size), exact, dtype in dealt(
            KINDS, act, turn, 2 * len(sizes), variants
        ):
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(rows, width) * 2).to(device, dtype)
            x[0, ::3] = 0
            # Large where x is not: a bias that reached rows or columns outside would raise the
            # amax.
            bias = (torch.randn(width, 2) * 3).to(device, dtype)[:, 0] if biased else None
            arguments = (x, act, E4M3, size, scale, exact, bias, next(saved))
            got, wanted = (m.activation_compress(*arguments) for m in (activation, reference))
            same_groups(got.pre8, wanted.pre8)
            torch.testing.assert_close(got.amax, wanted.amax, rtol=1e-5, atol=0)
            t8 = tensor_scale(wanted.amax, E4M3)
            for (source, b), turn in itertools.product(
                ((x, bias), (wanted.pre8, None)), (False, True)
            ):
                rest = (source, act, E4M3, t8, turn, b)
                close(*(m.activation_quantize(*rest).codes for m in (activation, reference)))
            da = torch.randn(rows, f).to(device, dtype)
            amax = reference.activation_grad_amax(da, wanted.pre8, act)
            torch.testing.assert_close(
                activation.activation_grad_amax(da, wanted.pre8, act), amax, rtol=1e-5, atol=0
            )  # fmt: skip
            sums = torch.float32 if biased else None
            rest = (da, wanted.pre8, act, grad_fmt, tensor_scale(amax, grad_fmt), E4M3, t8, sums)
            got, wanted = (m.activation_backward(*rest) for m in (activation, reference))
            for a, b in zip(got[:3], wanted[:3], strict=True):
                close(a.codes, b.codes)
            assert (got.dbias is None) == (wanted.dbias is None) == (not biased)
            if biased:
                torch.testing.assert_close(
                    got.dbias, wanted.dbias, rtol=1e-5, atol=1e-5 * amax.item() * rows
                )


def check_activation_of_bad_values(device="cpu"):
    """NaN and infinity reach the amax and the codes; no rows, and one row of one column, are
    shapes like any other.
    """
    for act, bad, where in itertools.product(
        ACTIVATIONS, (torch.inf, -torch.inf, torch.nan), ("pre", "bias", "da")
    ):
        parts = ACTIVATIONS[act].parts
        x, bias, da = torch.randn(5, 48 * parts), torch.randn(48 * parts), torch.randn(5, 48)
        {"pre": x[2], "bias": bias, "da": da[2]}[where][7] = bad
        x, bias, da = x.to(device), bias.to(device), da.to(device)
        got, wanted = (
            m.activation_compress(x, act, E4M3, 32, "e8m0", True, bias, INT8)
            for m in (activation, reference)
        )
        same_groups(got.pre8, wanted.pre8)
        assert got.amax == wanted.amax or torch.isclose(got.amax, wanted.amax, rtol=1e-5)
        one = torch.ones((), device=device)
        rest = (da, wanted.pre8, act, E4M3, one, E4M3, one, torch.float32)
        a, b = (m.activation_backward(*rest) for m in (activation, reference))
        for mine, expected in zip(a[:3], b[:3], strict=True):
            assert torch.equal(mine.codes.float().isnan(), expected.codes.float().isnan())
        assert torch.equal(a.dbias.isfinite(), b.dbias.isfinite())
        amaxes = [m.activation_grad_amax(da, wanted.pre8, act) for m in (activation, reference)]
        torch.testing.assert_close(*amaxes, rtol=1e-5, atol=0)
    shapes = (
        (0, 32, "swiglu"),
        (0, 32, "gelu"),
        (1, 1, "geglu"),
        (1, 1, "squared_relu"),
        (17, 1, "gelu"),
        (70, 5, "geglu"),
    )
    for rows, f, act in shapes:
        x, da = (
            torch.randn(rows, f * ACTIVATIONS[act].parts).to(device),
            torch.randn(rows, f).to(device),
        )
        bias = torch.ones(x.shape[1]).to(device)
        got, wanted = (
            m.activation_compress(x, act, E4M3, 32, "e8m0", True, bias, INT8)
            for m in (activation, reference)
        )
        same_groups(got.pre8, wanted.pre8)
        torch.testing.assert_close(got.amax, wanted.amax, rtol=1e-5, atol=0)
        scale = tensor_scale(wanted.amax, E4M3)
        close(
            *(
                m.activation_quantize(x, act, E4M3, scale, False, bias).codes
                for m in (activation, reference)
            )
        )
        rest = (da, wanted.pre8, act, E4M3, scale, E4M3, scale, torch.float64)
        a, b = (m.activation_backward(*rest) for m in (activation, reference))
        for mine, expected in zip(a[:3], b[:3], strict=True):
            close(mine.codes, expected.codes)
        assert a.dbias.dtype == torch.float64
        torch.testing.assert_close(a.dbias, b.dbias, rtol=1e-5, atol=1e-5)


def check_activation_rows(
    device="cpu", sizes=(176, 2752), rows=37, activations=tuple(ACTIVATIONS), variants=3
):
    """Every activation, with and without a bias, over tails of columns and groups; ``variants``
    of the rest.
    """
    saved = itertools.cycle(SAVED)
    for act, (turn, (f, biased)) in itertools.product(
        activations, enumerate(itertools.product(sizes, (False, True)))
    ):
        place = act, turn, 2 * len(sizes), variants
        for (fmt, (scale, size), exact, dtype), way in zip(
            dealt(KINDS, *place), dealt(WAYS, *place), strict=True
        ):
            width = f * ACTIVATIONS[act].parts
            x = (torch.randn(2, rows, width) * torch.exp(torch.randn(2, rows, 1))).to(device, dtype)
            x[0, 0, ::3] = 0
            # Large where x is not: a bias that reached columns outside would raise the amax.
            bias = (torch.randn(width) * 3).to(device, dtype) if biased else None
            rest = (act, fmt, size, scale, exact, bias, next(saved))
            with tiles(activation_compress, *way):
                got = activation.activation_compress_rows(x, *rest)
                alone = activation.activation_compress_rows(x[1, -1], *rest)
            wanted = reference.activation_compress_rows(x, *rest)
            same_groups(got.pre8, wanted.pre8)
            if act == "squared_relu":
                same_rows(got.a8, wanted.a8)
            # Where gates are so large that they hardly change, products of codes are ties between
            # others.
            else:
                close_rows(got.a8, wanted.a8, 3e-3 if exact else 2e-2)
            assert torch.equal(
                alone.a8.codes.view(torch.uint8), got.a8.codes[1, -1].view(torch.uint8)
            )
            assert torch.equal(alone.a8.scales, got.a8.scales[1, -1])


def check_rows_of_bad_values(device="cpu"):
    """A value that is not finite spoils its row and no other."""
    for act, (bad, chosen) in itertools.product(
        ACTIVATIONS, ((torch.inf, None), (torch.nan, SHORT))
    ):
        x = torch.randn(3, 72 * ACTIVATIONS[act].parts).to(device)
        rest = (act, E4M3, 32, "e8m0", True)
        with tiles(activation_compress, chosen=chosen):
            clean = activation.activation_compress_rows(x, *rest)
            x[1, 71] = bad
            got = activation.activation_compress_rows(x, *rest)
        check_top(got.a8)
        wanted = reference.activation_compress_rows(x, *rest)
        same_groups(got.pre8, wanted.pre8)
        assert got.a8.scales[1].isnan() and got.a8.codes[1].float().isnan().all()
        assert torch.equal(got.a8.scales.isnan(), wanted.a8.scales.isnan())
        others = [0, 2]
        assert torch.equal(
            got.a8.codes.view(torch.uint8)[others], clean.a8.codes.view(torch.uint8)[others]
        )
        assert torch.equal(got.a8.scales[others], clean.a8.scales[others])


def check_no_rows_and_one_element(device="cpu"):
    """No rows, as an expert without tokens has them, and one row of one column."""
    for rows, n in ((0, 64), (1, 1)):
        for act, parts in (("swiglu", 2), ("gelu", 1)):
            pre = torch.randn(rows, n * parts, device=device)
            got, wanted = (
                m.activation_compress_rows(pre, act, E4M3, 32, "e8m0", True)
                for m in (activation, reference)
            )
            same_groups(got.pre8, wanted.pre8)
            close_rows(got.a8, wanted.a8)
