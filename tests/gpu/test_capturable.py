"""CoatAdamW inside a CUDA graph: replays are steps, to the bit."""

import copy

import pytest
import torch

from tests.support.devices import CONVERTS_FP8, nothing_waits

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

from coat_dist.optim import CoatAdamW

SHAPES = ((512, 512), (64, 16), (128, 8), (1031,), (4096,), (7, 5))
OPTIONS = {
    "default": {},
    "nearest": {"betas": (0.9, 0.95), "stochastic_rounding": False},
    "moments by themselves": {"betas": (0.9, 0.95), "normalize": False},
    "int8, log8": {"first_moment": "int8", "second_moment": "log8"},
    "stochastic": {"stochastic_rounding": True},
    "bf16 remainder": {"master_weights": "bf16_remainder"},
    "lr tensor": {"lr": "tensor"},
}


def build(capturable, moments, lr=1e-2, **options):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    lr = torch.tensor(1e-2, device="cuda") if lr == "tensor" else lr
    groups = [{"params": params[:4], "moments": moments}, {"params": params[4:], "moments": "fp32"}]
    for p in params:
        p.grad = torch.randn_like(p)
    return params, CoatAdamW(groups, lr=lr, capturable=capturable, **options)


def warm_up(optimizer, steps=3):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)


def capture(optimizer):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def new_grads(params, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    for p in params:
        p.grad.copy_(torch.randn(p.shape, device="cuda", generator=g) ** 3)


def assert_equal(mine, theirs, steps):
    (params, optimizer), (others, other) = mine, theirs
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        a, b = optimizer.state[p], other.state[q]
        assert a.keys() == b.keys()
        assert float(a["step"]) == float(b["step"]) == steps
        assert all(
            torch.equal(a[k], b[k])
            for k in a
            if k.startswith("coat_") and k != "coat_seed" or "exp" in k
        )


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
@pytest.mark.parametrize("options", OPTIONS)
def test_replays_are_steps_to_the_bit(options, moments):
    runs = [build(capturable, moments, **OPTIONS[options]) for capturable in (True, False)]
    (params, optimizer), (others, other) = runs
    warm_up(optimizer)
    for _ in range(3):
        other.step()
    graph = capture(optimizer)
    assert_equal(*runs, 3)  # a capture is no step
    for i in range(12):
        for ps in (params, others):
            new_grads(ps, i)
        if i == 6 and options == "lr tensor":
            for o in (optimizer, other):
                o.param_groups[0]["lr"].fill_(0.5)
        graph.replay()
        other.step()
    assert_equal(*runs, 15)
    optimizer.step()  # the same optimizer without the graph
    other.step()
    assert_equal(*runs, 16)


def test_a_capture_after_one_step_and_a_second_capture():
    runs = [build(capturable, "fp8") for capturable in (True, False)]
    (params, optimizer), (others, other) = runs
    warm_up(optimizer, 1)
    other.step()
    graphs = [capture(optimizer)]
    new = [torch.empty_like(p) for p in params]
    for p, grad in zip(params, new, strict=True):
        p.grad = grad
    graphs.append(capture(optimizer))
    for i in range(6):
        for ps in (params, others):
            new_grads(ps, i)
        graphs[1].replay()
        other.step()
    torch.cuda.empty_cache()
    # Over whatever has been freed.
    junk = [torch.full((1 << 16,), 7, device="cuda") for _ in range(50)]
    for i in range(6):
        for ps in (params, others):
            new_grads(ps, i)
        graphs[1].replay()
        other.step()
    assert_equal(*runs, 13)
    del junk


def test_gradients_made_inside_the_graph():
    torch.manual_seed(0)
    nets = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
        for _ in range(2)
    ]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        CoatAdamW(n.parameters(), capturable=c) for n, c in zip(nets, (True, False), strict=True)
    ]
    x = torch.randn(16, 64, device="cuda")

    def train(i):
        optimizers[i].zero_grad(set_to_none=True)
        nets[i](x).square().mean().backward()
        optimizers[i].step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(0)
    torch.cuda.current_stream().wait_stream(stream)
    optimizers[0].zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(0)
    for _ in range(3):
        train(1)
    for i in range(8):
        x.copy_(
            torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        )
        graph.replay()
        train(1)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert float(optimizers[0].state[p]["step"]) == optimizers[1].state[q]["step"] == 11


def test_a_capture_without_the_option_is_refused():
    _, optimizer = build(False, "fp8")
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable"):
        capture(optimizer)


def test_steps_wait_for_nothing():
    """Neither the first step, nor one with new gradients, synchronises."""
    params, optimizer = build(True, "fp8")
    torch.cuda.synchronize()
    with nothing_waits():
        for _ in range(3):
            optimizer.step()
            for p in params:
                p.grad = torch.randn_like(p)


def test_the_state_travels_with_the_option():
    params, optimizer = build(True, "fp8")
    warm_up(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other = build(False, "fp8")
    other.load_state_dict(saved)
    assert all(group["capturable"] for group in other.param_groups)
    for p, q in zip(params, others, strict=True):
        step = other.state[q]["step"]
        assert (
            step.is_cuda and step.dtype == torch.float32 and step.shape == () and float(step) == 3
        )
        with torch.no_grad():
            q.copy_(p)
    graph = capture(other)
    for i in range(4):
        for ps in (params, others):
            new_grads(ps, i)
        graph.replay()
        optimizer.step()
    assert_equal((params, optimizer), (others, other), 7)
