"""``megatron_patches.initialize``, and what ``coat_dist.initialize`` refuses of models that were left half prepared."""

from __future__ import annotations

import base64
import copy
import json

import pytest
import torch

from coat_dist.config import ActivationConfig, CoatConfig, CoatConfigError
from megatron_patches import patch_model, patched
from tests.support import run_ranks

from .tiny import tiny_gpt

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "coat": {"activation": {"bf16_layers": [0]}},
}


def _start(tp):

    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(tp)


def _refusal(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def _train(engine, steps):
    from tests.megatron_patches.tiny import tiny_batch

    losses = []
    for step in range(steps):
        tokens, labels, positions = tiny_batch(step)
        loss = engine(tokens, positions, None, labels=labels).float().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _one_call(rank, world):
    """One call, and the same done by hand, over two tensor-parallel ranks with sequence parallelism."""
    import deepspeed

    import coat_dist
    import megatron_patches as mp

    _start(2)
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
        runs.append((_train(engine, 3), str(report), set(mp.check_replicas(model).values())))
        runs[-1] += (model.universal_checkpoint_info,)

    refused = {}
    bare, half = tiny_gpt(**parallel), tiny_gpt(**parallel)
    off = {**CONFIG, "coat": {"activation": {"enabled": False}}}
    plain = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)  # noqa: E731
    start = coat_dist.initialize
    refused["bare"] = _refusal(lambda: start(model=bare, config=off, mpu=mp.MPUAdapter()))
    refused["plain"] = _refusal(lambda: start(model=bare, config=plain, mpu=mp.MPUAdapter(), optimizer=adamw))
    refused["plain, by DeepSpeed's own call"] = _refusal(
        lambda: deepspeed.initialize(model=bare, config=plain, mpu=mp.MPUAdapter(), optimizer=adamw)
    )
    refused["no mpu"] = _refusal(lambda: start(model=bare, config=off))
    patch_model(half, CONFIG)
    refused["patched"] = _refusal(lambda: start(model=half, config=CONFIG, mpu=mp.MPUAdapter()))
    heads = tiny_gpt(tensor_model_parallel_size=2, qk_layernorm=True)
    refused["heads"] = _refusal(lambda: start(model=heads, config=off, mpu=mp.MPUAdapter()))
    wrong = tiny_gpt(**parallel)
    settings = {**CONFIG, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}}
    refused["settings"] = _refusal(lambda: mp.initialize(model=wrong, config=settings))
    unpatched = not any(getattr(type(m), "coat_patched", False) for m in wrong.modules())
    again, *_ = mp.initialize(model=wrong, config=CONFIG)  # its hooks are there: found, not installed twice
    return runs, refused, unpatched, _train(again, 3)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, _one_call)


def test_one_call_is_what_was_done_by_hand(two_ranks):
    for (by_hand, at_once), *_ in two_ranks:
        assert at_once == by_hand
        assert at_once[1].startswith("FP8 flow: 2 of 4 blocks patched") and at_once[2] == {0.0}


def test_a_call_that_fails_leaves_a_model_for_the_next_one(two_ranks):
    for runs, refused, unpatched, again in two_ranks:
        assert "zero_optimization.elastic_checkpoint: got true" in refused["settings"][1]
        assert unpatched and again == runs[0][0]


@pytest.mark.parametrize(
    ("case", "said"),
    {
        "bare": "decoder.layers.0.input_layernorm.weight, ...",
        "plain": "decoder.layers.0.input_layernorm.weight, ...",
        "plain, by DeepSpeed's own call": "decoder.layers.0.input_layernorm.weight, ...",
        "patched": "decoder.layers.0.input_layernorm.weight, ...",
        "heads": "decoder.layers.0.self_attention.q_layernorm.weight, ...",
        "no mpu": "mpu: got none for a model with tensor_model_parallel_size 2",
    }.items(),
)
def test_replicas_that_would_drift_are_refused_on_every_rank(two_ranks, case, said):
    for _, refused, *_ in two_ranks:
        kind, message = refused[case]
        assert kind == "CoatConfigError" and said in message
        assert "megatron_patches.initialize" in message
        assert case == "no mpu" or "megatron_patches.install_replicated_grad_hooks(model)" in message


