"""The error study: its truth is the layer, its way to Transformer Engine works, and another layout is noticed."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.accuracy import layer
from benchmarks.accuracy.layer import (
    TINY,
    VARIANTS,
    angles,
    cases,
    coat,
    errors,
    measure,
    outside,
    plain,
    run,
    weights,
)
from benchmarks.small_gpt import Block, Shape

# What transformer_engine.py uses of Transformer Engine, around our plain layer; 0 and 1 stand for the halves of fc1.
FAKE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe.py": """
class Format: E4M3 = "e4m3"
class Float8CurrentScaling:
    def __init__(self, fp8_format=None): pass
DelayedScaling = Float8CurrentScaling
""",
    "transformer_engine/pytorch.py": """
import contextlib, torch
from torch import nn
from benchmarks.accuracy.layer import TINY, plain
HALVES = [0, 1]
@contextlib.contextmanager
def autocast(enabled, recipe): yield
def weight(*shape): return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
class TransformerLayer(nn.Module):
    def __init__(self, h, f, n, **_):
        super().__init__()
        self.self_attention = nn.Module()
        self.self_attention.layernorm_qkv, self.self_attention.proj = nn.Module(), nn.Module()
        self.self_attention.layernorm_qkv.layer_norm_weight = weight(h)
        self.self_attention.layernorm_qkv.weight = weight(3 * h, h)
        self.self_attention.proj.weight = weight(h, h)
        self.layernorm_mlp = nn.Module()
        self.layernorm_mlp.layer_norm_weight = weight(h)
        self.layernorm_mlp.fc1_weight, self.layernorm_mlp.fc2_weight = weight(2 * f, h), weight(h, f)
    def forward(self, x, rotary_pos_emb):
        a, m = self.self_attention, self.layernorm_mlp
        halves = m.fc1_weight.chunk(2)
        w = dict(norm1=a.layernorm_qkv.layer_norm_weight, qkv=a.layernorm_qkv.weight, proj=a.proj.weight,
                 norm2=m.layer_norm_weight, fc1=torch.cat([halves[i] for i in HALVES]), fc2=m.fc2_weight)
        return plain(x.transpose(0, 1), w, rotary_pos_emb, TINY).transpose(0, 1)
""",
}


@pytest.fixture
def fake(tmp_path):
    for name, text in FAKE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_truth_is_a_llama_layer():
    """Against the GPT of the optimizer studies, whose projection has all queries first, then keys, then values."""
    torch.manual_seed(1)
    shape = Shape(hidden=TINY.hidden, heads=TINY.heads, ffn=TINY.ffn, sequence=TINY.tokens)
    w, (x, _), freqs = weights(TINY, "cpu"), cases(TINY, "cpu")["normal"], angles(TINY, "cpu")
    w = {k: t.double() for k, t in w.items()}
    block = Block(shape).double()
    by_head = w["qkv"].view(TINY.heads, 3, -1, TINY.hidden)
    given = w | {"qkv": by_head.transpose(0, 1).reshape(-1, TINY.hidden)}
    block.load_state_dict({f"{k}.weight": given[k] for k in given})
    half = freqs[:, 0, 0, : freqs.shape[-1] // 2].double()
    expected = block(x.double().transpose(0, 1), half.cos(), half.sin()).transpose(0, 1)
    torch.testing.assert_close(plain(x.double(), w, freqs, TINY), expected, rtol=1e-9, atol=1e-9)


def test_errors_by_hand():
    truth = {"output": torch.tensor([3.0, 4.0]).double(), "x": torch.tensor([0.0, 2.0]).double()}
    found = {"output": torch.tensor([3.0, 5.0]), "x": torch.tensor([0.0, -2.0])}
    rows = errors(found, truth, torch.tensor([3.0, 3.0]), torch.tensor([0.0, 1.0]))
    assert rows["output"]["relative_error"] == pytest.approx(0.2)
    assert rows["x"]["cosine"] == pytest.approx(-1) and rows["x"]["relative_error"] == pytest.approx(2)
    assert rows["branches"]["relative_error"] == pytest.approx(1)  # [0, 2] for [0, 1]
    with pytest.raises(RuntimeError, match="output: not finite"):
        errors({**found, "output": torch.tensor([1.0, float("nan")])}, truth, torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_layer(variant):
    torch.manual_seed(2)
    w, (x, dout), freqs = weights(TINY, "cpu"), cases(TINY, "cpu")["normal"], angles(TINY, "cpu")
    truth = run(plain, x.double(), dout.double(), {k: t.double() for k, t in w.items()}, freqs, TINY)
    rows = errors(run(coat, x, dout, w, freqs, TINY, VARIANTS[variant]), truth, x, dout)
    assert set(rows) == {"output", "x", *w, "branches", "x branches"}
    assert all(0.001 < row["relative_error"] < 0.3 for row in rows.values())  # FP8, and no other function


def test_with_peers(fake, capsys, monkeypatch):
    monkeypatch.setattr(layer, "VARIANTS", {"default": {}})
    results = measure(TINY, "cpu", str(fake))
    for found in results.values():
        same = [found[f"TE {name}"] for name in ("bf16", "current", "current, e4m3 gradients", "delayed")]
        assert same == [same[0]] * 4  # the fake layer knows no FP8
        assert found["TE bf16"]["fc1"]["relative_error"] == pytest.approx(found["bf16"]["fc1"]["relative_error"])
    assert capsys.readouterr().out.count("x TE current (") == len(results)
    assert outside(results) == []
    results["normal"]["default"]["fc2"]["relative_error"] = 0.2
    assert outside(results)[0].startswith("normal, fc2: relative error 0.2000")


def test_the_largest_ratio_to_each_recipe(capsys):
    def rows(*values):
        return {t: {"relative_error": v, "cosine": 1.0} for t, v in zip(("fc1", "fc2"), values, strict=True)}

    found = {"bf16": rows(0.1, 0.1), "TE current": rows(2.0, 1.0), "TE current, e4m3 gradients": rows(0.5, 1.0)}
    layer.show("normal", {**found, "default": rows(1.0, 1.5)})
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("default") and "at most" in x)
    assert "at most 1.500 x TE current (fc2)   at most 2.000 x TE current, e4m3 gradients (fc1)" in line


def test_a_tiny_run_leaves_the_measured_result_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "measure", lambda *_: {})
    for more, name in (["--tiny"], "layer-tiny.json"), ([], "layer.json"):
        monkeypatch.setattr(sys, "argv", ["layer", "--device", "cpu", "--output", str(tmp_path), *more])
        layer.main()
        written = list((tmp_path / "accuracy").iterdir())
        assert tmp_path / "accuracy" / name in written and len(written) == (1 if more else 2)


def test_another_layout_stops_the_program(fake):
    module = fake / "transformer_engine/pytorch.py"
    module.write_text(module.read_text().replace("HALVES = [0, 1]", "HALVES = [1, 0]"))
    with pytest.raises(RuntimeError, match="another function: normal, output"):
        measure(TINY, "cpu", str(fake))


def test_a_failing_peer_is_shown(tmp_path):
    with pytest.raises(RuntimeError, match="No module named 'transformer_engine'"):
        measure(TINY, "cpu", str(tmp_path))
