"""What holds of every step, whatever computes it: here the definition; the kernels in tests/coat_dist/kernels."""

import pytest

pytest.importorskip("triton")

from tests.coat_dist.kernels import adamw_layouts


@pytest.mark.parametrize("variant", adamw_layouts.VARIANTS)
def test_every_layout_gives_the_bits_of_contiguous_tensors(variant):
    adamw_layouts.check(**adamw_layouts.VARIANTS[variant])


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_autograd_sees_a_step(moments):
    adamw_layouts.check_versions(moments)


def test_what_does_not_fit_is_refused_before_anything_changes():
    adamw_layouts.check_sizes()
