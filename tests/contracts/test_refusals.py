"""Configurations that are refused: the key, what is given, and what would happen otherwise.

One line of the table is one configuration. Its error names that key alone, and what was given.
"""

import json

import pytest
import torch

import coat_dist
from coat_dist import CoatAdamW, CoatConfig, CoatConfigError
from coat_dist.config import Problem
from coat_dist.deepspeed.parallel.experts import announced_experts
from coat_dist.deepspeed.request import validate
from coat_dist.known_keys import known_keys
from coat_dist.settings import Settings
from tests.coat_dist.configurations import config
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed
from tests.coat_dist.deepspeed.test_pipeline_module import build as build_pipeline
from tests.coat_dist.deepspeed.test_pipeline_module import settings as pipeline_settings
from tests.coat_dist.deepspeed.test_pipeline_module import tied_layers
from tests.support import run_ranks

ZERO, PARAMS, MOMENTS, FLOW = (
    "zero_optimization",
    "optimizer.params",
    "coat.optimizer",
    "coat.activation",
)
OFFLOAD = f"{ZERO}.offload_optimizer"
ABSENT = ...
"""A value that removes a key."""
UNKNOWN = "unknown key"
ADAMW = {"optimizer.type": "AdamW", MOMENTS: ABSENT}
PLAIN = {"optimizer": {"type": "AdamW"}, "coat": ABSENT}
MASTERS, STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
REMAINDER = {MASTERS: True, STATES: True, f"{MOMENTS}.master_weights": "bf16_remainder"}
NAN = float("nan")


def row(key, *values, given=None, beside=None, **context):
    """The values of a key that are refused ``beside`` other keys. ``given``: what the error says
    of it, where that is not the value; ``context``: sizes for ``Settings.check``.
    """
    for value in values:
        said = f"got {json.dumps(value)}" if given is None else given
        yield {**(beside or {}), key: value}, {key: said}, context


def misspelt(key, meant, value=1, beside=None):
    hint = f' (did you mean "{meant}"?)' if meant else ""
    return row(key, value, given=f"{UNKNOWN}{hint}", beside=beside)


