"""A gradient that is not finite, under every ZeRO optimizer: the step is skipped where plain
DeepSpeed skips it.
"""

import pytest
import torch

from coat_dist.deepspeed.step import step as reviewed
from tests.coat_dist.deepspeed.small_engine import FP32, quiet_deepspeed, settings
from tests.support import equal, run_ranks

STEPS, BAD = 5, 2
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
FP16["bf16"] = {"enabled": False}
CASES = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-2": FP32,
    "zero-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "bf16_optimizer": {"zero_optimization": {"stage": 1}} | FP32,
    "zero-1, fp16": FP16 | {"zero_optimization": {"stage": 1}},
    "zero-2, fp16": FP16,
    "zero-3, fp16": FP16 | {"zero_optimization": {"stage": 3}},
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(48, 160), torch.nn.Linear(160, 48)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def poison(param, value, active):
    """One element of a parameter's gradient becomes ``value`` while ``active`` holds something."""

    def hook(grad):
        if not active:
            return grad
        grad = grad.clone()
        grad.view(-1)[7] = value
        return grad

    param.register_hook(hook)


def bits(tensors):
    """Copies in which NaN equals NaN."""
    return [
        t.detach().clone().view(torch.uint8)
        for t in tensors
        if isinstance(t, torch.Tensor) and t.dim()
    ]


def contents(engine):
    """Every tensor of the step: weights as the module has them, partitions and states."""
    inner = engine.optimizer.optimizer
    held = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
    ):
        held += getattr(engine.optimizer, name, [])
    steps = [int(s["step"]) for s in inner.state.values() if "step" in s]
    return bits(held + [s[k] for s in inner.state.values() for k in sorted(s)]), steps


def follow(engine, rank, active):
    """What each step said of itself, and whether it left everything as it was."""
    generator = torch.Generator().manual_seed(rank)
    dtype = next(engine.module.parameters()).dtype
    said = []
    for step in range(STEPS):
        x = torch.randn(2, 48, generator=generator).to(dtype)
        active[:] = [True] if step == BAD and rank == 1 else []
        before = contents(engine)
        engine.backward((engine(x).float() - x.float()).square().mean())
        engine.step()
        after = contents(engine)
        unchanged = before[1] == after[1] and equal(before[0], after[0])
        overflow = getattr(engine.optimizer, "overflow", None)
        said.append((engine.was_step_applied(), overflow, engine.skipped_steps, unchanged))
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return said, finite


def both(rank, case, value, read):
    """The same steps with CoatAdamW and with torch's AdamW under plain DeepSpeed."""
    import deepspeed

    import coat_dist

    found, config = [], settings(lr=1e-2, gradient_clipping=1.0) | CASES[case]
    plain = {k: v for k, v in config.items() if k not in ("optimizer", "coat")}
    plain["zero_allow_untested_optimizer"] = True
    for ours in (True, False):
        net, active = Net(), []
        poison(net.up.weight, value, active)
        if ours:
            engine, *_ = coat_dist.initialize(model=net, config=config)
        else:
            adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
            engine, *_ = deepspeed.initialize(model=net, optimizer=adamw, config=plain)
        found.append(follow(engine, rank, active))
        replaced = "unscale_and_clip_grads" in vars(engine.optimizer)
        assert replaced == (ours and read and case.split(",")[0] in ("zero-1", "zero-2")), (
            "fused where it was read"
        )
        engine.destroy()
    return found


def run(rank, world, cases, value, read):
    accelerator = quiet_deepspeed().accelerator.get_accelerator()
    # DeepSpeed refuses it on a CPU, where torch has it.
    accelerator.is_fp16_supported = lambda: True
    if not read:
        reviewed.VERIFIED.clear()
    for case in cases:
        (ours, finite), (plain, plain_finite) = both(rank, case, value, read)
        assert finite and plain_finite, case
        assert [s[:3] for s in ours] == [s[:3] for s in plain], case
        check_skipped(ours, case)


def check_skipped(said, case):
    """The bad step, and no other one, was skipped and left everything as it was."""
    assert [s[0] for s in said] == [i != BAD for i in range(STEPS)], case
    assert said[BAD] == (False, True, 1, True), case
    assert not any(s[3] for i, s in enumerate(said) if i != BAD), case


@pytest.mark.parametrize(
    ("cases", "value", "read"),
    [(CASES, "nan", True), (["zero-1", "zero-2", "zero-3"], "inf", False)],
    ids=["verified", "unverified"],
)
def test_step_skips_a_bad_gradient_as_plain_deepspeed(cases, value, read):
    """An unverified DeepSpeed keeps its passes."""
    run_ranks(2, run, list(cases), float(value), read)


# Parameter whose gradient is bad, whether the step is fused, whether biases are marked as
# replicated.
OUTSIDE = [
    ("up.bias", False, False),
    ("up.bias", True, False),
    ("up.weight", True, False),
    ("down.bias", True, True),
]


def tensor_parallel(rank, world):
    """NaN on rank 1 of two tensor-parallel ranks, in the gradient of a parameter that the norm
    of rank 1 leaves out: both skip, and no gradient is looked at again where the norm has seen
    those that it does not count.
    """
    import coat_dist
    from coat_dist.deepspeed.step import step
    from megatron_patches import MPUAdapter, initialize_model_parallel

    quiet_deepspeed()
    initialize_model_parallel(2)
    allowed = step.may_leave_out_passes
    for case in OUTSIDE:
        name, fused, pipeline = case
        net, active, looked = Net(), [], []
        for n, p in net.named_parameters():
            if n.endswith("weight"):
                p.tensor_model_parallel = True
            elif pipeline:
                p.tensor_model_parallel = p.ds_pipe_replicated = True
        poison(net.get_parameter(name), float("nan"), active)
        step.may_leave_out_passes = allowed if fused else lambda zero: False
        config = settings(lr=1e-2, **FP32)
        engine, *_ = coat_dist.initialize(model=net, config=config, mpu=MPUAdapter())
        check = engine.optimizer._has_inf_or_nan

        def look(gradient, check=check, looked=looked):
            looked.append(gradient)
            return check(gradient)

        engine.optimizer._has_inf_or_nan = look
        said, finite = follow(engine, rank, active)
        assert finite and bool(looked) != fused, case
        check_skipped(said, case)
        engine.destroy()


def test_step_checks_gradients_that_the_norm_leaves_out():
    run_ranks(2, tensor_parallel)
