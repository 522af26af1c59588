"""Values of a wrong kind, and optimizers that are handed over, are refused by key before anything is built."""

import pytest
import torch

from coat_dist import CoatAdamW
from coat_dist.config import CoatConfigError
from coat_dist.deepspeed.refusals import check_deepspeed
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
        *(("zero_optimization.stage", value, A_STAGE) for value in ("2", 4, True, None)),
        *(("optimizer.params.betas", value, "two numbers in [0, 1)") for value in (0.9, [0.9], ["a", 1], [0.9, 1.0])),
        *(("optimizer.params.lr", value, A_RATE) for value in ("1e-3", "auto", -1)),
        ("optimizer.params.lr", [1e-3], "a single value"),
        *(("optimizer.params.eps", value, A_RATE) for value in ("1e-8", True)),
        ("optimizer.params.maximize", "no", "True or False"),
        ("optimizer.type", "coatadamw", '"CoatAdamW"'),
        ("train_micro_batch_size_per_gpu", "2", "an integer >= 1"),
        ("tensor_parallel.autotp_size", "2", "an integer >= 0"),
        ("gradient_clipping", float("nan"), A_RATE),
        ("gradient_accumulation_steps", 0, "an integer >= 1"),
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
    ],
)
def test_what_deepspeed_reads_as_not_given_is_not_refused(changes):
    check_deepspeed(config(**changes))


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
    given = CoatAdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings, optimizer=given)
    (line,) = [line for line in str(error.value).splitlines() if "activation" not in line]
    assert words in line
    check_deepspeed({k: v for k, v in config().items() if k not in ("coat", "optimizer")}, optimizer=given)
