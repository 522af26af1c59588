"""A vision tower beside a GPT: attention in both directions, LayerNorm, GELU and biases, odd lengths, two stacks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock

from coat_dist.config import ActivationConfig
from examples.vision.model import VisionLanguageModel, VisionTower
from megatron_patches import gpt_layer_spec, patch_model, patched, tensor_parallel, unpatch_model
from tests.support import run_ranks

from .saved_bytes import Saved
from .tiny import VOCAB, tiny_config, tiny_gpt

SIDE, PATCH, BATCH, TOKENS, WORDS, IMAGE = 28, 4, 3, 50, 9, 1
"""49 patches and a class token of three pictures: no dimension but the width is a multiple of 16."""
SETTINGS = {"bf16": ActivationConfig(), "fp8": ActivationConfig(attention="fp8")}
GELU = {"exact": F.gelu, "tanh": fast_gelu}
TOWER = [f"vision.decoder.layers.{i}.{b}" for i in range(2) for b in ("self_attention", "mlp")]
GPT = [name.replace("vision", "language") for name in TOWER]


def vit_config(activation="exact", **changes):
    options = dict(
        hidden_size=64, ffn_hidden_size=128, gated_linear_unit=False, activation_func=GELU[activation],
        add_bias_linear=True, normalization="LayerNorm",
    )  # fmt: skip
    return tiny_config(**options | changes)


def spread(module):
    """Biases and norms that are no zeros and ones, among which a mix-up would go unseen."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape).mul_(0.2).to(parameter))
    return module


def block_of_layers(mask=AttnMaskType.no_mask, device="cpu", **changes):
    config = vit_config(**changes)
    torch.manual_seed(3)
    block = TransformerBlock(config, gpt_layer_spec(config, attn_mask_type=mask)).to(config.params_dtype)
    return spread(block).to(device)


def model_of_two(seed=5, tower_config=None, device="cpu", **changes):
    """A tower of two layers, a projector, and the tests' GPT."""
    language = tiny_gpt(seed=seed, gpt={"scatter_embedding_sequence_parallel": False}, **changes)
    tower = spread(VisionTower(tower_config or vit_config(), SIDE, PATCH))
    return VisionLanguageModel(tower, 64, language, IMAGE).to(language.config.params_dtype).to(device)


def pictures(device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    words = torch.randint(2, VOCAB, (BATCH, WORDS), generator=generator)
    text = torch.cat([torch.zeros(BATCH, 1).long(), torch.full((BATCH, TOKENS), IMAGE), words], 1)
    return images.to(device), text[:, :-1].to(device), text[:, 1:].to(device)


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    losses = model(*batch)
    losses[:, TOKENS:].mean().backward()  # the words'
    return losses.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def alike(found, expected, least):
    for name, gradient in expected.items():
        a, b = found[name].flatten().double(), gradient.flatten().double()
        if b.norm() > 0:
            assert F.cosine_similarity(a, b, dim=0) > least, name


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("mask", [AttnMaskType.no_mask, AttnMaskType.causal])
def test_the_mask_is_the_specs(which, mask, device):
    """What stands behind a token changes it, or does not, in the patched layers as in Megatron's."""
    block = block_of_layers(mask, device)
    x = torch.randn(TOKENS, BATCH, 64, dtype=torch.bfloat16, device=device)
    other = x.clone()
    other[-1] = other[-1].flip(-1)
    with torch.no_grad():
        plain = block(x, None)
        with patched(block, SETTINGS[which]) as report:
            assert len(report.patched) == 4 and not report.left
            found, changed = block(x, None), block(other, None)
        assert torch.equal(block(x, None), plain)
    assert not torch.equal(found, plain)
    assert torch.equal(found[0], changed[0]) == (mask is AttnMaskType.causal)
    assert (found.float() - plain.float()).norm() < 0.06 * plain.float().norm()


@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.parametrize("activation", ["exact", "tanh"])
def test_a_tower_is_close_to_bf16(which, activation, device):
    """Outputs and all gradients of LayerNorm, GELU and biases, over 50 tokens of 3 pictures."""
    block = block_of_layers(activation=activation, device=device)
    x = torch.randn(TOKENS, BATCH, 64, device=device).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, BATCH, 64, device=device).bfloat16()

    def run():
        block.zero_grad(set_to_none=True)
        y = block(x, None)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        y.backward(dy)
        return y.detach(), {"x": dx} | {n: p.grad for n, p in block.named_parameters()}

    expected = run()
    with patched(block, SETTINGS[which]) as report:
        assert len(report.patched) == 4 and not report.left and not report.unfused
        found = run()
    assert (found[0].float() - expected[0].float()).norm() < 0.06 * expected[0].float().norm()
    alike(found[1], expected[1], 0.97)


