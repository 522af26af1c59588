"""Which tensors run kernels."""

import pytest
import torch

from coat_dist.ops import adamw
from coat_dist.ops.dispatch import use_kernels


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv("COAT_REFERENCE", raising=False)
    monkeypatch.delenv("COAT_KERNELS", raising=False)


def test_cpu_tensors_run_definitions_unless_kernels_are_forced(monkeypatch):
    x = torch.zeros(2)
    assert not use_kernels(x)
    monkeypatch.setenv("COAT_KERNELS", "1")
    assert use_kernels(x)
    monkeypatch.setenv("COAT_REFERENCE", "1")
    assert not use_kernels(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_tensors_run_kernels_unless_definitions_are_forced(monkeypatch):
    x = torch.zeros(2, device="cuda")
    assert use_kernels(x) == (torch.cuda.get_device_capability() >= (8, 9))
    monkeypatch.setenv("COAT_REFERENCE", "1")
    assert not use_kernels(x)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["adamw_steps", "adamw_fp32_steps"])
def test_adamw_takes_the_side_that_dispatch_names(monkeypatch, kernels, name):
    pytest.importorskip("triton")
    from coat_dist.kernels import adamw as fp8_side
    from coat_dist.kernels import adamw_fp32 as fp32_side

    called = []
    monkeypatch.setattr(adamw, "use_kernels", lambda tensor: kernels)
    side = fp8_side if name == "adamw_steps" else fp32_side
    monkeypatch.setattr(side, name, lambda *a: called.append(("kernel", len(a))))
    monkeypatch.setattr(adamw.reference, name, lambda *a: called.append(("definition", len(a))))
    tensors = [adamw.AdamWTensors(torch.zeros(1), torch.zeros(1), None, None)]
    arguments = [tensors, None, None, None] if name == "adamw_steps" else [tensors, None]
    getattr(adamw, name)(*arguments)
    assert called == [("kernel" if kernels else "definition", len(arguments))]
