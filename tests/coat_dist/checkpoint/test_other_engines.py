"""A checkpoint of CoatAdamW before an engine of DeepSpeed's alone, in a program that imports coat_dist."""

import pytest
import torch

from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed, train
from tests.support import run_ranks


def loads(rank, world, folder, stage):
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    ours = deepspeed.initialize(model=model(), config=config)[0]
    train(ours, rank, 1)
    ours.save_checkpoint(folder, tag="ours")
    plain = {k: v for k, v in config.items() if k not in ("coat", "optimizer")}
    net = model()
    engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=plain)[0]
    before = [p.detach().clone() for p in net.parameters()]
    said = []
    for tag in (None, "ours"):
        try:
            engine.load_checkpoint(folder, tag=tag)
        except ValueError as error:
            said.append(str(error))
    same = all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    engine.save_checkpoint(folder, tag="theirs")
    return said, same, engine.load_checkpoint(folder)[0], engine.load_checkpoint(folder, "ours", True, False)[0]


def where_tags_or_files_differ(rank, world, folder):
    deepspeed = quiet_deepspeed()
    import coat_dist
    from coat_dist.checkpoint.read.load_checks import load_whole_checkpoints
    from coat_dist.checkpoint.read.native_check import refuse_compressed_moments

    class Derived(coat_dist.CoatAdamW):
        pass

    config = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")} | {"zero_optimization": {"stage": 2}}
    net = model()
    ours = deepspeed.initialize(model=net, optimizer=Derived(net.parameters()), config=config)[0]
    train(ours, rank, 1)
    ours.save_checkpoint(folder, tag="ours")
    said = []
    for whole in (False, True):
        net = model()
        engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)[0]
        if whole:  # as beside a block
            load_whole_checkpoints(engine)
            refuse_compressed_moments(engine)
        engine.save_checkpoint(folder, tag="theirs")
        for tag in (("ours", "theirs")[rank], "ours"):
            try:
                engine.load_checkpoint(folder, tag=tag)
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.filterwarnings("ignore:coat")
def test_every_rank_raises_what_one_finds(tmp_path):
    first, second = run_ranks(2, where_tags_or_files_differ, str(tmp_path))
    assert first == second
    by_name = f"{tmp_path / 'ours'}: optimizer.type: checkpoint has 'CoatAdamW', this run has 'AdamW'"
    assert [said.startswith(by_name) for said in first] == [True, True, False, True]
    assert first[2].startswith("tag: got 'ours' on rank 0; 'theirs' on rank 1")


def test_states_of_coat_adamw_are_refused_by_name(tmp_path):
    for rank_said, same, theirs, weights in run_ranks(2, loads, str(tmp_path), 2):
        start = f"{tmp_path / 'ours'}: optimizer.type: checkpoint has 'CoatAdamW', this run has 'AdamW'\naccepted: "
        assert len(rank_said) == 2 and all(line.startswith(start) for line in rank_said)
        assert same, "nothing has changed"
        assert "theirs" in theirs and "ours" in weights, "DeepSpeed's own loads go on"