def test_both_stacks_are_patched_and_listed(device):
    model, batch = model_of_two(device=device), pictures(device)
    classes, plain = [type(m) for m in model.modules()], gradients(model, batch)
    report = patch_model(model, SETTINGS["bf16"])
    assert report.patched == TOWER + GPT and not report.left and not report.unfused
    assert report.loss == {"language.output_layer": "chunked"}
    assert str(report).splitlines()[:5] == [
        "FP8 flow: 8 of 8 blocks patched",
        "  patched  vision.decoder.layers.[0-1].self_attention",
        "  patched  vision.decoder.layers.[0-1].mlp",
        "  patched  language.decoder.layers.[0-1].self_attention",
        "  patched  language.decoder.layers.[0-1].mlp",
    ]
    found = gradients(model, batch)
    torch.testing.assert_close(found[0], plain[0], rtol=0.02, atol=0.02)
    assert all(g is not None for g in found[1].values())
    alike(found[1], plain[1], 0.95)
    unpatch_model(model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(gradients(model, batch)[0], plain[0])


def test_bf16_layers_count_in_each_stack():
    model = model_of_two(tower_config=vit_config(num_layers=3))
    with patched(model, ActivationConfig(bf16_layers=(2,))) as report:
        assert set(report.left) == {f"vision.decoder.layers.2.{b}" for b in ("self_attention", "mlp")}
    with patched(model, ActivationConfig(bf16_layers=(-1,))) as report:
        assert {n[: n.rindex(".")] for n in report.left} == {"vision.decoder.layers.2", "language.decoder.layers.1"}
    with pytest.raises(ValueError, match="got 3, accepted: 0 to 2, or -3 to -1 from the last, for 3 layers"):
        patch_model(model, ActivationConfig(bf16_layers=(3,)))


@pytest.mark.parametrize("which", [None, *SETTINGS])
def test_a_frozen_tower_saves_nothing(which, device):
    """Its layers keep nothing for backward, and all other gradients are those beside a trained tower, to the bit."""
    model, batch = model_of_two(device=device), pictures(device)
    if which is not None:
        assert not patch_model(model, SETTINGS[which]).left
    losses, expected = gradients(model, batch)
    model.vision.requires_grad_(False)
    with Saved(model) as saved:
        assert not model.vision(batch[0]).requires_grad
    assert saved.bytes == 0
    again, found = gradients(model, batch)
    assert torch.equal(again, losses)
    for name, gradient in found.items():
        assert (gradient is None) == name.startswith("vision."), name
        if gradient is not None and device == "cpu":
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("which", SETTINGS)
def test_a_frozen_gpt_hands_gradients_on(which, device):
    """LLaVA's first stage: the projector alone is trained, and gets the gradient that it gets beside all others."""
    model, batch = model_of_two(device=device), pictures(device)
    patch_model(model, SETTINGS[which])
    losses, expected = gradients(model, batch)
    model.requires_grad_(False)
    model.projector.requires_grad_(True)
    again, found = gradients(model, batch)
    assert torch.equal(again, losses)
    assert {n for n, g in found.items() if g is not None} == {n for n in found if n.startswith("projector.")}
    if device == "cpu":
        assert all(torch.equal(g, expected[n]) for n, g in found.items() if g is not None)


def _two_ranks(rank, world, which):
    """Losses at TP 1 and 2, and after three steps how far replicas are apart."""
    from megatron.core import parallel_state

    from megatron_patches import check_replicas, initialize_model_parallel, install_replicated_grad_hooks

    found = {}
    for tp in (1, 2):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        initialize_model_parallel(tp)
        # Biases of the GPT's row-parallel linears: under sequence parallelism each rank sees a part of their gradient.
        parallel = {"tensor_model_parallel_size": tp}
        changes = {"add_bias_linear": True, "sequence_parallel": tp == 2, **parallel}
        torch.manual_seed(7)
        model = model_of_two(tower_config=vit_config(**parallel), **changes)
        if which is not None:
            assert not patch_model(model, SETTINGS[which]).left
        hooked = install_replicated_grad_hooks(model)
        batch, curve = pictures(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            losses, _ = gradients(model, (batch[0], batch[1][:, :-1], batch[2][:, :-1]))  # 58 tokens
            curve.append(losses[:, TOKENS:].mean().item())
            optimizer.step()
        assert tensor_parallel(model.language.output_layer).size == tp
        found[tp] = curve, check_replicas(model) if tp == 2 else {}, hooked
    return found


@pytest.mark.parametrize("which", ["bf16", *(pytest.param(which, marks=pytest.mark.slow) for which in (None, "fp8"))])
def test_a_sequence_parallel_gpt_behind_a_tower_that_is_not(which):
    """Each stack follows its own configuration: nothing drifts, and losses are those of one rank but for rounding."""
    for found in run_ranks(2, _two_ranks, which):
        curves, replicas, hooked = found[1][0], found[2][1], found[2][2]
        assert set(replicas.values()) == {0.0}, {n: d for n, d in replicas.items() if d}
        assert "language.decoder.layers.0.mlp.linear_fc2.bias" in hooked
        assert hooked and all(name.startswith("language.") for name in hooked)
        assert found[2][0] == pytest.approx(curves, rel=0.01)
        assert curves[-1] < curves[0]
