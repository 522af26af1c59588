"""Loading: what a run wrote, it loads; what does not fit is refused before anything has changed."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.coat_dist.checkpoint.universal_runs import WithBuffer
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


class Extra(torch.nn.Module):
    """Keeps a value in the model's state dict that is no parameter and no buffer."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


class Stateful(WithBuffer):
    def __init__(self):
        super().__init__()
        self.amaxes = Extra(torch.zeros(4))
        self.counts = Extra({"seen": 0, "names": []})
        self.nothing = Extra(None)


def build(settings, model=Stateful, frozen=("frozen",), universal=False, mpu=None, **more):
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}},
        "checkpoint": {"load_universal": universal},
        **settings,
        **more,
    }
    with deepspeed.zero.Init(
        config_dict_or_path=config, enabled=settings["zero_optimization"]["stage"] == 3
    ):
        net = model()
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    return coat_dist.initialize(model=net, config=config, mpu=mpu)[0]


def weights(engine):
    """The model's own, whole, and masters in fp32 of what is trained."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(named.values()), enabled=hasattr(named["scale"], "ds_id")
    ):
        held = {n: p.detach().clone() for n, p in named.items()}
    return held, {
        n: safe_get_full_fp32_param(p).clone() for n, p in named.items() if p.requires_grad
    }


def everything(engine):
    """All that loading may change."""
    held = [
        v
        for m in (engine.module.amaxes, engine.module.counts)
        if isinstance(m, Extra)
        for v in [m.value]
    ]
    return (
        snapshot(engine),
        [b.clone() for b in engine.module.buffers()],
        repr(held),
        (engine.global_steps, engine.global_samples, engine.lr_scheduler.state_dict()),
    )


def on_rank_0(rank, do):
    torch.distributed.barrier()
    if rank == 0:
        do()
    torch.distributed.barrier()


def refused(engine, **arguments):
    """The error of loading, and what it has changed."""
    before = everything(engine)
    try:
        engine.load_checkpoint(**arguments)
        return "loaded"
    except ValueError as error:
        after = everything(engine)
        assert not changes(before[0], after[0]), changes(before[0], after[0])
        assert all(map(torch.equal, before[1], after[1])) and before[2:] == after[2:]
        return str(error)


def frozen_now_and_then(rank, world, settings, folder):
    """A universal checkpoint loaded by models that train less, more and other things."""
    from coat_dist import convert_to_universal

    engine = build(settings)
    engine.module.amaxes.value, engine.module.counts.value = (
        torch.arange(4.0),
        {"seen": 7, "names": ["a"]},
    )
    engine.module.seen += torch.tensor([1, 2, 3])
    run(engine, rank, 0, 3)
    held, masters = weights(engine)
    engine.save_checkpoint(folder, tag="plain")
    engine.destroy()
    if rank == 0:
        convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    torch.distributed.barrier()
    arguments, wrong = {"load_dir": Path(folder), "tag": "universal"}, []

    engine = build(settings, frozen=("frozen", "up", "norm.weight"), universal=True)
    run(engine, rank, 5, 6)
    engine.load_checkpoint(**arguments)
    got, trained = weights(engine)
    wrong += [f"frozen now: {n}" for n, x in got.items() if not torch.equal(x, held[n])]
    wrong += [
        f"frozen now: {n}"
        for n, x in got.items()
        if n in masters and not torch.equal(x, masters[n].bfloat16())
    ]
    wrong += [
        f"frozen now: master {n}" for n, x in trained.items() if not torch.equal(x, masters[n])
    ]
    wrong += (
        []
        if len(trained) == 4 and torch.equal(engine.module.seen, torch.tensor([1, 2, 3]))
        else ["buffer"]
    )
    wrong += [] if torch.equal(engine.module.amaxes.value, torch.arange(4.0)) else ["amaxes"]
    wrong += [] if engine.module.counts.value == {"seen": 7, "names": ["a"]} else ["counts"]
    wrong += [] if all(0 < x < 10 for x in run(engine, rank, 6, 7)) else ["loss"]
    engine.destroy()

    engine = build(settings, frozen=("nothing",), universal=True)
    run(engine, rank, 5, 6)
    messages = [refused(engine, **arguments)]
    engine.load_checkpoint(**arguments, load_optimizer_states=False)
    got, trained = weights(engine)
    wrong += [f"frozen then: {n}" for n, x in got.items() if not torch.equal(x, held[n])]
    masters |= {n: x.float() for n, x in held.items() if n not in masters}
    wrong += [
        f"frozen then: master {n}" for n, x in trained.items() if not torch.equal(x, masters[n])
    ]
    wrong += [] if len(trained) == len(held) else ["frozen then: not all are trained"]
    engine.destroy()
    return wrong, messages


@pytest.mark.parametrize("case", ["zero-1", "zero-1, BF16_Optimizer", "zero-3"])
def test_what_was_trained_and_is_frozen_and_the_other_way_round(case, tmp_path):
    for wrong, (message,) in run_ranks(2, frozen_now_and_then, CASES[case], str(tmp_path)):
        assert wrong == []
        assert "frozen.weight, frozen.bias had no moments when this was saved" in message or (
            "frozen." in message
            and "load_optimizer_states=False, which loads weights alone" in message
        )


class Fewer(WithBuffer):
    """Without extra states, and with a buffer that was not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("newer", torch.ones(2))
        self.amaxes = self.counts = None


