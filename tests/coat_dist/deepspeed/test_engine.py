"""``coat_dist.initialize`` and ``"type": "CoatAdamW"`` under real DeepSpeed engines, two gloo
ranks.
"""

import contextlib
import copy
import io
from types import SimpleNamespace

import pytest
import torch

from coat_dist import CoatConfigError
from coat_dist.settings import Settings
from tests.coat_dist.deepspeed.small_engine import (
    CONFIG,
    PLAIN,
    model,
    quiet_deepspeed,
    settings,
)
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
    for args in (None, SimpleNamespace(local_rank=rank)):
        happened.clear()
        coat_dist.initialize(args=args, model=model(), config=CONFIG)
        first = happened.index("all_gather_object")
        found.append((happened[:first], {n for n in happened[first:] if n != "all_gather_object"}))
    return found


def test_initialize_takes_the_device_before_ranks_are_compared():
    for rank, found in enumerate(run_ranks(2, order)):
        assert found == [([rank], {rank})] * 2, "DeepSpeed then chooses the same"


def other_groups(rank, world):
    """Messages for parameter groups that differ between ranks, given as groups or as those of an
    optimizer.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist

    messages = []
    for case in ("lr", "order", "object", "object and clip", "same"):
        net = model()
        params = list(net.parameters())
        given = {
            "lr": {"model_parameters": [{"params": iter(params), "lr": 1e-3 * (1 + rank)}]},
            "order": {"model_parameters": [{"params": params[::-1] if rank else params}]},
            "same": {"model_parameters": ({"params": (p for p in params)} for _ in range(1))},
        }.get(case, {})
        config = CONFIG
        if case.startswith("object"):
            lr = 1e-3 * (1 + rank if case == "object" else 1)
            given = {"optimizer": coat_dist.CoatAdamW(params, lr=torch.tensor(lr) if rank else lr)}
            config = PLAIN
        if case == "object and clip":
            config = {**PLAIN, "gradient_clipping": 1.0 + rank}
        try:
            engine, *_ = deepspeed.initialize(model=net, config=config, **given)
            messages.append(
                [len(group["params"]) for group in engine.optimizer.optimizer.param_groups]
            )
        except coat_dist.CoatConfigError as error:
            messages.append(str(error))
    return messages


def test_initialize_names_groups_that_differ_between_ranks():
    first, second = run_ranks(2, other_groups)
    assert first == second
    lr, order, optimizer, clip, same = first
    start = "ranks were started differently: "
    assert lr == start + "model_parameters.0.lr: 0.001 on rank 0, 0.002 on rank 1"
    assert order.startswith(start + "model_parameters.0.params: [")
    assert optimizer.startswith(start + "optimizer.param_groups.0.lr: 0.001 on rank 0, 0.002")
    assert "gradient_clipping: 1.0 on rank 0, 2.0 on rank 1" in clip
    assert same == [1, 1], "iterators are read once, and split into both kinds"


def built(net, config, **given):
    """An engine of one rank, and the lines that it printed; or the message of what was refused."""
    deepspeed = quiet_deepspeed()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            engine, *_ = deepspeed.initialize(model=net, config=config, **given)
        except ValueError as error:
            return str(error), []
    return engine, [line for line in said.getvalue().splitlines() if line.startswith("coat_dist: ")]


HOSTED = settings()
HOSTED["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}


def start_line(rank, world):
    """What an engine prints, its configuration for other libraries, and the caller's own."""
    given = copy.deepcopy(HOSTED)
    lines = built(torch.nn.Linear(128, 128), Settings.read(settings()))[1]
    engine, more = built(torch.nn.Linear(64, 64), given)
    net = model()
    built(net, Settings.read(PLAIN), optimizer=torch.optim.AdamW(net.parameters()))
    return lines + more, engine.config["zero_optimization"], given


def test_initialize_says_what_runs_and_leaves_the_callers_configuration():
    lines, zero, given = run_ranks(1, start_line)[0]
    flow = "no layers in the FP8 flow"
    assert lines == [
        f"coat_dist: CoatAdamW; {flow}",
        f"coat_dist: CoatAdamW, states in host memory; {flow}",
    ]
    assert given == HOSTED and zero == HOSTED["zero_optimization"]


def reference(rank, world, frozen, bf16):
    net = torch.nn.Linear(64, 64).requires_grad_(not frozen)
    plain, kind = copy.deepcopy(net), torch.bfloat16 if bf16 else torch.float32
    plain.to(kind)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}
    engine, lines = built(net, settings(0, bf16={"enabled": bf16}, scheduler=scheduler))
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
def test_initialize_at_stage_0_builds_an_engine_that_evaluates(frozen, bf16):
    same, lines, messages = run_ranks(1, reference, frozen, bf16)[0]
    assert same and lines == [
        "coat_dist: no optimizer, this engine evaluates; no layers in the FP8 flow"
    ]
    assert len(messages) == 2
    assert all(
        text.startswith("zero_optimization.stage: got 0") and "1, 2 or 3 to train" in text
        for text in messages
    )
