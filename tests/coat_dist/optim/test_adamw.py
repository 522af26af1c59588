"""CoatAdamW as a torch optimizer."""

import copy
import io
import math
import pickle

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_moments, param_groups
from coat_dist.optim.state import moment

CODE_KEYS = {"coat_m_q", "coat_m_a", "coat_m_k", "coat_v_q", "coat_v_a", "coat_v_k", "step"}


def make(n=300, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(n).to(dtype))
    return p, CoatAdamW([p], **{"lr": 0.01, **options})


def train(optimizer, params, steps, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimizer.step()


def equal_bytes(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))
    )


def assert_same_state(a, b):
    assert len(a.state) == len(b.state)
    for one, other in zip(a.state.values(), b.state.values(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert equal_bytes(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


def test_state_layout_is_lazy_private_and_two_dimensional():
    p, optimizer = make(300)
    assert not optimizer.state
    optimizer.state[p] = {}  # DeepSpeed does this
    train(optimizer, [p], 2)
    state = optimizer.state[p]
    assert set(state) == CODE_KEYS | {"coat_seed"}
    assert state["step"] == 2 and type(state["step"]) is int
    for which in ("first", "second"):
        q, a, k = moment(state, which)
        assert (q.dtype, q.shape) == (torch.uint8, (3, 128))
        assert (a.dtype, a.shape, k.dtype, k.shape) == (torch.bfloat16, (3,), torch.uint8, (3,))
    assert sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor)) == 2 * 3 * (128 + 3)


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2"), ("int8", "log8")])
def test_minimizes_like_fp32_adamw(formats):
    torch.manual_seed(0)
    a, target = torch.randn(64, 32) / 8, torch.randn(64)
    losses = []
    for moments in ("fp32", "fp8"):
        w = torch.nn.Parameter(torch.zeros(32))
        optimizer = CoatAdamW(
            [{"params": [w], "moments": moments}], lr=0.02, first_moment=formats[0], second_moment=formats[1]
        )
        for _ in range(300):
            optimizer.zero_grad()
            loss = (a @ w - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    floor = (a @ torch.linalg.lstsq(a, target).solution - target).square().mean().item()
    assert losses[0] < floor * 1.01 and losses[1] < floor * 1.01 and losses[0] < 0.8 * target.square().mean()


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
@pytest.mark.parametrize("stochastic", [False, True, "auto"])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("int8", "log8")])
def test_state_dict_resumes_to_the_byte_through_a_file(moments, stochastic, formats):
    def build():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((13, 20), (0,), (129,), (4, 4, 4))]
        groups = [{"params": params[:2], "moments": moments}, {"params": params[2:], "lr": 0.1}]
        first, second = formats
        return params, CoatAdamW(groups, stochastic_rounding=stochastic, first_moment=first, second_moment=second)

    straight, whole = build()
    train(whole, straight, 3)
    file = io.BytesIO()
    torch.save({"o": whole.state_dict(), "p": [p.detach() for p in straight]}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed, again = build()
    with torch.no_grad():
        for p, old in zip(resumed, saved["p"], strict=True):
            p.copy_(old)
    again.load_state_dict(saved["o"])
    assert_same_state(whole, again)
    train(whole, straight, 3, seed=9)
    train(again, resumed, 3, seed=9)
    assert_same_state(whole, again)
    assert all(equal_bytes(a, b) for a, b in zip(straight, resumed, strict=True))


def test_loading_copies_and_keeps_dtypes_for_low_precision_parameters():
    p, optimizer = make(dtype=torch.bfloat16)
    train(optimizer, [p], 2)
    q, other = make(dtype=torch.bfloat16)
    other.load_state_dict(optimizer.state_dict())
    assert_same_state(optimizer, other)
    before = copy.deepcopy(optimizer.state_dict())
    train(other, [q], 1)
    for key, value in optimizer.state[p].items():
        assert torch.equal(value, before["state"][0][key]) if isinstance(value, torch.Tensor) else True


def test_deepcopy_and_pickle_continue_alike():
    p, optimizer = make(stochastic_rounding=True)
    train(optimizer, [p], 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    train(optimizer, [p], 2, seed=5)
    for one in copies:
        train(one, one.param_groups[0]["params"], 2, seed=5)
        assert_same_state(optimizer, one)
        assert equal_bytes(one.param_groups[0]["params"][0], p)


def test_hooks_of_the_user_see_plain_tensors():
    p, optimizer = make()
    train(optimizer, [p], 1)
    q, other = make()
    seen = []

    def look(opt, *arguments):
        state = arguments[0]["state"][0] if arguments else opt.state[q]
        seen.append(isinstance(state["coat_m_q"], torch.Tensor))

    other.register_load_state_dict_pre_hook(look)
    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(optimizer.state_dict())
    assert seen == [True, True]


@pytest.mark.parametrize(
    "change, word",
    [
        ({"group_size": 64}, "group_size"),
        ({"first_moment": "e5m2"}, "first_moment"),
        ({"expand": False}, "expand"),
        ({"second_moment": "e5m2"}, "second_moment"),
        ({"n": 700}, "coat_m_q"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(change, word):
    p, optimizer = make()
    train(optimizer, [p], 1)
    q, other = make(**{"n": 300, **change})
    train(other, [q], 2, seed=3)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=word):
        other.load_state_dict(optimizer.state_dict())
    after = other.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, value in before["state"][0].items():
        now = after["state"][0][key]
        assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now


def test_foreign_and_damaged_checkpoints_say_what_to_do():
    p, optimizer = make()
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.randn(300))])
    train(theirs, theirs.param_groups[0]["params"], 1)
    with pytest.raises(ValueError, match="another optimizer.*import_moments"):
        optimizer.load_state_dict(theirs.state_dict())
    train(optimizer, [p], 1)
    saved = optimizer.state_dict()
    fp32 = {"step": 3, "exp_avg": torch.zeros(300), "exp_avg_sq": torch.zeros(300)}
    for damage, word in (
        ({"state": {0: {**saved["state"][0], "coat_m_q": saved["state"][0]["coat_m_q"].float()}}}, "float32"),
        ({"state": {0: fp32}}, "exp_avg.*import_moments"),
        ({"state": {0: {**saved["state"][0], "step": torch.tensor(1.0)}}}, "step"),
        ({"param_groups": saved["param_groups"] * 2}, "parameter groups"),
    ):
        with pytest.raises(ValueError, match=word):
            optimizer.load_state_dict({**saved, **damage})
    optimizer.state[p] = fp32
    with pytest.raises(ValueError, match="import_moments"):
        optimizer.step()


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    p, optimizer = make()

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_groups_added_later_take_defaults_and_own_options():
    p, optimizer = make()
    q = torch.nn.Parameter(torch.randn(200))
    optimizer.add_param_group({"params": q, "moments": "fp32", "lr": 0.5})
    train(optimizer, [p, q], 1)
    assert set(optimizer.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[q]["exp_avg"].dtype == torch.float32
    assert optimizer.param_groups[1]["group_size"] == 128
    with pytest.raises(ValueError, match="group_size"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(3))], "group_size": 100})
    assert len(optimizer.param_groups) == 2
    named = CoatAdamW([("weight", torch.nn.Parameter(torch.randn(3)))])
    assert named.param_groups[0]["param_names"] == ["weight"]
    generator = CoatAdamW(x for x in [torch.nn.Parameter(torch.randn(3))])
    assert len(generator.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "options, word",
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"expand": 1}, "expand"),
        ({"first_moment": "fp8"}, "first_moment"),
        ({"second_moment": None}, "second_moment"),
        ({"first_moment": "log8"}, "first_moment"),
        ({"second_moment": "int8"}, "second_moment"),
        ({"second_moment": "log8", "expand": False}, "expand"),
        ({"group_size": 100}, "group_size"),
        ({"maximize": "no"}, "maximize"),
        ({"stochastic_rounding": 0}, "stochastic_rounding"),
        ({"stochastic_rounding": "always"}, "stochastic_rounding"),
    ],
)
def test_bad_options_are_named(options, word):
    with pytest.raises(ValueError, match=f"CoatAdamW {word}: got"):
        make(**options)


