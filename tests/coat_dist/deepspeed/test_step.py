"""ZeRO without the passes that CoatAdamW makes unnecessary: the same bits, and the same skipped steps."""

import shutil
from pathlib import Path

import pytest
import torch

from coat_dist.deepspeed import reviewed
from tests.support import run_ranks


def train(rank, world, stage, clip, fused):
    import deepspeed

    from coat_dist import CoatAdamW, initialize
    from coat_dist.deepspeed import step as passes
    from coat_dist.optim import adamw

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    copied = set()
    original_steps = (adamw.adamw_steps, adamw.adamw_fp32_steps)
    adamw.adamw_steps = lambda many, *a: (copied.add(many[0].copy is not None), original_steps[0](many, *a))
    adamw.adamw_fp32_steps = lambda many, *a: (copied.add(many[0].copy is not None), original_steps[1](many, *a))
    if not fused:
        passes.may_leave_out_passes = lambda zero: False
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.GELU(), torch.nn.Linear(160, 96))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-2}},
        "coat": {"activation": {"enabled": False}},
    } | ({"data_types": {"grad_accum_dtype": "fp32"}} if stage == 2 else {})
    built, *_ = initialize(model=net, config=config)
    assert isinstance(built.basic_optimizer, CoatAdamW)
    replaced = [name for name in built.coat_attached if name.startswith("step: ")]
    generator = torch.Generator().manual_seed(rank)
    norms, applied = [], []
    for step in range(12):
        x = torch.randn(2, 96, generator=generator).bfloat16()
        loss = (built(x).float() - x.float()).square().sum()
        if step in (6, 7) and rank == 1:
            loss = loss * float("nan")
        built.backward(loss)
        boundary = built.is_gradient_accumulation_boundary()
        built.step()
        if boundary:
            norms.append(float(built.get_global_grad_norm()))
            applied.append(built.was_step_applied())
    states = [s[k] for s in built.optimizer.optimizer.state.values() for k in sorted(s)]
    weights = [p.detach().clone() for p in net.parameters()]
    if stage < 3:
        masters = built.optimizer.single_partition_of_fp32_groups
        assert all(m.dtype == torch.float32 and m.grad is None for m in masters), "restored, and without a gradient"
        assert all(g["params"][0] is m for g, m in zip(built.basic_optimizer.param_groups, masters, strict=True))
        weights += [m.detach().clone() for m in masters]
        assert not built.basic_optimizer.copies and copied == {fused}
    return replaced, norms, applied, [t for t in states if isinstance(t, torch.Tensor)], weights


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e6])
@pytest.mark.parametrize("stage", [1, 2])
def test_fused_step_gives_the_same_bits(stage, clip):
    for fused, plain in zip(
        run_ranks(2, train, stage, clip, True), run_ranks(2, train, stage, clip, False), strict=True
    ):
        assert len(fused[0]) == 3 and plain[0] == []
        assert fused[2] == plain[2] and fused[2].count(False) == 1, "the step with NaN gradients is skipped"
        assert [n for n, ok in zip(fused[1], fused[2], strict=True) if ok] == [
            n for n, ok in zip(plain[1], plain[2], strict=True) if ok
        ]
        for a, b in zip(fused[3] + fused[4], plain[3] + plain[4], strict=True):
            assert torch.equal(a, b)


def test_stage_three_is_left_alone():
    assert run_ranks(2, train, 3, 1.0, True)[0][0] == []


def test_every_deepspeed_that_is_fused_is_the_one_tested_here(monkeypatch, tmp_path):
    """What these tests do not run is no version that was read: another installed DeepSpeed fails here until it is."""
    import deepspeed

    assert {deepspeed.__version__: reviewed.digest()} == reviewed.READ
    assert reviewed.was_read.__wrapped__()
    for name in reviewed._FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(deepspeed.__file__).parent / name, tmp_path / name)
    monkeypatch.setattr(deepspeed, "__file__", str(tmp_path / "__init__.py"))
    assert reviewed.was_read.__wrapped__()
    for name in reviewed._FILES:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n")
        assert not reviewed.was_read.__wrapped__(), f"a patched {name} has the same version number"
        (tmp_path / name).write_text(text)
    (tmp_path / name).unlink()
    assert not reviewed.was_read.__wrapped__()
