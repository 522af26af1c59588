"""ZeRO without the passes that CoatAdamW makes unnecessary: the same bits, and the same skipped
steps.
"""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coat_dist.deepspeed.step import step as reviewed
from tests.coat_dist.deepspeed.small_engine import FP32, quiet_deepspeed, settings
from tests.support import equal, run_ranks


def train(rank, world, stage, clip, fused):
    from coat_dist import CoatAdamW, initialize
    from coat_dist.deepspeed.step import step as passes
    from coat_dist.optim import adamw

    quiet_deepspeed()
    copied = set()

    def watched(original):
        return lambda many, *a: (copied.add(many[0].copy is not None), original(many, *a))

    for name in ("adamw_steps", "adamw_fp32_steps"):
        setattr(adamw, name, watched(getattr(adamw, name)))
    if not fused:
        passes.may_leave_out_passes = lambda zero: False
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.GELU(), torch.nn.Linear(160, 96))
    config = settings(stage, 1e-2, gradient_accumulation_steps=2, gradient_clipping=clip)
    built, *_ = initialize(model=net, config=config | FP32 if stage == 2 else config)
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
        assert all(m.dtype == torch.float32 and m.grad is None for m in masters), (
            "restored, and without a gradient"
        )
        assert all(
            g["params"][0] is m
            for g, m in zip(built.basic_optimizer.param_groups, masters, strict=True)
        )
        weights += [m.detach().clone() for m in masters]
        assert not built.basic_optimizer.copies and copied == {fused}
    return replaced, norms, applied, [t for t in states if isinstance(t, torch.Tensor)], weights


CASES = [(1, 0.0, 2), (1, 1e-3, 3), (2, 1e-3, 2), (2, 1e6, 2), (2, 0.0, 3)]


@pytest.mark.parametrize(("stage", "clip", "world"), CASES)
def test_step_without_deepspeeds_passes_gives_the_same_bits(stage, clip, world):
    for fused, plain in zip(
        run_ranks(world, train, stage, clip, True),
        run_ranks(world, train, stage, clip, False),
        strict=True,
    ):
        assert len(fused[0]) == 6 and plain[0] == []
        assert fused[2] == plain[2] and fused[2].count(False) == 1, (
            "the step with NaN gradients is skipped"
        )
        assert [n for n, ok in zip(fused[1], fused[2], strict=True) if ok] == [
            n for n, ok in zip(plain[1], plain[2], strict=True) if ok
        ]
        assert equal(fused[3] + fused[4], plain[3] + plain[4])


def test_in_a_row_finds_adjacent_slices():
    from coat_dist.deepspeed.step.step_gradients import _in_a_row

    memory = torch.arange(64, dtype=torch.bfloat16)
    whole = _in_a_row([memory[3:20], memory[20:21], memory[21:60]])
    assert (
        whole is not None
        and whole.data_ptr() == memory[3:].data_ptr()
        and torch.equal(whole, memory[3:60])
    )
    for apart in (
        [memory[3:20], memory[21:60]],
        [memory[20:30], memory[3:20]],
        [memory[:8], memory[8:].view(torch.int16)],
        [memory[:8], memory[8:40].view(4, 8).t()],
    ):
        assert _in_a_row(apart) is None


def test_add_without_a_copy_overwrites_zeros_once():
    """Zeros of a step before are forgotten where a new partition lies in their memory."""
    from coat_dist.deepspeed.step.step_gradients import add_without_a_copy, build_zeros

    memory = torch.zeros(100)

    class Bare(SimpleNamespace):
        def _build_compact_grad_partition_buffer(self, group_idx):
            return SimpleNamespace(flat_partition=memory[10 * group_idx :].zero_())

        def build(self, group_idx):
            self.averaged_gradients[group_idx] = self._build_compact_grad_partition_buffer(
                group_idx
            )

    zero = Bare(micro_step_id=0, averaged_gradients={})
    zero._add_to_grad_partition_buffer = partial(add_without_a_copy, zero)
    zero._build_compact_grad_partition_buffer = partial(build_zeros, zero)
    one, two = torch.full((5,), 1.5).bfloat16(), torch.full((5,), 2.0).bfloat16()
    zero.build(2)
    zero._add_to_grad_partition_buffer(None, one)
    memory[20:25] = 100.0  # shows what is copied, and what is added
    for source in (one, two):
        zero._add_to_grad_partition_buffer(memory[20:25], source)
    assert memory[20:25].eq(3.5).all()
    zero.micro_step_id = 1
    memory[30:35] = 100.0
    zero._add_to_grad_partition_buffer(memory[30:35], one)
    assert memory[30:35].eq(101.5).all(), "a program may have written it between two micro-batches"
    zero.micro_step_id = 0  # another step
    zero.averaged_gradients.clear()
    memory[40:45] = 1.0
    zero._add_to_grad_partition_buffer(memory[40:45], one)
    assert memory[40:45].eq(2.5).all(), "in the memory of zeros that are gone"
    zero.build(1)
    for source in (one, two, two):
        zero._add_to_grad_partition_buffer(memory[30:35], source)
    assert memory[30:35].eq(5.5).all()


def test_is_verified_build_compares_file_hashes(monkeypatch, tmp_path, caplog):
    """What these tests do not run is no version that was read: another installed DeepSpeed fails
    here until it is.
    """
    import deepspeed

    assert {deepspeed.__version__: reviewed.build_hash()} == reviewed.VERIFIED
    assert reviewed.is_verified_build.__wrapped__()
    for name in reviewed._FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(deepspeed.__file__).parent / name, tmp_path / name)
    monkeypatch.setattr(deepspeed, "__file__", str(tmp_path / "__init__.py"))
    assert reviewed.is_verified_build.__wrapped__()
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    assert not reviewed.is_verified_build.__wrapped__(), (
        f"a patched {name} has the same version number"
    )
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "docs/support.md" in record.message
