"""A vision tower beside a GPT: attention in both directions, LayerNorm, GELU and biases, odd
lengths, two stacks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
from megatron.core.transformer.enums import AttnMaskType

from coat_dist.config import ActivationConfig
from examples.vision.model import VisionLanguageModel, VisionTower
from megatron_patches import gpt_layer_spec, patch_model, patched
from megatron_patches.compat import older_than
from tests.support import run_ranks, slow

from .tiny import VOCAB, assert_equal, gradients, tiny_config, tiny_gpt
from .training import start

SIDE, PATCH, BATCH, TOKENS, WORDS, IMAGE = 28, 4, 3, 50, 9, 1
"""49 patches and a class token of three pictures: no dimension but the width is a multiple of
16.
"""
SETTINGS = {"bf16": ActivationConfig(), "fp8": ActivationConfig(attention="fp8")}
TOWER = [f"vision.decoder.layers.{i}.{b}" for i in range(2) for b in ("self_attention", "mlp")]
GPT = [name.replace("vision", "language") for name in TOWER]


def vit_config(**changes):
    options = dict(
        hidden_size=64, ffn_hidden_size=128, gated_linear_unit=False, activation_func=F.gelu,
        add_bias_linear=True, normalization="LayerNorm",
    )  # fmt: skip
    return tiny_config(**options | changes)


def model_of_two(tower_config=None, device="cpu", **changes):
    """A tower of two layers, a projector, and the tests' GPT."""
    language = tiny_gpt(gpt={"scatter_embedding_sequence_parallel": False}, **changes)
    tower = VisionTower(tower_config or vit_config(), SIDE, PATCH)
    with torch.no_grad():  # biases and norms that are no zeros and ones
        for parameter in tower.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape).mul_(0.2).to(parameter))
    return (
        VisionLanguageModel(tower, 64, language, IMAGE).to(language.config.params_dtype).to(device)
    )


def pictures(device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    words = torch.randint(2, VOCAB, (BATCH, WORDS), generator=generator)
    text = torch.cat([torch.zeros(BATCH, 1).long(), torch.full((BATCH, TOKENS), IMAGE), words], 1)
    return images.to(device), text[:, :-1].to(device), text[:, 1:].to(device)


def words_loss(model, batch, _=False):
    return model(*batch)[:, TOKENS:].mean()


def alike(found, expected, least):
    for name, gradient in expected.items():
        a, b = found[name].flatten().double(), gradient.flatten().double()
        assert not b.norm() or F.cosine_similarity(a, b, dim=0) > least, name


@pytest.mark.parametrize(("which", "function"), [("bf16", F.gelu), ("fp8", fast_gelu)])
def test_patch_model_of_a_vision_tower_and_a_gpt(which, function, device):
    """Losses and all gradients, over lengths that nothing divides. The last patch of a picture
    changes what the tower makes of the first one; the last word changes no loss before it.
    """
    model, batch = model_of_two(vit_config(activation_func=function), device), pictures(device)
    plain = gradients(model, batch, loss_of=words_loss)
    with patched(model, SETTINGS[which]) as report:
        assert report.patched == TOWER + GPT and not report.left and not report.unfused
        assert report.loss == {"language.output_layer": "chunked"}
        found = gradients(model, batch, loss_of=words_loss)
        with torch.no_grad():
            images, text, labels = batch
            other = images.clone()
            other[..., -PATCH:, -PATCH:] += 1.0
            assert not torch.equal(model.vision(other)[0], model.vision(images)[0])
            changed = text.clone()
            changed[:, -1] ^= 1
            losses = [model(images, t, labels)[:, :-1] for t in (text, changed)]
            assert torch.equal(*losses)
    assert found[0] == pytest.approx(plain[0], rel=5e-3)
    alike(found[1], plain[1], 0.95)
    assert_equal(gradients(model, batch, loss_of=words_loss), plain)


def test_bf16_layers_count_in_each_stack():
    model = model_of_two(vit_config(num_layers=3))
    with patched(model, ActivationConfig(bf16_layers=(2,))) as report:
        assert set(report.left) == {
            f"vision.decoder.layers.2.{b}" for b in ("self_attention", "mlp")
        }
    with patched(model, ActivationConfig(bf16_layers=(-1,))) as report:
        assert {n[: n.rindex(".")] for n in report.left} == {
            "vision.decoder.layers.2",
            "language.decoder.layers.1",
        }
    with pytest.raises(
        ValueError, match="got 3, accepted: 0 to 2, or -3 to -1 from the last, for 3 layers"
    ):
        patch_model(model, ActivationConfig(bf16_layers=(3,)))


@pytest.mark.parametrize("which", [None, *SETTINGS])
def test_vision_tower_frozen_saves_nothing(which, device):
    """Its layers keep nothing for backward, and all other gradients are those beside a trained
    tower, to the bit.
    """
    model, batch = model_of_two(device=device), pictures(device)
    if which is not None:
        assert not patch_model(model, SETTINGS[which]).left
    loss, expected = gradients(model, batch, loss_of=words_loss)
    model.vision.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        assert not model.vision(batch[0]).requires_grad and not kept
    for trained in (
        lambda name: not name.startswith("vision."),
        lambda name: name.startswith("projector."),
    ):
        # LLaVA's first stage trains the projector alone.
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained(name))
        wanted = {name: g if trained(name) else None for name, g in expected.items()}
        assert_equal(gradients(model, batch, loss_of=words_loss), (loss, wanted))


