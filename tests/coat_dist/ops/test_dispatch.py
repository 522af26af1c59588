"""Which tensors run kernels."""

import importlib
from inspect import signature

import pytest
import torch

from coat_dist import ops
from coat_dist.devices import KERNEL_CAPABILITY
from coat_dist.ops import dispatch
from coat_dist.ops.dispatch import use_kernels
from coat_dist.reference import adamw


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
    assert use_kernels(x) == (torch.cuda.get_device_capability() >= KERNEL_CAPABILITY)
    monkeypatch.setenv("COAT_REFERENCE", "1")
    assert not use_kernels(x)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["adamw_steps", "adamw_fp32_steps"])
def test_adamw_takes_the_side_that_dispatch_names(monkeypatch, kernels, name):
    pytest.importorskip("triton")
    from coat_dist.kernels import adamw as side

    called = []

    def definition(*a):
        called.append(("definition", len(a)))

    definition.__module__, definition.__name__ = "coat_dist.reference.adamw", name
    monkeypatch.setattr(dispatch, "use_kernels", lambda tensor: kernels)
    monkeypatch.setattr(side, name, lambda *a: called.append(("kernel", len(a))))
    tensors = [ops.AdamWTensors(torch.zeros(1), torch.zeros(1), None, None)]
    arguments = [tensors, None, None, None] if name == "adamw_steps" else [tensors, None]
    dispatch.operation_on_list(definition)(*arguments)
    assert called == [("kernel" if kernels else "definition", len(arguments))]
    assert getattr(ops, name).__wrapped__ is getattr(adamw, name)


PAGE = [name for name in ops.__all__ if hasattr(getattr(ops, name), "__wrapped__")]


@pytest.mark.parametrize("name", PAGE)
def test_every_operation_has_a_kernel_of_the_same_name_and_arguments(name):
    pytest.importorskip("triton")
    definition = getattr(ops, name).__wrapped__
    kernel = getattr(importlib.import_module(definition.__module__.replace(".reference.", ".kernels.")), name)
    assert definition.__name__ == name and list(signature(kernel).parameters) == list(signature(definition).parameters)
