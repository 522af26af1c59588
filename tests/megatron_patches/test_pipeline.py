"""Pipeline stages, each patched by itself: all of them raise or none does, since a rank that
goes on would wait.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from coat_dist.config import ActivationConfig
from coat_dist.patching.report import is_patched
from megatron_patches import gpt_layer_spec, patch_model, patched, unpatch_model
from megatron_patches.layers.loss import ChunkedLossGPTModel

from .tiny import BATCH, HIDDEN, SEQ, VOCAB, tiny_batch, tiny_config

LAYERS = 4


def stage(numbers, first=False, last=False, **changes):
    """A stage with the layers of these numbers, counted from 1 over all stages."""
    config = tiny_config(num_layers=LAYERS, **changes)
    spec = gpt_layer_spec(config)
    model = GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
    ).bfloat16()
    for layer, number in zip(model.decoder.layers, numbers, strict=False):
        layer.layer_number = layer.self_attention.layer_number = number
    model.decoder.layers = model.decoder.layers[: len(numbers)]
    config.pipeline_model_parallel_size = 3  # known to a config only together with process groups
    return model.cuda() if torch.cuda.is_available() else model


def stages(**changes):
    """The last of three stages has no layers, only the norm, the output layer and the loss."""
    return [
        stage((1, 2), first=True, **changes),
        stage((3, 4), **changes),
        stage((), last=True, **changes),
    ]


def names(*indices):
    return [f"decoder.layers.{i}.{b}" for i in indices for b in ("self_attention", "mlp")]


def test_patch_model_of_every_stage(device):
    models = stages()
    before = [[type(m) for m in model.modules()] for model in models]
    reports = [patch_model(model, ActivationConfig()) for model in models]
    assert [r.patched for r in reports] == [names(0, 1), names(0, 1), []]
    assert reports[2].loss == {"output_layer": "chunked"} and not reports[0].loss
    assert "note     no block is patched in this pipeline stage" in str(reports[2])
    assert isinstance(models[2], ChunkedLossGPTModel)
    hidden = torch.randn(
        SEQ, BATCH, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True
    )
    tokens, labels, positions = tiny_batch(0, device)
    models[2].set_input_tensor(hidden)
    models[2](tokens, positions, None, labels=labels).mean().backward()
    assert models[2].output_layer.weight.grad is not None and hidden.grad is not None
    for model in models:
        unpatch_model(model)
    assert [[type(m) for m in model.modules()] for model in models] == before


@pytest.mark.parametrize(
    ("layers", "expected"),
    [((0, -1), [names(1), names(0), []]), ((2,), [names(0, 1), names(1), []])],
)
def test_bf16_layers_count_over_all_stages(layers, expected):
    for model, blocks in zip(stages(), expected, strict=True):
        with patched(model, ActivationConfig(bf16_layers=layers)) as report:
            assert report.patched == blocks
            assert set(report.left.values()) <= {"bf16_layers"}


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bf16_layers": (0, 1, 2, 3)}, {}, r"nothing to patch \(bf16_layers\)"),
        ({}, {"cpu_offloading": True}, r"nothing to patch(.|\n)*config.cpu_offloading=True"),
        (
            {"z_loss": 1e-4},
            {"config_logger_dir": "x"},
            "z_loss: got 0.0001, accepted: 0, or a model whose",
        ),
    ],
)
def test_patch_model_refuses_in_every_stage(settings, change, message):
    for model in stages():
        for key, value in change.items():
            setattr(model.config, key, value)
        with pytest.raises(ValueError, match=message):
            patch_model(model, ActivationConfig(**settings))


def test_patch_model_of_a_list_of_chunks():
    """As Megatron builds for interleaved stages."""
    chunks = [stage((1, 2), first=True), stage((3, 4), last=True)]
    with patched(chunks, ActivationConfig(bf16_layers=(3,))) as report:
        assert report.patched == [f"0.{n}" for n in names(0, 1)] + [f"1.{n}" for n in names(0)]
        assert report.loss == {"1.output_layer": "chunked"}
        assert all(chunk.coat_patch_report is report for chunk in chunks)
        with pytest.raises(ValueError, match=r"patched already"):
            patch_model(chunks, ActivationConfig())
    assert not any(map(is_patched, chunks))


def test_patch_model_refuses_a_model_without_layers():
    model = stage((), last=True)
    model.config.pipeline_model_parallel_size = 1
    with pytest.raises(ValueError, match="got GPTModel, which holds no Megatron transformer layer"):
        patch_model(model, ActivationConfig())
