"""bfloat16 and remainder through DeepSpeed: the bits of fp32 master weights, in one copy, saved
and loaded exactly.
"""

import pytest
import torch

import coat_dist
from coat_dist.reference.master import split
from tests.coat_dist.checkpoint.universal_runs import contents as contents_of
from tests.coat_dist.deepspeed.remainders import Given, build
from tests.coat_dist.deepspeed.zero_runs import run
from tests.support import run_ranks

CASES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-2": {"zero_optimization": {"stage": 2}},
    "zero-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero-3, sub-groups, persistent": {"zero_optimization": {"stage": 3, "sub_group_size": 5000}},
}


def trajectory(rank, world, settings, remainder, clip):
    """Master weights, weights and moments after each of ten steps on given gradients."""
    engine = build(
        settings, remainder, model=Given, gradient_clipping=clip, gradient_accumulation_steps=2
    )
    found = []
    shapes = [getattr(p, "ds_shape", p.shape) for p in engine.module.parameters()]
    for step in range(20):
        g = torch.Generator().manual_seed(100 * step + rank)
        given = [(torch.randn(s, generator=g) ** 3).bfloat16() for s in shapes]
        engine.backward(engine(given))
        engine.step()
        if step % 2:
            found.append(contents_of(engine))
    return found


@pytest.mark.parametrize(
    ("case", "clip"),
    [("zero-1", 0.0), ("zero-2", 30.0), ("zero-3", 0.0), ("zero-3, sub-groups, persistent", 0.0)],
)
def test_remainders_step_with_the_bits_of_fp32_masters(case, clip):
    """Where ZeRO clips, it is CoatAdamW that multiplies (ZeRO-1, 2); ZeRO-3 would round clipped
    gradients to bf16.
    """
    ours = run_ranks(2, trajectory, CASES[case], True, clip)
    fp32 = run_ranks(2, trajectory, CASES[case], False, clip)
    masters = ours[0][0]["fp32"].values()
    assert any((x.view(torch.int32) % (1 << 16)).any() for x in masters)
    for rank in range(2):
        for mine, theirs in zip(ours[rank], fp32[rank], strict=True):
            for n, x in mine["fp32"].items():
                assert torch.equal(x.view(torch.int32), theirs["fp32"][n].view(torch.int32)), n
                weight = mine["weights"][n]
                assert weight.dtype == torch.bfloat16 and torch.equal(weight, split(x)[0]), n
                for which in ("first", "second"):
                    assert torch.equal(mine[which][n], theirs[which][n]), (n, which)


def accessors(rank, world, settings):
    """A master weight that is set has those bits, the weight their upper half, and no other
    parameter changes.
    """
    from deepspeed.utils import (
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_local_fp32_param,
    )

    engine = build(settings)
    named = dict(engine.module.named_parameters())
    for first, last in ((0, 2), (2, 3)):
        wanted = contents_of(engine)["fp32"]
        for name in ("up.weight", "norm.weight", "scale"):
            value = torch.randn(wanted[name].shape, generator=torch.Generator().manual_seed(3))
            value.view(-1)[0] = -0.0
            safe_set_full_fp32_param(named[name], value)
            wanted[name] = value
            after = contents_of(engine)
            for n, x in after["fp32"].items():
                assert torch.equal(x.view(torch.int32), wanted[n].view(torch.int32)), (name, n)
            assert torch.equal(after["weights"][name], split(value)[0]), name
        assert all(0 < x < 20 for x in run(engine, rank, first, last))
    p = named["up.weight"]
    if hasattr(p, "ds_id"):
        value = torch.randn(safe_get_local_fp32_param(p).shape)
        safe_set_local_fp32_param(p, value)
        assert torch.equal(safe_get_local_fp32_param(p), value)


@pytest.mark.parametrize("case", ["zero-2", "zero-3", "zero-3, sub-groups, persistent"])
def test_deepspeeds_accessors_give_and_set_fp32_masters(case):
    run_ranks(2, accessors, CASES[case])


def weights_only(rank, world, settings, folder):
    """Weights loaded without optimizer states are as saved. DeepSpeed's own files hold bfloat16
    weights, so nothing of older remainders is left; a universal checkpoint holds masters.

    ``load_module_only`` leaves ZeRO-3's weights as they are in DeepSpeed 0.19.8, whatever the
    optimizer.
    """
    engine = build(settings)
    run(engine, rank, 0, 3)
    engine.save_checkpoint(folder, tag="plain")
    if rank == 0:
        coat_dist.convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    torch.distributed.barrier()
    saved = contents_of(engine)
    rounded = {n: x.float() for n, x in saved["weights"].items()}
    ways = [("plain", {"load_optimizer_states": False}, rounded)]
    if not hasattr(engine.module.scale, "ds_id"):
        ways.append(("plain", {"load_module_only": True}, rounded))
    ways.append(("universal", {"load_optimizer_states": False}, saved["fp32"]))
    for tag, more, wanted in ways:
        engine._config.load_universal_checkpoint = tag == "universal"
        run(engine, rank, 3, 5)
        engine.load_checkpoint(folder, tag=tag, **more)
        for n, x in contents_of(engine)["fp32"].items():
            assert torch.equal(x, wanted[n]), (tag, more, n)


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_load_checkpoint_without_optimizer_states_resets_remainders(case, tmp_path):
    run_ranks(2, weights_only, CASES[case], str(tmp_path))