TABLE = {
    "DeepSpeed takes any type, and means another thing than is written": (
        *row(f"{ZERO}.stage", "2", True),
        *row(f"{PARAMS}.betas", 0.9, [0.9], ["a", 1], [0.9, 1.0]),
        *row(f"{PARAMS}.lr", "1e-3", "auto", -1, [1e-3], None),
        *row(f"{PARAMS}.eps", "1e-8", True),
        *row(f"{PARAMS}.maximize", "no"),
        *row(f"{PARAMS}.first_moment", "int4", beside={MOMENTS: ABSENT}),
        *row("gradient_clipping", "1.0", True, None, -1, NAN),
        *row("wall_clock_breakdown", "true", 2, []),
        *row("flops_profiler.enabled", "true", 2, []),
        *row("checkpoint.use_node_local_storage", "x"),
    ),
    "DeepSpeed ignores a schedule without a name": (
        *row("scheduler.type", None, beside={"scheduler": {"params": {"warmup_num_steps": 10}}}),
    ),
    "the block would do another thing, or nothing": (
        *row("coat", 3, None),
        *row("coat.optimiser", {}, given=f"{UNKNOWN} (did you mean 'optimizer'?)"),
        *row("coat.first_moment", "int8", given=UNKNOWN),
        *row(MOMENTS, 3),
        *row(f"{MOMENTS}.expend", 1, given=f"{UNKNOWN} (did you mean 'expand'?)"),
        *row(
            f"{MOMENTS}.expand",
            False,
            given='got false with second_moment "log8"',
            beside={f"{MOMENTS}.second_moment": "log8"},
        ),
        *row(f"{MOMENTS}.expand", "yes"),
        *row(f"{MOMENTS}.group_size", 100),
        *row(f"{MOMENTS}.first_moment", "log8"),
        *row(f"{MOMENTS}.second_moment", "int8"),
        *row(f"{MOMENTS}.stochastic_rounding", "on"),
        *row(f"{FLOW}.forward", "fast"),
        *row(f"{FLOW}.saved_format", "fp8"),
        *row(f"{FLOW}.attention", "fp16"),
        *row(f"{FLOW}.z_loss", -1e-4, NAN, "small", True),
        *row(
            f"{FLOW}.z_loss", 1, given='got 1.0 with loss "plain"', beside={f"{FLOW}.loss": "plain"}
        ),
        *row(
            f"{FLOW}.z_loss",
            1,
            given="got 1.0 with enabled false",
            beside={f"{FLOW}.enabled": False},
        ),
        *row(f"{FLOW}.bf16_layers", [0, 2, 0]),
        *row(
            f"{FLOW}.tp_invariant",
            True,
            given="got true with fp8_gather false",
            beside={f"{FLOW}.fp8_gather": False},
        ),
        *row(
            f"{FLOW}.cuda_graphs",
            True,
            given='got true with weights "cached"',
            beside={f"{FLOW}.weights": "cached"},
        ),
        *row(
            f"{FLOW}.cuda_graphs",
            True,
            given='got true with wgrad "main_grad"',
            beside={f"{FLOW}.wgrad": "main_grad"},
        ),
        *row(
            f"{FLOW}.cuda_graphs",
            True,
            given="got true with tp_invariant true",
            beside={f"{FLOW}.tp_invariant": True},
        ),
        *row(f"{FLOW}.wgrad", "main_grad"),
        *row("fp16.enabled", True),
        *row(f"{FLOW}.weights", "cached", beside={f"{ZERO}.stage": 3}),
        *row(f"{FLOW}.cuda_graphs", True, beside={f"{ZERO}.stage": 3}),
        *row(f"{FLOW}.compile", True, beside={f"{ZERO}.stage": 3}),
    ),
    "two places say which optimizer, or how it stores moments": (
        *row("optimizer.type", "AdamW"),
        *row(f"{PARAMS}.expand", True, given="given beside coat.optimizer"),
        *row(f"{PARAMS}.adam_w_mode", False),
    ),
    "CoatAdamW's states would be lost, merged raw, or stepped by other code": (
        *row(f"{PARAMS}.checkpoint", "fp32"),
        *row(f"{ZERO}.elastic_checkpoint", True),
        *row(f"{ZERO}.cpu_offload", True),
        *row(f"{ZERO}.zenflow", {}),
        *row(f"{OFFLOAD}.device", "nvme"),
        *row(f"{OFFLOAD}.super_offload", True),
        *row(f"{OFFLOAD}.device", "cpu", beside={f"{MOMENTS}.master_weights": "parameter"}),
        *row(f"{OFFLOAD}.ratio", 0.5, beside={f"{OFFLOAD}.device": "cpu"}),
    ),
    "weights would be rounded twice, or lose their lower 16 bits": (
        *row(f"{ZERO}.zero_quantized_weights", True),
        *row(f"{ZERO}.zero_quantized_nontrainable_weights", True),
        *row(f"{ZERO}.zero_quantized_gradients", True),
        *row(MASTERS, True, beside={STATES: True}),
        *row(MASTERS, None, beside=REMAINDER),
        *row(STATES, None, beside=REMAINDER),
        *row("bf16.enabled", False, beside=REMAINDER),
        *row(
            f"{ZERO}.offload_param.device",
            "cpu",
            beside={**REMAINDER, f"{ZERO}.stage": 3},
        ),
    ),
    "a checkpoint may be incomplete when save_checkpoint returns": (
        *row("checkpoint.writer", {"type": "fast"}),
        *row("datastates_ckpt", {}, True),
    ),
    "a node would lose what other nodes saved": (*row("checkpoint.use_node_local_storage", True),),
    "tensor- or context-parallel ranks would lose weights or gradients": (
        *row(f"{ZERO}.zero_hpz_partition_size", 2, tp=2, beside={f"{ZERO}.stage": 3}),
        *row("checkpoint.load_universal", True, tp=2, beside={**ADAMW, f"{ZERO}.stage": 3}),
    ),
    "pipeline stages reduce gradients after the last micro-batch": (
        *row(f"{ZERO}.stage", 2, stages=2),
        *row(f"{ZERO}.overlap_comm", True, stages=2, beside={f"{ZERO}.stage": 1}),
        *row("fp16.enabled", True, stages=2, beside={**PLAIN, f"{ZERO}.stage": 1}),
    ),
    "experts that ranks divide are sharded over other ranks": (
        *row(f"{ZERO}.stage", 3, ep=2),
        *row(f"{ZERO}.round_robin_gradients", True, ep=2),
        *row(f"{ZERO}.offload_param.device", "cpu", ep=2),
    ),
    "a misspelt name would disable compression": (
        *(
            case
            for name in ("Coat", "caot", "coat ", "cot", "coats", "coat_dist", "coaat")
            for beside in ({}, PLAIN)
            for case in misspelt(name, "coat", {}, beside)
        ),
        *(
            (
                {**beside, "optimizer.type": name},
                {"optimizer.type": f'got "{name}" (did you mean "CoatAdamW"?)'},
                {},
            )
            for name in ("CoatAdam", "coatadamw", "Coat AdamW", "CaotAdamW", "Coat", "coat_adamw")
            for beside in ({}, PLAIN)
        ),
        *misspelt("first_moment", f"{MOMENTS}.first_moment", "int8", PLAIN),
        *misspelt("First-Momment", f"{MOMENTS}.first_moment", "int8", PLAIN),
        *misspelt("activation.forward_scales", f"{FLOW}.forward_scales", "row", PLAIN),
        *misspelt("optimizer.second_moment", f"{MOMENTS}.second_moment", "log8", PLAIN),
        *misspelt(f"{PARAMS}.fp8_gather", f"{FLOW}.fp8_gather", 1, PLAIN),
        *misspelt("optimizer.coat", "coat", {}, PLAIN),
        *misspelt(f"{ZERO}.offload_param.Coat", "coat", {}, PLAIN),
        *row("optimizer", "CoatAdamW"),
        *row("optimizer.name", "CoatAdamW", beside=PLAIN),
        *row("optimiser.type", "CoatAdamW", beside=PLAIN),
    ),
    "DeepSpeed ignores keys that it does not know": (
        *misspelt("gradient_cliping", "gradient_clipping"),
        *misspelt("zero_optimisation", ZERO, {}),
        *misspelt("stage", f"{ZERO}.stage"),
        *misspelt("lr", f"{PARAMS}.lr"),
        *misspelt("optimizer.parms", PARAMS, {}),
        *misspelt("data_types.grad_acum_dtype", "data_types.grad_accum_dtype"),
        *misspelt("flops_profiler.profile_steps", "flops_profiler.profile_step"),
        *misspelt(f"{PARAMS}.frist_moment", f"{PARAMS}.first_moment", "int8"),
        *misspelt(f"{PARAMS}.learning_rate", None, beside={"coat": ABSENT}),
    ),
}


