"""Every family of transformers at toy size, patched: gradients as plain rounding to E4M3 gives
them, a report that says what runs, evaluation and unpatched models to the bit, and training.
"""

import copy

import pytest
import torch
from torch import nn

from tests.support import equal

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from coat_dist.config import ActivationConfig
from coat_dist.hf import blocks, patch_model, unpatch_model

from .families import FAMILIES, UNBUILT, toy
from .rounded import Read, RoundedProducts

QUICK = (
    "llama",
    "gpt2",
    "deepseek_v3",
    "lfm2",
    "gemma3:ImageTextToText",
    "bert:SequenceClassification",
    "t5:Seq2SeqLM",
)
"""Families of the ordinary run: one for each way in which blocks are served, or are not."""
EVERY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in dict.fromkeys((*QUICK, *FAMILIES))
    if name not in UNBUILT
]
PARTLY = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "openai-gpt"), "Conv1D in place of linears"),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), "experts with a gate of their own"),
    **dict.fromkeys(
        ("dbrx", "inkling_text", "jetmoe", "llama4", "llama4_text", "longcat_flash"),
        "experts whose code is not known",
    ),
    "deepseek_v4": "hyper-connections, whose weights are no linears",
    **dict.fromkeys(
        ("bloom", "mamba2", "reformer", "zamba2"), "linears whose weights other modules read"
    ),
    "falcon": "linears of its own class",
    "xlnet": "weights of three dimensions",
    **dict.fromkeys(("falcon_mamba", "mamba", "xmod", "zaya"), "linears that are small here"),
}
"""Families with less than 90 % of their layers' weights in FP8, and why."""


@pytest.fixture(autouse=True)
def usual_sizes(monkeypatch):
    monkeypatch.setattr(blocks, "SMALLEST", 256)


def built(family, chosen):
    if family.partition(":")[0] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    return toy(family, chosen)


def step(model, batch):
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def read_by(model, batch):
    """What a step gives, and the weights that its products read."""
    with Read() as read:
        result = step(model, batch)
    return result, read.weights(model)


def rounding(twin, in_fp8):
    """The context in which a model's products with these weights round to E4M3."""
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")
    return RoundedProducts(p for n, p in twin.named_parameters() if n in in_fp8)


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        out = model(**batch).to_tuple()
    model.train()
    return [value for value in out if isinstance(value, torch.Tensor)]


def error(found, exact):
    difference = found.double() - exact.double()
    return (difference.norm() / exact.double().norm()).item()


@pytest.mark.parametrize("family", EVERY)
def test_gradients_of_every_family(family):
    """They differ from exact ones as those of plain rounding do, and the report counts the weights
    that no product reads any more.
    """
    # A token goes to all experts: else rounding gives it to another one, by chance.
    model, batch = built(family, 4)
    twin, in_float = copy.deepcopy(model), copy.deepcopy(model).float()
    exact = step(in_float, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})
    (loss, plain), products = read_by(model, batch)
    evaluated = evaluate(model, batch)
    report = patch_model(model, ActivationConfig(enabled="auto"))
    (_, found), in_bf16 = read_by(model, batch)
    in_fp8 = products - in_bf16
    with rounding(twin, in_fp8):
        _, rounded = step(twin, batch)
    layers = tuple({name.rpartition(".")[0] + "." for name in report.blocks})
    inside = {name for name in products if name.startswith(layers)}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    count, total = (sum(map(sizes.get, names)) for names in (in_fp8, inside))
    # It also counts what no product reads: filters, and towers that a text does not use.
    assert report.fp8_share < count / total + 0.03
    if not any(
        isinstance(m, nn.ModuleList) and n.endswith("experts") for n, m in model.named_modules()
    ):
        assert (count < 0.9 * total) == (family in PARTLY), inside - in_fp8
    assert found.keys() == plain.keys()
    for name, wanted in exact[1].items():
        assert found[name].dtype == plain[name].dtype and found[name].isfinite().all(), name
        if wanted.numel() >= 64 and wanted.any():
            bound = max(error(rounded[name], wanted), error(plain[name], wanted))
            assert error(found[name], wanted) < 2 * bound + 0.08, name
    assert equal(evaluate(model, batch), evaluated)
    if report.patched:
        unpatch_model(model)
    again, restored = step(model, batch)
    assert again == loss and equal(list(restored.values()), list(plain.values()))


def train(model, state, batch):
    """Losses of 20 steps that begin at ``state``."""
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(20):
        losses.append(step(model, batch)[0])
        optimizer.step()
    return torch.tensor(losses)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNBUILT])
def test_training_of_every_family(family):
    """Losses are as near to those of BF16 as with plain rounding."""
    model, batch = built(family, 2)
    twin, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    _, products = read_by(model, batch)
    report = patch_model(model, ActivationConfig(enabled="auto"))
    _, in_bf16 = read_by(model, batch)
    found = train(model, state, batch)
    with rounding(twin, products - in_bf16):
        rounded = train(twin, state, batch)
    if report.patched:
        unpatch_model(model)
    wanted = train(model, state, batch)
    assert wanted[-1] < wanted[0]
    assert (found - wanted).abs().max() < 2 * (rounded - wanted).abs().max() + 0.05
