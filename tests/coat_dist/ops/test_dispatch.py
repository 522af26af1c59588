"""Which tensors run kernels."""

import importlib
from inspect import signature

import pytest
import torch

from coat_dist import ops
from coat_dist.devices import KERNEL_CAPABILITY
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
def test_gpu_tensors_run_kernels():
    x = torch.zeros(2, device="cuda")
    assert use_kernels(x) == (torch.cuda.get_device_capability() >= KERNEL_CAPABILITY)


PAGE = [name for name, value in vars(ops).items() if hasattr(value, "__wrapped__")]


@pytest.mark.parametrize("name", PAGE)
def test_every_operation_has_a_kernel_of_the_same_name_and_arguments(name):
    pytest.importorskip("triton")
    definition = getattr(ops, name).__wrapped__
    kernel = getattr(
        importlib.import_module(definition.__module__.replace(".reference.", ".kernels.")), name
    )
    assert definition.__name__ == name and list(signature(kernel).parameters) == list(
        signature(definition).parameters
    )
