"""Gradient checkpointing of patched layers: codes in place of their inputs, and how many layers
recompute.
"""

from contextlib import nullcontext

import pytest
import torch

from tests.support import equal

pytest.importorskip("transformers")

from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.flow.blocks import boundary
from coat_dist.flow.core.products import saved_format
from coat_dist.flow.saved import saved_for_backward
from coat_dist.hf import patch_model
from coat_dist.hf.layer import DecoderLayer
from coat_dist.ops import dequantize, quantize_groups

from .families import toy
from .tiny import relative, step, tiny, tokens

LAYERS = 4
ELEMENTS = 2 * 24 * 64
CODES = ELEMENTS * 33 // 32


def built(reentrant=None, name="llama", **block):
    """A patched model; its layers recompute where ``reentrant`` is not None. Llama is patched
    before the program asks for it, all others after.
    """
    model = tiny(name, num_hidden_layers=LAYERS)
    if name == "llama":
        patch_model(model, ActivationConfig(**block))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if name != "llama":
        patch_model(model, ActivationConfig(**block))
    return model


def saved(model):
    with saved_for_backward(model) as found:
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
    return sum(found.values())


def flat(grads):
    return torch.cat([grads[key].flatten().double() for key in sorted(grads)])


@pytest.fixture
def ran(monkeypatch):
    """Layers that run, with their inputs: in forward, then in backward."""
    found, forward = [], DecoderLayer.coat_forward

    def spy(layer, plain, x, *args, **kwargs):
        found.append((layer, x.detach()))
        return forward(layer, plain, x, *args, **kwargs)

    monkeypatch.setattr(DecoderLayer, "coat_forward", spy)
    return found


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_layers_recompute_from_codes_of_their_inputs(name, reentrant, ran):
    plain, model = built(reentrant, name), built(reentrant, name, boundaries="fp8")
    assert saved(plain) - saved(model) == LAYERS * (4 * ELEMENTS - CODES - 4)
    loss, grads = step(plain)
    ran.clear()
    again, found = step(model)
    assert torch.equal(again, loss) and not equal(found, grads)
    settings = ran[0][0].coat.settings
    inputs = [x for _, x in ran]
    for x, decoded in zip(inputs[:LAYERS], reversed(inputs[LAYERS:]), strict=True):
        q = quantize_groups(x, saved_format(settings), settings.group_size, settings.scale)
        assert torch.equal(decoded, dequantize(q, x.dtype)) and not torch.equal(decoded, x)
    exact = tiny(name, torch.float64, num_hidden_layers=LAYERS)
    exact.load_state_dict(model.state_dict())
    wanted = flat(step(exact)[1])
    assert relative(flat(found), wanted) < 1.1 * relative(flat(grads), wanted)
    model.gradient_checkpointing_disable()
    assert equal(step(model)[1], grads)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("boundaries", ["bf16", "fp8"])
def test_the_first_layers_recompute(reentrant, boundaries, ran):
    kept = built()
    loss, grads = step(kept)
    bytes_ = [saved(kept)]
    for n in range(LAYERS + 1):
        model = built(reentrant, recompute=n, boundaries=boundaries)
        bytes_.append(saved(model))
        ran.clear()
        again, found = step(model)
        assert torch.equal(again, loss)
        assert [layer for layer, _ in ran[LAYERS:]] == list(model.model.layers[:n])[::-1]
        assert boundaries == "fp8" and n or equal(found, grads)
    assert bytes_[0] == bytes_[1] and bytes_[1:] == sorted(set(bytes_), reverse=True)


@pytest.mark.parametrize(
    ("family", "compress"),
    [("deepseek_v3", [True, False]), ("gemma3n_text", [True] * 4)],  # with a modality_router
)
def test_layers_that_route_tokens_keep_their_inputs(family, compress):
    model, _ = toy(family)
    report = patch_model(model, ActivationConfig(boundaries="fp8"))
    assert [layer.coat.compress for layer in model.model.layers] == compress
    assert any("route tokens" in note for note in report.notes) != all(compress)


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_checkpoints_of_deepspeed(name):
    checkpointing = pytest.importorskip("deepspeed").checkpointing
    model = built(False, boundaries="fp8")
    loss, grads = step(model)
    model._set_gradient_checkpointing(True, getattr(checkpointing, name))
    assert equal(step(model), (loss, grads))


class LazyStream:
    """A stream that does nothing until another one waits for it."""

    device = torch.device("cpu")

    def __init__(self):
        self.work = []

    def wait_stream(self, other):
        while other.work:
            other.work.pop(0)()


@pytest.mark.parametrize("reentrant", [True, False])
def test_codes_in_host_memory_give_equal_bits(reentrant, monkeypatch):
    """On streams without a GPU; tests/gpu has real ones."""
    main, side, recorded, copies = LazyStream(), LazyStream(), [], []

    def copy(t, device):
        found = torch.full_like(t, 77)
        copies.append(device)
        side.work.append(lambda: found.data.copy_(t))
        return found

    _, grads = step(built(reentrant, boundaries="fp8"))
    monkeypatch.setattr(boundary, "_copy", copy)
    monkeypatch.setattr(boundary, "_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: recorded.append(stream))
    model = built(reentrant, boundaries="fp8", boundaries_device="cpu")
    for steps in (1, 2):
        assert equal(step(model)[1], grads)
        assert recorded.count(side) == recorded.count(main) == steps * 2 * LAYERS
        # The last layer's codes are still on the GPU when backward asks for them.
        assert len(copies) == steps * 2 * (2 * LAYERS - 1)


@pytest.mark.parametrize(
    ("boundaries", "accepted"), [("bf16", 'boundaries "fp8"'), ("fp8", '"layer"')]
)
def test_host_memory_is_refused_in_vain(boundaries, accepted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    block = {"activation": {"boundaries": boundaries, "boundaries_device": "cpu"}}
    with pytest.raises(CoatConfigError, match=f'device: got "cpu".*, accepted: {accepted}'):
        patch_model(tiny(), {"coat": block})
