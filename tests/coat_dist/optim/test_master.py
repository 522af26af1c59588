"""Master weights as bfloat16 parameters and remainders: the bits of an fp32 run, in every way a
state travels.
"""

import copy

import pytest
import torch

from coat_dist.optim import (
    CoatAdamW,
    export_master,
    export_moments,
    fp32_state_dict,
    import_moments,
    set_master,
)
from coat_dist.reference.master import split

KINDS = ("fp8", "fp32")


def shapes():
    return (40, 31), (17,), (), (0, 3), (128,)


def build(moments="fp8", remainder=True, seed=0, **options):
    """Parameters that start as bfloat16 numbers, in bfloat16 with remainders or in fp32."""
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).bfloat16()) for s in shapes()]
    if remainder:
        options["master_weights"] = "bf16_remainder"
    else:
        params = [torch.nn.Parameter(p.detach().float()) for p in params]
    return params, CoatAdamW(
        [{"params": params, "moments": moments}], lr=0.01, weight_decay=0.1, **options
    )


def step(params, optimizer, first, last):
    """Gradients are bfloat16 numbers, as parameters of that type receive."""
    for i in range(first, last):
        g = torch.Generator().manual_seed(100 + i)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=g) ** 3).bfloat16().to(p.dtype)
        optimizer.step()


def masters(params, optimizer):
    return [export_master(p, optimizer.state[p]) for p in params]


def same_bits(a, b):
    return all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


def test_two_bytes_a_parameter_more_and_of_no_shape_that_deepspeed_takes_for_a_moment():
    p = torch.nn.Parameter(torch.zeros(128 * 50, dtype=torch.bfloat16))
    for moments in KINDS:
        optimizer = CoatAdamW(
            [{"params": [p], "moments": moments}], master_weights="bf16_remainder"
        )
        step([p], optimizer, 0, 1)
        low = optimizer.state[p]["coat_p_low"]
        assert low.dtype == torch.uint8 and low.shape == (50, 256) and low.nbytes == 2 * p.numel()


@pytest.mark.parametrize("moments", KINDS)
def test_a_parameter_that_is_written_between_steps_stays_what_was_written(moments):
    params, optimizer = build(moments)
    step(params, optimizer, 0, 5)
    for value in (0.0, -0.0, 1.5, torch.inf, -torch.inf, 1e-40):
        for p in params:
            p.data.fill_(value)
            written = p.detach().float()
            master = export_master(p, optimizer.state[p])
            assert torch.equal(split(master)[0], p.detach())
            if written.isfinite().all():
                spacing = (split(written.abs())[0].view(torch.int16) + 1).view(
                    torch.bfloat16
                ).float() - written.abs()
                assert ((master - written).abs() <= spacing / 2).all()


@pytest.mark.parametrize("moments", KINDS)
def test_masters_are_set_and_read_exactly(moments):
    params, optimizer = build(moments)
    step(params[:2], optimizer, 0, 2)  # the others have no state yet
    values = [torch.randn(p.shape).double().float() * 3 for p in params]
    for p, value in zip(params, values, strict=True):
        set_master(optimizer, p, value)
    assert same_bits(masters(params, optimizer), values)
    assert all(torch.equal(p, split(v)[0]) for p, v in zip(params, values, strict=True))

    p32, fp32 = build(moments, remainder=False)
    for p, value in zip(p32, values, strict=True):
        set_master(fp32, p, value)
    assert same_bits(masters(p32, fp32), values)
    with pytest.raises(ValueError, match=r"param: got a tensor of shape \[3\]"):
        set_master(optimizer, torch.zeros(3), torch.zeros(3))
    with pytest.raises(
        ValueError, match="value: got torch.int64 of 17 elements, accepted: floating point, 17"
    ):
        set_master(optimizer, params[1], torch.zeros(17, dtype=torch.int64))


