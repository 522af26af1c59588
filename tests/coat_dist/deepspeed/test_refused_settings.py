"""Tables of DeepSpeed configurations: each refused one names its key and value, each accepted
one is let through.
"""

import json
from pathlib import Path

import pytest
import torch

from coat_dist import CoatAdamW
from coat_dist.config import CoatConfig, CoatConfigError, Problem
from coat_dist.deepspeed.config.keys import known_keys
from coat_dist.deepspeed.config.validate import check_deepspeed, check_parallel
from tests.coat_dist.configurations import config

PLAIN = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
ZERO = "zero_optimization"
UNKNOWN = "unknown key"
OBJECTS = (
    "bf16",
    "fp16",
    "scheduler",
    "compile",
    "data_types",
    "tensor_parallel",
    ZERO,
    "optimizer",
    "checkpoint",
)


def problems(settings, check=check_deepspeed, **context):
    with pytest.raises(CoatConfigError) as error:
        check(settings, **context)
    assert all(isinstance(one, Problem) for one in error.value.problems)
    assert str(error.value) == "\n".join(map(str, error.value.problems))
    return {one.key: one.got for one in error.value.problems}


def expected(key, value):
    return (
        value
        if isinstance(value, str) and value.startswith(UNKNOWN)
        else f"got {json.dumps(value)}"
    )


TYPES = [
    *((key, True) for key in OBJECTS),
    *((key, None) for key in (ZERO, "optimizer", "checkpoint")),
    *((f"{ZERO}.stage", value) for value in ("2", True)),
    *(("optimizer.params.betas", value) for value in (0.9, [0.9], ["a", 1], [0.9, 1.0])),
    *(("optimizer.params.lr", value) for value in ("1e-3", "auto", -1, [1e-3], None)),
    *(("optimizer.params.eps", value) for value in ("1e-8", True)),
    *(("gradient_clipping", value) for value in ("1.0", True, None, -1, float("nan"))),
    *(
        (key, value)
        for key in (
            "wall_clock_breakdown",
            "flops_profiler.enabled",
            "bf16.enabled",
            "fp16.enabled",
        )
        for value in ("true", 2, [])
    ),
    (ZERO, 2),
    ("optimizer", "CoatAdamW"),
    ("optimizer.params", [1]),
    ("optimizer.params.maximize", "no"),
    ("train_micro_batch_size_per_gpu", "2"),
    ("gradient_accumulation_steps", 0),
    (f"{ZERO}.overlap_comm", "false"),
    ("checkpoint.use_node_local_storage", "x"),
    ("optimizer.params.first_moment", "int4"),
]
TP, STAGE_3 = {"tp": 2}, {f"{ZERO}__stage": 3}
FEATURES = [
    *(
        (f"{ZERO}.{key}", value, {})
        for key, value in (
            ("elastic_checkpoint", True),
            ("offload_optimizer", {"device": "cpu"}),
            ("cpu_offload", True),
            ("zenflow", {}),
            ("offload_optimizer", {"device": "nvme"}),
            ("offload_optimizer", {"super_offload": True}),
            ("zero_quantized_weights", True),
            ("zero_quantized_nontrainable_weights", True),
            ("zero_quantized_gradients", True),
        )
    ),
    ("checkpoint.writer", {"type": "fast"}, {}),
    ("checkpoint.use_node_local_storage", True, {}),
    ("datastates_ckpt", {}, {}),
    ("datastates_ckpt", True, {}),
    ("optimizer.params.adam_w_mode", False, {}),
    ("optimizer.params.checkpoint", "fp32", {}),
    ("coat.activation.wgrad", "main_grad", {}),
    ("fp16.enabled", True, {}),
]


@pytest.mark.parametrize(("key", "value"), TYPES)
def test_wrong_types(key, value):
    changes = {key.replace(".", "__"): value}
    if key.startswith("optimizer.params.first"):
        changes["coat"] = {"activation": {}}
    assert problems(config(**changes)) == {key: expected(key, value)}


def test_a_schedule_without_a_name():
    assert problems(config(scheduler={"params": {"warmup_num_steps": 10}})) == {
        "scheduler.type": "got null"
    }


@pytest.mark.parametrize(("key", "value", "context"), FEATURES)
def test_features_that_cannot_be_honoured(key, value, context):
    name = ".".join([key, *value]) if key.startswith(f"{ZERO}.offload") else key
    given = next(iter(value.values())) if name != key else value
    assert problems(config(**{key.replace(".", "__"): value}), **context) == {
        name: expected(key, given)
    }


