"""``coat_dist.initialize`` and ``"type": "CoatAdamW"`` under real DeepSpeed engines, two gloo
ranks.
"""

import contextlib
import copy
import io
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from coat_dist import CoatConfigError
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed
from tests.support import run_ranks


def order(rank, world):
    """What happens first: devices that are chosen, and collectives on whatever device is the
    current one.
    """
    deepspeed = quiet_deepspeed()
    import torch.distributed as dist

    import coat_dist

    happened, gather, found = [], dist.all_gather_object, []
    deepspeed.accelerator.get_accelerator().set_device = lambda n: happened.append(n)
    dist.all_gather_object = lambda *a, **k: (
        happened.append("all_gather_object"),
        gather(*a, **k),
    )[1]
    for args in (None, SimpleNamespace(local_rank=rank), SimpleNamespace(device_rank=5)):
        happened.clear()
        coat_dist.initialize(args=args, model=model(), config=CONFIG)
        first = happened.index("all_gather_object")
        found.append((happened[:first], {n for n in happened[first:] if n != "all_gather_object"}))
    return found


def test_each_rank_takes_deepspeeds_device_before_ranks_are_compared():
    for rank, found in enumerate(run_ranks(2, order)):
        assert found == [([n], {n}) for n in (rank, rank, 5)], "DeepSpeed then chooses the same"


def failing(rank, world, changes):
    quiet_deepspeed()
    import coat_dist

    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        config[key] = value[rank] if isinstance(value, list) else value
    try:
        coat_dist.initialize(model=model(), config=config)
    except ValueError as error:
        return str(error)
    return "no error"


OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_clipping": [1.0, 0.5]}, "gradient_clipping: 1.0 on rank 0, 0.5 on rank 1"),
        (
            {"coat": [{"activation": OFF}, {"optimizer": {"expand": False}, "activation": OFF}]},
            "ranks were started differently: coat.optimizer.expand: true on rank 0, false on rank "
            "1",
        ),
        ({"coat": {}}, "coat.activation.enabled: got true"),
        ({"coat": {"optimizer": {"group_size": 3}}}, "coat.optimizer.group_size: got 3"),
        (
            {"optimizer": {"type": "AdamW8bit"}, "coat": {"activation": OFF}},
            "coat: got a block that compresses nothing",
        ),
    ],
)
def test_errors_reach_every_rank(changes, words):
    for message in run_ranks(2, failing, changes):
        assert words in message


