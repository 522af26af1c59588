"""One block, one call, any caller: ``deepspeed.initialize`` builds what ``coat_dist.initialize``
would build.
"""

import argparse
import copy
import importlib.util
import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.coat_dist.deepspeed.small_engine import (
    CONFIG,
    NO_FLOW,
    PLAIN,
    model,
    quiet_deepspeed,
    settings,
    train,
)
from tests.support import run_ranks

HF = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
BLOCK = {"optimizer": {"first_moment": "int8", "second_moment": "log8"}, **NO_FLOW}
WITH_BLOCK = {**CONFIG, "coat": BLOCK}


def built(engine, rank):
    """What an engine is: its groups, what is attached, and two losses."""
    groups = [
        [
            g.get(k)
            for k in ("name", "moments", "weight_decay", "first_moment", "second_moment", "lr")
        ]
        for g in engine.optimizer.optimizer.param_groups
    ]
    return groups, engine.coat_attached, train(engine, rank, 2)


def as_lightning_calls(net, config, rank):
    """The call of DeepSpeedStrategy in pytorch-lightning 2.6."""
    import deepspeed

    return deepspeed.initialize(
        args=argparse.Namespace(device_rank=rank),
        model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
        optimizer=None,
        lr_scheduler=None,
        dist_init_required=False,
        model=net,
        config=config,
    )


def every_form(rank, world, folder):
    """By form of the configuration, what is built. The last two have no block."""
    deepspeed = quiet_deepspeed()
    import coat_dist

    (folder / "ds.json").write_text(json.dumps(WITH_BLOCK))
    start, found = deepspeed.initialize, {}
    given = copy.deepcopy(WITH_BLOCK)
    arguments = SimpleNamespace(deepspeed_config=given, local_rank=rank)
    for name, call in {
        "ours": lambda: coat_dist.initialize(model=model(), config=given),
        "ours, by position": lambda: coat_dist.initialize(None, model(), *[None] * 8, given),
        "dict": lambda: start(model=model(), config=given),
        "path": lambda: start(model=model(), config=str(folder / "ds.json")),
        "config_params": lambda: start(model=model(), config_params=given),
        "args": lambda: start(args=arguments, model=model()),
        "position": lambda: start(
            None, model(), None, None, None, None, 29500, None, None, None, given
        ),
        "Lightning": lambda: as_lightning_calls(model(), given, rank),
    }.items():
        found[name] = built(call()[0], rank)
    assert given == WITH_BLOCK and arguments.deepspeed_config is given, (
        "the caller's stay as they are"
    )
    make, plain = (lambda params: coat_dist.CoatAdamW(params, lr=1e-3)), copy.deepcopy(PLAIN)
    net = model()
    found["object"] = built(
        start(model=net, optimizer=make(net.parameters()), config=plain)[0], rank
    )
    found["callable"] = built(start(model=model(), optimizer=make, config=plain)[0], rank)
    assert plain == PLAIN
    return found


def test_initialize_accepts_every_form_of_the_configuration(tmp_path):
    for found in run_ranks(2, every_form, tmp_path):
        made, called = found.pop("object"), found.pop("callable")
        expected = found["ours"]
        assert [group[:4] for group in expected[0]] == [
            ["decay/fp8", "fp8", 0.1, "int8"],
            ["no_decay/fp32", "fp32", 0.0, "int8"],
        ]
        assert expected[1]
        for form, one in found.items():
            assert one == expected, form
        assert made == called and made[1] == expected[1]
        assert [group[1] for group in made[0]] == ["fp8"], (
            "a user's own optimizer stays as the user built it"
        )


