"""``megatron_patches.initialize``, and what ``coat_dist.initialize`` refuses of models that were
left half prepared.
"""

from __future__ import annotations

import base64
import copy
import json

import pytest
import torch

import megatron_patches as mp
from coat_dist.config import ActivationConfig, CoatConfig
from coat_dist.patching.report import is_patched
from megatron_patches import patch_model, patched
from tests.support import run_ranks

from .tiny import labelled_loss, tiny_batch, tiny_gpt
from .training import drive, engine_config

CONFIG = engine_config(2, gradient_clipping=1.0, coat={"activation": {"bf16_layers": [0]}})
OFF = {**CONFIG, "coat": {"activation": {"enabled": False}}}


def _refusal(initialize, **arguments):
    try:
        initialize(**arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _train(engine, steps):
    return drive(engine, map(tiny_batch, range(steps)), labelled_loss)


def _one_call(rank, world):
    """One call, and the same done by hand, over two tensor-parallel ranks with sequence
    parallelism.
    """
    import deepspeed

    import coat_dist

    mp.initialize_model_parallel(2)
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    runs = []
    for by_hand in (True, False):
        model = tiny_gpt(**parallel)
        if by_hand:
            report = patch_model(model, CONFIG)
            mp.install_replicated_grad_hooks(model)
            model.universal_checkpoint_info = mp.universal_checkpoint_info(model)
            engine, *_ = coat_dist.initialize(model=model, config=CONFIG, mpu=mp.MPUAdapter())
        else:
            engine, optimizer, loader, scheduler = mp.initialize(model=model, config=CONFIG)
            report = engine.coat_patch_report
            assert optimizer is engine.optimizer and loader is None and scheduler is None
        replicas = set(mp.check_replicas(model).values())
        runs.append((_train(engine, 3), str(report), replicas, model.universal_checkpoint_info))

    bare, half, wrong = (tiny_gpt(**parallel) for _ in range(3))
    heads = tiny_gpt(tensor_model_parallel_size=2, qk_layernorm=True)
    patch_model(half, CONFIG)
    plain = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    adamw = {
        "mpu": mp.MPUAdapter(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    }
    settings = {**CONFIG, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}}
    refused = {
        "bare": _refusal(coat_dist.initialize, model=bare, config=OFF, mpu=mp.MPUAdapter()),
        "plain": _refusal(coat_dist.initialize, model=bare, config=plain, **adamw),
        "plain, by DeepSpeed's own call": _refusal(
            deepspeed.initialize, model=bare, config=plain, **adamw
        ),
        "no mpu": _refusal(coat_dist.initialize, model=bare, config=OFF),
        "patched": _refusal(coat_dist.initialize, model=half, config=CONFIG, mpu=mp.MPUAdapter()),
        "heads": _refusal(coat_dist.initialize, model=heads, config=OFF, mpu=mp.MPUAdapter()),
        "settings": _refusal(mp.initialize, model=wrong, config=settings),
    }
    unpatched = not is_patched(wrong)
    # Its hooks are there: found, not installed twice.
    again, *_ = mp.initialize(model=wrong, config=CONFIG)
    return runs, refused, unpatched, _train(again, 3)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, _one_call)


def test_initialize_is_what_was_done_by_hand(two_ranks):
    for (by_hand, at_once), refused, unpatched, again in two_ranks:
        assert at_once == by_hand
        losses, report, replicas, _ = at_once
        assert losses[-1] < 0.9 * losses[0]
        assert report.startswith("FP8 flow: 2 of 4 blocks patched") and replicas == {0.0}
        # A call that fails leaves a model for the next one.
        assert "zero_optimization.elastic_checkpoint: got true" in refused["settings"]
        assert unpatched and again == by_hand[0]