@pytest.mark.parametrize("moments", KINDS)
def test_fp32_state_dicts_hold_masters(moments):
    params, optimizer = build(moments)
    step(params, optimizer, 0, 4)
    with fp32_state_dict(optimizer):
        saved = optimizer.state_dict()
    assert set(saved["state"][0]) - {"coat_seed"} == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert same_bits(
        [saved["state"][i]["master"] for i in range(len(params))], masters(params, optimizer)
    )
    other, again = build(moments, seed=1, group_size=64)
    for p, q in zip(params, other, strict=True):
        q.data.copy_(p)  # the model is loaded, too
    with fp32_state_dict(again):
        again.load_state_dict(saved)
    assert same_bits(masters(other, again), masters(params, optimizer))

    fp32 = build(moments, remainder=False)[1]
    with (
        fp32_state_dict(fp32),
        pytest.raises(
            ValueError,
            match="import_moments master: got a tensor, accepted: None, or master_weights",
        ),
    ):
        fp32.load_state_dict(saved)
    assert not fp32.state
    # As of another AdamW: the parameter becomes its own master.
    for entry in saved["state"].values():
        del entry["master"]
    with fp32_state_dict(again):
        again.load_state_dict(saved)
    assert same_bits(masters(other, again), [p.detach().float() for p in other])


def test_states_with_and_without_remainder_are_not_mistaken_for_each_other():
    (params, optimizer), (p32, fp32) = build(), build(remainder=False)
    step(params, optimizer, 0, 1)
    step(p32, fp32, 0, 1)
    for target, source in ((optimizer, fp32), (fp32, optimizer)):
        before = copy.deepcopy(target.state_dict())
        with pytest.raises(ValueError, match="master_weights: got .*, accepted: "):
            target.load_state_dict(source.state_dict())
        assert str(before) == str(target.state_dict())
    del optimizer.state[params[0]]["coat_p_low"]
    with pytest.raises(ValueError, match="master_weights='bf16_remainder': coat_m_a, .*coat_p_low"):
        step(params, optimizer, 1, 2)


def test_import_and_export():
    (p, *_), optimizer = build()
    step([p], optimizer, 0, 3)
    group, state = optimizer.param_groups[0], optimizer.state[p]
    m, v = export_moments(p, state, group)
    again = import_moments(p, group, m, v, 3, export_master(p, state))
    assert torch.equal(export_master(p, again), export_master(p, state))
    assert not import_moments(p, group, m, v, 3)["coat_p_low"].any()
    with pytest.raises(ValueError, match="import_moments master: got a tensor, accepted: None"):
        import_moments(p, {**group, "master_weights": "parameter"}, m, v, 3, m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bfloat16_parameters_have_remainders(dtype):
    p = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(
        TypeError, match=f"master_weights: got 'bf16_remainder' for a {dtype} parameter"
    ):
        CoatAdamW([p], master_weights="bf16_remainder")
    with pytest.raises(
        ValueError, match="master_weights: got \"bf16\", accepted: 'parameter' or 'bf16_remainder'"
    ):
        CoatAdamW([p], master_weights="bf16")
    q = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = CoatAdamW([q], master_weights="bf16_remainder")
    optimizer.param_groups[0]["params"][0] = p  # as an optimizer around this one may do
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="bf16_master_weights_and_grads"):
        optimizer.step()
    assert not p.any() and not optimizer.state[p]


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("copied", [torch.bfloat16, torch.float16])
def test_copies_receive_the_new_parameter_rounded_to_nearest_even(moments, copied):
    params, optimizer = build(moments, remainder=False)
    optimizer.copies = {p: torch.full((p.numel(),), 7.0, dtype=copied) for p in params[:3]}
    plain, other = build(moments, remainder=False)
    step(params, optimizer, 0, 3)
    step(plain, other, 0, 3)
    assert same_bits([p.detach() for p in params], [p.detach() for p in plain])
    for p, c in optimizer.copies.items():
        assert torch.equal(c.view(p.shape), p.detach().to(copied))
