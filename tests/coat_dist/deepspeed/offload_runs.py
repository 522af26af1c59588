"""Engines with states in host memory and without, on the CPU or on a GPU: what they hold after
each step.
"""

import copy

import torch
from torch.utils._pytree import tree_map

from tests.coat_dist.checkpoint.universal_runs import contents as contents_of
from tests.coat_dist.deepspeed.remainders import Given, build
from tests.support import equal

OFFLOAD = {"device": "cpu", "pin_memory": True}
CASES = {
    "zero-1": {"stage": 1},
    "zero-2": {"stage": 2},
    "zero-3": {"stage": 3, "sub_group_size": 5000},
}


def engine_of(zero, offloaded, **more):
    from coat_dist.optim import host

    host.DEVICES, host.CHUNK = ("cpu", "cuda"), 16 * 128
    settings = {
        "zero_optimization": copy.deepcopy(zero)
        | ({"offload_optimizer": OFFLOAD} if offloaded else {})
    }
    engine = build(settings, model=Given, gradient_clipping=30.0, **more)
    assert engine.config["zero_optimization"].get("offload_optimizer") == (
        OFFLOAD if offloaded else None
    )
    assert (
        not engine.zero_use_cpu_optimizer()
        and getattr(engine.optimizer, "cpu_offload", False) is False
    )
    places = {g["state_device"] for g in engine.optimizer.optimizer.param_groups}
    assert places == {"cpu" if offloaded else "parameter"}
    return engine


def train(engine, rank, first, last):
    """Given gradients, NaN in every fourth step, which ZeRO leaves out; all contents after each
    step.
    """
    shapes, found = [getattr(p, "ds_shape", p.shape) for p in engine.module.parameters()], []
    for step in range(first, last):
        g = torch.Generator().manual_seed(100 * step + rank)
        given = [(torch.randn(s, generator=g) ** 3).bfloat16().to(engine.device) for s in shapes]
        loss = engine(given) * (torch.nan if step % 4 == 3 else 1.0)
        engine.backward(loss)
        engine.step()
        found.append(contents(engine))
    return found


def contents(engine):
    found = contents_of(engine)
    return {k: tree_map(torch.Tensor.cpu, found[k]) for k in ("fp32", "first", "second", "weights")}


def trajectory(rank, world, zero, offloaded, folder):
    """Ten steps, a checkpoint after five; the same checkpoint loaded into the other kind, and
    its five steps.
    """
    from coat_dist.optim import host

    engine = engine_of(zero, offloaded)
    found = train(engine, rank, 0, 5)
    engine.save_checkpoint(folder, tag="five")
    found += train(engine, rank, 5, 10)
    assert bool(host._lanes) == offloaded
    other = engine_of(zero, not offloaded)
    other.load_checkpoint(folder, tag="five")
    return found, train(other, rank, 5, 10)


def universal(rank, world, zero, offloaded, folder):
    """The contents that a universal checkpoint has, loaded, and those of more steps."""
    engine = engine_of(zero, offloaded, universal=True)
    engine.load_checkpoint(folder, tag="universal")
    return [contents(engine), *train(engine, rank, 5, 8)]


def assert_same(one, other):
    assert equal(one, other)


def moved(rank, world, zero, offloaded, remainder, include):
    """Contents of ten steps; in `include`'s run everything is moved away and back between all
    steps.
    """
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    from coat_dist.deepspeed.step.master_weights import pairs_of_copies

    engine, found = engine_of(zero, offloaded, remainder=remainder), []
    kinds = None if include == "all" else [OffloadStateTypeEnum(x) for x in include.split()]
    allocated = torch.cuda.memory_allocated if torch.cuda.is_available() else int
    for step in range(6):
        found += train(engine, rank, step, step + 1)
        if include:
            before, weights = (
                allocated(),
                sum(flat.numel() for flat, _ in pairs_of_copies(engine.optimizer)),
            )
            (engine, engine.optimizer)[step % 2].offload_states(kinds)
            # Most parameters have codes, and remainders where weights are masters.
            if torch.cuda.is_available():
                named = {"all": (2 if remainder else 6) * (not offloaded) + 2, "lp_params": 2}
                assert before - allocated() >= 0.9 * weights * named.get(
                    include, 2 * (not offloaded)
                )
            else:  # where accessors can reduce what is on the CPU
                assert_same(found[-1:], [contents(engine)])
            (engine, engine.optimizer)[step % 2].reload_states()
            assert not engine.optimizer.offloaded_states
            if remainder:
                assert all(
                    a.data_ptr() == b.data_ptr() for a, b in pairs_of_copies(engine.optimizer)
                )
    return found
