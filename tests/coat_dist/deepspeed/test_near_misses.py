"""What is nearly right does not train silently: names that are nearly ours, keys in the wrong place, unknown keys."""

import json
from pathlib import Path

import pytest

from coat_dist.config import CoatConfig, CoatConfigError
from coat_dist.deepspeed.config.schema import _asked
from coat_dist.deepspeed.config.validate import check_deepspeed
from tests.coat_dist.configurations import config

PLAIN = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
OTHERS = {"boat": 1, "cost": 0.1, "cat": [1], "context": {}, "activation": "gelu", "format": "x", "_coat": {}, "a": {}}
OTHERS |= {
    "chat": {"model": "x"},
    "group_size": 7,
    "loss": "mse",
    "save_format": "safetensors",
    "own": {"type": "AdamW"},
    "_own": {"coat": {}},
}


def problem(settings):
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize("name", ["Coat", "COAT", "caot", "coat ", "cot", "coats", "coat_dist", "coatconfig", "coaat"])
def test_names_that_are_nearly_coat(name):
    expected = f'{name}: unknown key (did you mean "coat"?), accepted: "coat"'
    assert problem({**PLAIN, name: {"activation": {}}}) == problem({**config(), name: {}}) == expected
    with pytest.raises(CoatConfigError, match="did you mean"):
        CoatConfig.from_deepspeed({name: {}})


@pytest.mark.parametrize(
    "name",
    ["CoatAdam", "coatadamw", "Coat AdamW", "COATADAMW", "CoatAdamw", "CaotAdamW", "Coat", "coat_adamw", "CoAdamW"],
)
def test_names_that_are_nearly_coat_adamw(name):
    line = f'optimizer.type: got "{name}" (did you mean "CoatAdamW"?), accepted: "CoatAdamW"'
    assert problem({**PLAIN, "optimizer": {"type": name}}) == problem(config(optimizer__type=name)) == line


def test_configurations_of_others_are_left_alone():
    check_deepspeed({**PLAIN, **OTHERS})
    for name in ("Adam", "AdamW", "FusedAdam", "OneBitAdam", "CAdamW", "Lion", "Muon", "Adamax", "ZeroOneAdam"):
        check_deepspeed({**PLAIN, "optimizer": {"type": name}})


