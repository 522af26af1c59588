"""The AdamW kernel on a GPU: launches, memory, beyond 2**31 elements, and inside the optimizer."""

import pytest
import torch

from tests.support.devices import CONVERTS_FP8

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

from coat_dist.kernels import adamw as kernels
from coat_dist.optim import CoatAdamW
from coat_dist.reference.adamw import AdamWStep
from coat_dist.reference.moments import Moment, MomentCodec, decode, encode
from tests.coat_dist.ops.adamw_problems import NUMBERS, one_step


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_launches_of_a_step_do_not_grow_with_the_number_of_tensors(moments):
    launches = []
    for tensors in (4, 40):
        params = [torch.nn.Parameter(torch.randn(256, 16, device="cuda")) for _ in range(tensors)]
        optimizer = CoatAdamW([{"params": params, "moments": moments}])
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        launches.append(
            len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA])
        )
    assert 0 < launches[1] <= 2 * launches[0] + 4, launches


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_code_survives_a_step_that_changes_nothing(fp8, normalize):
    """Nothing drifts: the hardware's approximations never carry a decoded code over to a
    neighbour, nor the amax up.
    """
    codec_m = MomentCodec(fp8, False, over_root=normalize)
    codec_v = MomentCodec(fp8, False, keep_nonzero=normalize, keep_grid=normalize)
    codes = (
        torch.arange(256, device="cuda").byte().view(codec_m.kind.fp8.dtype).float().view(2, 128)
    )
    x = torch.where(codes.isfinite() & (codes != 0), codes, 0.0)  # the step turns -0 into 0
    x[:, 0] = codec_m.kind.fp8.max
    for scale in (1.0, 0.7, 1e-6, 1e-30, 1e30):
        m, v = (
            encode(x * (0.7 if normalize else scale), MomentCodec(fp8, False)),
            encode(x.abs() * scale, codec_v),
        )
        before = [t.clone() for t in (*m, *v)]
        zero = torch.zeros(256, device="cuda")
        still = AdamWStep(
            lr=0.0, beta1=1 - 2**-40, beta2=1 - 2**-40, eps=1e-8, weight_decay=0.0, step=1
        )
        for _ in range(5):
            one_step(kernels, zero.clone(), zero, m, v, codec_m, codec_v, still)
        assert all(map(torch.equal, (*m, *v), before)), scale


@pytest.mark.parametrize("normalize", [False, True])
def test_more_than_two_to_the_31_elements(normalize):
    n = 2**31 + 128 * 3 + 5
    if torch.cuda.mem_get_info()[0] < 34 * 2**30:
        pytest.skip("needs 34 GiB of free GPU memory")
    codec_m, codec_v = (
        MomentCodec(over_root=normalize),
        MomentCodec(keep_nonzero=True, keep_grid=normalize),
    )
    param, grad = torch.ones(n, device="cuda"), torch.full((n,), 0.5, device="cuda")
    m, v = codec_m.zeros(n, "cuda"), codec_v.zeros(n, "cuda")
    one_step(kernels, param, grad, m, v, codec_m, codec_v, NUMBERS, seed=1)
    small = [
        torch.ones(1024, device="cuda"),
        grad[:1024],
        codec_m.zeros(1024, "cuda"),
        codec_v.zeros(1024, "cuda"),
    ]
    one_step(kernels, *small, codec_m, codec_v, NUMBERS, seed=1)
    for end in (param[:1024], param[-1024:]):
        assert torch.equal(end, small[0])
    tail_m, tail_v = (Moment(x.q[-1:], x.a[-1:], x.k[-1:]) for x in (m, v))
    second = decode(tail_v, codec_v, 5)
    assert torch.allclose(second, torch.full((5,), 0.0125, device="cuda"), rtol=0.02)
    back = decode(tail_m, codec_m, 5, second if normalize else None)
    assert torch.allclose(back, torch.full((5,), 0.05, device="cuda"), rtol=0.02)
    for moment in (m, v):
        assert (moment.q[-1, 5:] == 0).all() and (moment.a == moment.a[0]).all()
        assert (moment.k[:-1] == moment.k[0]).all()


@pytest.mark.parametrize("remainder", [False, True])
def test_a_step_allocates_nothing(remainder):
    p = torch.nn.Parameter(
        torch.randn(1 << 22, device="cuda").to(torch.bfloat16 if remainder else torch.float32)
    )
    optimizer = CoatAdamW([p], master_weights="bf16_remainder" if remainder else "parameter")
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert ("coat_p_low" in optimizer.state[p]) == remainder
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() == held
