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
@pytest.mark.parametrize("bf16", [(), (0, 1), (2,)])
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
    assert read([Wrapped(chunk) for chunk in some], block) and all(
        read([chunk], block) for chunk in some
    )
    with pytest.raises(
        CoatConfigError, match="coat.activation: got a model that is patched already with"
    ):
        read(some, PLAIN)
    for chunk in some:
        unpatch_model(chunk)
    patch_model(some, block)
    assert read(some, block)


@pytest.mark.parametrize(
    "of", [lambda model: model, Wrapped, lambda model: [model]], ids=["model", "wrapped", "list"]
)
def test_check_settings_of_patched_and_unpatched_models(of):
    model = tiny_gpt()
    given = of(model)
    with pytest.raises(
        CoatConfigError, match="coat.activation.enabled: got true for a model that is not patched"
    ):
        by_optimizer(given)
    assert by_optimizer(given, OFF) and by_initialize(given, OFF) == (None, False)
    report, patched_here = by_initialize(given)
    assert patched_here and by_initialize(given) == (report, False) and by_optimizer(given)
    with pytest.raises(
        CoatConfigError, match="coat.activation.enabled: got false for a model that is patched"
    ):
        by_optimizer(given, OFF)
    unpatch_model(given)
    assert not hasattr(model, "coat_patch_report")
    patch_model(model.decoder, PLAIN)  # a part alone
    assert by_initialize(given, PLAIN)[1] is False and by_optimizer(given, PLAIN)