@pytest.mark.parametrize(
    "case", ["bare", "plain", "plain, by DeepSpeed's own call", "patched", "heads", "no mpu"]
)
def test_initialize_refuses_replicas_that_would_drift(two_ranks, case):
    for _, refused, *_ in two_ranks:
        assert (
            refused[case].startswith("CoatConfigError")
            and "megatron_patches.initialize" in refused[case]
        )
        if case == "no mpu":
            assert "mpu: got none for a model with tensor_model_parallel_size 2" in refused[case]
        else:
            norm = "self_attention.q_layernorm" if case == "heads" else "input_layernorm"
            assert f"decoder.layers.0.{norm}.weight, ..." in refused[case]
            assert "megatron_patches.install_replicated_grad_hooks(model)" in refused[case]


def _accepted(rank, world, folder):
    """What is taken as a model, a configuration and an mpu, at one rank, each with the first
    loss; what is refused.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    mp.initialize_model_parallel(1)
    path = f"{folder}/ds.json"
    with open(path, "w") as file:
        json.dump(CONFIG, file)
    before, found, patched_before = copy.deepcopy(CONFIG), {}, tiny_gpt()
    report = patch_model(patched_before, CONFIG)
    for name, arguments in {
        "dict": dict(model=tiny_gpt(), config=CONFIG),
        "path": dict(model=tiny_gpt(), config=path),
        "list": dict(model=[tiny_gpt()], config=CONFIG),
        "Float16Module": dict(model=Float16Module(tiny_gpt().config, tiny_gpt()), config=CONFIG),
        "mpu": dict(model=tiny_gpt(), config=CONFIG, mpu=mp.MPUAdapter()),
        "patched already": dict(model=patched_before, config=CONFIG),
    }.items():
        engine, *_ = mp.initialize(**arguments)
        assert before == CONFIG
        assert arguments.get("mpu") in (None, engine.mpu)
        assert (engine.coat_patch_report is report) == (name == "patched already")
        found[name] = _train(engine, 1), len(engine.coat_patch_report.patched)

    absent = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    del absent["coat"]
    for config in (OFF, absent):
        engine, *_ = mp.initialize(model=tiny_gpt(), config=config)
        assert engine.coat_patch_report is None
        assert not is_patched(engine.module)

    gpt, other = tiny_gpt(), tiny_gpt()
    patch_model(other, ActivationConfig(bf16_layers=(0,), forward="quantized"))
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    refused = {
        "other settings": _refusal(mp.initialize, model=other, config=CONFIG),
        "chunks": _refusal(mp.initialize, model=[tiny_gpt(), tiny_gpt()], config=CONFIG),
        "DDP": _refusal(mp.initialize, model=ddp, config=CONFIG),
        "linear": _refusal(mp.initialize, model=torch.nn.Linear(4, 4), config=CONFIG),
    }
    return found, refused


def test_initialize_accepts_and_refuses(tmp_path):
    found, refused = run_ranks(1, _accepted, str(tmp_path))[0]
    assert len({tuple(losses) for losses, _ in found.values()}) == 1, found
    assert {patched for _, patched in found.values()} == {2}
    for case, said in {
        "other settings": "forward 'quantized' where the block says 'exact'",
        "chunks": "model: got a list of 2 model chunks, accepted: 1",
        "DDP": "DistributedDataParallel, which reduces gradients",
        "linear": "coat.activation: model: got Linear, which holds no Megatron transformer layer",
    }.items():
        assert said in refused[case]


def test_patch_model_takes_what_deepspeed_takes(tmp_path):
    path, model = tmp_path / "ds.json", tiny_gpt()
    path.write_text(json.dumps(CONFIG))
    for config in (
        path,
        str(path),
        CONFIG,
        {"coat": CONFIG["coat"]},
        base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
        CoatConfig.from_deepspeed(CONFIG),
        ActivationConfig(bf16_layers=(0,)),
    ):
        with patched(model, config) as report:
            assert report.settings == ActivationConfig(bf16_layers=(0,)), config
            assert len(report.patched) == 2 and model.coat_patch_report is report
        assert not hasattr(model, "coat_patch_report")
