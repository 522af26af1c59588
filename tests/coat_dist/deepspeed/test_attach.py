"""What is replaced on DeepSpeed's objects is what the list in ``attach.py`` says, no more and no
less.
"""

import functools
import inspect
import types
from pathlib import Path

import torch

import coat_dist
from coat_dist.config import ActivationConfig
from coat_dist.deepspeed.attach import ATTACHMENTS
from tests.coat_dist.deepspeed.small_engine import FP32, REMAINDERS, quiet_deepspeed
from tests.support import run_ranks

BF16_OPTIMIZER = {"zero_optimization": {"stage": 1}, **FP32}
ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
CASES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "BF16_Optimizer": BF16_OPTIMIZER,
    "zero-2": {"zero_optimization": {"stage": 2}},
    "zero-2, some gradients are not counted": {"zero_optimization": {"stage": 2}},
    "zero-2, round robin, remainders": {**ROUND_ROBIN, **REMAINDERS},
    "zero-2, cached weights": {
        "zero_optimization": {"stage": 2},
        "coat": {"activation": {"weights": "cached"}},
    },
    "zero-2, experts divided": {"zero_optimization": {"stage": 2}},
    "BF16_Optimizer, experts divided": BF16_OPTIMIZER,
    "zero-3": {"zero_optimization": {"stage": 3}},
    "zero-3, codes": {"zero_optimization": {"stage": 3}, "coat": {}},
    "zero-3, remainders": {"zero_optimization": {"stage": 3}, **REMAINDERS},
    "torch's AdamW": {"zero_optimization": {"stage": 2}},
    "torch's AdamW, round robin, universal": {
        **ROUND_ROBIN,
        "checkpoint": {"load_universal": True},
    },
    "zero-1, a pipeline stage": {"zero_optimization": {"stage": 1}},
    "zero-1, a pipeline stage, BF16_Optimizer": BF16_OPTIMIZER,
    "zero-1, a pipeline stage, some gradients are not counted": {"zero_optimization": {"stage": 1}},
    "torch's SGD, stage 0": {"bf16": {"enabled": False}},
    "stage 0, evaluated": {"zero_optimization": {"stage": 0}},
}


class TwoStages:
    """An mpu of a pipeline of which this process is the first stage and no other runs."""

    coat_mpu = True

    def __getattr__(self, name):
        if not name.startswith("get_") or "sequence" in name:
            raise AttributeError(name)
        if name.endswith("group"):
            return lambda: torch.distributed.group.WORLD
        if name.endswith("world_size"):
            return lambda: 2 if "pipeline" in name else 1
        return lambda: [0] if name.endswith("ranks") else 0


class TwoExpertRanks(TwoStages):
    """An mpu of two ranks that divide experts, of which this process is the first and no other
    runs.
    """

    def __getattr__(self, name):
        if name.endswith("world_size"):
            return lambda: 2 if name == "get_expert_model_parallel_world_size" else 1
        return super().__getattr__(name)


class Patched(torch.nn.Linear):
    coat_patched = True
    coat = types.SimpleNamespace(settings=ActivationConfig(fp8_weight_gather=True))

    def coat_flow_weights(self):
        return [self.weight]


def build(case):
    quiet_deepspeed()
    changes = CASES[case]
    net = (Patched if "coat" in changes else torch.nn.Linear)(64, 96)
    net.bias.ds_pipe_replicated = "not counted" in case
    if "experts" in case:
        net.universal_checkpoint_info = {"expert_parallel": {"size": 2, "rank": 0, "names": {}}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **changes}
    given = None
    if "torch's" in case:
        given = (torch.optim.AdamW if "AdamW" in case else torch.optim.SGD)(
            net.parameters(), lr=1e-3
        )
    else:
        kept = {"master_weights": "bf16_remainder"} if "remainders" in case else {}
        config["optimizer"] = {"type": "CoatAdamW", "params": {"lr": 1e-3, **kept}}
    mpu = {"mpu": TwoStages()} if "pipeline" in case else {}
    if "BF16_Optimizer, experts" in case:
        net.weight.allreduce, mpu = False, {"mpu": TwoExpertRanks()}
    return coat_dist.initialize(model=net, config=config, optimizer=given, **mpu)[0]


def is_ours(value):
    while isinstance(value, functools.partial) or inspect.ismethod(value):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    folder = Path(coat_dist.__file__).parent
    return inspect.isfunction(value) and folder in Path(value.__code__.co_filename).parents


def replaced(engine):
    """Methods of the instances that hide one of their class; of parameters, which get theirs
    from DeepSpeed, ours.
    """
    objects = {"engine": engine, "zero": engine.optimizer}
    hidden = {
        f"{kind}.{name}"
        for kind, one in objects.items()
        for name, value in vars(one).items()
        if callable(value) and callable(getattr(type(one), name, None))
    }
    params = (vars(param).items() for param in engine.module.parameters())
    theirs = {f"param.{name}" for items in params for name, value in items if is_ours(value)}
    return hidden | {name for name in theirs if not name.startswith("param.coat_")}


def engines(rank, world):
    declared = {attachment.name: set(attachment.replaces) for attachment in ATTACHMENTS}
    found = {}
    for case in CASES:
        engine = build(case)
        before = replaced(engine)
        found[case] = attached = list(getattr(engine, "coat_attached", ()))
        assert before == set().union(*(declared[name] for name in attached)), case
        in_order = [name for name in declared if name in attached]
        assert attached == in_order, "in the order of the list"
        if "cached" in case:
            wrapped = getattr(engine.optimizer.step, "__wrapped__", None)
            assert is_ours(wrapped), "what drops the cache is around the step that was replaced"
        if case == "torch's AdamW":
            assert not before
        engine.destroy()
    unseen = {
        "ranks hear of one another",  # of several ranks: test_heartbeat.py
        "step: the host does not wait for reductions",  # on a GPU
        # test_pipeline_module.py.
        "gradient norm of a PipelineModule with other groups on other stages",
        "Megatron's jobs around a step's micro-batches",  # tests/megatron_patches/test_step_jobs.py
    }
    assert set().union(*found.values()) == declared.keys() - unseen
    assert not found["torch's SGD, stage 0"]


def test_attach_replaces_what_the_list_says():
    run_ranks(1, engines)