def other_groups(rank, world):
    """Messages for parameter groups that differ between ranks, given as groups or as those of an
    optimizer.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist

    plain, messages = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}, []
    for case in ("lr", "order", "object", "object and clip", "same"):
        net = model()
        params = list(net.parameters())
        given = {
            "lr": {"model_parameters": [{"params": iter(params), "lr": 1e-3 * (1 + rank)}]},
            "order": {"model_parameters": [{"params": params[::-1] if rank else params}]},
            "same": {"model_parameters": ({"params": (p for p in params)} for _ in range(1))},
        }.get(case, {})
        settings = (
            {**plain, "gradient_clipping": 1.0 + rank} if case == "object and clip" else plain
        )
        if case.startswith("object"):
            lr = 1e-3 * (1 + rank if case == "object" else 1)
            given = {"optimizer": coat_dist.CoatAdamW(params, lr=torch.tensor(lr) if rank else lr)}
        try:
            engine, *_ = deepspeed.initialize(
                model=net, config=settings if "object" in case else CONFIG, **given
            )
            messages.append(
                [len(group["params"]) for group in engine.optimizer.optimizer.param_groups]
            )
        except coat_dist.CoatConfigError as error:
            messages.append(str(error))
    return messages


def test_groups_that_differ_between_ranks_are_named():
    first, second = run_ranks(2, other_groups)
    assert first == second
    lr, order, optimizer, clip, same = first
    start = "ranks were started differently: "
    assert lr == start + "model_parameters.0.lr: 0.001 on rank 0, 0.002 on rank 1"
    assert order.startswith(start + "model_parameters.0.params: [")
    assert optimizer.startswith(start + "optimizer.param_groups.0.lr: 0.001 on rank 0, 0.002")
    assert "gradient_clipping: 1.0 on rank 0, 2.0 on rank 1" in clip
    assert same == [1, 1], "iterators are read once, and split into both kinds"


def made_by_callables(rank, world):
    """Messages for optimizers that come from a callable, and how often it was called."""
    quiet_deepspeed()
    import coat_dist

    calls, messages = [], []

    def ours(params):
        calls.append(1)
        return coat_dist.CoatAdamW(params, lr=1e-3)

    plain = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")}
    block = {"coat": {"optimizer": {"expand": False}, "activation": {"enabled": False}}}
    for make, config in (
        (ours, {**plain, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}}),
        (torch.optim.AdamW, {**plain, "coat": {"activation": {"enabled": False}}}),
        (ours, {**plain, **block}),
        (torch.optim.AdamW, {**plain, **block}),
        (None, {**plain, **block}),
    ):
        try:
            coat_dist.initialize(model=model(), optimizer=make, config=config)
        except coat_dist.CoatConfigError as error:
            messages.append(str(error))
    return messages, len(calls)


def test_an_optimizer_of_a_callable_is_checked_before_zero_is_built():
    for messages, calls in run_ranks(2, made_by_callables):
        elastic, effect, expand, foreign, nothing = messages
        assert (
            effect.startswith("coat: got a block that compresses nothing") and '"AdamW"' in effect
        )
        assert calls == 2 and elastic.startswith(
            "zero_optimization.elastic_checkpoint: got true, accepted: false"
        )
        assert expand.startswith(
            "coat.optimizer.expand: got false beside a CoatAdamW that has true"
        )
        assert foreign.startswith("coat.optimizer: got a block beside optimizer=AdamW")
        assert nothing.startswith("optimizer.type: got null, accepted: ")


def test_a_file_that_cannot_be_read_is_named_by_either_call(tmp_path):
    deepspeed = quiet_deepspeed()
    import coat_dist

    (tmp_path / "ds.json").write_text('{"coat": {')
    for call in (deepspeed.initialize, coat_dist.initialize):
        with pytest.raises(coat_dist.CoatConfigError, match="^config: .*ds.json is not JSON: "):
            call(model=torch.nn.Linear(3, 3), config=str(tmp_path / "ds.json"))


def test_exactly_one_configuration():
    import coat_dist

    with pytest.raises(coat_dist.CoatConfigError, match="got 0 of"):
        coat_dist.initialize(model=model())
    with pytest.raises(coat_dist.CoatConfigError, match="got 2 of"):
        coat_dist.initialize(model=model(), config=CONFIG, config_params=CONFIG)
    with pytest.raises(ValueError, match="model: got None"):
        coat_dist.initialize(config=CONFIG)


ALONE = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
    "coat": {"activation": {"enabled": False}},
}


def built(net, config=ALONE, **given):
    """An engine of one rank, and the lines that it printed; or the message of what was refused."""
    deepspeed = quiet_deepspeed()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            engine, *_ = deepspeed.initialize(model=net, config=config, **given)
        except ValueError as error:
            return str(error), []
    return engine, [line for line in said.getvalue().splitlines() if line.startswith("coat_dist: ")]


def start_line(rank, world):
    given, lightning = copy.deepcopy(ALONE), copy.deepcopy(ALONE)
    lines = built(torch.nn.Linear(128, 128), given)[1]
    with mock.patch.dict(sys.modules, {"lightning": object()}):
        built(torch.nn.Linear(64, 64), lightning)
    return lines, given, lightning


def test_one_line_says_what_runs():
    lines, given, lightning = run_ranks(1, start_line)[0]
    assert lines == ["coat_dist: CoatAdamW; no layers in the FP8 flow"]
    assert given == ALONE, "the caller's configuration was changed"
    assert lightning == ALONE | {"zero_allow_untested_optimizer": True}, (
        "where trainer.test looks that key up"
    )


def reference(rank, world, frozen, bf16):
    net = torch.nn.Linear(64, 64).requires_grad_(not frozen)
    plain, kind = copy.deepcopy(net), torch.bfloat16 if bf16 else torch.float32
    plain.to(kind)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}
    given = ALONE | {
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 0},
        "scheduler": scheduler,
    }
    engine, lines = built(net, given)
    x, messages = torch.randn(2, 64, dtype=kind), []
    with torch.no_grad():
        same = torch.equal(engine(x), plain(x))
    for work in (lambda: engine.backward(engine(x).float().sum()), lambda: engine.step()):
        try:
            work()
        except CoatConfigError as error:
            messages.append(str(error))
    return same, lines, messages


@pytest.mark.parametrize(("frozen", "bf16"), [(False, True), (True, True), (True, False)])
def test_a_reference_engine_at_stage_0_is_built_and_not_trained(frozen, bf16):
    same, lines, messages = run_ranks(1, reference, frozen, bf16)[0]
    assert same and lines == [
        "coat_dist: no optimizer, this engine evaluates; no layers in the FP8 flow"
    ]
    assert len(messages) == 2
    assert all(
        text.startswith("zero_optimization.stage: got 0") and "1, 2 or 3 to train" in text
        for text in messages
    )
