"""What test_interpreted.py runs with TRITON_INTERPRET=1: the optimizer on its kernels."""

import pytest

from tests.coat_dist.kernels import adamw_layouts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("COAT_KERNELS", "1")


@pytest.mark.parametrize("variant", ["fp8", "fp8, remainder, copies", "fp32", "fp32, remainder, copies"])
def test_every_layout_gives_the_bits_of_contiguous_tensors(variant):
    adamw_layouts.check(few=True, steps=1 if "fp8, " in variant else 2, **adamw_layouts.VARIANTS[variant])


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_autograd_sees_a_step(moments):
    adamw_layouts.check_versions(moments)


@pytest.mark.parametrize("stochastic", [True, "auto"])
def test_tables_are_kept_over_steps_with_noise(stochastic):
    adamw_layouts.check_tables(stochastic_rounding=stochastic)


def test_what_does_not_fit_is_refused_before_anything_changes():
    adamw_layouts.check_sizes()