def problems(refuse):
    with pytest.raises(CoatConfigError) as error:
        refuse()
    assert str(error.value) == "\n".join(map(str, error.value.problems))
    assert all(isinstance(one, Problem) and one.accepted for one in error.value.problems)
    return {one.key: one.got for one in error.value.problems}


CASES = [
    pytest.param(*case, id=f"{why}: {case[1]}") for why, cases in TABLE.items() for case in cases
]


@pytest.mark.parametrize(("changes", "expected", "context"), CASES)
def test_check_refuses(changes, expected, context):
    settings = Settings.read(config(changes))
    assert problems(lambda: settings.check(**context)) == expected


def test_check_reports_all_that_is_wrong_at_once():
    settings = Settings.read(
        config(
            {
                f"{MOMENTS}.expend": True,
                "gradient_clipping": "1.0",
                "zero_optimisation": {},
                "group_size": 64,
            }
        )
    )
    assert {*problems(settings.check)} == {
        f"{MOMENTS}.expend",
        "group_size",
        "gradient_clipping",
        "zero_optimisation",
    }
    several = Settings.read(config({f"{ZERO}.stage": 1}))
    assert problems(lambda: several.check_parallel(stages=2, ep=2)) == {
        "mpu": "got 2 pipeline stages"
    }
    assert problems(lambda: several.check(cp=2)) == {"context_parallel_size": "got 2"}