FOREIGN = "up.weight/exp_avg_sq.pt"
SPOILT = (
    *("rest.pt", "optimizer_state.pt", "extra_state.pt", "up.weight/step.pt", "up.bias/exp_avg.pt"),
    *("down.weight/codes.coat", FOREIGN),
)


def late_refusals(rank, world, settings, folder):
    """A file spoilt on disk, or a model of other names: whatever it is, found first and by all."""
    from coat_dist import convert_to_universal

    engine = build(settings)
    engine.module.amaxes.value = torch.arange(4.0)
    run(engine, rank, 0, 2)
    engine.save_checkpoint(folder, tag="plain")
    if rank == 0:
        convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    engine.destroy()
    engine = build(settings, universal=True)
    run(engine, rank, 5, 6)
    zero, messages = Path(folder) / "universal" / "zero", {}
    other = (zero / "down.weight" / "fp32.pt").read_bytes()
    for name in SPOILT:
        whole = (zero / name).read_bytes()
        spoilt = other if name == FOREIGN else whole[: len(whole) // 2]
        on_rank_0(rank, lambda name=name, spoilt=spoilt: (zero / name).write_bytes(spoilt))
        messages[name] = refused(engine, load_dir=folder, tag="universal")
        on_rank_0(rank, lambda name=name, whole=whole: (zero / name).write_bytes(whole))
    step = torch.load(zero / "norm.bias" / "step.pt")
    on_rank_0(rank, lambda: torch.save(step + 1, zero / "norm.bias" / "step.pt"))
    messages["steps"] = refused(engine, load_dir=folder, tag="universal")
    on_rank_0(rank, lambda: torch.save(step, zero / "norm.bias" / "step.pt"))
    engine.destroy()
    engine = build(settings, model=Fewer, universal=True)
    run(engine, rank, 5, 6)
    messages["fewer"] = refused(engine, load_dir=folder, tag="universal")
    engine.load_checkpoint(folder, tag="universal", load_module_strict=False)
    return messages, engine.global_steps


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_every_refusal_comes_before_any_change(case, tmp_path):
    (messages, steps), (others, _) = run_ranks(2, late_refusals, CASES[case], str(tmp_path))
    shapes = "got shape [61, 129], accepted: one that gives [129, 47] on tensor-"
    for name in SPOILT:
        text = f"{name}: {shapes if name == FOREIGN else 'cannot be read'}"
        assert text in messages[name] and text in others[name], name
    assert "got steps [2, 3] of" in messages["steps"] and messages["steps"] == others["steps"]
    extra, missing = "got amaxes._extra_state, counts._extra_state", "missing newer, accepted: "
    assert (
        extra in messages["fewer"]
        and missing in messages["fewer"]
        and "load_module_strict" in messages["fewer"]
    )
    assert messages["fewer"] == others["fewer"] and steps == 2


def test_a_tensor_parallel_ranks_part_of_what_was_frozen(tmp_path):
    """Gate and up of a frozen gated MLP, joined by [gate; gate; up; up] of two ranks; extra
    states of each rank.
    """
    from coat_dist.checkpoint.universal.folder import UniversalFolder

    zero = tmp_path / "zero"
    zero.mkdir()
    torch.save({}, zero / "optimizer_state.pt")
    entry = {"param": torch.arange(8.0).view(8, 1), "cat_dim": 0, "param_n_sub_params": 2}
    torch.save({"fc1.weight": entry}, zero / "rest.pt")
    torch.save(
        {"a._extra_state": [{"x": 1}, {"x": 2}], "b._extra_state": [3, 3]}, zero / "extra_state.pt"
    )
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        source = UniversalFolder(tmp_path, (rank, 2))
        assert source.weights("fc1.weight", torch.Size([4, 1])).flatten().tolist() == rows
        assert source.extra_state("a._extra_state") == {"x": rank + 1}
    one = UniversalFolder(tmp_path, (0, 1))
    assert one.extra_state("b._extra_state") == 3
    with pytest.raises(
        ValueError, match="a._extra_state: got one for each of 2 tensor-parallel ranks, accepted"
    ):
        one.extra_state("a._extra_state")


def natively(rank, world, folder):
    """Save, train on, load what was saved with sequence parallelism; whatever is not as it was."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    wrong = []
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    for case in ("zero-1", "zero-2"):
        engine = build(CASES[case], mpu=parallel_state_sp, sequence_parallel_size=2)
        run(engine, rank, 0, 2)
        before = snapshot(engine)
        engine.save_checkpoint(f"{folder}/{case}", tag="x")
        run(engine, rank, 2, 3)
        path, _ = engine.load_checkpoint(Path(folder, case), tag="x")
        wrong += changes(before, snapshot(engine)) + ["nothing loaded"] * (path is None)
        engine.destroy()
    return wrong


def test_a_run_with_sequence_parallelism_loads_what_it_wrote(tmp_path):
    assert run_ranks(2, natively, str(tmp_path)) == [[], []]


def missing_file(rank, world, folder):
    engine = build(CASES["zero-2"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="x")
    gone = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    on_rank_0(rank, lambda: [os.remove(f"{folder}/x/{name}") for name in (gone, "manifest.json")])
    return refused(engine, load_dir=folder, tag="x")


def test_a_missing_file_is_named_on_every_rank_without_a_manifest(tmp_path):
    for said in run_ranks(2, missing_file, str(tmp_path)):
        assert (
            "x/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: missing\naccepted: what wrote it"
            in said
        )


def saved_on_two(rank, world, settings, folder):
    engine = build(settings)
    run(engine, rank, 0, 2)
    engine.save_checkpoint(folder, tag="two")
    trained = snapshot(engine)
    engine.load_checkpoint(folder, tag="two")
    return changes(trained, snapshot(engine))


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_deepspeeds_own_converter_names_ours_and_ends(case, tmp_path):
    from deepspeed.checkpoint import ds_to_universal

    assert run_ranks(2, saved_on_two, CASES[case], str(tmp_path)) == [[], []]
    given = [
        "--input_folder",
        f"{tmp_path}/two",
        "--output_folder",
        f"{tmp_path}/out",
        "--inject_missing_state",
    ]
    with mock.patch("sys.argv", ["ds_to_universal", *given]):
        arguments = ds_to_universal.parse_arguments()
    with pytest.raises(
        KeyError, match="exp_avg: CoatAdamW's moments are .* convert .* launch/to_universal.py"
    ):
        ds_to_universal.main(arguments)