def _accepted(rank, world, folder):
    """What is taken as a model, a configuration and an mpu, at one rank; each with the first loss."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    import megatron_patches as mp

    refused = {}
    _start(1)
    path = f"{folder}/ds.json"
    with open(path, "w") as file:
        json.dump(CONFIG, file)
    found = {}
    for name, arguments in {
        "dict": dict(model=tiny_gpt(), config=CONFIG),
        "path": dict(model=tiny_gpt(), config=path),
        "list": dict(model=[tiny_gpt()], config=CONFIG),
        "Float16Module": dict(model=Float16Module(tiny_gpt().config, tiny_gpt()), config=CONFIG),
        "mpu": dict(model=tiny_gpt(), config=CONFIG, mpu=mp.MPUAdapter()),
    }.items():
        before = copy.deepcopy(CONFIG)
        engine, *_ = mp.initialize(**arguments)
        assert before == CONFIG
        assert arguments.get("mpu") in (None, engine.mpu)
        found[name] = _train(engine, 1), len(engine.coat_patch_report.patched)

    model = tiny_gpt()
    report = patch_model(model, CONFIG)
    engine, *_ = mp.initialize(model=model, config=CONFIG)
    assert engine.coat_patch_report is report
    found["patched already"] = _train(engine, 1), len(report.patched)

    off = {**CONFIG, "coat": {"activation": {"enabled": False}}}
    absent = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    del absent["coat"]
    for config in (off, absent):
        engine, *_ = mp.initialize(model=tiny_gpt(), config=config)
        assert engine.coat_patch_report is None
        assert not any(getattr(type(m), "coat_patched", False) for m in engine.module.modules())

    other = tiny_gpt()
    patch_model(other, ActivationConfig(bf16_layers=(0,), forward="quantized"))
    gpt, linear = tiny_gpt(), torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    for name, arguments in {
        "other settings": dict(model=other, config=CONFIG),
        "chunks": dict(model=[tiny_gpt(), tiny_gpt()], config=CONFIG),
        "none": dict(config=CONFIG),
        "DDP": dict(model=ddp, config=CONFIG),
        "mpu": dict(model=tiny_gpt(), config=CONFIG, mpu=parallel_state),
        "no config": dict(model=tiny_gpt()),
        "linear": dict(model=linear, config=CONFIG),
    }.items():
        refused[name] = _refusal(lambda arguments=arguments: mp.initialize(**arguments))
    parallel_state.destroy_model_parallel()
    refused["no groups"] = _refusal(lambda: mp.initialize(model=gpt, config=CONFIG))
    return found, refused


@pytest.fixture(scope="module")
def one_rank_alone(tmp_path_factory):
    return run_ranks(1, _accepted, str(tmp_path_factory.mktemp("json")))[0]


def test_models_and_configurations_that_are_accepted(one_rank_alone):
    found, _ = one_rank_alone
    assert len(found) == 6
    assert {len(losses) for losses, _ in found.values()} == {1}
    assert len({tuple(losses) for losses, _ in found.values()}) == 1, found
    assert {patched for _, patched in found.values()} == {2}


@pytest.mark.parametrize(
    ("case", "said"),
    {
        "other settings": "forward 'quantized' where the block says 'exact'",
        "chunks": "model: got a list of 2 model chunks, accepted: one module",
        "none": "model: got NoneType, accepted: one module",
        "DDP": "DistributedDataParallel, which reduces gradients",
        "mpu": "mpu: got the module megatron.core.parallel_state",
        "no config": "config: got 0 of",
        "linear": "coat.activation: model: got Linear, which holds no Megatron transformer layer",
        "no groups": "call initialize_model_parallel first",
    }.items(),
)
def test_what_is_refused(one_rank_alone, case, said):
    assert said in one_rank_alone[1][case][1]


def _forms(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return {
        "path": path,
        "str": str(path),
        "dict": CONFIG,
        "block only": {"coat": CONFIG["coat"]},
        "base64": base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
        "CoatConfig": CoatConfig.from_deepspeed(CONFIG),
        "ActivationConfig": ActivationConfig(bf16_layers=(0,)),
    }


def test_patch_model_takes_what_deepspeed_takes(tmp_path):
    model = tiny_gpt()
    for name, config in _forms(tmp_path).items():
        with patched(model, config) as report:
            assert report.settings == ActivationConfig(bf16_layers=(0,)), name
            assert len(report.patched) == 2 and model.coat_patch_report is report
        assert not hasattr(model, "coat_patch_report")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"optimizer": {"first_moment": "e5m2"}, "activation": {}}, "(its keys: optimizer, activation)"),
        ({"train_batch_size": 8, "coat": None}, "coat: got null, accepted: an object with keys optimizer, activation"),
        (None, "config: got NoneType, accepted: a DeepSpeed configuration"),
        ({"coat": {"activation": {"enabled": False}}}, "activation.enabled: got false"),
    ],
)
def test_patch_model_refuses_what_has_no_block(config, said):
    model = tiny_gpt()
    with pytest.raises(CoatConfigError if "enabled: got" not in said else ValueError) as caught:
        patch_model(model, config)
    assert said in str(caught.value) and not hasattr(model, "coat_patch_report")
