"""Megatron models under DeepSpeed's ZeRO, with tensor and sequence parallelism, on two ranks
(gloo).
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from tests.support import residuals_apart, run_ranks

from .tiny import tiny_batch, tiny_gpt
from .training import drive, engine_config, start


def _deepspeed(rank, world, stage, tp, sp, steps, settings):
    import deepspeed
    from megatron.core import parallel_state

    from megatron_patches import (
        MPUAdapter,
        check_replicas,
        install_replicated_grad_hooks,
        patch_model,
    )

    start(tp)
    model = tiny_gpt(tensor_model_parallel_size=tp, sequence_parallel=sp)
    if settings is not None:
        patch_model(model, settings)
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
    losses = drive(
        engine, (tiny_batch(step if tp > 1 else world * step + rank) for step in range(steps))
    )
    with torch.no_grad():
        shape = list(engine(*tiny_batch(0)[::2], None).shape)
    groups = [
        parallel_state.get_data_parallel_world_size(),
        engine.mpu.get_model_parallel_world_size(),
    ]
    return (
        losses,
        shape,
        groups,
        (check_replicas(model) if stage < 3 else {}),
        float(engine.get_global_grad_norm()),
    )


def test_zero2_with_tensor_and_sequence_parallelism():
    """DeepSpeed drives TP 2 + SP through the mpu adapter: it learns, ranks agree and replicas
    stay equal.
    """
    results = run_ranks(2, _deepspeed, 2, 2, True, 20, ActivationConfig())
    for losses, shape, groups, replicas, norm in results:
        assert losses == results[0][0] and norm == results[0][-1]
        assert losses[-1] < 0.75 * losses[0]
        assert shape == [2, 32, 256]
        assert groups == [1, 2]
        assert set(replicas.values()) == {0.0}


def test_zero2_norm_of_gradients_counts_replicas_once():
    """The same model and data at TP 1 and TP 2: the gradient norms that DeepSpeed reports agree."""
    runs = [run_ranks(n, _deepspeed, 2, n, n > 1, 1, None) for n in (1, 2)]
    norms = [result[-1] for run in runs for result in run]
    assert norms[1] == norms[2]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def _apart(*arguments):
    with residuals_apart():
        return _deepspeed(*arguments)


def test_zero3_gathers_weights_of_modules_that_are_not_called():
    """ZeRO-3 gathers a module's own weights; fc1, fc2 and folded norms belong to modules that are
    not called.

    Its hooks also wrap what modules return: with FP8 attention, the tensors that attention hands to
    linear_proj. And what modules take, so that autograd adds the residual's gradient, as it is made
    to do in the run to compare with.
    """
    settings = ActivationConfig(attention="fp8")
    runs = [
        run_ranks(2, run, stage, 1, False, 6, settings)
        for stage, run in ((3, _deepspeed), (2, _apart))
    ]
    for (losses, *_), (reference, *_) in zip(*runs, strict=True):
        assert losses == pytest.approx(reference, rel=2e-3)
