"""Values of a wrong kind, and optimizers that are handed over, are refused by key before anything is built."""

import pytest
import torch

from coat_dist import CoatAdamW
from coat_dist.config import CoatConfigError
from coat_dist.deepspeed.config.validate import check_deepspeed
from tests.coat_dist.configurations import config

AN_OBJECT, A_STAGE, A_RATE = "an object with its settings", "0, 1, 2 or 3", "a number >= 0"


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        *(
            (key, value, AN_OBJECT)
            for key in ("zero_optimization", "optimizer", "checkpoint")
            for value in (True, None)
        ),
        *((key, True, AN_OBJECT) for key in ("bf16", "fp16", "scheduler", "compile", "data_types", "tensor_parallel")),
        ("zero_optimization", 2, AN_OBJECT),
        ("optimizer", "CoatAdamW", AN_OBJECT),
        ("optimizer.params", [1], AN_OBJECT),
        ("zero_optimization.offload_optimizer", True, AN_OBJECT),
        ("zero_optimization.offload_param", "cpu", AN_OBJECT),
        *(("zero_optimization.stage", value, A_STAGE) for value in ("2", 4, True, None, 2.5)),
        *(("optimizer.params.betas", value, "two numbers in [0, 1)") for value in (0.9, [0.9], ["a", 1], [0.9, 1.0])),
        *(("optimizer.params.lr", value, A_RATE) for value in ("1e-3", "auto", -1)),
        ("optimizer.params.lr", [1e-3], "a single value"),
        *(("optimizer.params.eps", value, A_RATE) for value in ("1e-8", True)),
        ("optimizer.params.maximize", "no", "true or false"),
        ("optimizer.type", "coatadamw", '"CoatAdamW"'),
        ("train_micro_batch_size_per_gpu", "2", "an integer >= 1"),
        ("tensor_parallel.autotp_size", "2", "an integer >= 0"),
        ("gradient_clipping", float("nan"), A_RATE),
        ("gradient_accumulation_steps", 0, "an integer >= 1"),
        *(("steps_per_print", value, "a number but 0, or null") for value in ("10", 0, True)),
        *(
            (key, value, "true or false")
            for key in ("wall_clock_breakdown", "flops_profiler.enabled", "bf16.enabled", "fp16.enabled")
            for value in ("true", 2, [])
        ),
        *((key, None, "true or false") for key in ("wall_clock_breakdown", "bf16.enabled")),
        ("zero_optimization.overlap_comm", "false", "true or false"),
        ("zero_optimization.reduce_bucket_size", "5e8", "a valid integer"),
        ("zero_optimization.reduce_bucket_size", 0, "greater than 0"),
        ("data_types.grad_accum_dtype", "f32", '"fp32", "fp16" or "bf16"'),
        ("communication_data_type", "float32", '"fp16", "bf16", "fp32"'),
        ("checkpoint.tag_validation", 5, '"Ignore", "Warn", "Fail"'),
        *(("gradient_clipping", value, A_RATE) for value in ("1.0", True, None, -1)),
    ],
)
def test_values_of_a_wrong_kind_give_one_line_by_key(key, value, accepted):
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(config(**{key.replace(".", "__"): value}))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{key}: got ") and f"accepted: {accepted}" in line, line


@pytest.mark.parametrize(
    "changes",
    [
        *({key: None} for key in ("bf16", "bfloat16", "aio", "gradient_accumulation_steps")),
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": None},
        {"zero_optimization__offload_optimizer": {"device": "auto"}},
        *({f"zero_optimization__{key}": "auto"} for key in ("cpu_offload", "elastic_checkpoint", "zenflow")),
        {"bf16__bf16_master_weights_and_grads": "auto"},
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}, "zero_optimization__stage": 0},
        {"fp16__enabled": "auto"},
        {"tensor_parallel__autotp_size": "auto"},
        {"bf16__enabled": 1, "wall_clock_breakdown": 0, "dump_state": None, "zero_optimization__stage": 2.0},
        {"flops_profiler": {"enabled": None}, "steps_per_print": -1, "zero_optimization__overlap_comm": 1},
        {"steps_per_print": float("inf"), "zero_optimization__overlap_comm": None, "wall_clock_breakdown": True},
        {"checkpoint__tag_validation": "WARN", "communication_data_type": "BF16", "steps_per_print": None},
        {"data_types__grad_accum_dtype": "bf16"},
    ],
)
def test_what_deepspeed_reads_as_not_given_is_not_refused(changes):
    check_deepspeed(config(**changes))


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"lr": None}, "lr: got null, accepted: a number >= 0"),
        ({"maximize": "yes"}, 'maximize: got "yes", accepted: true or false'),
        ({"first_moment": "int4"}, 'first_moment: got "int4", accepted: "e4m3", "e5m2", "int8"'),
        (
            {"second_moment": "log8", "expand": False},
            'expand: got false, accepted: true with second_moment="log8", whose codes always span a group\'s range',
        ),
        pytest.param(
            {"capturable": True},
            "capturable: got true without a CUDA GPU, accepted: false there",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU"),
        ),
    ],
)
def test_options_in_a_file_are_named_in_the_words_of_json(params, line):
    settings = config(optimizer__params=params)
    del settings["coat"]
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings)
    assert str(error.value).splitlines()[-1] == f"optimizer.params.{line}"