def plain(rank, world):
    """A program without block: what DeepSpeed is called with, and errors of names that are
    nearly ours.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist

    config = {
        **PLAIN,
        "a_key_of_another_library": 3,
        "_comment": "x",
        "optimizer": {"type": "AdamW"},
    }
    config["optimizer"]["params"] = {"torch_adam": True}
    handed, theirs = [], deepspeed.initialize.__wrapped__
    own = theirs.__code__, theirs.__globals__["set_optimizer_flags"]
    theirs.__globals__["set_optimizer_flags"] = lambda made, net: handed.append(made._param_dict)
    engine = deepspeed.initialize(model=model(), config=config)[0]
    theirs.__globals__["set_optimizer_flags"] = own[1]
    untouched = handed[0] is config and not hasattr(engine, "coat_attached")
    messages = []
    for changes, optimizer in (
        ({"caot": BLOCK}, None),
        ({"coat": BLOCK}, lambda params: torch.optim.AdamW(params)),
    ):
        with pytest.raises(coat_dist.CoatConfigError) as error:
            deepspeed.initialize(model=model(), optimizer=optimizer, config={**PLAIN, **changes})
        messages.append(str(error.value).partition(",")[0])
    return untouched, messages


def test_initialize_leaves_a_plain_program_alone_and_refuses_near_misses():
    for untouched, messages in run_ranks(2, plain):
        assert untouched and messages == [
            'caot: unknown key (did you mean "coat"?)',
            "coat.optimizer: got a block beside optimizer=AdamW",
        ]


def under_accelerate(rank, world):
    """Accelerate with Trainer-like groups (decay, no decay) and its stand-ins for optimizer and
    schedule.
    """
    quiet_deepspeed()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    import coat_dist  # noqa: F401

    config = copy.deepcopy(WITH_BLOCK)
    config["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
    accelerator = Accelerator(
        mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    net = model()
    matrices, vectors = (
        [p for p in net.parameters() if (p.ndim > 1) == whole] for whole in (True, False)
    )
    optimizer = DummyOptim(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        weight_decay=0.1,
    )
    schedule = DummyScheduler(
        optimizer,
        lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
    )
    engine, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    groups, attached, losses = built(engine, rank)
    return groups, bool(attached), losses[1] < losses[0]


@pytest.mark.skipif(not HF, reason="transformers or accelerate is not installed")
def test_initialize_under_accelerate():
    for groups, attached, learns in run_ranks(2, under_accelerate):
        assert attached and learns
        assert [group[1:5] for group in groups] == [
            ["fp8", 0.1, "int8", "log8"],
            ["fp32", 0.0, "int8", "log8"],
        ]


def under_the_trainer(rank, world, folder):
    """The Trainer with ZeRO-3 and ``from_pretrained`` under ``zero.Init`` evaluates, and trains
    in the flow.
    """
    quiet_deepspeed()
    import transformers

    from tests.coat_dist.deepspeed.test_trainer import llama, trainer

    llama().save_pretrained(f"{folder}/pretrained")

    def built(block, stage):
        auto = settings(stage, "auto", coat=block, gradient_clipping="auto")
        auto |= {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
        auto["optimizer"]["params"] |= {"betas": "auto", "weight_decay": "auto"}
        auto["zero_optimization"]["reduce_bucket_size"] = "auto"
        load = partial(transformers.LlamaForCausalLM.from_pretrained, f"{folder}/pretrained")
        return trainer(folder, 3, auto, load)

    evaluates = built(BLOCK, 3)
    partitioned = hasattr(evaluates.model.model.norm.weight, "ds_shape")
    evaluated = evaluates.evaluate()["eval_loss"]
    trains = built({}, 2)
    trains.train()
    return partitioned, evaluated, str(trains.model_wrapped.coat_patch_report)


@pytest.mark.skipif(not HF, reason="transformers or accelerate is not installed")
def test_initialize_under_the_trainer_with_zero_3_and_the_flow(tmp_path):
    ((partitioned, evaluated, report),) = run_ranks(1, under_the_trainer, str(tmp_path))
    assert partitioned and evaluated > 0
    assert report.startswith("FP8 flow: "), report


def unknown_scheduler(rank, world):
    deepspeed = quiet_deepspeed()
    from tests.coat_dist.hf.tiny import tiny

    net = tiny(dtype=torch.bfloat16)
    before = type(net.model.layers[0])
    config = {**CONFIG, "coat": {}, "scheduler": {"type": "Nope", "params": {}}}
    with pytest.raises(AssertionError, match="Nope"):
        deepspeed.initialize(model=net, config=config)
    assert type(net.model.layers[0]) is before and not hasattr(net, "coat_patch_report")


@pytest.mark.skipif(not HF, reason="needs transformers and accelerate")
def test_initialize_restores_the_model_where_deepspeed_raises():
    run_ranks(1, unknown_scheduler)
