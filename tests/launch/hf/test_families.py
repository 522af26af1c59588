"""Every family in both directions: transformers' logits, the same bytes after a round trip, any parallel size."""

from __future__ import annotations

import pytest
import torch

from coat_dist import CoatConfigError
from launch import convert_hf
from launch.hf.families import FAMILIES
from launch.model.gpt import build_model, parameter_count
from launch.weights import fill, open_weights
from tests.launch.hf.folders import CASES, SIZES, config, make, meaning, tensors

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2 * 16).view(2, 16) * 37 % SIZES["vocab_size"]
POSITIONS = torch.arange(16).expand(2, -1)


@torch.no_grad()
def our_logits(model):
    return model(TOKENS, POSITIONS, None)[..., : SIZES["vocab_size"]]


@torch.no_grad()
def their_logits(folder, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model(TOKENS).logits


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def convert(*argv):
    assert convert_hf.main([str(a) for a in argv]) == 0


@pytest.mark.parametrize("name", CASES)
def test_both_directions(one_rank, tmp_path, capsys, name):
    """In: transformers' logits. Out, with other weights: transformers reads ours. Round trip: the same bytes."""
    source, converted, back, trained = (tmp_path / n for n in ("source", "converted", "back", "trained"))
    make(name, source, shard="100KB")
    expected = their_logits(source, torch.float32)

    weights = open_weights(source)
    model = build_model(weights.model, dtype=torch.float32)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {n: weights.shape(n) for n in weights.names()}
    assert sum(p.numel() for p in model.parameters()) == parameter_count(weights.model)
    fill(model, weights)
    assert_close(our_logits(model), expected)
    padding = model.embedding.word_embeddings.weight[SIZES["vocab_size"] :]
    assert padding.shape[0] == 28 and not padding.any()

    convert("--from", source, "--to", converted, "--max-shard-size", "150KB")
    assert len(list(converted.glob("weights-0000?-of-0000?.safetensors"))) > 1
    convert("--from", converted, "--to", back, "--max-shard-size", "100KB", "--verify")
    said = f"--verify: {len(tensors(back))} tensors, read once more, are what was converted"
    assert said in capsys.readouterr().out
    one, other = tensors(source), tensors(back)
    assert one.keys() == other.keys()
    assert all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)
    assert config(source) == config(back) and meaning(source) == meaning(back)
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json"):
        assert (source / file).read_bytes() == (back / file).read_bytes()

    # Ours, changed, and written without knowing any config.json.
    fill(model, open_weights(converted))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_as_ours(model, weights.model, trained)
    if name == "mistral_window":  # what a window does within its length any other family says too
        convert("--from", trained, "--to", tmp_path / "new", "--family", "mistral")
    else:
        convert("--from", trained, "--to", tmp_path / "new")
    assert_close(their_logits(tmp_path / "new", torch.float32), our_logits(model))
    assert "mistral" in name or config(tmp_path / "new")["model_type"] == config(source)["model_type"]


def save_as_ours(model, description, folder):
    """A converted folder, by its format alone."""
    import json
    import zlib

    from safetensors.torch import save_file

    folder.mkdir()
    save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "weights.safetensors")
    (folder / "model.json").write_text(description.model_dump_json(exclude_defaults=True))
    content = {n: (folder / n).read_bytes() for n in ("weights.safetensors", "model.json")}
    files = {n: [len(c), zlib.crc32(c)] for n, c in content.items()}
    manifest = {"format": 1, "kind": "weights", "files": files, "tensors": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "olmo2"])
def test_bfloat16_is_kept_and_equal_to_rounding(one_rank, tmp_path, name):
    make(name, tmp_path / "source", dtype=torch.bfloat16)
    convert("--from", tmp_path / "source", "--to", tmp_path / "ours")
    weights = open_weights(tmp_path / "ours")
    assert {weights.dtype(n) for n in weights.names()} == {torch.bfloat16}
    model = build_model(weights.model)
    fill(model, weights)
    exact = their_logits(tmp_path / "source", torch.float32)
    theirs = their_logits(tmp_path / "source", torch.bfloat16).float()
    ours = our_logits(model).float()
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_every_family_is_tried():
    kinds = {getattr(transformers, kind).model_type for kind, _ in CASES.values()}
    assert kinds == set(FAMILIES)


def test_a_type_can_be_asked_for(tmp_path):
    make("llama3", tmp_path / "source")
    convert("--from", tmp_path / "source", "--to", tmp_path / "half", "--dtype", "bfloat16")
    convert("--from", tmp_path / "half", "--to", tmp_path / "back")
    one, other = tensors(tmp_path / "source"), tensors(tmp_path / "back")
    assert all(torch.equal(one[n].bfloat16(), other[n]) for n in one)
    assert config(tmp_path / "back")["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_type_cannot_hold_is_named(tmp_path, capsys, dtype):
    """Not made infinite; what is infinite stays what it is."""
    from safetensors.torch import save_file

    make("llama3", tmp_path / "source", dtype=dtype)
    content, name = tensors(tmp_path / "source"), "model.layers.1.mlp.up_proj.weight"
    for value, ends in ((float("inf"), 0), (-70000.0, 2)):
        content[name][3, 5] = value
        save_file(content, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
        argv = ["--from", str(tmp_path / "source"), "--to", str(tmp_path / str(ends)), "--dtype", "float16"]
        assert convert_hf.main(argv) == ends
    assert f"tensor {name}: has values beyond 65504" in capsys.readouterr().err
    assert not (tmp_path / "2").exists()


def test_tensors_of_several_types_keep_theirs(tmp_path):
    """Also config.json's, which says what most of them have."""
    from safetensors.torch import save_file

    make("olmo2", tmp_path / "source", dtype=torch.bfloat16)
    content = {n: t.float() if "norm" in n else t for n, t in tensors(tmp_path / "source").items()}
    save_file(content, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    convert("--from", tmp_path / "source", "--to", tmp_path / "ours")
    convert("--from", tmp_path / "ours", "--to", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in content.items())
    assert config(tmp_path / "back") == config(tmp_path / "source")


def test_a_model_that_no_family_has_is_named(tmp_path):
    from launch.hf.config_out import config_for
    from launch.model.gpt import ModelConfig

    base = dict(num_layers=1, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, seq_length=32, vocab_size=100)
    with pytest.raises(CoatConfigError, match=r'model.activation: got "squared_relu", which llama cannot say'):
        config_for(ModelConfig(**base, activation="squared_relu"), torch.float32)
    with pytest.raises(CoatConfigError, match=r"model.qk_norm: got true, which mistral cannot say"):
        config_for(ModelConfig(**base, qk_norm=True), torch.float32, family="mistral")
