"""A checkpoint of CoatAdamW before an engine of another optimizer, in a program that imports
coat_dist.
"""

import pytest
import torch

from tests.coat_dist.checkpoint.small_saves import told
from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed, train
from tests.support import run_ranks


def loads(rank, world, folder, whole):
    """What plain AdamW says of states of a class derived from CoatAdamW, and of tags that differ
    between ranks.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist
    from coat_dist.checkpoint.read.load_checks import load_whole_checkpoints
    from coat_dist.checkpoint.read.native_check import refuse_compressed_moments

    class Derived(coat_dist.CoatAdamW):
        pass

    config = {k: v for k, v in CONFIG.items() if k not in ("coat", "optimizer")} | {
        "zero_optimization": {"stage": 2}
    }
    net = model()
    ours = deepspeed.initialize(model=net, optimizer=Derived(net.parameters()), config=config)[0]
    train(ours, rank, 1)
    ours.save_checkpoint(folder, tag="ours")
    net = model()
    engine = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config
    )[0]
    if whole:  # as beside a block
        load_whole_checkpoints(engine)
        refuse_compressed_moments(engine)
    before = [p.detach().clone() for p in net.parameters()]
    said = [told(engine.load_checkpoint, folder), told(engine.load_checkpoint, folder, tag="ours")]
    same = all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    engine.save_checkpoint(folder, tag="theirs")
    said.append(told(engine.load_checkpoint, folder, tag=("ours", "theirs")[rank]))
    return (
        said,
        same,
        engine.load_checkpoint(folder)[0],
        engine.load_checkpoint(folder, "ours", True, False)[0],
    )


@pytest.mark.filterwarnings("ignore:coat")
@pytest.mark.parametrize("whole", [False, True])
def test_states_of_coat_adamw_are_refused_by_key_on_every_rank(tmp_path, whole):
    key = (
        f"{tmp_path}/ours: optimizer.type: checkpoint has 'CoatAdamW', this run has "
        "'AdamW'\naccepted: "
    )
    for said, same, theirs, weights in run_ranks(2, loads, str(tmp_path), whole):
        assert all(key in text for text in said[:2]) and same, said
        assert ("tag: got 'ours' on rank 0, 'theirs' on rank 1" if whole else key) in said[2]
        assert "theirs" in theirs and "ours" in weights, "what fits is loaded"