COMMENTS = {"_comment": "", "#": "", "//": "CoatAdamW", "$schema": ""}
ACCEPTED = [
    {},
    *({key: None} for key in ("bf16", "bfloat16", "aio", "gradient_accumulation_steps")),
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": None},
    {f"{OFFLOAD}.device": "auto", f"{ZERO}.cpu_offload": "auto", f"{ZERO}.zenflow": "auto"},
    {f"{OFFLOAD}": {"device": "cpu", "pin_memory": True, "ratio": 1.0}},
    {f"{ZERO}.elastic_checkpoint": "auto", MASTERS: "auto", "fp16.enabled": "auto"},
    {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}, f"{ZERO}.stage": 0},
    {"bf16.enabled": 1, "wall_clock_breakdown": 0, "dump_state": None, f"{ZERO}.stage": 2.0},
    {"flops_profiler.enabled": None, "steps_per_print": -1, f"{ZERO}.overlap_comm": 1},
    {"steps_per_print": float("inf"), f"{ZERO}.overlap_comm": None, "wall_clock_breakdown": None},
    {"checkpoint.tag_validation": "WARN", "communication_data_type": "BF16"},
    {"data_types.grad_accum_dtype": "bf16", "wandb": {"enabled": False}, "tensorboard": {}},
    {"scheduler": {}},
    {"scheduler": {"type": None, "params": {}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", **COMMENTS}}},
    REMAINDER,
    {**REMAINDER, f"{ZERO}.stage": 0, "data_types.grad_accum_dtype": "fp32"},
    {**COMMENTS, "inference": {}, "vocabulary_size": 64, "sequence_parallel_size": 1},
    {f"{block}.{key}": "" for block in (ZERO, "bf16", PARAMS, "coat", FLOW) for key in COMMENTS},
]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_check_accepts(changes):
    given = config(changes)
    assert (
        Settings.read(given).check().coat.activation == CoatConfig.from_deepspeed(given).activation
    )
    assert given == config(changes), "what the caller gave is not changed"


OTHERS = {
    **{"boat": 1, "cost": 0.1, "cat": [1], "context": {}, "activation": "gelu", "format": "x"},
    **{"_coat": {}, "a": {}, "chat": {"model": "x"}, "group_size": 7, "loss": "mse", "stage": 0},
    **{"own": {"type": "AdamW"}, "_own": {"coat": {}}, "wandb": {"group": "CoatAdamW"}},
}
"""Keys of other programs, some of them much like ours."""


@pytest.mark.parametrize("name", ["Adam", "OneBitAdam", "CAdamW", "Lion", "Muon", "Adamax"])
def test_check_leaves_configurations_of_others_alone(name):
    settings = Settings.read(config({**PLAIN, **OTHERS, "optimizer.type": name, "lr": 2}))
    assert settings.check().coat is None


def test_known_keys_are_those_that_deepspeed_reads():
    read = {"train_batch_size", "wandb", "csv_monitor", ZERO, "hybrid_engine", "timers", "pipeline"}
    known = known_keys()
    assert read <= {*known[""]} and {*known["optimizer"]} == {"type", "params", "legacy_fusion"}


def coat_adamw(params, **options):
    return CoatAdamW([{"params": list(params), **options}])


def two_groups(params):
    """The first one has what the block asks for."""
    other = {"params": [torch.nn.Parameter(torch.ones(3))]}
    return CoatAdamW([{"params": list(params), "expand": False}, other])


def fp32_checkpoints(params):
    made = coat_adamw(params)
    made.checkpoint = "fp32"
    return made


GIVEN = {"optimizer": ABSENT, "coat": ABSENT}
OFF = {f"{FLOW}.enabled": False}


@pytest.mark.parametrize(
    ("make", "changes", "key", "given"),
    [
        (coat_adamw, {**GIVEN, f"{ZERO}.elastic_checkpoint": True}, None, "got true"),
        (coat_adamw, {**GIVEN, f"{ZERO}.stage": 0}, None, "got 0"),
        (fp32_checkpoints, GIVEN, f"{PARAMS}.checkpoint", "got null"),
        (
            two_groups,
            {**GIVEN, "coat": {"activation": {"enabled": False}}, f"{MOMENTS}.expand": False},
            None,
            "got false beside a CoatAdamW that has true",
        ),
        (torch.optim.AdamW, OFF, MOMENTS, "got a block beside optimizer=AdamW"),
        (
            torch.optim.AdamW,
            {"coat": ABSENT},
            "optimizer.type",
            'got "CoatAdamW" beside optimizer=AdamW',
        ),
        (
            torch.optim.AdamW,
            {**OFF, "optimizer": ABSENT, MOMENTS: ABSENT},
            "coat",
            "got a block that compresses nothing (activation.enabled is false, the optimizer is "
            '"AdamW")',
        ),
    ],
)
@pytest.mark.parametrize("by_callable", [False, True])
def test_validate_refuses_a_given_optimizer(make, changes, key, given, by_callable):
    model = torch.nn.Linear(3, 3)
    optimizer = make if by_callable else make(model.parameters())
    call = {"model": model, "config": config(changes), "optimizer": optimizer}
    request = validate(call, explicit=True)

    def refuse():
        if by_callable and request.error is None:
            request.checked(make)(model.parameters())
        raise request.error

    assert problems(refuse) == {key or [*changes][-1]: given}


@pytest.mark.parametrize(
    ("call", "key", "given"),
    [
        ({"config": config({})}, "model", "got None"),
        ({}, "config", "got 0 of"),
        ({"config": config({}), "config_params": config({})}, "config", "got 2 of"),
        ({"config": config({})}, f"{FLOW}.enabled", "got true, but no module of Linear is patched"),
        (
            {"config": config({f"{MOMENTS}.expand": True, **OFF, "optimizer": ABSENT})},
            "optimizer.type",
            "got null",
        ),
        (
            {"config": config({**OFF, **ADAMW, "optimizer.type": "AdamW8bit"})},
            "coat",
            "got a block that compresses nothing",
        ),
    ],
)
def test_validate_refuses_a_call(call, key, given):
    if key != "model":
        call = {**call, "model": torch.nn.Linear(3, 3)}

    def refuse():
        raise validate(call, explicit=True).error

    ((found, said),) = problems(refuse).items()
    assert found == key and said.startswith(given)


def small(**changes):
    coat_dist.initialize(model=model(), config={**CONFIG, **changes})


def tied(changes, **given):
    """A PipelineModule of two stages that both hold a weight."""
    build_pipeline(tied_layers(), changes, **given)


def with_fp8(parameters):
    return [{"params": parameters, "moments": "fp8"}]


def frozen_experts():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for p in net[1].parameters():
        p.allreduce = False
    net[1].bias.requires_grad_(False)
    with announced_experts(net, None, 2):
        pass


def mixed_master_weights():
    net = model().bfloat16()
    first, *others = net.parameters()
    groups = [{"params": [first]}, {"params": others, "master_weights": "bf16_remainder"}]
    plain = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, ZERO: {"stage": 2}}
    coat_dist.initialize(model=net, optimizer=CoatAdamW(groups), config=plain)


