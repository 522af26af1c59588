"""Vision-language models that others have made: a tower of transformers, Megatron's own LLaVAModel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from examples.vision.model import VisionLanguageModel
from megatron_patches import gpt_layer_spec, patch_model, patched
from megatron_patches.compat import older_than

from .test_vision import (
    BATCH,
    GPT,
    IMAGE,
    PATCH,
    SETTINGS,
    SIDE,
    TOWER,
    WORDS,
    gradients,
    pictures,
    vit_config,
)
from .tiny import VOCAB, tiny_config, tiny_gpt


def test_a_tower_of_transformers_as_the_docs_put_it_in(device):
    """The code of docs/vision-language.md: the GPT is patched, the tower is as it was."""
    transformers = pytest.importorskip("transformers")
    text = (Path(__file__).parents[2] / "docs" / "vision-language.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    config = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=4
    )
    names = {
        "torch": torch, "SiglipVisionModel": transformers.SiglipVisionModel, "vision_config": config, "IMAGE": IMAGE,
        "VisionLanguageModel": VisionLanguageModel,
        "language": tiny_gpt(gpt={"scatter_embedding_sequence_parallel": False}),
    }  # fmt: skip
    exec(code, names)
    model = names["model"].to(device, torch.bfloat16)
    images, tokens, labels = pictures(device)
    assert names["tower"].tokens == 49
    tokens[:, 1] = 0  # one place less: this tower has no class token
    batch = images, tokens, labels
    losses = gradients(model, batch)[0]
    report = patch_model(model, SETTINGS["bf16"])
    assert report.patched == GPT and not report.left
    found, grads = gradients(model, batch)
    torch.testing.assert_close(found, losses, rtol=0.02, atol=0.02)
    (first,) = (g for n, g in grads.items() if n.startswith("vision.") and n.endswith("layers.0.mlp.fc1.weight"))
    assert first is not None


@pytest.mark.skipif(older_than("0.16"), reason="written for the LLaVAModel of megatron-core 0.16")
def test_megatrons_own_llava_model(device, monkeypatch):
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    if device == "cpu":
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_: tensor)
    language, tower = tiny_config(), vit_config()
    tower.vision_model_type = "internvit"  # of the others' norms, Megatron's own way needs Transformer Engine
    projection = vit_config(hidden_size=language.hidden_size)
    model = LLaVAModel(
        language,
        gpt_layer_spec(language),
        VOCAB,
        128,
        tower,
        gpt_layer_spec(tower, attn_mask_type=AttnMaskType.no_mask),
        True,
        projection,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
        language_position_embedding_type="rope",
    ).to(device, torch.bfloat16)
    images = torch.randn(BATCH, 3, SIDE, SIDE).to(device, torch.bfloat16)
    tokens = torch.randint(2, VOCAB, (BATCH, WORDS), device=device)
    tokens[:, 1] = -200  # LLaVAModel's placeholder
    labels = tokens.roll(-1, 1)
    labels[labels < 0] = -100
    positions, tiles = torch.arange(WORDS, device=device).expand(BATCH, -1), torch.ones(BATCH, dtype=torch.int)

    def run():
        losses, mask = model(
            images, tokens, positions, None, labels=labels, loss_mask=torch.ones(BATCH, WORDS, device=device),
            num_image_tiles=tiles.to(device),
        )[:2]  # fmt: skip
        return (losses * mask).sum() / mask.sum()

    plain = run().item()
    with patched(model, SETTINGS["bf16"]) as report:
        assert sorted(report.patched) == sorted(n.replace(".decoder", "_model.decoder") for n in TOWER + GPT)
        loss = run()
        loss.backward()
    assert loss.item() == pytest.approx(plain, rel=5e-3)
    assert all(p.grad is not None for p in model.vision_model.decoder.parameters())