@pytest.mark.parametrize(
    ("changes", "context", "key", "value"),
    [
        (
            {**STAGE_3, "coat__activation__weights": "cached"},
            {},
            "coat.activation.weights",
            "cached",
        ),
        (
            {**STAGE_3, "coat__activation__cuda_graphs": True},
            {},
            "coat.activation.cuda_graphs",
            True,
        ),
        (
            {**STAGE_3, f"{ZERO}__zero_hpz_partition_size": 2},
            TP,
            f"{ZERO}.zero_hpz_partition_size",
            2,
        ),
        (
            {
                **STAGE_3,
                "checkpoint__load_universal": True,
                "optimizer__type": "AdamW",
                "coat": {"activation": {}},
            },
            TP,
            "checkpoint.load_universal",
            True,
        ),
        ({"optimizer__type": "AdamW"}, {}, "optimizer.type", "AdamW"),
        ({}, {"cp": 2}, "context_parallel_size", 2),
        ({"optimizer__params__expand": True}, {}, "optimizer.params.expand", ...),
    ],
)
def test_combinations_that_cannot_be_honoured(changes, context, key, value):
    given = "given beside coat.optimizer" if value is ... else expected(key, value)
    assert problems(config(**changes), **context) == {key: given}


MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
ON = {"bf16": {"enabled": True, **MASTERS}}
MASTER, STATES = (f"bf16.{key}" for key in MASTERS)
FP32 = {"data_types__grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (ON, {}),
        ({**ON, **FP32}, {}),
        ({**ON, f"{ZERO}__stage": 0}, {}),
        (
            {
                **ON,
                f"{ZERO}__offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1.0},
            },
            {},
        ),
        (
            {**ON, f"{ZERO}__offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            {f"{ZERO}.offload_optimizer.ratio": 0.5},
        ),
        ({}, {MASTER: None, STATES: None}),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {STATES: None}),
        ({"bf16": {"enabled": False, **MASTERS}}, {"bf16.enabled": False}),
        (
            {**ON, **STAGE_3, f"{ZERO}__offload_param": {"device": "cpu"}},
            {f"{ZERO}.offload_param.device": "cpu"},
        ),
    ],
)
@pytest.mark.parametrize("place", ["block", "params"])
def test_remainders_need_deepspeeds_keys(changes, wrong, place):
    where = (
        "coat__optimizer__master_weights"
        if place == "block"
        else "optimizer__params__master_weights"
    )
    settings = config(**{where: "bf16_remainder"}, **changes)
    if place == "params":
        del settings["coat"]["optimizer"]  # not beside it
    if wrong:
        assert problems(settings) == {key: expected(key, value) for key, value in wrong.items()}
    else:
        check_deepspeed(settings)


@pytest.mark.parametrize("block", ["bf16", "bfloat16"])
def test_bf16_masters_without_remainders(block):
    settings = config()
    del settings["bf16"]
    settings[block] = ON["bf16"]
    assert problems(settings) == {MASTER: "got true"}
    check_deepspeed({**settings, "optimizer": {"type": "AdamW"}, "coat": {"activation": {}}})


