"""Kept codes of experts' weights under DeepSpeed's flat buffers: losses are those without a cache,
to the bit.
"""

from __future__ import annotations

import pytest
import torch

from tests.coat_dist.deepspeed.remainders import BF16
from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed, settings
from tests.megatron_patches.test_grouped import EXPERTS, GROUPED_GEMM
from tests.megatron_patches.tiny import FULL, SMALL, tiny_batch, tiny_gpt, tiny_loss
from tests.support import run_ranks, slow

STEPS, ACCUMULATION = 7, 2


def _evaluate(engine, losses):
    engine.eval()
    with torch.no_grad() if len(losses) % 2 else torch.inference_mode():
        losses.append(tiny_loss(engine, tiny_batch(1000)).item())
    engine.train()


def _train(rank, stage, grad_accum, weights, folder, changes):
    """Losses of two training micro-batches a step, evaluation before and after steps, a
    checkpoint loaded between.
    """
    import coat_dist
    from megatron_patches import MPUAdapter, install_replicated_grad_hooks, patch_model

    quiet_deepspeed()
    config = settings(
        stage,
        gradient_accumulation_steps=ACCUMULATION,
        data_types={"grad_accum_dtype": grad_accum},
        gradient_clipping=1.0,
        coat={"activation": {"weights": weights}},
    )
    model = tiny_gpt(**SMALL | EXPERTS | GROUPED_GEMM | changes)
    patch_model(model, config)
    install_replicated_grad_hooks(model)
    engine, *_ = coat_dist.initialize(model=model, config=config, mpu=MPUAdapter())
    losses = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            if step in (1, 4):
                _evaluate(engine, losses)  # in the middle of a window
            batch = tiny_batch(100 * step + 10 * micro + rank)
            loss = tiny_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if step in (2, 5):
            _evaluate(engine, losses)  # the first forward after a step
        if step == 1:
            engine.save_checkpoint(folder, tag="here")
        if step == 3:
            _evaluate(engine, losses)
            engine.load_checkpoint(folder, tag="here")
            _evaluate(engine, losses)  # the first forward after a load
    zero = engine.optimizer  # master weights edited by hand
    for flat in (
        getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
    ):
        flat.data.mul_(1.25)
    _evaluate(engine, losses)
    zero.update_lp_params()
    _evaluate(engine, losses)
    return losses


def _modes(rank, world, stage, grad_accum, changes, folder):
    """Losses are the same; weights are quantized on every use, or where they have changed."""
    from coat_dist.flow.blocks.grouped import _Weight
    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(1)
    quantized, original, losses, made = [], _Weight._quantize, {}, {}
    _Weight._quantize = lambda weight: (quantized.append(weight), original(weight))[1]
    for mode in ("on_use", "cached"):
        quantized.clear()
        losses[mode] = _train(rank, stage, grad_accum, mode, f"{folder}/{mode}", changes)
        made[mode] = len(quantized)
    assert losses["cached"] == losses["on_use"]
    assert len(set(losses["cached"])) > STEPS * ACCUMULATION  # weights did move
    # Two layers of two weights: at the start, after all steps but the last, and after the load.
    # By hand: two.
    assert made["cached"] == 2 * 2 * (STEPS + 3) and made["on_use"] > 2 * made["cached"]


CASES = {
    "ZeRO-1": (1, "bf16", {}),
    "BF16_Optimizer": (1, "fp32", {}),
    "ZeRO-2": (2, "fp32", {}),
    "ZeRO-2, recompute": (2, "fp32", FULL),
}


# DeepSpeed's BF16_Optimizer calls what ZeRO-1 calls.
@pytest.mark.parametrize("case", [slow(c) if c == "BF16_Optimizer" else c for c in CASES])
def test_cached_weights_give_the_same_losses(case, tmp_path):
    run_ranks(2, _modes, *CASES[case], str(tmp_path))


def _replaced(rank, world, weights):
    """Losses before and after a master weight, of which the library writes the weight too, was
    replaced.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    import megatron_patches

    megatron_patches.initialize_model_parallel(1)
    halves = {"master_weights": "bf16_remainder"}
    config = settings(bf16=BF16, coat={"activation": {"weights": weights}, "optimizer": halves})
    engine = megatron_patches.initialize(
        model=tiny_gpt(**SMALL | EXPERTS | GROUPED_GEMM), config=config
    )[0]
    losses = []
    _evaluate(engine, losses)
    weight = engine.module.decoder.layers[0].mlp.experts.weight1
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * -3)
    _evaluate(engine, losses)
    loss = tiny_loss(engine, tiny_batch(rank))
    engine.destroy()
    return [*losses, loss.item()]


def test_cached_weights_are_dropped_when_a_weight_is_set():
    kept, quantized = (run_ranks(1, _replaced, weights)[0] for weights in ("cached", "on_use"))
    assert kept == quantized and kept[0] != kept[1]
