"""Megatron models under DeepSpeed's ZeRO, with tensor and sequence parallelism, on two ranks
(gloo).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow.blocks import loss
from tests.support import residuals_apart, run_ranks, slow

from .tiny import BATCH, SEQ, labelled_loss, tiny_batch, tiny_gpt, tiny_loss
from .training import drive, engine_config, start


def _deepspeed(
    rank, world, stage, tp, steps, apart=False, loss_of=tiny_loss, tied=False, **activation
):
    """Losses, the last one of evaluation, and the last norm; ``apart``: the residual's gradient is
    left to autograd.
    """
    import deepspeed

    from megatron_patches import MPUAdapter, install_replicated_grad_hooks, patch_model

    start(tp)
    loss._BLOCK = BATCH * SEQ * 128  # chunks of a loss that the model computes
    model = tiny_gpt(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        gpt={"share_embeddings_and_output_weights": tied},
    )
    if activation:
        with residuals_apart() if apart else nullcontext():
            patch_model(model, ActivationConfig(**activation))
    install_replicated_grad_hooks(model)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = engine_config(
        stage, zero_optimization=zero, gradient_clipping=1.0, zero_allow_untested_optimizer=True
    )
    del config["coat"], config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config,
        mpu=MPUAdapter(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
    )
    batches = (tiny_batch(step if tp > 1 else world * step + rank) for step in range(steps))
    losses = drive(engine, batches, loss_of)
    engine.eval()
    with torch.no_grad():
        losses.append(loss_of(engine, tiny_batch(rank)).item())
    return losses, float(engine.get_global_grad_norm())


def test_zero2_norm_of_gradients_counts_replicas_once():
    """The same model and data at TP 1 and TP 2: the gradient norms that DeepSpeed reports agree."""
    ((_, one),) = run_ranks(1, _deepspeed, 2, 1, 1)
    (_, first), (_, second) = run_ranks(2, _deepspeed, 2, 2, 1)
    assert first == second == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize(
    ("loss_of", "tied"),
    [
        (tiny_loss, False),
        (labelled_loss, True),
        slow(labelled_loss, False),
    ],
)
def test_zero3_gathers_weights_of_modules_that_are_not_called(loss_of, tied):
    """ZeRO-3 gathers a module's own weights; fc1, fc2 and folded norms belong to modules that are
    not called, and a tied output weight to the embedding.

    Its hooks also wrap what modules return: with FP8 attention, the tensors that attention hands to
    linear_proj. And what modules take, so that autograd adds the residual's gradient, as it is made
    to do in the run to compare with.
    """
    train = partial(_deepspeed, attention="fp8", loss_of=loss_of, tied=tied)
    gathered = run_ranks(2, train, 3, 1, 6)
    whole = run_ranks(2, partial(train, apart=True), 2, 1, 6)
    for (losses, _), (expected, _) in zip(gathered, whole, strict=True):
        assert losses == pytest.approx(expected, rel=2e-3) and losses[-1] < losses[0]