def _two_ranks(rank, world, which):
    """Each stack follows its own configuration: nothing drifts in three steps, and losses are
    those of one rank but for rounding.
    """
    from megatron_patches import check_replicas, install_replicated_grad_hooks

    curves = []
    for tp in (1, 2):
        start(tp)
        # Biases of the GPT's row-parallel linears: under sequence parallelism each rank sees a part
        # of their gradient.
        parallel = {"tensor_model_parallel_size": tp}
        changes = {"add_bias_linear": True, "sequence_parallel": tp == 2, **parallel}
        torch.manual_seed(7)
        model = model_of_two(vit_config(**parallel), **changes)
        assert not patch_model(model, SETTINGS[which]).left
        hooked = install_replicated_grad_hooks(model)
        images, text, labels = pictures()
        short = images, text[:, :-1], labels[:, :-1]  # 58 tokens
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curves.append([])
        for _ in range(3):
            curves[-1].append(gradients(model, short, loss_of=words_loss)[0])
            optimizer.step()
    assert not any(check_replicas(model).values())
    assert "language.decoder.layers.0.mlp.linear_fc2.bias" in hooked
    assert all(name.startswith("language.") for name in hooked)
    assert curves[1] == pytest.approx(curves[0], rel=0.01) and curves[0][-1] < curves[0][0]


@pytest.mark.parametrize("which", ["bf16", slow("fp8")])
def test_vision_tower_before_a_sequence_parallel_gpt(which):
    run_ranks(2, _two_ranks, which)


def test_vision_tower_of_transformers_by_the_docs(device):
    """The code of docs/vision-language.md: the GPT is patched, the tower is as it was."""
    transformers = pytest.importorskip("transformers")
    text = (Path(__file__).parents[2] / "docs" / "vision-language.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    config = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=28,
        patch_size=4,
    )
    names = {
        "torch": torch,
        "SiglipVisionModel": transformers.SiglipVisionModel,
        "vision_config": config,
        "IMAGE": IMAGE,
        "VisionLanguageModel": VisionLanguageModel,
        "language": tiny_gpt(gpt={"scatter_embedding_sequence_parallel": False}),
    }
    exec(code, names)
    model = names["model"].to(device, torch.bfloat16)
    images, tokens, labels = pictures(device)
    assert names["tower"].tokens == 49
    tokens[:, 1] = 0  # one place less: this tower has no class token
    batch = images, tokens, labels
    plain = gradients(model, batch, loss_of=words_loss)[0]
    report = patch_model(model, SETTINGS["bf16"])
    assert report.patched == GPT and not report.left
    found, grads = gradients(model, batch, loss_of=words_loss)
    assert found == pytest.approx(plain, rel=5e-3)
    (first,) = (
        g
        for n, g in grads.items()
        if n.startswith("vision.") and n.endswith("layers.0.mlp.fc1.weight")
    )
    assert first is not None


@pytest.mark.skipif(older_than("0.16"), reason="written for the LLaVAModel of megatron-core 0.16")
def test_megatrons_own_llava_model(device, monkeypatch):
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    if device == "cpu":
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_: tensor)
    language, tower = tiny_config(), vit_config()
    # Of the others' norms, Megatron's own way needs Transformer Engine.
    tower.vision_model_type = "internvit"
    projection = vit_config(hidden_size=language.hidden_size)
    specs = gpt_layer_spec(language), gpt_layer_spec(tower, attn_mask_type=AttnMaskType.no_mask)
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    sizes = {
        "img_h": SIDE,
        "img_w": SIDE,
        "patch_dim": PATCH,
        "language_position_embedding_type": "rope",
    }
    model = LLaVAModel(
        language, specs[0], VOCAB, 128, tower, specs[1], True, projection, mlp, **sizes
    )
    model = model.to(device, torch.bfloat16)
    images = torch.randn(BATCH, 3, SIDE, SIDE).to(device, torch.bfloat16)
    tokens = torch.randint(2, VOCAB, (BATCH, WORDS), device=device)
    tokens[:, 1] = -200  # LLaVAModel's placeholder
    labels = tokens.roll(-1, 1)
    labels[labels < 0] = -100
    positions, tiles = (
        torch.arange(WORDS, device=device).expand(BATCH, -1),
        torch.ones(BATCH, dtype=torch.int),
    )

    ones = torch.ones(BATCH, WORDS, device=device)
    given = {"labels": labels, "loss_mask": ones, "num_image_tiles": tiles.to(device)}

    def run():
        losses, mask = model(images, tokens, positions, None, **given)[:2]
        return (losses * mask).sum() / mask.sum()

    plain = run().item()
    with patched(model, SETTINGS["bf16"]) as report:
        assert sorted(report.patched) == sorted(
            n.replace(".decoder", "_model.decoder") for n in TOWER + GPT
        )
        loss = run()
        loss.backward()
    assert loss.item() == pytest.approx(plain, rel=5e-3)
    assert all(p.grad is not None for p in model.vision_model.decoder.parameters())
