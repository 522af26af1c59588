"""Weights of the flow: main_grad where saved tensors are replayed, and codes that grouped experts
keep: training with them, their bytes and lifetime, and that none survives a change of the weights.
"""

import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist

from coat_dist.flow import grouped_mlp, invalidate_weights
from coat_dist.flow.blocks import grouped
from coat_dist.flow.core import weights

from .common import Layer, settings
from .microbatches import REPLAYS, WEIGHTS, backward, batches, replayed, with_main_grad

COUNTS = torch.tensor([5, 0, 15])
H, F = 48, 32
LAST = torch.randn(3 * F, H)
CACHED = settings(weights="cached")


@pytest.fixture(autouse=True)
def empty_cache():
    invalidate_weights()
    yield
    invalidate_weights()


@pytest.fixture
def quantized(monkeypatch):
    """Shapes of the weights that were quantized for forward."""
    seen, original = [], grouped._Weight._quantize

    def quantize(weight):
        seen.append(tuple(weight.parameter.shape))
        return original(weight)

    monkeypatch.setattr(grouped._Weight, "_quantize", quantize)
    return seen


def parameter():
    return torch.nn.Parameter(torch.randn(H, 3 * F))


def experts(p, x, config=CACHED):
    """Experts whose first weight is p, ``[H, 3 F]``, of x ``[20, H]``."""
    return grouped_mlp(x, COUNTS, p, LAST, "gelu", config)


@pytest.mark.parametrize("kind", REPLAYS)
def test_into_main_grad_under_replays(kind):
    """Saved parameters come back without their attributes there."""
    layer = Layer.random()
    plain, x = layer.copy(), batches(1)[0]
    expected = backward(plain, x, settings())
    other = with_main_grad(layer.copy(), torch.float32)
    assert torch.equal(backward(other, x, settings(wgrad="main_grad"), replayed(kind)), expected)
    for name, p in other.parameters().items():
        got = p.main_grad if name in WEIGHTS else p.grad
        assert torch.equal(got, getattr(plain, name).grad), name


class Model(torch.nn.Module):
    """Two layers of experts, with residual connections."""

    def __init__(self, state=None):
        super().__init__()
        for i in range(2):
            setattr(self, f"first_{i}", parameter())
            setattr(self, f"last_{i}", torch.nn.Parameter(torch.randn(3 * F, H)))
        if state is not None:
            self.load_state_dict(state)

    def forward(self, x, config, wrap=lambda f, x: f(x)):
        for i in range(2):
            pair = getattr(self, f"first_{i}"), getattr(self, f"last_{i}")
            x = x + wrap(lambda t, pair=pair: grouped_mlp(t, COUNTS, *pair, "gelu", config), x)
        return x