@pytest.mark.parametrize(
    ("context", "settings", "keys"),
    [
        (
            {"stages": 2},
            {ZERO: {"stage": 2, "overlap_comm": True}},
            [f"{ZERO}.stage", f"{ZERO}.overlap_comm"],
        ),
        ({"stages": 2}, {ZERO: {"stage": 1}, "fp16": {"enabled": True}}, ["fp16.enabled"]),
        (
            {"ep": 2},
            {ZERO: {"stage": 3, "round_robin_gradients": True}},
            [f"{ZERO}.stage", f"{ZERO}.round_robin_gradients"],
        ),
        (
            {"ep": 2},
            {ZERO: {"stage": 1, "offload_param": {"device": "cpu"}}},
            [f"{ZERO}.offload_param.device"],
        ),
        ({"ep": 2, "stages": 2}, {ZERO: {"stage": 1}}, ["mpu"]),
    ],
)
def test_stages_and_experts(context, settings, keys):
    assert list(problems(settings, check_parallel, **context)) == keys
    check_parallel(settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({key: None} for key in ("bf16", "bfloat16", "aio", "gradient_accumulation_steps")),
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": None},
        {f"{ZERO}__offload_optimizer": {"device": "auto"}},
        *({f"{ZERO}__{key}": "auto"} for key in ("cpu_offload", "elastic_checkpoint", "zenflow")),
        {"bf16__bf16_master_weights_and_grads": "auto"},
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}, f"{ZERO}__stage": 0},
        {"fp16__enabled": "auto", "tensor_parallel__autotp_size": "auto"},
        {"bf16__enabled": 1, "wall_clock_breakdown": 0, "dump_state": None, f"{ZERO}__stage": 2.0},
        {"flops_profiler": {"enabled": None}, "steps_per_print": -1, f"{ZERO}__overlap_comm": 1},
        {
            "steps_per_print": float("inf"),
            f"{ZERO}__overlap_comm": None,
            "wall_clock_breakdown": None,
        },
        {
            "checkpoint__tag_validation": "WARN",
            "communication_data_type": "BF16",
            "steps_per_print": None,
        },
        {"data_types__grad_accum_dtype": "bf16", "wandb": {"enabled": False}, "tensorboard": {}},
        {"scheduler": {}},
        {"scheduler": {"type": None, "params": {}}},
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": "auto", "warmup_max_lr": 0.1},
            }
        },
    ],
)
def test_accepted_settings(changes):
    assert check_deepspeed(config(**changes)) == CoatConfig.from_deepspeed(config())


