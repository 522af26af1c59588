"""What is known of the installed transformers: forwards by fingerprint, and the arguments of its
attentions.
"""

import pytest
import torch

from tests.support import equal

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model
from coat_dist.hf.recognize import (
    attention_kind,
    fingerprint,
    is_causal_lm,
    layer_norms,
    mlp_kind,
    norm_kind,
)

from .tiny import FOUR_NORMS, FUSED, GENERIC, step, tiny

UNKNOWN = () if FOUR_NORMS else ("glm4", "gemma2", "gemma3_text")
OWN = {
    **dict.fromkeys(("olmo2", "olmo3", "granite", *UNKNOWN), ("layer",)),
    "olmo": ("norm",),
    "cohere": ("layer", "norm"),
}
"""Parts of families that compute something of their own, which the flow leaves to them."""


@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_fingerprints_of_the_installed_transformers(name):
    """Where one is not: read it, and add its fingerprint in ``recognize.py`` to those that
    compute the same.
    """
    model = tiny(name)
    layer = model.model.layers[0]
    attention = layer.self_attn
    norms = {type(m): m for m in model.modules() if type(m).__name__.endswith("Norm")}
    parts = [
        ("loss", type(model), is_causal_lm(model)),
        ("layer", type(layer), layer_norms(layer) is not None),
        ("mlp", type(layer.mlp), mlp_kind(layer.mlp) is not None),
        *(("norm", cls, norm_kind(m) is not None) for cls, m in norms.items()),
    ]
    if name in FUSED:
        parts.append(("attention", type(attention), attention_kind(attention) is not None))
    wrong = [
        f"{part}: {where.__module__}.{where.__qualname__}, "
        f"{fingerprint(getattr(where, 'forward', where))}"
        for part, where, known in parts
        if known == (part in OWN.get(name, ()))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("cached", [True, False])
def test_attention_interface_gets_the_same_arguments(name, cached, monkeypatch):
    """By a patched layer as by the model's own: windows, positions, scale, masks, and all that a
    program passes.
    """
    calls = []

    def attend(module, q, k, v, mask, **given):
        given.pop("use_cache", None)  # which no attention reads
        calls.append({"q": q.shape, "k": k.shape, "v": v.shape, "mask": mask, **given})
        return torch.zeros_like(q).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny(
        name, attn_implementation="sdpa", attention_dropout=0.1, **window if name != "gemma" else {}
    )
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    given = {"attention_mask": mask, "use_cache": cached, "is_causal": True}
    step(model, **given)
    patch_model(model, ActivationConfig())
    step(model, **given)
    assert len(calls) == 4
    assert equal(calls[2:], calls[:2])
    wanted = {"mistral": (8, 8), "qwen2": (None, 8), "qwen3": (None, 8)}.get(name, (None, None))
    assert (calls[0].get("sliding_window"), calls[1].get("sliding_window")) == wanted
