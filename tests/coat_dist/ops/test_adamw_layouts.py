"""CoatAdamW on its kernels: tensors of every memory layout, sizes that do not fit, a step as
autograd sees it.
"""

import pytest

from tests.support.devices import DEVICE, on_device

pytest.importorskip("triton")

from tests.coat_dist.ops import adamw_layouts  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("COAT_KERNELS", "1")


@pytest.mark.parametrize(
    "variant",
    on_device(
        tuple(adamw_layouts.VARIANTS),
        ("fp8", "fp8, remainder, copies", "fp32", "fp32, remainder, copies"),
    ),
)
def test_every_layout_gives_the_bits_of_contiguous_tensors(variant):
    steps = on_device(3, 1 if "fp8, " in variant else 2)
    adamw_layouts.check(DEVICE, steps, few=DEVICE == "cpu", **adamw_layouts.VARIANTS[variant])


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_autograd_sees_a_step(moments):
    adamw_layouts.check_versions(moments, DEVICE)


def test_what_does_not_fit_is_refused_before_anything_changes():
    adamw_layouts.check_sizes(DEVICE)