@pytest.mark.parametrize(
    ("changes", "key", "meant"),
    [
        ({"first_moment": "int8"}, "first_moment", "coat.optimizer.first_moment"),
        ({"bf16_layers": [0]}, "bf16_layers", "coat.activation.bf16_layers"),
        ({"activation": {"enabled": True}}, "activation", "coat.activation"),
        ({"optimizer": {"type": "AdamW", "second_moment": "log8"}}, "optimizer.second_moment", "coat.optimizer."),
        ({"optimizer": {"first_moment": "int8"}}, "optimizer.first_moment", "coat.optimizer.first_moment"),
        ({"optimizer": {"type": "AdamW", "coat": {}}}, "optimizer.coat", "coat"),
        ({"scheduler": {"type": "WarmupLR", "coat": {}}}, "scheduler.coat", "coat"),
        ({"zero_optimization": {"offload_param": {"Coat": {}}}}, "zero_optimization.offload_param.Coat", "coat"),
        ({"First-Momment": "int8"}, "First-Momment", "coat.optimizer.first_moment"),
        ({"group_size": 64}, "group_size", "coat.optimizer.group_size"),
        ({"forward": "quantized"}, "forward", "coat.activation.forward"),
        ({"saved_format": "int8"}, "saved_format", "coat.activation.saved_format"),
        ({"activation": {"enabled": True, "forwrd": 1}}, "activation", "coat.activation"),
        (
            {"optimizer": {"type": "Muon", "params": {"first_moment": "int8"}}},
            "optimizer.params.first_moment",
            "coat.optimizer.first_moment",
        ),
    ],
)
def test_keys_of_the_block_outside_of_it(changes, key, meant):
    assert problem({**PLAIN, **changes}).startswith(f'{key}: unknown key (did you mean "{meant}')


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": "CoatAdamW"}, "optimizer"),
        ({"optimizer": {"name": "CoatAdamW"}}, "optimizer.name"),
        ({"optimizer": {"type": ["CoatAdamW"]}}, "optimizer.type"),
        ({"optimiser": {"type": "CoatAdamW"}}, "optimiser.type"),
    ],
)
def test_coat_adamw_where_no_optimizer_is_named(changes, key):
    line = problem({**PLAIN, **changes})
    accepted = {
        "optimizer": 'an object with its settings, "type" among them',
        "optimizer.type": 'a name, not a list: "CoatAdamW"',
    }.get(key, 'as "optimizer.type"')
    assert line.startswith(f"{key}: got ") and line.endswith(f"accepted: {accepted}")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"gradient_cliping": 1.0}, 'gradient_cliping: unknown key (did you mean "gradient_clipping"?)'),
        ({"zero_optimisation": {}}, 'zero_optimisation: unknown key (did you mean "zero_optimization"?)'),
        ({"Gradient-Clipping": 1}, 'Gradient-Clipping: unknown key (did you mean "gradient_clipping"?)'),
        ({"stage": 2}, 'stage: unknown key (did you mean "zero_optimization.stage"?)'),
        ({"lr": 2}, 'lr: unknown key (did you mean "optimizer.params.lr"?)'),
        ({"group_size": 64}, 'group_size: unknown key (did you mean "coat.'),
        (
            {"zero_optimization__first_moment": "e4m3"},
            'zero_optimization.first_moment: unknown key (did you mean "coat.optimizer.first_moment"?), accepted: ',
        ),
        ({"bf16__group_size": 128}, 'bf16.group_size: unknown key (did you mean "coat.optimizer.group_size"?), acc'),
        (
            {"zero_optimization__overlap_com": True},
            'zero_optimization.overlap_com: unknown key (did you mean "zero_optimization.overlap_comm"?), accepted: ',
        ),
        ({"my_own_key": 2}, "my_own_key: unknown key, which DeepSpeed would ignore; accepted: DeepSpeed's keys"),
        ({"optimizer__parms": {}}, 'optimizer.parms: unknown key (did you mean "optimizer.params"?)'),
        ({"data_types__grad_acum_dtype": 1}, 'data_types.grad_acum_dtype: unknown key (did you mean "data_types.grad_'),
        ({"checkpoint__load_univrsal": 1}, 'checkpoint.load_univrsal: unknown key (did you mean "checkpoint.load_u'),
        (
            {"flops_profiler": {"profile_steps": 2}},
            'flops_profiler.profile_steps: unknown key (did you mean "flops_pro',
        ),
        ({"optimizer__params__activation": {}}, "optimizer.params.activation: unknown key"),
        (
            {"optimizer__params__frist_moment": "int8"},
            'optimizer.params.frist_moment: unknown key (did you mean "first',
        ),
    ],
)
def test_keys_that_deepspeed_would_ignore(changes, start):
    settings = config(**changes)
    assert problem(settings).startswith(start)
    del settings["coat"]
    assert problem(settings).startswith(start), "without a block, CoatAdamW is enough"
    if not any("optimizer" in key or key == "group_size" for key in changes):
        settings["optimizer"] = {"type": "AdamW"}
        check_deepspeed(settings)


def test_comments_and_what_deepspeed_reads_are_accepted():
    read_elsewhere = {"sequence_parallel_size": 1, "data_parallel_size": 1, "inference": {}, "vocabulary_size": 64}
    comments = {"_comment": "", "#": "", "//": "CoatAdamW", "$schema": ""}
    check_deepspeed({**config(), **comments, **read_elsewhere, "zero_allow_untested_optimizer": True})
    settings = config()
    for key in ("zero_optimization", "bf16", "optimizer", "coat"):
        settings[key] |= comments
    for block in (settings["coat"]["optimizer"], settings["coat"]["activation"], settings["optimizer"]["params"]):
        block |= comments
    check_deepspeed({**settings, "scheduler": {"type": "WarmupLR", "params": comments}})
    assert CoatConfig.from_deepspeed(settings) == CoatConfig.from_deepspeed(config())
    expected = {"train_batch_size", "wandb", "csv_monitor", "zero_optimization", "hybrid_engine", "timers", "pipeline"}
    assert expected <= _asked()[0][""] and _asked()[0]["optimizer"] == {"type", "params", "legacy_fusion"}
    for path in sorted((Path(__file__).parents[3] / "configs" / "deepspeed").glob("*.json")):
        check_deepspeed(json.loads(path.read_text()))
