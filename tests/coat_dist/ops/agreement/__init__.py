"""Kernels against their definitions: one runner, and in a file for each file of kernels the rows
that it runs.

:func:`agree` calls an operation's kernel and its definition with the same arguments and compares
what they return. Quantization is the same to the byte. Norms and activations sum or exponentiate
differently in the last bits of fp32, so there a code may be the neighbour where its value sits that
close to the middle. ``ROWS`` of a file: name of a row -> a check and its arguments, larger ones
where a GPU runs the kernels.
"""

import functools
import importlib
from unittest import mock

import torch

from coat_dist import ops
from coat_dist.formats import QuantizedTensor
from coat_dist.reference.quantize import scale_values

SCALES = (("e8m0", 32), ("bf16", 16))
SHORT = (32, 1, True, 4)
"""Tiles (see row_tiles) that hold so few columns that most rows are longer: the rest is read
twice.
"""


@functools.cache
def pair(name):
    """An operation's kernel and its definition."""
    definition = getattr(ops, name).__wrapped__
    module = definition.__module__.replace(".reference.", ".kernels.")
    return getattr(importlib.import_module(module), name), definition


def agree(name, *arguments, codes=None, rtol=0.0, atol=0.0, **options):
    """What the kernel and the definition of an operation give, compared by :func:`compare`."""
    got, wanted = (function(*arguments, **options) for function in pair(name))
    compare(got, wanted, codes, rtol, atol)
    return got, wanted


def compare(got, wanted, codes=None, rtol=0.0, atol=0.0):
    """``codes(got, wanted)`` compares codes with one scale a tensor, row or expert; None = to the
    byte. Codes by groups are always the same. Tolerances are for values.
    """
    if wanted is None:
        assert got is None
    elif isinstance(wanted, QuantizedTensor):
        assert got.layout == wanted.layout and got.group_size == wanted.group_size
        if wanted.layout == "group":
            same_groups(got, wanted)
        elif wanted.layout == "row":
            same_rows(got, wanted) if codes is None else close_rows(got, wanted, codes)
        else:
            (codes or same)(got.codes, wanted.codes)
    elif isinstance(wanted, (tuple, list)):
        for mine, theirs in zip(got, wanted, strict=True):
            compare(mine, theirs, codes, rtol, atol)
    else:
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)


def same(got, wanted):
    """Codes equal byte for byte; NaN has several codes."""
    nan = wanted.float().isnan()
    assert got.shape == wanted.shape and got.is_contiguous()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(
        got.contiguous().view(torch.uint8)[~nan], wanted.contiguous().view(torch.uint8)[~nan]
    )


def same_groups(got, wanted):
    """Codes and scales equal byte for byte; of a group whose scale is NaN codes mean nothing."""
    assert got.layout == wanted.layout == "group" and got.group_size == wanted.group_size
    stored = [q.scales.float().nan_to_num(-1) for q in (got, wanted)]
    assert torch.equal(*stored)
    bad = (
        scale_values(wanted.scales)
        .isnan()
        .repeat_interleave(wanted.group_size, -1)[..., : wanted.codes.shape[-1]]
    )
    assert (
        got.codes.dtype == wanted.codes.dtype
        and got.codes.shape == wanted.codes.shape
        and got.codes.is_contiguous()
    )
    assert torch.equal(*(q.codes.view(torch.uint8).masked_fill(bad, 0) for q in (got, wanted)))


def close(got, wanted, share=3e-3):
    """Few codes differ, and by one step; below 1e-5 of the largest value, where activations
    cancel, by anything.
    """
    assert got.shape == wanted.shape and got.is_contiguous()
    if not wanted.numel():
        return
    a, b = (t.contiguous().view(torch.uint8) for t in (got, wanted))
    values, exact = got.float(), wanted.float()
    different = (a != b) & (torch.maximum(values.abs(), exact.abs()) > 1e-5 * exact.abs().max())
    assert different.sum() <= share * different.numel() + 3
    steps = (a & 0x7F).int() - (b & 0x7F).int()
    assert (steps[different].abs() <= 1).all() and (values[different] * exact[different] >= 0).all()


def same_rows(got, wanted):
    """Codes and scales equal bit for bit; NaN has several codes."""
    assert got.layout == wanted.layout == "row" and got.scales.dtype == torch.float32
    assert got.scales.shape == wanted.scales.shape and got.scales.is_contiguous()
    torch.testing.assert_close(got.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
    same(got.codes, wanted.codes)
    for q in (got, wanted):
        check_top(q)


def check_top(q):
    """The largest of the row scales, to the bit; NaN if one of them is; none of no rows."""
    assert (q.top is None) == (not q.scales.numel())
    if q.top is not None:
        assert q.top.shape == () and q.top.dtype == torch.float32
        torch.testing.assert_close(q.top, q.scales.amax(), rtol=0, atol=0, equal_nan=True)


def close_rows(got, wanted, codes=close):
    """Few codes are neighbours; scales differ by rounding."""
    torch.testing.assert_close(got.scales, wanted.scales, rtol=1e-5, atol=0)
    codes(got.codes, wanted.codes)
    for q in (got, wanted):
        check_top(q)


def tiles(name, ahead=None, chosen=None):
    """A module of kernels that takes rows by other tiles: ``ahead`` of them on their way,
    ``chosen`` as SHORT is.
    """
    module = importlib.import_module(f"coat_dist.kernels.{name}")
    held = module.HELD_TILES if ahead is None else (ahead, *module.HELD_TILES[1:])
    values = {} if chosen is None else {"row_tiles": lambda *_: chosen}
    return mock.patch.multiple(module, HELD_TILES=held, **values)
