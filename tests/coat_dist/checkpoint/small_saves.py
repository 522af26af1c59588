"""Engines for tests of saving and loading: what they hold, what a folder holds, and what a call
says.
"""

from pathlib import Path

import torch

from coat_dist.checkpoint.manifest import CheckpointError
from tests.coat_dist.checkpoint.universal_runs import WithBuffer
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.coat_dist.deepspeed.zero_runs import drawn, snapshot
from tests.support import equal

ONE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def small(config, net=None):
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    return coat_dist.initialize(model=net or torch.nn.Linear(128, 128), config={**ONE, **config})[0]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 128, dtype=dtype)).float().square().mean())
    engine.step()


def weights(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


def listed(folder):
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith("zero_to_"))


def told(function, *args, **kwargs):
    """The error's type and text, or what the call returned."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
    import coat_dist

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}},
        "checkpoint": {"load_universal": universal},
        **settings,
        **more,
    }
    net = drawn(model, config)
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    return coat_dist.initialize(model=net, config=config, mpu=mpu)[0]


def everything(engine):
    """All that loading may change."""
    extra = [m.value for m in engine.module.modules() if isinstance(m, Extra)]
    return (
        snapshot(engine),
        [b.clone() for b in engine.module.buffers()],
        repr(extra),
        (engine.global_steps, engine.global_samples, engine.lr_scheduler.state_dict()),
    )


def on_rank_0(rank, do):
    torch.distributed.barrier()
    if rank == 0:
        do()
    torch.distributed.barrier()


def refused(engine, **arguments):
    """The error of loading, a ``CheckpointError`` that changes nothing."""
    before = everything(engine)
    try:
        engine.load_checkpoint(**arguments)
        return "loaded"
    except CheckpointError as error:
        after = everything(engine)
        assert not changes(before[0], after[0]), changes(before[0], after[0])
        assert equal(before[1], after[1]) and before[2:] == after[2:]
        return str(error)
