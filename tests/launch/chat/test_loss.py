"""The loss and its gradients, in fp32 on one rank: those of transformers, however a step is cut
into micro-batches.
"""

import types

import numpy as np
import pytest
import torch

from launch.chat.batches import Sequences, micro_batches
from launch.model.gpt import build_model
from launch.train.build import language_model_loss
from launch.weights import fill, open_weights
from tests.launch.chat.support import chat, make_llama, make_tokenizer, prepared

transformers = pytest.importorskip("transformers")

SEQUENCES = 8


class Engine:
    """What the loss asks of a DeepSpeed engine."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *args, **more):
        return self.module(*args, **more)


@pytest.fixture
def made(tmp_path, one_rank):
    """The same Llama in transformers and in Megatron, fp32, and conversations with answers of
    different lengths.
    """
    tokenizer = make_tokenizer(texts=["hello hello"] * 9)
    make_llama(tmp_path / "llama", tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", dtype=torch.float32
    )
    weights = open_weights(tmp_path / "llama")
    # As finetune.py has it.
    ours = build_model(weights.model.model_copy(update={"vocab_multiple": 1}))
    fill(ours, weights)
    lengths = np.random.default_rng(0).permutation(
        [1, 2, 3, 30, 1, 20, 2, 1, 5, 25, 1, 1, 2, 28, 3, 2]
    )
    lines = [chat(f"user: {n}?", "assistant: " + "hello " * n) for n in lengths]
    stored = prepared(tmp_path, tokenizer, *lines)
    return types.SimpleNamespace(theirs=theirs, ours=ours.float(), stored=stored)


def batches(made, packed, micro, accumulation, dp=1, rank=0):
    plan = Sequences(made.stored, np.arange(len(made.stored)), capacity=64, packed=packed, seed=0)
    source = micro_batches(
        plan, micro=micro, accumulation=accumulation, dp_rank=rank, dp_size=dp, pad=1
    )
    return [next(source) for _ in range(accumulation)]


def step(made, packed, micro, accumulation, dp):
    """Loss and gradients of one step, divided as DeepSpeed does: by micro-batches, averaged over
    ranks.
    """
    loss_of, engine = language_model_loss(1, torch.device("cpu")), Engine(made.ours)
    made.ours.zero_grad()
    total = 0.0
    for rank in range(dp):
        for batch in batches(made, packed, micro, accumulation, dp, rank):
            loss = loss_of(engine, batch) / accumulation / dp
            loss.backward()
            total += loss.item()
    return total, {name: p.grad.clone() for name, p in made.ours.named_parameters()}


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_do_not_depend_on_how_a_step_is_cut(made, packed):
    whole, wanted = step(made, packed, SEQUENCES, 1, 1)
    for micro, accumulation, dp in ((1, 8, 1), (2, 2, 2), (1, 4, 2)):
        loss, gradients = step(made, packed, micro, accumulation, dp)
        assert loss == pytest.approx(whole, rel=1e-6)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-7), name
    # A mean of micro-batches' means is another number here, which is what this is about.
    parts = [b["loss_mask"].sum().item() for b in batches(made, packed, 1, 8)]
    assert max(parts) > 1.5 * min(parts)


@pytest.mark.parametrize("packed", [True, False])
def test_loss_is_transformers_loss(made, packed):
    """Each conversation by itself through transformers, labels of -100 where nothing is trained."""
    (batch,) = batches(made, packed, SEQUENCES, 1)
    loss = language_model_loss(1, torch.device("cpu"))(Engine(made.ours), batch).item()
    keys = ("tokens", "labels", "loss_mask")
    if packed:
        borders = batch["cu_seqlens"].tolist()
        parts = [slice(a, b) for a, b in zip(borders, borders[1:], strict=False)]
        documents = [tuple(batch[k][0, part] for k in keys) for part in parts]
    else:
        documents = list(zip(*(batch[k] for k in keys), strict=True))
    summed, count = 0.0, 0
    for tokens, labels, mask in documents:
        if not mask.any():
            continue
        wanted = torch.where(mask.bool(), labels, -100)
        with torch.no_grad():
            logits = made.theirs(tokens[None]).logits[0]
        summed += torch.nn.functional.cross_entropy(
            logits, wanted, ignore_index=-100, reduction="sum"
        ).item()
        count += int(mask.sum())
    assert loss == pytest.approx(summed / count, rel=2e-6) and count == float(batch["loss_tokens"])