SCHEDULES = '"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"'


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}, None),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 0.1, "cycle_momentum": False}}, None),
        ({"type": None}, None),
        ({}, None),
        ({"params": {"warmup_num_steps": 10}}, f"type: missing, accepted: {SCHEDULES}"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}, None),
        ({"type": "WarmupLRR"}, f'type: got "WarmupLRR" (did you mean "WarmupLR"?), accepted: {SCHEDULES}'),
        ({"type": "math", "params": {}}, f'type: got "math", accepted: {SCHEDULES}'),
        ({"type": ["WarmupLR"]}, f'type: got ["WarmupLR"], accepted: {SCHEDULES}'),
        ({"type": "StepLR", "params": {"step_size": 3}}, f'type: got "StepLR", accepted: {SCHEDULES}'),
        ({"type": "WarmupLR"}, "params: got null, accepted: an object with the schedule's parameters"),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lrr": 0.1}},
            'params.warmup_max_lrr: unknown key (did you mean "warmup_max_lr"?), accepted: warmup_min_lr, warm',
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}},
            'params.warmup_num_steps: got "10", accepted: a n',
        ),
        ({"type": "WarmupDecayLR", "params": {}}, "params.total_num_steps: missing, accepted: a value"),
    ],
)
def test_schedules_are_looked_at_before_an_engine_is_built(scheduler, line):
    if line is None:
        return check_deepspeed(config(scheduler=scheduler))
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(config(scheduler=scheduler))
    assert str(error.value).startswith(f"scheduler.{line}")


def test_torchs_schedules_go_without_zero():
    """Of the same rules as DeepSpeed's: torch wants its own optimizers, which ZeRO's are not."""
    params = {"step_size": 3, "gama": 0.5}
    assert list(wrong_schedule({"scheduler": {"type": "StepLR", "params": params}})) == [
        'scheduler.params.gama: unknown key (did you mean "gamma"?), accepted: step_size, gamma, last_epoch'
    ]
    assert not list(wrong_schedule({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}))


def test_a_wrong_block_and_what_is_wrong_elsewhere_are_one_error():
    settings = config(coat__optimizer__expend=True, gradient_clipping="1.0", zero_optimisation={}, group_size=64)
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings)
    keys = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert keys == ["coat.optimizer.expend", "group_size", "gradient_clipping", "zero_optimisation"]


def test_a_block_of_nearly_the_right_name_is_not_passed_over():
    with pytest.raises(CoatConfigError, match=r'^Coat: unknown key \(did you mean "coat"\?\), accepted: "coat"$'):
        check_deepspeed({"Coat": {}, "optimizer": {"type": "AdamW"}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_optimization__elastic_checkpoint": True}, "zero_optimization.elastic_checkpoint: got true"),
        ({"elasticity": {"enabled": True}}, "elasticity: got "),
        ({"zero_optimization__offload_optimizer": {"device": "cpu"}}, 'offload_optimizer.device: got "cpu"'),
        ({"zero_optimization__stage": 0}, "zero_optimization.stage: got 0"),
        ({"zero_optimization": True}, "zero_optimization: got true"),
        ({"bf16__bf16_master_weights_and_grads": True}, "or true with CoatAdamW master_weights"),
        (
            {"coat": {"optimizer": {"expand": False}}},
            "coat.optimizer.expand: got false beside a CoatAdamW that has true",
        ),
    ],
)
def test_a_given_optimizer_is_checked_like_one_by_name(changes, words):
    settings = config(**changes)
    del settings["optimizer"]
    if changes.keys() != {"coat"}:
        del settings["coat"]
    usual, other = ({"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2))
    if changes.keys() == {"coat"}:  # of any group, not of the first one alone
        usual["expand"] = False
    given = CoatAdamW([usual, other])
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings, optimizer=given)
    (line,) = [line for line in str(error.value).splitlines() if "activation" not in line]
    assert words in line
    check_deepspeed({k: v for k, v in config().items() if k not in ("coat", "optimizer")}, optimizer=given)