@pytest.mark.parametrize("key", ["amsgrad", "differentiable", "capturable"])
def test_options_of_other_adams_are_refused(key):
    p = torch.nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match=key):
        CoatAdamW([{"params": [p], key: True}])
    CoatAdamW([{"params": [p], key: False}])


def test_sparse_complex_and_wide_tensors_are_refused():
    for bad in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(TypeError, match="accepted: dense"):
            CoatAdamW([torch.nn.Parameter(bad)])
    table = torch.nn.Embedding(10, 4, sparse=True)
    other = torch.nn.Parameter(torch.ones(4))
    optimizer = CoatAdamW([other, *table.parameters()])
    (table(torch.tensor([1, 2])).sum() + other.sum()).backward()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert torch.equal(other, torch.ones(4)) and not any(optimizer.state.values())


def test_parameters_without_gradient_or_elements():
    p, optimizer = make()
    idle, empty = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(0))
    optimizer.add_param_group({"params": [idle, empty]})
    before = idle.detach().clone()
    p.grad, empty.grad = torch.randn(300), torch.randn(0)
    optimizer.step()
    assert torch.equal(idle, before) and idle not in optimizer.state
    assert optimizer.state[empty]["step"] == 1


def test_non_contiguous_parameters_are_updated_in_place():
    torch.manual_seed(0)
    base = torch.randn(20, 30)
    strided, plain = torch.nn.Parameter(base.clone().t()), torch.nn.Parameter(base.t().contiguous())
    grads = torch.randn(20, 30)
    for p in (strided, plain):
        p.grad = grads.t() if p is strided else grads.t().contiguous()
        CoatAdamW([p], lr=0.1).step()
    assert not strided.is_contiguous() and torch.equal(strided, plain)
    assert not torch.equal(strided, base.t())


