"""CoatAdamW on its kernels: tensors of every memory layout, sizes that do not fit, a step as autograd sees it."""

import pytest
import torch

from coat_dist.optim import CoatAdamW
from coat_dist.reference import adamw
from tests.support.devices import DEVICE, on_device

pytest.importorskip("triton")

from coat_dist.kernels import table  # noqa: E402
from tests.coat_dist.ops import adamw_layouts  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("COAT_KERNELS", "1")


@pytest.mark.parametrize(
    "variant",
    on_device(tuple(adamw_layouts.VARIANTS), ("fp8", "fp8, remainder, copies", "fp32", "fp32, remainder, copies")),
)
def test_every_layout_gives_the_bits_of_contiguous_tensors(variant):
    steps = on_device(3, 1 if "fp8, " in variant else 2)
    adamw_layouts.check(DEVICE, steps, few=DEVICE == "cpu", **adamw_layouts.VARIANTS[variant])


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_autograd_sees_a_step(moments):
    adamw_layouts.check_versions(moments, DEVICE)


@pytest.mark.parametrize("stochastic", [True, "auto"])
def test_tables_are_kept_over_steps_with_noise(stochastic):
    adamw_layouts.check_tables(DEVICE, stochastic_rounding=stochastic)


def test_what_does_not_fit_is_refused_before_anything_changes():
    adamw_layouts.check_sizes(DEVICE)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("group_size", [64, 256])
def test_large_copies_are_told_of_in_parts(monkeypatch, kernels, group_size):
    """The same bits, noise included, and when a part is told of, it is written; small ones may not be told of."""
    monkeypatch.setattr(table, "LIMIT", 4096)
    monkeypatch.setenv("COAT_KERNELS", str(int(kernels)))
    runs, heard = [], []
    for part in (1 << 26, 2048):
        monkeypatch.setattr(adamw, "PART", part)
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in (4096, 7000)]
        optimizer = CoatAdamW(params, lr=0.1, group_size=group_size, stochastic_rounding=True)
        optimizer.copies = {p: torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in params}
        if part == 2048:
            optimizer.when_written = lambda copy, first, end: heard.append(
                (len(copy), first, end, bool(copy[first:end].isfinite().all()), bool(copy[end:].isfinite().any()))
            )
        for i in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(DEVICE)
            optimizer.step()
            if i == 0:
                after_one = list(heard)
        state = [optimizer.state[p][key] for p in params for key in ("coat_m_q", "coat_v_q", "coat_m_a", "coat_v_k")]
        runs.append([*params, *optimizer.copies.values(), *state])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    # the definition tells of a tensor when all of it is written
    expected = [(7000, 0, 2048), (7000, 2048, 4096), (7000, 4096, 6144), (7000, 6144, 7000)]
    assert [one[:3] for one in after_one if one[0] == 7000] == expected and all(one[3] for one in after_one)
    if kernels:
        rest = [one[4] for one in after_one if one[0] == 7000]
        assert rest == [False] * 4, "the rest is not written yet"