def train(state, data, mode, kind, scales, accumulation=2):
    """Losses of a loop with everything in it: accumulation, two micro-batches in flight,
    evaluation, loads.
    """
    config, model = settings(weights=mode, forward_scales=scales), Model(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses, wrap = [], replayed(kind)

    def evaluate():
        losses.append(model(-window[0], config).square().mean().item())

    for step in range(len(data) // accumulation):
        window = data[step * accumulation : (step + 1) * accumulation]
        flight = [model(x.clone().requires_grad_(), config, wrap).square().mean() for x in window]
        for loss in flight:
            loss.backward()
            losses.append(loss.item())
        if step % 2:
            with torch.no_grad() if step % 4 == 1 else torch.inference_mode():
                evaluate()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:  # evaluation straight after a step, before any training forward
            with torch.inference_mode():
                evaluate()
            model.load_state_dict(state)
        if step == 3:
            with torch.no_grad():
                evaluate()
            for p in model.parameters():
                p.data = p.data * 1.25  # other storage
        if step == 4:
            with torch.no_grad():
                evaluate()
                for p in model.parameters():
                    p.mul_(0.75)
    return losses


@pytest.mark.parametrize(
    ("kind", "scales"), [*((kind, "tensor") for kind in REPLAYS), ("plain", "row")]
)
def test_grouped_mlp_with_kept_codes_trains_to_the_same_bits(kind, scales, quantized):
    state = {name: t.clone() for name, t in Model().state_dict().items()}
    data = [torch.randn(20, H) for _ in range(14)]
    expected = train(state, data, "on_use", kind, scales)
    quantized.clear()
    assert train(state, data, "cached", kind, scales) == expected
    assert len(set(expected)) == len(expected)  # nothing stood still
    # Once for each of 7 steps and 3 changes in between.
    assert len(quantized) == 4 * (7 + 3)


def test_from_cache_of_different_settings():
    p, x = parameter(), torch.randn(20, H)
    for fmt, scales in (
        ("e4m3", "tensor"),
        ("e5m2", "tensor"),
        ("e5m2", "row"),
        ("e4m3", "row"),
        ("e4m3", "tensor"),
    ):
        options = {"format": fmt, "grad_format": "e4m3", "forward_scales": scales}
        kept = experts(p, x, settings(weights="cached", **options))
        assert torch.equal(kept, experts(p, x, settings(**options)))


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_from_cache_bytes_and_lifetime(scales):
    p, x = parameter(), torch.randn(20, H)
    config = settings(weights="cached", forward_scales=scales)
    grads = []
    for drop in (False, True):
        out = experts(p, x, config)
        operands = [entry.operand for entry in weights._cache.values()]
        # A byte each, and scales of rows or experts.
        rows = 3 * F + 3 * H if scales == "row" else 6
        assert sum(o.q8.codes.nbytes for o in operands) == p.numel() + LAST.numel()
        assert sum(o.q8.scales.nbytes for o in operands) == 4 * rows
        copied = copy.deepcopy(p)
        assert not copied.__dict__ and torch.equal(copied, p)
        pickle.dump(p, buffer := io.BytesIO())
        assert len(buffer.getvalue()) < 4 * p.numel() + 2000
        if drop:
            invalidate_weights()
            assert not weights._cache
        grads += torch.autograd.grad(out.square().sum(), [p])  # backward needs none of them
    assert torch.equal(*grads)
    experts(p, x, config)
    entries = len(weights._cache)
    del p, out, copied, operands
    gc.collect()
    assert len(weights._cache) == entries - 1


def test_cacheable_refuses_parameters_of_zero_3():
    p = parameter()
    p.ds_id = 7
    message = "activation.weights: got 'cached' with a parameter that ZeRO-3"
    with pytest.raises(ValueError, match=message):
        experts(p, torch.randn(20, H))


def test_cacheable_in_compiled_code():
    """What was traced once must quantize the weights of each call."""
    p, x = parameter(), torch.randn(20, H)
    compiled = torch.compile(lambda t: experts(p, 2 * t), backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), experts(p, 2 * x, settings()))
        p.data.mul_(1.5)
    assert not weights._cache


def quietly(function, *arguments):
    with torch.no_grad():
        function(*arguments)


def step_elsewhere(p, new):
    """As ZeRO does it: an optimizer steps on something else, then the parameter's storage is
    written.
    """
    master = torch.nn.Parameter(p.detach().clone())
    master.grad = new
    torch.optim.SGD([master], lr=0.5).step()
    p.data.copy_(master.detach())


WRITES = {
    # A version counts what writes through the parameter: nn.init, load_state_dict, foreach, ...
    "copy_": (lambda p, new: quietly(p.copy_, new), True),
    "data =": (lambda p, new: setattr(p, "data", new), True),
    "an optimizer's step on a master": (step_elsewhere, True),
    # As torch's DistributedDataParallel makes its ranks equal.
    "_broadcast_coalesced": (
        lambda p, new: dist._broadcast_coalesced(dist.group.WORLD, [p.detach()], 2**20, 0),
        True,
    ),
    "broadcast": (lambda p, new: dist.broadcast(p, 0), False),
    "data.copy_": (lambda p, new: p.data.copy_(new), False),
    "foreach on data": (lambda p, new: quietly(torch._foreach_mul_, [p.data], 2.0), False),
}
"""{name: (a write to p, whether the cache sees it)}; what it does not see is documented."""


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_invalidate_weights_after_writes_that_are_not_seen(one_rank, quantized):
    """By whether codes are made anew: a collective of one rank writes what was there."""
    for name, (write, seen) in WRITES.items():
        p, x = parameter(), torch.randn(20, H)
        experts(p, x)
        quantized.clear()
        write(p, torch.randn(H, 3 * F))
        after = experts(p, x)
        assert quantized.count((H, 3 * F)) == seen, name
        if not seen:
            invalidate_weights()
            after = experts(p, x)
        assert torch.equal(after, experts(p, x, settings())), name


def test_from_cache_of_new_storage_at_an_old_address():
    """An allocator gives a freed address again, and assigning ``data`` raises no version."""
    memory, x = bytearray(torch.randn(H * 3 * F).numpy().tobytes()), torch.randn(20, H)
    p = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(H, 3 * F))
    experts(p, x)
    address, version = p.data_ptr(), p._version
    p.data = torch.randn(H, 3 * F)
    memory[:] = torch.randn(H * 3 * F).numpy().tobytes()
    p.data = torch.frombuffer(memory, dtype=torch.float32).view(H, 3 * F)
    assert (p.data_ptr(), p._version) == (address, version)
    assert torch.equal(experts(p, x), experts(p, x, settings()))


def test_invalidate_after_methods_that_write_weights():
    class Owner:
        def load(self, path, fails=False):
            """Load."""
            if fails:
                raise OSError(path)
            return path

    owner, p, x = Owner(), parameter(), torch.randn(20, H)
    weights.invalidate_after(owner, "load", "save")  # what it does not have is left out
    assert owner.load.__doc__ == "Load." and not hasattr(owner, "save")
    for fails in (False, True):
        experts(p, x)
        assert weights._cache
        with pytest.raises(OSError, match="here") if fails else contextlib.nullcontext():
            assert owner.load("here", fails=fails) == "here"
        assert not weights._cache