def test_a_wrong_block_and_what_is_wrong_elsewhere_are_one_error():
    settings = config(
        coat__optimizer__expend=True, gradient_clipping="1.0", zero_optimisation={}, group_size=64
    )
    assert {*problems(settings)} == {
        "coat.optimizer.expend",
        "group_size",
        "gradient_clipping",
        "zero_optimisation",
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{ZERO}__elastic_checkpoint": True}, f"{ZERO}.elastic_checkpoint"),
        ({f"{ZERO}__offload_optimizer": {"device": "nvme"}}, f"{ZERO}.offload_optimizer.device"),
        ({f"{ZERO}__stage": 0}, f"{ZERO}.stage"),
        ({ZERO: True}, ZERO),
        ({"bf16__bf16_master_weights_and_grads": True}, MASTER),
        (
            {"coat": {"optimizer": {"expand": False}, "activation": {"enabled": False}}},
            "coat.optimizer.expand",
        ),
    ],
)
def test_a_given_optimizer_is_checked_like_one_by_name(changes, key):
    settings = config(**changes)
    del settings["optimizer"]
    if "coat" not in changes:
        del settings["coat"]
    usual, other = ({"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2))
    if "coat" in changes:  # of any group, not of the first one alone
        usual["expand"] = False
    given = CoatAdamW([usual, other])
    assert list(problems(settings, optimizer=given)) == [key]
    settings = {k: v for k, v in config().items() if k not in ("coat", "optimizer")}
    check_deepspeed(settings, optimizer=given)
    given.checkpoint = "fp32"
    assert list(problems(settings, optimizer=given)) == ["optimizer.params.checkpoint"]


@pytest.mark.parametrize("name", ["Coat", "caot", "coat ", "cot", "coats", "coat_dist", "coaat"])
def test_names_that_are_nearly_coat(name):
    found = {name: f'{UNKNOWN} (did you mean "coat"?)'}
    assert (
        problems({**PLAIN, name: {"activation": {}}}) == problems({**config(), name: {}}) == found
    )
    assert problems({name: {}}, CoatConfig.from_deepspeed) == found


@pytest.mark.parametrize(
    "name", ["CoatAdam", "coatadamw", "Coat AdamW", "CaotAdamW", "Coat", "coat_adamw", "CoAdamW"]
)
def test_names_that_are_nearly_coat_adamw(name):
    found = {"optimizer.type": f'got "{name}" (did you mean "CoatAdamW"?)'}
    assert (
        problems({**PLAIN, "optimizer": {"type": name}})
        == problems(config(optimizer__type=name))
        == found
    )


@pytest.mark.parametrize(
    ("changes", "key", "meant"),
    [
        ({"first_moment": "int8"}, "first_moment", "coat.optimizer.first_moment"),
        (
            {"activation": {"forward_scales": "row"}},
            "activation.forward_scales",
            "coat.activation.forward_scales",
        ),
        (
            {"optimizer": {"type": "AdamW", "second_moment": "log8"}},
            "optimizer.second_moment",
            "coat.optimizer.s",
        ),
        ({"optimizer": {"type": "AdamW", "coat": {}}}, "optimizer.coat", "coat"),
        ({ZERO: {"offload_param": {"Coat": {}}}}, f"{ZERO}.offload_param.Coat", "coat"),
        ({"First-Momment": "int8"}, "First-Momment", "coat.optimizer.first_moment"),
        (
            {"optimizer": {"type": "Muon", "params": {"fp8_gather": 1}}},
            "optimizer.params.fp8_gather",
            "coat.activation.f",
        ),
        ({"optimizer": "CoatAdamW"}, "optimizer", None),
        ({"optimizer": {"name": "CoatAdamW"}}, "optimizer.name", None),
        ({"optimiser": {"type": "CoatAdamW"}}, "optimiser.type", None),
    ],
)
def test_keys_of_the_block_and_coat_adamw_in_other_places(changes, key, meant):
    ((found, given),) = problems({**PLAIN, **changes}).items()
    assert found == key and given.startswith(
        "got " if meant is None else f'{UNKNOWN} (did you mean "{meant}'
    )


OTHERS = {
    "boat": 1,
    "cost": 0.1,
    "cat": [1],
    "context": {},
    "activation": "gelu",
    "format": "x",
    "_coat": {},
    "a": {},
}
OTHERS |= {
    "chat": {"model": "x"},
    "group_size": 7,
    "loss": "mse",
    "save_format": "safetensors",
    "stage": 0,
}
OTHERS |= {"own": {"type": "AdamW"}, "_own": {"coat": {}}, "wandb": {"group": "CoatAdamW"}}


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "FusedAdam", "OneBitAdam", "CAdamW", "Lion", "Muon", "Adamax"]
)
def test_configurations_of_others_are_left_alone(name):
    assert check_deepspeed({**PLAIN, **OTHERS, "optimizer": {"type": name}}) is None


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("gradient_cliping", 1.0, "gradient_clipping"),
        ("zero_optimisation", {}, ZERO),
        ("stage", 2, f"{ZERO}.stage"),
        ("lr", 2, "optimizer.params.lr"),
        (f"{ZERO}.normalize", True, "coat.optimizer.normalize"),
        (f"{ZERO}.overlap_com", True, f"{ZERO}.overlap_comm"),
        (f"{ZERO}.mics_shard_size", 2, None),
        ("optimizer.parms", {}, "optimizer.params"),
        ("data_types.grad_acum_dtype", 1, "data_types.grad_accum_dtype"),
        ("flops_profiler.profile_steps", 2, "flops_profiler.profile_step"),
        ("optimizer.params.frist_moment", "int8", "optimizer.params.first_moment"),
        ("optimizer.params.learning_rate", 1, None),
    ],
)
def test_keys_that_deepspeed_would_ignore(key, value, meant):
    settings = config(**{key.replace(".", "__"): value})
    found = {key: UNKNOWN + (f' (did you mean "{meant}"?)' if meant else "")}
    assert problems(settings) == found
    del settings["coat"]
    assert problems(settings) == found, "without a block, CoatAdamW is enough"
    if not key.startswith("optimizer"):
        check_deepspeed({**settings, "optimizer": {"type": "AdamW"}})


def test_comments_and_what_deepspeed_reads_are_accepted():
    read_elsewhere = {
        "sequence_parallel_size": 1,
        "data_parallel_size": 1,
        "inference": {},
        "vocabulary_size": 64,
    }
    comments = {"_comment": "", "#": "", "//": "CoatAdamW", "$schema": ""}
    check_deepspeed(
        {**config(), **comments, **read_elsewhere, "zero_allow_untested_optimizer": True}
    )
    settings = config()
    for key in (ZERO, "bf16", "optimizer", "coat"):
        settings[key] |= comments
    for block in (
        settings["coat"]["optimizer"],
        settings["coat"]["activation"],
        settings["optimizer"]["params"],
    ):
        block |= comments
    check_deepspeed({**settings, "scheduler": {"type": "WarmupLR", "params": comments}})
    read = {"train_batch_size", "wandb", "csv_monitor", ZERO, "hybrid_engine", "timers", "pipeline"}
    known = known_keys()
    assert read <= {*known[""]} and {*known["optimizer"]} == {"type", "params", "legacy_fusion"}
    for path in sorted((Path(__file__).parents[3] / "configs" / "deepspeed").glob("*.json")):
        check_deepspeed(json.loads(path.read_text()))
