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


READERS = [pytest.param(by_initialize, "model", id="initialize"), pytest.param(by_optimizer, "model_chunks", id="Adam")]


class Wrapped(nn.Module):
    """As ``DistributedDataParallel`` and ``Float16Module`` hold a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def chunks(*numbers):
    """Model chunks of one rank, of four layers in all, by the layers' numbers."""
    return [stage(n, first=i == 0, last=i == len(numbers) - 1) for i, n in enumerate(numbers)]


@pytest.mark.parametrize(("read", "argument"), READERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_chunk_that_is_not_patched_is_refused(read, argument, wrapped):
    some = chunks((1,), (2, 3), (4,))
    for i in (0, 2):
        patch_model(some[i], BLOCK)
    given = [Wrapped(chunk) for chunk in some] if wrapped else some
    with pytest.raises(CoatConfigError, match=f"^{argument}: got 3 chunks of which 1 .* is not patched, accepted: "):
        read(given)
    patch_model(some[1], BLOCK)
    assert read(given)


@pytest.mark.parametrize(("read", "argument"), READERS)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("bf16", [(), (0, 1), (2,)])
def test_chunks_with_nothing_to_patch_are_accepted(read, argument, at_once, bf16):
    """One without layers, and one of whose layers all are ``bf16_layers``."""
    some, block = chunks((1, 2), (), (3,)), CoatConfig.parse({"activation": {"bf16_layers": bf16}})
    for model in [some] if at_once else some:
        patch_model(model, block)
    assert read(some, block)
    assert all(read([chunk], block) for chunk in some)
    with pytest.raises(CoatConfigError, match="coat.activation: got a model that is patched already with"):
        read(some, PLAIN)


@pytest.mark.parametrize(("read", "argument"), READERS)
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("decoder", r"12 of 14 .*decoder.layers.\[0-1\].input_layernorm"),
        ("decoder.layers.1", r"6 of 14 .*decoder.layers.\[1\].input_layernorm"),
        ("output_layer", "1 of 14 .*output_layer"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_of_which_a_part_was_unpatched_is_refused(read, argument, part, said, wrapped):
    model = tiny_gpt()
    patch_model(model, BLOCK)
    given = Wrapped(model) if wrapped else model
    unpatch_model(model.get_submodule(part))
    with pytest.raises(CoatConfigError, match=f"^{argument}: got one of which {said}.*, accepted: .* unpatch_model"):
        read(given)
    unpatch_model(given)
    patch_model(model, BLOCK)
    assert read(given)


@pytest.mark.parametrize("of", [lambda model: model, Wrapped, lambda model: [model]], ids=["model", "wrapped", "list"])
def test_a_report_of_which_nothing_holds_counts_no_longer(of):
    model = tiny_gpt()
    patch_model(model, PLAIN)
    unpatch_model(model.decoder)  # all that was patched, the loss being plain
    given = of(model)
    with pytest.raises(CoatConfigError, match="coat.activation.enabled: got true for a model that is not patched"):
        by_optimizer(given)
    assert by_optimizer(given, OFF) and by_initialize(given, OFF) == (None, False)
    report, patched_here = by_initialize(given)
    assert patched_here and len(report.patched) == 4
    assert by_initialize(given) == (report, False) and by_optimizer(given)  # the earlier report is gone


@pytest.mark.parametrize(("read", "argument"), READERS)
def test_parts_that_are_patched_one_by_one_and_again_are_accepted(read, argument):
    model = tiny_gpt()
    patch_model(model.decoder, BLOCK)
    assert read(model)
    unpatch_model(model.decoder)
    patch_model(model, BLOCK)
    unpatch_model(model.decoder)
    patch_model(model.decoder, BLOCK)
    assert read(model)
    if read is by_optimizer:
        assert read(model.decoder.layers[0]), "a part of what is patched has no report"


@pytest.mark.parametrize(("read", "argument"), READERS)
def test_modules_that_were_wrapped_or_taken_out_since_are_no_unpatched_ones(read, argument):
    model = tiny_gpt()
    patch_model(model, BLOCK)
    model.decoder.layers[0].mlp = Wrapped(model.decoder.layers[0].mlp)
    model.decoder.layers = model.decoder.layers[:1]
    assert read(model)
