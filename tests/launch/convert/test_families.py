"""Every family in both directions: transformers' logits and gradients, and the same bytes after
a round trip.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from coat_dist.config import ActivationConfig
from launch.convert.conversion import plan_conversion
from launch.convert.families import FAMILIES
from launch.convert.fill import fill
from launch.convert.recipes import put_together
from launch.convert.sources import open_weights
from launch.model.gpt import build_model, parameter_count
from megatron_patches import patch_model
from tests.launch.convert.hf_folders import (
    CASES,
    SIZES,
    Given,
    config,
    convert,
    make,
    meaning,
    tensors,
)
from tests.support import equal

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2 * 16).view(2, 16) * 37 % SIZES["vocab_size"]
POSITIONS = torch.arange(16).expand(2, -1)


def our_logits(model):
    return model(TOKENS, POSITIONS, None)[..., : SIZES["vocab_size"]]


def their_model(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def loss(logits):
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten())


def assert_close(ours, theirs, tolerance=1e-5, message=None):
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=tolerance,
        atol=tolerance * float(theirs.detach().abs().max()),
        msg=message,
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(one_rank, tmp_path, name):
    """In fp32; and nearly the same logits in the FP8 flow."""
    make(name, tmp_path, shard="100KB")
    theirs, weights = their_model(tmp_path), open_weights(tmp_path)
    model = build_model(weights.model, dtype=torch.float32).eval()
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == weights.shapes
    assert sum(p.numel() for p in model.parameters()) == parameter_count(weights.model)
    fill(model, weights)
    expected, logits = theirs(TOKENS).logits, our_logits(model)
    assert_close(logits, expected)
    padding = model.embedding.word_embeddings.weight[SIZES["vocab_size"] :]
    assert padding.shape[0] == 28 and not padding.any()

    loss(logits).backward()
    loss(expected).backward()
    if not weights.model.num_moe_experts:  # transformers has experts stacked
        grads = {n: p.grad for n, p in theirs.named_parameters()}
        for key, parameter in model.named_parameters():
            wanted = put_together(weights.recipes[key], torch.float32, grads.__getitem__)
            assert_close(
                parameter.grad[: len(wanted)], wanted, 1e-4, lambda text, key=key: f"{key}: {text}"
            )
    patch_model(model, ActivationConfig())
    assert (
        0.95
        < F.cosine_similarity(our_logits(model).flatten(), expected.flatten(), dim=0)
        < 1 - 1e-7
    )


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_conversion_of_every_family(one_rank, tmp_path, capsys, name):
    """Of its own folder: the same bytes. Of other weights, without a config.json: transformers
    computes what our model does.
    """
    source, back, new = (tmp_path / n for n in ("source", "back", "new"))
    make(name, source, shard="100KB")
    convert(source, back, "--max-shard-size", "150KB", "--verify")
    assert len(list(back.glob("model-0000?-of-0000?.safetensors"))) > 1
    assert f"--verify: {len(tensors(back))} tensors" in capsys.readouterr().out
    one, other = tensors(source), tensors(back)
    assert one.keys() == other.keys()
    assert all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)
    assert config(source) == config(back) and meaning(source) == meaning(back)
    for file in (
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
    ):
        assert (source / file).read_bytes() == (back / file).read_bytes()

    weights = open_weights(source)
    model = build_model(weights.model, dtype=torch.float32)
    fill(model, weights)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    trained = Given(weights.model, {n: p.detach() for n, p in model.named_parameters()})
    # A window that covers the sequence is the same model in any other family.
    family = "mistral" if name == "mistral_window" else None
    conversion = plan_conversion(trained, None, {}, {}, family, None)
    new.mkdir()
    conversion.write(trained, new, 10**5, lambda _: None)
    assert_close(their_model(new)(TOKENS).logits, our_logits(model))
    assert "mistral" in name or config(new)["model_type"] == config(source)["model_type"]


def test_every_family_is_tried():
    assert {getattr(transformers, kind).model_type for kind, _ in CASES.values()} == set(FAMILIES)


def test_a_type_can_be_asked_for(tmp_path):
    make("llama3", tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "half", "--dtype", "bfloat16")
    convert(tmp_path / "half", tmp_path / "back")
    one, other = tensors(tmp_path / "source"), tensors(tmp_path / "back")
    assert all(torch.equal(one[n].bfloat16(), other[n]) for n in one)
    assert config(tmp_path / "back")["dtype"] == "bfloat16"


def test_values_that_a_type_cannot_hold_are_refused(tmp_path, capsys):
    """Not made infinite; what is infinite stays what it is."""
    make("llama3", tmp_path / "source")
    content, name = tensors(tmp_path / "source"), "model.layers.1.mlp.up_proj.weight"
    for value, ends in ((float("inf"), 0), (-70000.0, 2)):
        content[name][3, 5] = value
        save_file(content, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
        convert(tmp_path / "source", tmp_path / str(ends), "--dtype", "float16", status=ends)
    assert f"tensor {name}: got values beyond 65504" in capsys.readouterr().err
    assert not (tmp_path / "2").exists()


def test_a_folder_of_several_types_comes_back_as_it_was(tmp_path):
    """Also parts of one tensor of Megatron's, and config.json's type, which most tensors have."""
    make("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    file, written = tmp_path / "hf" / "model.safetensors", config(tmp_path / "hf")
    stored = {
        n: t.float() if "k_proj" in n or "gate_proj" in n or "norm" in n else t
        for n, t in tensors(file.parent).items()
    }
    save_file(stored, file, metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, "torch_dtype": "float16"}))
    for source, target in (("hf", "back"), ("back", "last")):
        convert(tmp_path / source, tmp_path / target, "--verify")
    for target in ("back", "last"):
        back = tensors(tmp_path / target)
        assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in stored.items()}
        assert equal(back, stored)
        assert config(tmp_path / target) == written
