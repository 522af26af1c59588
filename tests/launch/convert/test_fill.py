"""Whole weights into models that ranks share: tensor parallel, pipeline parallel, both."""

from __future__ import annotations

import pytest
import torch

from launch.convert.fill import fill
from launch.convert.sources import open_weights
from launch.convert.weights import CheckpointError
from launch.model.gpt import ModelConfig, build_model
from tests.launch.convert.hf_folders import SMALL, Given, make
from tests.launch.convert.weight_runs import filled
from tests.support import run_ranks

pytest.importorskip("transformers")


def joined(name, parts):
    """What Megatron's layout says the ranks hold together."""
    replicated = ("layernorm.weight", "proj.bias", "router.weight", "gate_weight")
    if name.endswith(replicated) and ".q_" not in name and ".k_" not in name:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
    return torch.cat(parts, dim)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("olmo2", 2, 1),
        ("qwen2", 1, 2),
        ("llama_attention_bias", 2, 2),
        ("llama2", 4, 1),
        ("qwen2_moe", 2, 1),
    ],
)
def test_ranks_hold_their_slices(tmp_path, name, tp, pp):
    """Tied embeddings are on the first and on the last stage."""
    make(name, tmp_path / "hf", dtype=torch.bfloat16)
    weights = open_weights(tmp_path / "hf")
    ranks = run_ranks(tp * pp, filled, str(tmp_path / "hf"), tp, pp)
    seen = set()
    for stage in range(pp):
        members = ranks[stage * tp : (stage + 1) * tp]
        for parameter in members[0]:
            source = parameter
            if parameter == "output_layer.weight" and weights.model.tie_embeddings:
                source = "embedding.word_embeddings.weight"
            assert torch.equal(
                joined(parameter, [m[parameter] for m in members]), weights.read(source)
            ), parameter
            seen.add(source)
    assert seen == set(weights.shapes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("decoder.final_layernorm.weight"),
            "here: decoder.final_layernorm.weight: the model has it",
        ),
        (lambda t: t.update(more=torch.ones(1)), "here: more: the source has it"),
        (
            lambda t: t.update({"output_layer.weight": torch.ones(128, 16)}),
            r"output_layer.weight: got \[128, 16\] on tensor-parallel rank 0 of 1, accepted: "
            r"\[128, 32\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(one_rank, change, message):
    model = ModelConfig(**SMALL, vocab_size=100)
    built = build_model(model)
    tensors = {n: p.detach().clone() for n, p in built.named_parameters()}
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        fill(built, Given(model, tensors))


def test_padding_may_be_another(one_rank):
    """A vocabulary padded to 128 rows fills one of 104, and the other way round."""
    wide, narrow = (ModelConfig(**SMALL, vocab_size=100, vocab_multiple=n) for n in (128, 8))
    models = {m.padded_vocab: build_model(m) for m in (wide, narrow)}
    tensors = {n: p.detach().clone() for n, p in models[128].named_parameters()}
    fill(models[104], Given(wide, tensors))
    assert torch.equal(models[104].output_layer.weight, tensors["output_layer.weight"][:104])
    tensors = {n: p.detach().clone() for n, p in models[104].named_parameters()}
    fill(models[128], Given(narrow, tensors))
    assert torch.equal(models[128].output_layer.weight[:104], tensors["output_layer.weight"])
    assert not models[128].output_layer.weight[104:].any()
