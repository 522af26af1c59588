"""A patched model under Megatron's own training loop, on the CPU; the same on GPUs is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from . import megatron_loop


@pytest.fixture
def cuda_by_name(monkeypatch):
    """Megatron's distributed optimizer asks for CUDA by name: for types of parameters, and in a few scalars."""
    kind, tensor, zeros = torch.Tensor.type, torch.tensor, torch.zeros

    def type_(self, *args, **kwargs):
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    def on_cpu(make):
        return lambda *args, **kwargs: make(
            *args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)
        )

    monkeypatch.setattr(torch.Tensor, "type", type_)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(torch, "tensor", on_cpu(tensor))
    monkeypatch.setattr(torch, "zeros", on_cpu(zeros))


@pytest.mark.long  # twenty seconds
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it without stand-ins")
def test_distributed_data_parallel_and_distributed_optimizer(cuda_by_name):
    megatron_loop.check(*(megatron_loop.losses(patch, "cpu") for patch in (False, True)))
