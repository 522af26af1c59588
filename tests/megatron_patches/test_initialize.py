"""``megatron_patches.initialize``, and what ``coat_dist.initialize`` refuses of models that were
left half prepared.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

import megatron_patches as mp
from coat_dist.config import ActivationConfig, CoatConfigError
from coat_dist.patching.report import is_patched
from megatron_patches import patch_model
from tests.support import run_ranks

from .tiny import labelled_loss, tiny_batch, tiny_gpt
from .training import drive, engine_config

CONFIG = engine_config(2, gradient_clipping=1.0, coat={"activation": {"bf16_layers": [0]}})
OFF = {**CONFIG, "coat": {"activation": {"enabled": False}}}


def _refused(said, initialize, **arguments):
    with pytest.raises((ValueError, RuntimeError)) as error:
        initialize(**arguments)
    assert said in str(error.value)
    return error


def _train(engine, steps):
    return drive(engine, map(tiny_batch, range(steps)), labelled_loss)


def _one_call(rank, world):
    """One call, and the same done by hand, over two tensor-parallel ranks with sequence
    parallelism.
    """
    import coat_dist

    mp.initialize_model_parallel(2)
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    by_hand, at_once, wrong = (tiny_gpt(**parallel) for _ in range(3))
    expected = patch_model(by_hand, CONFIG)
    mp.install_replicated_grad_hooks(by_hand)
    by_hand.universal_checkpoint_info = mp.universal_checkpoint_info(by_hand)
    engine, *_ = coat_dist.initialize(model=by_hand, config=CONFIG, mpu=mp.MPUAdapter())
    losses = _train(engine, 3)
    engine, optimizer, loader, scheduler = mp.initialize(model=at_once, config=CONFIG)
    assert optimizer is engine.optimizer and loader is None and scheduler is None
    assert _train(engine, 3) == losses and losses[-1] < 0.9 * losses[0]
    assert str(engine.coat_patch_report) == str(expected)
    assert str(expected).startswith("FP8 flow: 2 of 4 blocks patched")
    assert at_once.universal_checkpoint_info == by_hand.universal_checkpoint_info
    assert {*mp.check_replicas(by_hand).values(), *mp.check_replicas(at_once).values()} == {0.0}

    # A call that fails leaves a model for the next one; its hooks are found, not installed twice.
    elastic = {**CONFIG, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}}
    said = "zero_optimization.elastic_checkpoint: got true"
    _refused(said, mp.initialize, model=wrong, config=elastic)
    assert not is_patched(wrong)
    again, *_ = mp.initialize(model=wrong, config=CONFIG)
    assert _train(again, 3) == losses


def test_initialize_is_what_was_done_by_hand():
    run_ranks(2, _one_call)


def _would_drift(rank, world):
    import deepspeed

    import coat_dist

    mp.initialize_model_parallel(2)
    bare, half = (tiny_gpt(tensor_model_parallel_size=2, sequence_parallel=True) for _ in range(2))
    heads = tiny_gpt(tensor_model_parallel_size=2, qk_layernorm=True)
    patch_model(half, CONFIG)
    plain = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    mpu = {"mpu": mp.MPUAdapter()}
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3), **mpu}
    norm = "decoder.layers.0.input_layernorm.weight, ..."
    for said, initialize, arguments in (
        (norm, coat_dist.initialize, dict(model=bare, config=OFF, **mpu)),
        (norm, coat_dist.initialize, dict(model=bare, config=plain, **adamw)),
        (norm, deepspeed.initialize, dict(model=bare, config=plain, **adamw)),
        (norm, coat_dist.initialize, dict(model=half, config=CONFIG, **mpu)),
        (
            "decoder.layers.0.self_attention.q_layernorm.weight, ...",
            coat_dist.initialize,
            dict(model=heads, config=OFF, **mpu),
        ),
        (
            "mpu: got none for a model with tensor_model_parallel_size 2",
            coat_dist.initialize,
            dict(model=bare, config=OFF),
        ),
    ):
        error = _refused(said, initialize, **arguments)
        hint = "initialize" if "mpu: " in said else "install_replicated_grad_hooks(model)"
        assert error.type is CoatConfigError and f"megatron_patches.{hint}" in str(error.value)


def test_initialize_refuses_replicas_that_would_drift():
    run_ranks(2, _would_drift)


def _accepted(rank, world, folder):
    """What is taken as a model, a configuration and an mpu, at one rank, each with the first
    loss; what is refused.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    mp.initialize_model_parallel(1)
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    before, losses, patched_before = copy.deepcopy(CONFIG), set(), tiny_gpt()
    report = patch_model(patched_before, CONFIG)
    for model, more in (
        (tiny_gpt(), {}),
        (tiny_gpt(), {"config": str(folder / "ds.json")}),
        ([tiny_gpt()], {}),
        (Float16Module(tiny_gpt().config, tiny_gpt()), {}),
        (tiny_gpt(), {"mpu": mp.MPUAdapter()}),
        (patched_before, {}),
    ):
        engine, *_ = mp.initialize(model=model, **{"config": CONFIG, **more})
        assert before == CONFIG and more.get("mpu") in (None, engine.mpu)
        assert (engine.coat_patch_report is report) == (model is patched_before)
        assert len(engine.coat_patch_report.patched) == 2
        losses.add(*_train(engine, 1))
    assert len(losses) == 1

    absent = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    del absent["coat"]
    for config in (OFF, absent):
        engine, *_ = mp.initialize(model=tiny_gpt(), config=config)
        assert engine.coat_patch_report is None and not is_patched(engine.module)

    gpt, other = tiny_gpt(), tiny_gpt()
    patch_model(other, ActivationConfig(bf16_layers=(0,), forward="quantized"))
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    for model, said in (
        (other, "forward 'quantized' where the block says 'exact'"),
        ([tiny_gpt(), tiny_gpt()], "model: got a list of 2 model chunks, accepted: 1"),
        (ddp, "DistributedDataParallel, which reduces gradients"),
        (
            torch.nn.Linear(4, 4),
            "coat.activation: model: got Linear, which holds no Megatron transformer layer",
        ),
    ):
        _refused(said, mp.initialize, model=model, config=CONFIG)


def test_initialize_accepts_and_refuses(tmp_path):
    run_ranks(1, _accepted, tmp_path)