NO_TYPE = {**pipeline_settings(), "coat": {"activation": {"enabled": False}}}
del NO_TYPE["optimizer"]
DIFFERENT, DRIFT = (
    "ranks were started differently: ",
    'moments: got "fp8" for a weight that several',
)
ON_ALL_RANKS = [
    # The lower halves of some weights would be lost.
    ("CoatAdamW master_weights: got 'bf16_remainder'", lambda rank: mixed_master_weights()),
    # Each rank would step its shards with options of its own.
    (
        f"{DIFFERENT}gradient_clipping: 1.0 on rank 0, 2.0 on rank 1",
        lambda rank: small(gradient_clipping=1.0 + rank),
    ),
    (
        f"{DIFFERENT}coat.optimizer.expand: true on rank 0, false on rank 1",
        lambda rank: small(
            coat={"optimizer": {"expand": not rank}, "activation": {"enabled": False}}
        ),
    ),
    # Copies of a weight on two stages would drift apart.
    (
        f"model_parameters.0.{DRIFT}",
        lambda rank: tied(
            pipeline_settings(), model_parameters=lambda net: with_fp8(net.parameters())
        ),
    ),
    (
        f"optimizer.param_groups.0.{DRIFT}",
        lambda rank: tied(NO_TYPE, optimizer=lambda net: CoatAdamW(with_fp8(net.parameters()))),
    ),
    (
        f"optimizer.param_groups.0.{DRIFT}",
        lambda rank: tied(
            NO_TYPE,
            optimizer=lambda net: CoatAdamW,
            model_parameters=lambda net: net.parameters(),
        ),
    ),
    # Stage 0 would step on zero gradients.
    (f"{ZERO}.stage: got 0, accepted: 1, 2 or 3", lambda rank: tied(pipeline_settings(stage=0))),
    # The model's file would hold the experts of one rank, which every rank would load.
    ("1.bias: got requires_grad False, accepted: True with", lambda rank: frozen_experts()),
]


def refused_on(rank, world):
    quiet_deepspeed()
    found = []
    for _, call in ON_ALL_RANKS:
        try:
            call(rank)
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


def test_initialize_refuses_on_all_ranks():
    for found in run_ranks(2, refused_on):
        for (expected, _), text in zip(ON_ALL_RANKS, found, strict=True):
            assert text.startswith(expected), text