def test_learning_rate_tensor_and_scheduler():
    p, optimizer = make(lr=torch.tensor(0.1))
    q, other = make(lr=0.1)
    train(optimizer, [p], 2)
    train(other, [q], 2)
    assert torch.allclose(p, q, rtol=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.0)
    before = q.detach().clone()
    train(other, [q], 1)
    scheduler.step()
    assert torch.equal(q, before)  # lr 0 also stops weight decay


def test_stochastic_rounding_can_be_switched_on_later_and_parameters_draw_different_noise():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    optimizer = CoatAdamW(params)
    grad = torch.randn(4096)
    for group_on in (False, True):
        optimizer.param_groups[0]["stochastic_rounding"] = group_on
        for p in params:
            p.grad = grad.clone()
        optimizer.step()
        same = torch.equal(optimizer.state[params[0]]["coat_m_q"], optimizer.state[params[1]]["coat_m_q"])
        assert same is not group_on
    assert [optimizer.state[p]["coat_seed"] for p in params] == [0, 1]


def test_two_bytes_a_parameter_for_a_model():
    model = torch.nn.Sequential(torch.nn.Embedding(500, 256), torch.nn.Linear(256, 1024), torch.nn.LayerNorm(1024))
    optimizer = CoatAdamW(param_groups(model, 0.1))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    assert held / sum(p.numel() for p in model.parameters()) <= 2.1
    matrix = model[1].weight
    exported, _ = export_moments(matrix, optimizer.state[matrix], optimizer.param_groups[0])
    assert exported.shape == matrix.shape


@pytest.mark.parametrize("options", [{}, {"expand": False}, {"second_moment": "log8"}], ids=str)
def test_no_second_moment_beside_a_huge_one_becomes_zero(options):
    p, optimizer = make(128, **options)
    p.grad = torch.full((128,), 1e-12)
    p.grad[0] = 1e6
    optimizer.step()
    _, v = export_moments(p, optimizer.state[p], optimizer.param_groups[0])
    assert (v > 0).all()
