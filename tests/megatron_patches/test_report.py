"""What is patched, asked where reports are read: ``initialize`` and ``get_megatron_optimizer``."""

from __future__ import annotations

import pytest
from torch import nn

from coat_dist.config import CoatConfig, CoatConfigError
from megatron_patches import patch_model, unpatch_model
from megatron_patches.parallel.engine import _patch
from megatron_patches.parallel.optimizer import _moments

from .test_pipeline import stage
from .tiny import tiny_gpt

BLOCK = CoatConfig.parse({})
PLAIN = CoatConfig.parse({"activation": {"loss": "plain"}})
OFF = CoatConfig.parse({"activation": {"enabled": False}})


def by_initialize(model, block=BLOCK):
    return _patch(nn.ModuleList(model) if isinstance(model, list) else model, block)


def by_optimizer(model, block=BLOCK):
    return _moments(block, model if isinstance(model, list) else [model])


class Wrapped(nn.Module):
    """As ``DistributedDataParallel`` and ``Float16Module`` hold a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("read", [by_initialize, by_optimizer])
@pytest.mark.parametrize("bf16", [(), (0, 1)])
def test_check_settings_of_model_chunks(read, bf16):
    """One without layers, and one of whose layers all are ``bf16_layers``; all are patched, or
    none.
    """
    some = [stage((1, 2), first=True), stage(()), stage((3,), last=True)]
    block = CoatConfig.parse({"activation": {"bf16_layers": bf16}})
    patch_model(some[0], block)
    patch_model(some[2], block)
    with pytest.raises(CoatConfigError, match="patched already|for a model that is not patched"):
        read(some, block)
    patch_model(some[1], block)
    assert read([Wrapped(chunk) for chunk in some], block)
    assert all(read([chunk], block) for chunk in some)
    with pytest.raises(
        CoatConfigError, match="coat.activation: got a model that is patched already"
    ):
        read(some, PLAIN)
    for chunk in some:
        unpatch_model(chunk)
    patch_model(some, block)
    assert read(some, block)


def test_check_settings_of_patched_and_unpatched_models():
    """How a model is handed over: test_initialize.py. A part of it may be patched alone."""
    model = tiny_gpt()
    unpatched = "coat.activation.enabled: got true for a model that is not patched"
    with pytest.raises(CoatConfigError, match=unpatched):
        by_optimizer(model)
    assert by_optimizer(model, OFF)
    patch_model(model, BLOCK)
    patched = "coat.activation.enabled: got false for a model that is patched"
    with pytest.raises(CoatConfigError, match=patched):
        by_optimizer(model, OFF)
    unpatch_model(model)
    patch_model(model.decoder, PLAIN)
    assert by_initialize(model, PLAIN)[1] is False and by_optimizer(model, PLAIN)
